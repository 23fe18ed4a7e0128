"""`strict=False` hides everything; an allow-list hides what it names."""

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.problems import Problem, ProblemKind
from tests.loading.fingerprint import described_module, whole
from tests.pains.conftest import StockFails


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_nothing_is_loaded(stock_fails: StockFails) -> None:
    state = {f"network.{name}": value for name, value in net(2).state_dict().items()}
    theirs, ours = net(1), net(1)
    before = described_module(theirs)
    theirs.load_state_dict(state, strict=False)
    stock_fails("strict=False loads nothing and raises nothing", described_module(theirs) == before)

    before = whole(ours)
    with pytest.raises(ms.PlanError, match="4 names differ only by the prefix"):
        ms.load(ours, state)
    with pytest.raises(ms.PlanError):
        ms.load(ours, state, allow_unexpected=["network.*"])
    assert whole(ours) == before


def test_a_shape_that_differs(stock_fails: StockFails) -> None:
    state = net(2).state_dict() | {"1.weight": torch.zeros(9, 9)}
    theirs, ours = net(1), net(1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        theirs.load_state_dict(state, strict=False)
    half = torch.equal(theirs[0].weight, state["0.weight"])
    stock_fails("strict=False raises for a shape all the same, with half of the model loaded", half)

    before = whole(ours)
    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, state, allow_missing=["1.weight"], allow_unexpected=["1.weight"])
    assert Problem(ProblemKind.WRONG_SHAPE, "1.weight", (2, 4), (9, 9)) in caught.value.problems
    assert whole(ours) == before


def test_what_is_meant_and_what_is_not(stock_fails: StockFails) -> None:
    """One name is left out on purpose, another by a slip."""
    state = net(2).state_dict() | {"old_head.weight": torch.ones(2)}
    state["1.wieght"] = state.pop("1.weight")
    theirs, ours = net(1), net(1)
    theirs.load_state_dict(state, strict=False)
    stock_fails("strict=False hides a slip with what is meant", torch.equal(theirs[1].weight, net(1)[1].weight))

    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, state, allow_unexpected=["old_head.*"])
    assert sorted(p.name for p in caught.value.problems) == ["1.weight", "1.wieght"]
    assert "ms.suggest" in str(caught.value)


@pytest.mark.parametrize("option", ["allow_missing", "allow_unexpected"])
def test_a_pattern_that_matches_nothing_is_a_problem(option: str) -> None:
    ours = net(1)
    before = whole(ours)
    with pytest.raises(ms.PlanError) as caught:
        ms.load(ours, net(2).state_dict(), **{option: ["head.*"]})
    assert caught.value.problems == (Problem(ProblemKind.IDLE_PATTERN, "head.*", found=option),)
    assert whole(ours) == before


def test_every_pattern_of_several_must_match() -> None:
    state = net(2).state_dict() | {"a.b": torch.ones(1)}
    with pytest.raises(ms.PlanError) as caught:
        ms.load(net(1), state, allow_unexpected=["a.*", "a.?", "b.*"])
    assert caught.value.problems == (Problem(ProblemKind.IDLE_PATTERN, "b.*", found="allow_unexpected"),)


def test_coverage_is_in_every_report() -> None:
    state = net(2).state_dict()
    whole_report = ms.load(net(1), state)
    assert whole_report.coverage == 1
    assert "4 of 4 slots filled" in str(whole_report)

    del state["1.bias"]
    report = ms.load(net(1), state, allow_missing=["1.bias"])
    assert report.coverage == 3 / 4
    assert "3 of 4 slots filled" in str(report)
    assert "1.bias" in str(report)
    assert "3 of 4 slots filled" in str(ms.plan(net(1), state, allow_missing=["1.bias"]))
