"""The story of a tensor that is None at first: killed, and resumed with and without it."""

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.programs import code_of, run_program

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lazy_tensor.py"
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("lazy_tensor", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each in processes of its own, the last two killed by SIGKILL."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.subprocess, "run", run_forked)
        return {
            "uninterrupted": example.in_a_process("modelstate", folder / "whole"),
            "stock": example.in_a_process("stock", folder / "stock", example.KILLED),
            "modelstate": example.in_a_process("modelstate", folder / "modelstate", example.KILLED),
        }


def run_forked(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of an interpreter."""
    done = run_program(code_of(command[1:]))
    if check:
        done.check_returncode()
    return done


def test_the_resumed_run_is_the_uninterrupted_one_to_the_last_bit(runs: Runs, example: Any) -> None:
    assert len(runs["uninterrupted"]) == example.EPOCHS
    assert runs["modelstate"] == runs["uninterrupted"]
    assert all(len(one["losses"]) == 32 for one in runs["modelstate"])


def test_without_the_tensor_accuracy_drops_and_the_curve_forks(runs: Runs, example: Any) -> None:
    whole, stock = runs["uninterrupted"], runs["stock"]
    assert stock[: example.KILLED] == whole[: example.KILLED]
    assert stock[example.KILLED]["accuracy"] < whole[example.KILLED]["accuracy"] - 0.2
    for one, other in zip(stock[example.KILLED :], whole[example.KILLED :], strict=True):
        assert one["losses"] != other["losses"]


def test_the_picture(runs: Runs, example: Any, tmp_path: Path) -> None:
    example.plot(runs, str(tmp_path / "curves.svg"))
    assert (tmp_path / "curves.svg").read_text().lstrip().startswith("<?xml")
