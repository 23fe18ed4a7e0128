"""Inputs that a package takes, and would answer wrongly: what `torch.export` has found is checked before the call."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.export import Dim

import modelstate as ms
from modelstate.errors import ProgramInputError
from tests.serve.packages import package_of


class Writes(nn.Module):
    """Writes to an input, for an even number of rows. A number decides which graph is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor, is_negative: bool) -> torch.Tensor:
        torch._check(x.shape[0] <= y.shape[0])
        if x.shape[0] % 2 == 0:
            x.mul_(self.weight)
        return (-x if is_negative else x) + y[: x.shape[0]]


def rows(*sizes: int) -> tuple[torch.Tensor, ...]:
    """Tensors with so many rows, whose elements differ."""
    return tuple(torch.arange(size * 3.0).view(size, 3) + place for place, size in enumerate(sizes))


DYNAMIC: Any = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, None)


def served() -> ms.Live:
    return ms.Live(package_of(Writes(), *rows(4, 6), True, dynamic_shapes=DYNAMIC))


@pytest.mark.slow
def test_a_package_checks_what_the_program_was_exported_for() -> None:
    """The library itself looks at no size: it would read past the end of `y`."""
    live = served()
    torch_says = torch.export.export(Writes(), (*rows(4, 6), True), dynamic_shapes=DYNAMIC).module()

    @settings(max_examples=60, deadline=None)
    @given(st.integers(2, 14), st.integers(2, 14))
    def law(long: int, other: int) -> None:
        x, y = rows(long, other)
        expected = x.clone()
        try:
            answer = torch_says(expected, y, True)
        except AssertionError:
            with pytest.raises(ProgramInputError):
                live(x, y, True)
            assert torch.equal(x, expected)
        else:
            assert torch.equal(live(x, y, True), answer)
            assert torch.equal(x, expected)

    law()
    with pytest.raises(ProgramInputError, match="other sizes"):
        live(torch.ones(100_000, 3), torch.ones(2, 3), True)


@pytest.mark.slow
def test_what_a_package_writes_to_is_not_copied() -> None:
    live, (x, y) = served(), rows(4, 6)
    for wrong in (x.T.contiguous().T, torch.ones(4, 6)[:, ::2], torch.ones(1, 3).expand(4, 3)):
        before = wrong.clone()
        with pytest.raises(ProgramInputError, match="writes to x"):
            live(wrong, y, True)
        assert torch.equal(wrong, before)
    inside = torch.ones(13)[1:].view(4, 3)  # at no round address
    for right in (x, inside):
        before = right.clone()
        assert torch.equal(live(right, y.T.contiguous().T, True), y[:4] - before * 2)
        assert torch.equal(right, before * 2)


@pytest.mark.slow
def test_a_tensor_in_place_of_a_number_is_named() -> None:
    live, (x, y) = served(), rows(4, 6)
    expected = y[:4] - 2 * x
    for wrong in (torch.tensor(True), x, torch.eye(3).to_sparse()):
        with pytest.raises(ProgramInputError, match="is_negative is of another kind"):
            live(x, y, wrong)
    with pytest.raises(ProgramInputError, match="other sizes or values"):
        live(x, y, False)
    assert torch.equal(live(x, y, True), expected)
