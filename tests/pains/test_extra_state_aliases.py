"""A state dict is kept for later: the best epoch so far, say. What extra state it holds goes on changing."""

import copy
from typing import Any

import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.p = torch.zeros(2)


class ByHand(Kept):
    def get_extra_state(self) -> Any:
        return {"history": self.history, "p": self.p}

    def set_extra_state(self, state: Any) -> None:
        self.history, self.p = state["history"], state["p"]


@ms.extra_state("history", "p")
class Declared(Kept):
    pass


def train(model: Kept) -> None:
    model.history.append(1.0)
    model.p.add_(1)


def test_going_back_to_the_best_epoch(stock_fails: StockFails) -> None:
    theirs = ByHand()
    best = theirs.state_dict()
    train(theirs)
    stock_fails("what was kept has been trained on", best["_extra_state"]["history"] == [1.0])
    stock_fails("its tensors too", bool(best["_extra_state"]["p"].any()))
    other = ByHand()
    other.load_state_dict(best)
    stock_fails("and what loads it trains along", other.p is theirs.p)

    ours = Declared()
    best = ours.state_dict()
    train(ours)
    for load in (nn.Module.load_state_dict, ms.load_state_dict, ms.load):
        load(ours, best)
        assert ours.history == []
        assert not ours.p.any()
        other = Declared()
        load(other, best)
        train(other)
        assert ours.history == []
        train(ours)


def test_what_is_kept_can_be_loaded_again_and_again() -> None:
    ours = Declared()
    best = ours.state_dict()
    was = copy.deepcopy(best["_extra_state"]["values"]["history"])
    for _ in range(2):
        ms.load(ours, best)
        train(ours)
        assert best["_extra_state"]["values"]["history"] == was
