"""`Within`: a rule for one part of the names does there what it does by itself, and nothing elsewhere."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import modelstate as ms
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
