"""Which PyTorch what needs: the table of the documentation, `pyproject.toml` and the errors say the same."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

import modelstate as ms
from modelstate.errors import ExportError, LiveTargetError
from tests.serve.models import linear
from tests.serve.packages import linear_package

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def rows(heading: str) -> list[list[str]]:
    """The rows of the table after a heading, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if "|" in line][2:]


def versions(column: int) -> set[tuple[int, ...]]:
    """The versions, of two numbers each, in a column of the table of runs."""
    return {tuple(map(int, row[column].split(".")[:2])) for row in rows("What was run")}


def lower_bound(requirement: str) -> tuple[int, ...]:
    found = re.search(r">=([\d.]+)", requirement)
    assert found is not None
    return tuple(map(int, found[1].split(".")))


def test_the_oldest_torch_that_was_run_is_the_one_that_is_required() -> None:
    (torch_requirement,) = [one for one in PROJECT["dependencies"] if re.match(r"torch\b", one)]
    assert lower_bound(torch_requirement) == min(versions(1))


def test_the_oldest_python_that_was_run_is_the_one_that_is_required() -> None:
    assert lower_bound(PROJECT["requires-python"]) == min(versions(0))


def test_the_version_that_ci_runs_was_run() -> None:
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert tuple(map(int, pinned[1].split(".")[:2])) in versions(1)


def torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))


def test_this_torch_is_not_too_old() -> None:
    assert torch_version() >= min(versions(1))


@pytest.mark.slow
def test_an_old_torch_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = linear(1), torch.ones(3, 4)
    oldest = {row[0]: row[1] for row in rows("What needs which PyTorch")}["AOTInductor packages"]
    package = linear_package() if torch_version() >= tuple(map(int, oldest.split("."))) else None
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    path = tmp_path / "program.pt2"
    with pytest.raises(ExportError) as caught:
        ms.export(module, (x,), path, kind="aoti")
    error = caught.value
    assert (error.expected, error.found) == (f"torch {oldest} or later", "torch 2.8.0+cu128")
    assert error.remedy == f"install torch {oldest} or later; or export with kind='exported'"
    assert not path.exists()
    if package is not None:
        with pytest.raises(LiveTargetError, match="AOTInductor packages need a newer PyTorch"):
            ms.Live(package)
    ms.export(module, (x,), path)  # as the remedy says
    assert torch.equal(ms.Live(path)(x), module(x))
