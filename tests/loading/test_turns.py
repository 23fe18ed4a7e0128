"""Values that are needed whole: large ones are read by another thread, small ones between them are not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms


@pytest.mark.parametrize("options", [{}, {"in_place": False}, {"in_place": True}, {"dtype": torch.float64}])
def test_small_values_between_large_ones_get_their_own_bytes(tmp_path: Path, options: dict[str, object]) -> None:
    sizes = [200 if number % 5 == 0 else 3 for number in range(40)]
    model = nn.ModuleList(nn.Conv2d(size, 64, 3).to(memory_format=torch.channels_last) for size in sizes)
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "x.safetensors")
    planned = ms.plan(model, tmp_path / "x.safetensors", **options)  # type: ignore[arg-type]
    report = ms.load(model, tmp_path / "x.safetensors", **options)  # type: ignore[arg-type]
    assert all(torch.equal(value, state[name].to(value.dtype)) for name, value in model.state_dict().items())
    assert 0 < report.peak_memory_bytes <= planned.peak_memory_bytes
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in model)
