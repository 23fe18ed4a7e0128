"""Tensor subclasses that were loaded own their payload, in the dtype that was asked for."""

from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import described
from tests.pains.conftest import StockFails
from tests.pains.quantized import from_plain, quantized, quantized_class


def skeleton(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A layer on meta with its weight in the subclass of the tutorial, whose handler keeps the tensor it is given."""
    cls = quantized_class()
    from_plain(cls)
    with torch.device("meta"):
        return quantized(nn.Linear(3, 5, dtype=dtype), cls)


def shows_file(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the tensor's memory is a map of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < stop:
                return True
    return False


def test_the_source_mapping_is_left_alone(stock_fails: StockFails) -> None:
    theirs, model, state = skeleton(), skeleton(), nn.Linear(3, 5).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(True)
    theirs.load_state_dict(state, assign=True)
    torch.__future__.set_swap_module_params_on_conversion(False)
    shared = theirs.weight.elem.data_ptr() == state["weight"].data_ptr()
    stock_fails("the payload is the memory of the state dict", shared)

    before = described(dict(state))
    ms.load(model, state)
    with torch.no_grad():
        model.weight.elem.zero_()
        model.bias.zero_()
    assert described(dict(state)) == before


@pytest.mark.parametrize("map", [True, False])
def test_map_holds_for_payloads(map: bool, tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 5).state_dict(), tmp_path / "state.pt")
    model = skeleton()
    ms.load(model, tmp_path / "state.pt", map=map)
    assert shows_file(model.bias, tmp_path / "state.pt") == map
    assert map or not shows_file(model.weight.elem, tmp_path / "state.pt")


def test_dtype_reaches_the_payload() -> None:
    state = nn.Linear(3, 5).state_dict()
    model = skeleton()
    report = ms.load(model, state, dtype=torch.bfloat16)
    assert model.weight.dtype is model.weight.elem.dtype is torch.bfloat16
    assert torch.equal(model.weight.elem, state["weight"].bfloat16())
    assert model.bias.dtype is torch.bfloat16
    assert {step.dtype for step in report.steps} == {torch.bfloat16}
