"""A module that keeps `p`, which is None for the first 350 epochs, and checkpoints from before it was saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.problems import Problem, ProblemKind
from tests.pains.conftest import StockFails


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.p: Any = None
        self.epoch = 0


class ByHand(Old):
    """As torch's documentation has it, with a default where `p` is missing."""

    def get_extra_state(self) -> Any:
        return {"p": self.p, "epoch": self.epoch}

    def set_extra_state(self, state: Any) -> None:
        self.p, self.epoch = state.get("p"), state.get("epoch", 0)


@ms.extra_state("p", "epoch", optional=True)
class Declared(Old):
    pass


def three_deep(inner: nn.Module) -> nn.Module:
    return nn.ModuleDict({"body": nn.ModuleDict({"layers": nn.Sequential(nn.Linear(2, 2), inner)})})


KEY = "body.layers.1._extra_state"
LOADS: tuple[Callable[[nn.Module, Any], Any], ...] = (nn.Module.load_state_dict, ms.load_state_dict, ms.load)


def strictly(model: nn.Module, state: Any) -> str:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_checkpoint_from_before(stock_fails: StockFails) -> None:
    old = three_deep(Old()).state_dict()
    stock_fails(
        "a missing extra state fails, whatever set_extra_state makes of it",
        f'Missing key(s) in state_dict: "{KEY}"' in strictly(three_deep(ByHand()), old),
    )
    injected = {**old, "_extra_state": {}}
    stock_fails(
        "putting in an empty one takes the key of each module, at its depth",
        "Unexpected key(s)" in strictly(three_deep(ByHand()), injected),
    )

    for load in LOADS:
        model = three_deep(Declared())
        load(model, old)
        assert torch.equal(model["body"]["layers"][1].conv.weight, old["body.layers.1.conv.weight"])
        assert (model["body"]["layers"][1].p, model["body"]["layers"][1].epoch) == (None, 0)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_no_hole_in_the_firewall(stock_fails: StockFails, wrapper: str) -> None:
    old = {wrapper + name: value for name, value in three_deep(Old()).state_dict().items()}
    del old[wrapper + "body.layers.1.conv.bias"]

    def wrapped(inner: nn.Module) -> nn.Module:
        return nn.ModuleDict({wrapper[:-1]: three_deep(inner)}) if wrapper else three_deep(inner)

    theirs = wrapped(ByHand())
    skipped = theirs.load_state_dict(old, strict=False).missing_keys
    stock_fails("strict=False lets a lost bias through with it", wrapper + "body.layers.1.conv.bias" in skipped)

    for load in LOADS:
        with pytest.raises(RuntimeError, match=r"conv\.bias") as caught:
            load(wrapped(Declared()), old)
        assert "_extra_state" not in str(caught.value)
    assert ms.plan(wrapped(Declared()), old).problems == (
        Problem(ProblemKind.MISSING, wrapper + "body.layers.1.conv.bias", (1,)),
    )


def test_a_name_that_is_missing(stock_fails: StockFails) -> None:
    state = three_deep(Declared()).state_dict()
    del state[KEY]["values"]["p"]
    by_hand = three_deep(ByHand()).state_dict()
    del by_hand[KEY]["p"]
    stock_fails("a name that got lost is None, without a word", strictly(three_deep(ByHand()), by_hand) == "")

    (problem,) = ms.plan(three_deep(Declared()), state).problems
    assert problem.kind is ProblemKind.BAD_EXTRA_STATE
    assert problem.name == KEY
    assert "'p'" in problem.why


def test_a_model_without_it(stock_fails: StockFails) -> None:
    """The way back: the checkpoint has it, and the class does not take it."""
    stock_fails(
        "an unexpected extra state fails as well",
        "Unexpected key(s)" in strictly(three_deep(Old()), three_deep(ByHand()).state_dict()),
    )

    state = three_deep(Declared()).state_dict()
    assert ms.plan(three_deep(Old()), state).problems == (Problem(ProblemKind.UNEXPECTED, KEY),)
    ms.load(three_deep(Old()), state, allow_unexpected=["*._extra_state"])


def test_the_life_of_p() -> None:
    """None at first, then a tensor whose shape nobody knew, then fixed over a restart."""
    training = three_deep(Declared())
    for epoch, p in ((349, None), (351, torch.rand(3))):
        training["body"]["layers"][1].epoch, training["body"]["layers"][1].p = epoch, p
        for load in LOADS:
            restarted = three_deep(Declared())
            load(restarted, training.state_dict())
            found = restarted["body"]["layers"][1]
            assert found.epoch == epoch
            assert found.p is None if p is None else torch.equal(found.p, p)
