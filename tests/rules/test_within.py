"""`Within`: a rule for one part of the names does there what it does by itself, and nothing elsewhere."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import modelstate as ms
from modelstate.errors import RuleError
from modelstate.problems import ProblemKind
from modelstate.rules.rule import Scoped
from modelstate.rules.schema import Rules

RULES = [
    ms.rules.Prefix(strip="a."),
    ms.rules.Prefix(add="c."),
    ms.rules.Rename("a.*", "d.*"),
    ms.rules.Split("a.w", ["a.q", "a.k"]),
    ms.rules.Concat(["a.w", "b.w"], "ab.w"),
    ms.rules.Transpose("*.w"),
    ms.rules.Ignore("b.*"),
    ms.rules.Copy("a.w", "z.w"),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def state() -> dict[str, Any]:
    return {f"{part}.{name}": torch.randn(4, 4) for part in "ab" for name in "wx"}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@every_rule
@given(st.sampled_from(["m.", "a.", "a.b."]))
def test_it_does_there_what_it_does_by_itself(rule: Any, prefix: str) -> None:
    inner, outer = state(), {f"other.{name}": value for name, value in state().items()}
    both = {**outer, **{prefix + name: value for name, value in inner.items()}}
    found = Rules([Scoped(prefix, rule)]).apply(both)
    expected = Rules([rule]).apply(inner)
    assert same({name: found.pop(name) for name in outer}, outer)
    assert same(found, {prefix + name: value for name, value in expected.items()})


@every_rule
def test_its_way_back(rule: Any) -> None:
    whole = {f"m.{name}": value for name, value in state().items()}
    scoped = Rules([Scoped("m.", rule)])
    try:
        back: Any = Rules([rule]).reverse()
    except RuleError:
        with pytest.raises(RuleError):
            scoped.reverse()
        return
    there = scoped.apply(whole)
    expected = back.apply({name[2:]: value for name, value in there.items()})
    found = scoped.reverse().apply(there)
    assert same(found, {f"m.{name}": value for name, value in expected.items()})


def test_problems_have_their_names_in_full() -> None:
    model = nn.ModuleDict({"m": nn.Linear(2, 2)})
    idle = [Scoped("n.", ms.rules.Rename("x", "y")), Scoped("n.", ms.rules.Split("x", ["y"]))]
    rules = [Scoped("m.", ms.rules.Split("weight", ["a"], sizes=[9])), *idle]
    found = ms.plan(model, model.state_dict(), rules=rules).problems
    assert [one.name for one in found if one.kind is ProblemKind.BAD_RULE] == ["m.weight"]
    assert [one.name for one in found if one.kind is ProblemKind.IDLE_PATTERN] == list(map(repr, idle))
    assert "in n.*" in repr(rules[1])


def test_a_rule_that_makes_values_for_what_is_lacking_there() -> None:
    model = nn.ModuleDict({"m": nn.Linear(2, 2), "n": nn.Linear(2, 2)})
    ms.load(model, {}, key="", rules=[Scoped("m.", ms.rules.Fill("*", 3.0)), Scoped("n.", ms.rules.Fill("*", 4.0))])
    assert model["m"].weight.eq(3).all()
    assert model["n"].bias.eq(4).all()
