"""What runs in the processes that are measured."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import child, saving


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
    saving.from_gpu(contender=contender, folder=str(folder), quick=True)
    assert Stages.ended == [f"{contender}, the first", f"{contender}, the second"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_every_way_to_open_gives_the_same_names_and_shapes(suffix: str, tmp_path: Path) -> None:
    path = child._saved({"a": torch.ones(2, 3), "b": torch.ones(4)}, str(tmp_path / "file"), suffix)
    other = "torch.load(mmap)" if suffix == ".pt" else "safetensors safe_open + get_slice"
    for name in ("modelstate.open", "modelstate.open + every shape", other):
        found: Any = child.OPENERS[name](path)
        shapes = {key: tuple(getattr(value, "shape", value)) for key, value in found.items()}
        assert shapes == {"a": (2, 3), "b": (4,)}, name


def test_the_loops_measure_what_diff_measures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [{"a": torch.randn(5, 4)} for _ in range(2)]
    a, b = (child._saved(state, str(tmp_path / str(at)), ".pt") for at, state in enumerate(states))
    ours: Any = child.DIFFS["modelstate.diff"](a, b)
    for name in ("two torch.load + a loop", "two torch.load(mmap) + a loop"):
        loop: Any = child.DIFFS[name](a, b)
        ((key, (differ, largest, *_)),) = loop
        assert key == "a"
        assert differ == 1.0
        assert f"{largest:.2g}" in str(ours), (largest, str(ours))
