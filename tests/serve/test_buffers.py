"""Buffers that code replaces: None at first, another shape, deleted. What a canary and what requests leave behind."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import CanaryError

persistences = pytest.mark.parametrize("persistent", [True, False])
X = torch.ones(1, 2)
WEIGHTS = {"weight": torch.full((2,), 10.0)}


class Cache(nn.Module):
    """Keeps all rows that it has been asked, in a buffer that is None at first."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rows", None, persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        return (self.rows * self.weight).tolist()


class Shifting(nn.Module):
    """Has a buffer that it deletes, one that it sets to None, one that it replaces, and one that it adds."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name in ("deleted", "none", "replaced"):
            self.register_buffer(name, torch.zeros(2), persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        names = sorted(self._buffers)
        shapes = [None if one is None else tuple(one.shape) for _, one in sorted(self._buffers.items())]
        if hasattr(self, "deleted"):
            del self.deleted
        self.none = None
        self.replaced = torch.cat([self.replaced, self.replaced])
        self.register_buffer("added", torch.ones(1), persistent=False)
        return names, shapes


FRESH = (["deleted", "none", "replaced"], [(2,), (2,), (2,)])


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(value) for name, value in module.state_dict().items()}


@persistences
@pytest.mark.parametrize("inference", [False, True])
def test_a_canary_leaves_no_rows_in_a_buffer_that_was_none(persistent: bool, inference: bool) -> None:
    live = ms.Live(Cache(persistent).eval())
    with torch.inference_mode(inference):
        live.swap(WEIGHTS, canary=lambda v: v(X * 7) and v(X * 7))
        assert live(X) == [[10.0, 10.0]]
        live.swap(WEIGHTS, canary=lambda v: v(X * 7))
        assert live(X) == [[10.0, 10.0]] * 2
    with pytest.raises(CanaryError):
        live.swap({"weight": torch.full((2,), 3.0)}, canary=lambda v: v(X * 7) and False)
    assert live(X) == [[10.0, 10.0]] * 3


@persistences
def test_rows_of_requests_are_carried_over_or_reset(persistent: bool) -> None:
    live = ms.Live(Cache(persistent).eval())
    live(X * 5), live(X)
    assert live.swap(WEIGHTS).carried == ("rows",)
    assert live(X) == [[50.0, 50.0], [10.0, 10.0], [10.0, 10.0]]
    assert live.swap(WEIGHTS, buffers="reset").carried == ()
    assert live(X) == [[10.0, 10.0]]


@persistences
def test_a_canary_leaves_the_buffers_that_there_were(persistent: bool) -> None:
    module = Shifting(persistent).eval()
    live, state = ms.Live(module), weights(module)
    live.swap(state, canary=lambda v: v(X) and v(X))
    assert live(X) == FRESH
    with pytest.raises(CanaryError):
        live.swap(state, canary=lambda v: v(X) and False)
    assert live(X) == (["added", "none", "replaced"], [(1,), None, (4,)])


@persistences
def test_buffers_that_code_has_replaced_are_carried_over(persistent: bool) -> None:
    module = Shifting(persistent).eval()
    live, state = ms.Live(module), weights(module)
    live(X), live(X)
    report = live.swap(state)
    assert set(report.carried) == {"none", "replaced", "added"}
    # What was deleted is there again, with the value of a new version.
    assert live(X) == (["added", "deleted", "none", "replaced"], [(1,), (2,), None, (8,)])


class Shared(nn.Module):
    """A buffer under two names, at which two layers look; requests make it longer, and may give one layer its own."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.first, self.second = nn.Module(), nn.Module()
        rows = torch.zeros(1)
        for layer in (self.first, self.second):
            layer.register_buffer("rows", rows, persistent=persistent)

    def forward(self, x: torch.Tensor | None = None, *, apart: bool = False) -> Any:
        if x is not None:
            self.first.rows = self.second.rows = torch.cat([self.first.rows, x])
        if apart:
            self.second.rows = self.second.rows + 2
        return self.first.rows.tolist(), self.second.rows.tolist(), self.first.rows is self.second.rows


@persistences
@pytest.mark.parametrize("request_", [{"x": torch.ones(2)}, {"apart": True}], ids=["longer", "apart"])
def test_buffers_under_two_names_are_carried_over(persistent: bool, request_: dict[str, Any]) -> None:
    live = ms.Live(Shared(persistent).eval())
    live(**request_)
    after = ([0, 1, 1], [0, 1, 1], True) if "x" in request_ else ([float(persistent)], [2], False)
    for _ in range(2):
        live.swap(weights(Shared(persistent)))
        assert live() == after
    live.swap(weights(Shared(persistent)), buffers="reset")
    assert live() == ([float(persistent)], [float(persistent)], True)
