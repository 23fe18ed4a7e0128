"""Buffers that are converted: who they are, and who shares them."""

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Rotary(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.register_buffer("positions", torch.arange(4), persistent=False)


def model() -> nn.ModuleList:
    """Two layers with one table, and a third that shows a part of it."""
    table = torch.linspace(0, 1, 8)
    return nn.ModuleList([Rotary(table), Rotary(table), Rotary(table[2:6])])


@pytest.mark.parametrize("swap", [False, True], ids=["swapping is off", "swapping is on"])
def test_stock_replaces_them(swap: bool, stock_fails: StockFails) -> None:
    theirs = model()
    held = theirs[0].table
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        theirs.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    stock_fails("whoever holds a buffer has the old one", theirs[0].table is not held)
    stock_fails("buffers that were shared no longer are", theirs[0].table is not theirs[1].table)


@pytest.mark.parametrize("keeping", [False, True], ids=["convert", "reference_keeping"])
def test_ours_are_who_they_were(keeping: bool) -> None:
    ours = model()
    before, table = ms.identity(ours), ours[0].table.clone()
    held = ours[0].table
    if keeping:
        with ms.reference_keeping():
            ours.double()
    else:
        assert not ms.convert(ours, torch.float64).references_lost
    assert before.differences(ms.identity(ours)) == []
    assert held is ours[0].table is ours[1].table
    assert torch.equal(held, table.double())
    assert ours[0].positions.dtype is torch.int64
    assert "positions" not in ours.state_dict()

    held.fill_(7)
    assert torch.equal(ours[2].table, torch.full((4,), 7.0, dtype=torch.float64))


def test_identity_finds_what_stock_has_replaced() -> None:
    theirs = model()
    before = ms.identity(theirs)
    theirs.double()
    changed = before.differences(ms.identity(theirs))
    assert changed == [
        "0.table is another object",
        "1.table is another object",
        "2.table is another object",
        "0.table and 2.table no longer share memory",
    ]
