"""Tied weights that a checkpoint has several values for."""

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.pains.conftest import StockFails


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.head.register_buffer("scale", self.scale)


NAMES = ("embed.weight", "head.weight", "scale", "head.scale")


def state(*values: float) -> dict[str, torch.Tensor]:
    shapes = ((5, 3), (5, 3), (3,), (3,))
    return {name: torch.full(shape, float(value)) for name, shape, value in zip(NAMES, shapes, values, strict=True)}


def test_values_that_differ(stock_fails: StockFails) -> None:
    theirs, ours = Tied(), Tied()
    theirs.load_state_dict(state(1, 2, 3, 4))
    stock_fails(
        "the last value of a tied weight wins, silently",
        theirs.embed.weight[0, 0].item() == 2 and theirs.scale[0].item() == 4,
    )

    before = whole(ours)
    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, state(1, 2, 3, 4))
    assert {(p.name, *p.others) for p in caught.value.problems if p.kind.name == "TIE_CONFLICT"} == {
        ("head.weight", "embed.weight"),
        ("head.scale", "scale"),
    }
    assert len(caught.value.problems) == 2
    assert whole(ours) == before


@pytest.mark.parametrize("given", NAMES[:2])
def test_one_value_is_enough(given: str, stock_fails: StockFails) -> None:
    """Writers that know of ties leave one of the names out, and not always the same."""
    one = {given: torch.full((5, 3), 7.0), "scale": torch.ones(3)}
    with pytest.raises(RuntimeError, match="Missing key"):
        Tied().load_state_dict(one)
    stock_fails("a tied weight under one of its names is a missing key", True)

    for ours in (Tied(), skeleton()):
        assert ms.load(ours, one).coverage == 1
        assert ours.head.weight is ours.embed.weight
        assert ours.head.weight[0, 0].item() == 7


def skeleton() -> Tied:
    with ms.skeleton():
        return Tied()


def test_one_value_on_request() -> None:
    ours = Tied()
    ms.load(ours, state(1, 2, 3, 4), rules=[ms.rules.Ignore("head.weight"), ms.rules.Ignore("head.scale")])
    assert ours.embed.weight[0, 0].item() == ours.head.weight[0, 0].item() == 1
    assert ours.scale[0].item() == 3
