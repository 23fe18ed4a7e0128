"""Files whose elements are not at multiples of their size, since their header is not padded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import holding


def unaligned(path: Path, state: dict[str, torch.Tensor], blanks: int) -> Path:
    """Saves a file in which the header has a number of blanks behind it, instead of its padding to 8 bytes."""
    save_file(state, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length])).encode() + b" " * blanks
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return path


def state_of(*dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    return {f"{index}": torch.arange(12.0).reshape(3, 4).to(dtype) for index, dtype in enumerate(dtypes)}


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blanks=st.integers(0, 15),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]), min_size=1, max_size=4),
    options=st.fixed_dictionaries({}, optional={"in_place": st.booleans(), "map": st.booleans()}),
    is_skeleton=st.booleans(),
)
def test_the_values(
    blanks: int, dtypes: list[torch.dtype], options: dict[str, Any], is_skeleton: bool, tmp_path: Path
) -> None:
    state = state_of(*dtypes)
    path = unaligned(tmp_path / "x.safetensors", state, blanks)
    device = "meta" if is_skeleton else "cpu"
    module = holding(
        **{f"{name}": torch.zeros(3, 4, dtype=tensor.dtype, device=device) for name, tensor in state.items()}
    )
    report = ms.load(module, path, **options)
    checkpoint = ms.open(path)
    is_aligned = True
    for name, tensor in state.items():
        assert torch.equal(getattr(module, name), tensor)
        assert torch.equal(checkpoint.tensor(name), tensor)
        location = checkpoint[name].location
        assert location is not None
        is_aligned = is_aligned and location.start % tensor.itemsize == 0
    if is_skeleton and options.get("map") is not False:
        assert is_aligned == (not any("not at multiples of their size" in note for note in report.notes))


@pytest.mark.parametrize("blanks", range(4))
def test_tied_slots_with_equal_and_with_other_values(blanks: int, tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    module = holding(a=weight, b=weight)
    path = unaligned(tmp_path / "x.safetensors", {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, blanks)
    ms.load(module, path)
    assert torch.equal(weight, torch.ones(2, 2))
    unaligned(path, {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}, blanks)
    with pytest.raises(ms.PlanError, match="same tensor"):
        ms.load(module, path)
    assert torch.equal(weight, torch.ones(2, 2))
