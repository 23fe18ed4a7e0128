"""What runs in the processes that are measured."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import child


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
