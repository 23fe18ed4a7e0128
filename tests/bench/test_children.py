"""The processes that measure are there, and do what their names say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
from bench import child, saving
from bench.models import QUICK, with_memory


def test_each_child_that_is_started_exists() -> None:
    texts = [path.read_text() for path in Path(bench.__file__).parent.glob("*.py")]
    names = {name for text in texts for name in re.findall(r'\.child\(\s*"(\w+)"', text)}
    assert {"load", "save_from_gpu"} <= names
    assert [name for name in sorted(names) if not callable(getattr(child, name, None))] == []


class Stages:
    """Keeps what a child reports."""

    ended: list[str]

    def __init__(self) -> None:
        Stages.ended = []

    def end(self, name: str, seconds: float, nbytes: int) -> None:
        assert seconds > 0 < nbytes
        self.ended.append(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: saves from one are not measured")
@pytest.mark.parametrize("contender", saving.FROM_GPU)
def test_saves_from_a_gpu(contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _first_and_second(contender, tmp_path / "saved", monkeypatch)


@pytest.mark.parametrize("contender", [name for name in saving.FROM_GPU if "DCP" not in name])
def test_saves_from_a_gpu_with_the_cpu_in_its_place(
    contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own stager refuses to work without a device."""

    def same(value: Any) -> Any:
        return value

    monkeypatch.setattr(torch.nn.Module, "cuda", same)
    monkeypatch.setattr(torch.Tensor, "pin_memory", same)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    _first_and_second(contender, tmp_path / "saved", monkeypatch)


def _first_and_second(contender: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "Stages", Stages)
    saving.from_gpu(contender, with_memory("tiny", QUICK), folder)
    assert Stages.ended == [f"{contender}, the first", f"{contender}, the second"]
