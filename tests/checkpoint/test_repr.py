"""What a notebook shows of plans, reports and suggestions is one line, and `print` shows the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ChecksumError, SourceNotFoundError


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))


def results(directory: Path) -> dict[str, Any]:
    """Each with a part of what its line says."""
    path, one = directory / "x.safetensors", model()
    saved = ms.save(one, path, shard_size_bytes=100)
    other = nn.Sequential(*(nn.Linear(4, 4) for _ in range(101)))
    return {
        "200 tensors, ": saved,
        "200 of 200 slots filled, 8.0 kB to read, ok": ms.plan(one, path),
        "200 of 202 slots filled, 8.0 kB to read, 2 problems": ms.plan(other, path),
        "200 of 200 slots filled, 8.0 kB in ": ms.load(one, path),
        "1 rules, 200 of 200 names": ms.suggest(one, {f"module.{key}": v for key, v in one.state_dict().items()}),
        "converted to float16: 200 of 200 tensors changed": ms.convert(one, dtype=torch.float16),
    }


@pytest.mark.slow
def test_it_is_one_short_line_that_says_the_most(tmp_path: Path) -> None:
    for part, result in results(tmp_path).items():
        assert part in repr(result)
        assert repr(result).startswith("<")
        assert len(repr(result)) < 300
        assert "\n" not in repr(result)


def test_print_says_more(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    ms.save(model(), path)
    report = ms.load(model(), path)
    assert "all references kept" in str(report)
    assert "all references kept" not in repr(report)


@pytest.mark.parametrize(
    "verify", [lambda path: ms.open(path).verify(), lambda path: ms.load(model(), path, verify=True)]
)
def test_what_to_do_about_a_file_without_checksums(tmp_path: Path, verify: Any) -> None:
    from safetensors.torch import save_file

    save_file(model().state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(ChecksumError) as caught:
        verify(tmp_path / "plain.safetensors")
    assert "modelstate.save(modelstate.open(path), new_path)" in caught.value.remedy
    ms.save(ms.open(tmp_path / "plain.safetensors"), tmp_path / "kept.safetensors")
    verify(tmp_path / "kept.safetensors")


def test_a_store_that_is_opened_as_a_checkpoint_is_named(tmp_path: Path) -> None:
    with ms.Store(tmp_path / "run") as store:
        store.save(1, {"model": nn.Linear(2, 2)})
    with pytest.raises(SourceNotFoundError, match=r"modelstate\.Store"):
        ms.open(tmp_path / "run").verify()
