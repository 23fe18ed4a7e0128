"""Rules: what they make of names, and what is no rule."""

import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import modelstate as ms
from modelstate.errors import OptionError, RuleError
from modelstate.plan.rules import Prefix, Rename, Rule, apply_rules, check_rules, renamed_by

names = st.lists(st.text("ab.", max_size=5), unique=True, max_size=8)
rules = st.lists(
    st.one_of(
        st.builds(Prefix, strip=st.sampled_from(["a", "a.", "b.a"]), add=st.sampled_from(["", "b.", "a"])),
        st.builds(Rename, st.sampled_from(["a", r"^b\.", "(a)(b)", r"\.+"]), st.sampled_from(["", "b", r"\g<0>a"])),
    ),
    max_size=3,
)


# One rule.


@pytest.mark.parametrize(
    ("rule", "name", "becomes"),
    [
        (Prefix(strip="module."), "module.a", "a"),
        (Prefix(strip="module."), "module.module.a", "module.a"),
        (Prefix(strip="module."), "a", None),
        (Prefix(strip="module."), "module.", None),
        (Prefix(strip="module."), "a.module.b", None),
        (Prefix(strip="a"), "ab", "b"),
        (Prefix(add="encoder."), "a", "encoder.a"),
        (Prefix(add="encoder."), "encoder.a", "encoder.encoder.a"),
        (Prefix(strip="a.", add="b."), "a.c", "b.c"),
        (Prefix("a."), "a.c", "c"),
        (Rename("gamma", "weight"), "norm.gamma", "norm.weight"),
        (Rename("gamma", "weight"), "gamma.gamma", "weight.weight"),
        (Rename("gamma", "weight"), "norm.weight", None),
        (Rename("gamma", "gamma"), "gamma", "gamma"),
        (Rename(r"layer_(\d+)", r"layers.\1"), "layer_12.w", "layers.12.w"),
        (Rename(r"(?P<a>x)|y", r"\g<a>z"), "y.x", "z.xz"),
        (Rename("^", "model."), "a", "model.a"),
    ],
)
def test_what_a_rule_makes_of_a_name(rule: Rule, name: str, becomes: str | None) -> None:
    assert rule.rename(name) == becomes
    assert isinstance(rule, Rule)


@given(st.text("a.", max_size=4), st.text("a.", max_size=4), st.text("a.b", min_size=1, max_size=4))
def test_a_prefix_is_taken_back_by_its_reverse(strip: str, add: str, name: str) -> None:
    if strip or add:
        renamed = Prefix(strip=strip, add=add).rename(strip + name)
        assert renamed == add + name
        assert Prefix(strip=add, add=strip).rename(renamed) == strip + name


def test_a_prefix_that_changes_nothing() -> None:
    with pytest.raises(RuleError, match="changes nothing"):
        Prefix()


@pytest.mark.parametrize(
    ("pattern", "replacement"), [("(", "x"), ("a", r"\1"), ("(a)", r"\2"), ("a", r"\g<b>"), ("*", "")]
)
def test_what_is_no_regular_expression(pattern: str, replacement: str) -> None:
    with pytest.raises(RuleError, match=re.escape(repr(pattern))) as caught:
        Rename(pattern, replacement)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is not None
    assert caught.value.found


def test_rules_are_values_whose_text_can_be_pasted() -> None:
    for rule in (Prefix(strip="a.", add="b."), Rename(r"a\.(\d)", r"b.\1")):
        pasted = eval(repr(rule), {"Prefix": ms.Prefix, "Rename": ms.Rename})
        assert pasted == rule
        assert hash(pasted) == hash(rule)
        with pytest.raises(FrozenInstanceError):
            setattr(rule, fields(rule)[0].name, "c")


# Several rules.


@given(rules, names)
def test_rules_are_applied_in_their_order(rules: list[Rule], names: list[str]) -> None:
    result = apply_rules(rules, names)
    by_target: dict[str, list[str]] = {}
    for name in names:
        by_target.setdefault(renamed_by(rules, name), []).append(name)
    assert result.names == {target: sources[0] for target, sources in by_target.items()}
    assert dict(result.clashes) == {t: tuple(sources) for t, sources in by_target.items() if len(sources) > 1}


@given(rules, names)
def test_rules_of_use_and_idle_ones(rules: list[Rule], names: list[str]) -> None:
    result = apply_rules(rules, names)
    of_use: set[int] = set()
    for name in names:
        now, chain = name, []
        for index, rule in enumerate(rules):
            changed = rule.rename(now)
            if changed is not None:
                now = changed
                chain.append(repr(rule))
                of_use.add(index)
        assert now == renamed_by(rules, name)
        if result.names[now] == name and now not in dict(result.clashes):
            assert result.used.get(now, ()) == tuple(chain)
    assert result.idle == tuple(repr(rule) for index, rule in enumerate(rules) if index not in of_use)


def test_an_order_that_matters() -> None:
    strip, add = Prefix(strip="module."), Prefix(add="net.")
    assert renamed_by([strip, add], "module.a") == "net.a"
    assert renamed_by([add, strip], "module.a") == "net.module.a"
    assert apply_rules([add, strip], ["module.a"]).idle == (repr(strip),)
    assert apply_rules([strip, add], ["module.a"]).used == {"net.a": (repr(strip), repr(add))}


def test_several_names_become_one() -> None:
    result = apply_rules([Rename(r"\d", "")], ["a1", "a2", "b"])
    assert result.names == {"a": "a1", "b": "b"}
    assert result.clashes == (("a", ("a1", "a2")),)


def test_no_rules_change_nothing() -> None:
    result = apply_rules([], ["a", "b"])
    assert (result.names, result.used, result.idle, result.clashes) == ({"a": "a", "b": "b"}, {}, (), ())


# What is a rule.


class Upper:
    """A rule of a user's own."""

    def rename(self, name: str) -> str | None:
        return name.upper() if name.islower() else None


def test_a_rule_of_ones_own() -> None:
    (rule,) = check_rules([Upper()])
    assert apply_rules([rule], ["a", "B"]).names == {"A": "a", "B": "B"}


def test_rules_may_be_given_as_any_series_or_one_alone() -> None:
    one = Prefix("a.")
    assert check_rules(one) == check_rules([one]) == check_rules(iter([one])) == (one,)
    assert check_rules(()) == ()


@pytest.mark.parametrize("rules", ["abc", [Prefix], None, {"a": "b"}, 3, [Prefix("a"), "b"], [("a", "b")], ms.Prefix])
def test_what_is_no_rule(rules: Any) -> None:
    with pytest.raises(OptionError, match="not a rule") as caught:
        check_rules(rules)
    assert isinstance(caught.value, TypeError)
