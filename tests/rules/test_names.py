"""Rules: what they make of names, and what is no rule."""

import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, RuleError
from modelstate.rules import Concat, Copy, Fill, Ignore, Prefix, Rename, Rule, Same, Split
from modelstate.rules.schema import renaming
from tests.rules.naming import problems_of, renamed

NAMES = {name: getattr(ms.rules, name) for name in ms.rules.__all__}
"""What a program has after `from modelstate.rules import *`."""

names = st.lists(st.text("ab.", max_size=5), unique=True, max_size=8)
expressions = st.sampled_from(["a", r"^b\.", "(a)(b)", r"\.+"]).map(re.compile)
rules = st.lists(
    st.one_of(
        st.builds(Prefix, strip=st.sampled_from(["a", "a.", "b.a"]), add=st.sampled_from(["", "b.", "a"])),
        st.builds(Rename, expressions, st.sampled_from(["", "b", r"\g<0>a"])),
        st.builds(Rename, st.sampled_from(["a*", "*.b"]), st.sampled_from(["b.*", "*a", "*"])),
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
        (Rename("a", "b"), "a", "b"),
        (Rename("a", "b"), "aa", None),
        (Rename("a", "b"), "a.a", None),
        (Rename("*.gamma", "*.weight"), "norm.gamma", "norm.weight"),
        (Rename("*.gamma", "*.weight"), "gamma.gamma.gamma", "gamma.gamma.weight"),
        (Rename("*.gamma", "*.weight"), "norm.weight", None),
        (Rename("h.*.*", "blocks.*.*"), "h.3.attn.w", "blocks.3.attn.w"),
        (Rename("h.*.w", "*.h.w"), "h.w.w.w", "w.w.h.w"),
        (Rename("a.b", "x"), "aXb", None),
        (Rename("[a]?", "x"), "[a]?", "x"),
        (Rename("*", "*.w"), "a\nb", "a\nb.w"),
        (Rename(re.compile("gamma"), "weight"), "gamma.gamma", "weight.weight"),
        (Rename(re.compile("gamma"), "weight"), "norm.weight", None),
        (Rename(re.compile("gamma"), "gamma"), "gamma", "gamma"),
        (Rename(re.compile(r"layer_(\d+)"), r"layers.\1"), "layer_12.w", "layers.12.w"),
        (Rename(re.compile(r"(?P<a>x)|y"), r"\g<a>z"), "y.x", "z.xz"),
        (Rename(re.compile("^"), "model."), "a", "model.a"),
        (Ignore("a.*"), "a.b", None),
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


@pytest.mark.parametrize(("pattern", "replacement"), [("a", r"\1"), ("(a)", r"\2"), ("a", r"\g<b>"), ("a", None)])
def test_what_is_no_replacement_of_an_expression(pattern: str, replacement: Any) -> None:
    with pytest.raises(RuleError, match="replacement of this") as caught:
        Rename(re.compile(pattern), replacement)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is not None
    assert caught.value.found


@pytest.mark.parametrize(
    ("pattern", "replacement", "says"),
    [
        ("a.*", "b", "as many"),
        ("a", "*.a", "as many"),
        ("", "b", "a name"),
        ("a", "", "a name"),
        ("a.*", "a.*", "changes nothing"),
        (7, "b", "a name"),
        ("a", None, "a name"),
    ],
)
def test_what_is_no_rename(pattern: Any, replacement: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        Rename(pattern, replacement)


def test_rules_are_values_whose_text_can_be_pasted() -> None:
    for rule in (Prefix(strip="a.", add="b."), Rename(re.compile(r"a\.(\d)"), r"b.\1"), Ignore("a.*")):
        pasted = eval(repr(rule), {**NAMES, "re": re})
        assert pasted == rule
        assert hash(pasted) == hash(rule)
        with pytest.raises(AttributeError):
            setattr(rule, rule.__struct_fields__[0], "c")


# Several rules.


@pytest.mark.slow
@given(rules, names)
def test_rules_are_applied_in_their_order(rules: list[Rule], names: list[str]) -> None:
    """A plain oracle: names one at a time, with everything that can be wrong with several of them."""
    now = {name: name for name in names}  # from the names in the checkpoint
    clash, idle = False, []
    for rule in rules:
        changed = {source: rule.rename(name) for source, name in now.items()}
        if not any(name is not None for name in changed.values()):
            idle.append(("IDLE_PATTERN", repr(rule)))
        after = {source: now[source] if name is None else name for source, name in changed.items()}
        clash = clash or len(set(after.values())) < len(after)
        now = after
    if clash:
        assert "NAME_CLASH" in [kind for kind, _ in problems_of(rules, names)]
    elif idle:
        assert [problem for problem in problems_of(rules, names) if problem[0] == "IDLE_PATTERN"] == idle
    else:
        with suppress(RuleError):  # rules that go round
            assert renamed(rules, names) == {name: source for source, name in now.items()}


literal_names = st.sampled_from(["a", "b", "c", "d"])
literal_rules = st.one_of(
    st.tuples(literal_names, literal_names).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: Rename(*pair)),
    st.builds(Ignore, literal_names),
    st.builds(Copy, literal_names, literal_names),
    st.builds(Same, literal_names, literal_names),
    st.builds(Split, literal_names, st.lists(literal_names, min_size=1, max_size=3, unique=True)),
    st.builds(Concat, st.lists(literal_names, min_size=1, max_size=3, unique=True), literal_names),
    st.builds(Fill, literal_names, st.just(torch.ones(6))),
    st.just(Prefix(strip="a", add="c")),
)


def from_elsewhere(rule: Any) -> Rule:
    """Returns an equal rule of a class that may change any name, with the same text."""
    values = [getattr(rule, name) for name in rule.__struct_fields__]
    return type(type(rule).__name__, (type(rule),), {"__module__": "elsewhere"})(*values)  # type: ignore[no-any-return]


def outcome(rules: Iterable[Any], state: dict[str, torch.Tensor]) -> Any:
    """The values by name, or the kinds of the problems."""
    try:
        return {name: value.tolist() for name, value in ms.rules.Rules(rules).apply(state).items()}
    except RuleError as error:
        kinds = {problem.kind.name for problem in error.problems}
        return "a clash" if "NAME_CLASH" in kinds else kinds


@pytest.mark.slow
@given(st.lists(literal_rules, max_size=6), st.permutations("abcde"), st.integers(0, 5))
def test_rules_for_single_names_do_what_rules_for_all_names_do(rules: list[Rule], names: list[str], count: int) -> None:
    state = {name: torch.full((6,), index // 2) for index, name in enumerate(names[:count])}
    assert outcome(rules, state) == outcome(map(from_elsewhere, rules), state)


@pytest.mark.slow
@given(st.lists(st.one_of(literal_rules, st.builds(Rename, st.sampled_from(["a*", "*b"]), st.just("*c"))), max_size=8))
def test_renaming_by_all_rules_is_that_by_one_after_the_other(rules: list[Rule]) -> None:
    renamed_by_all = renaming(rules)
    for name in "abcde":
        expected = name
        for rule in rules:
            renamed = rule.rename(expected)
            expected = expected if renamed is None else renamed
        assert renamed_by_all(name) == expected


def test_an_order_that_matters() -> None:
    strip, add = Prefix(strip="module."), Prefix(add="net.")
    assert renamed([strip, add], ["module.a"]) == {"net.a": "module.a"}
    assert problems_of([add, strip], ["module.a"]) == [("IDLE_PATTERN", repr(strip))]


def test_names_that_meet_or_go_round() -> None:
    assert problems_of([Rename(re.compile(r"\d"), "")], ["a1", "a2", "b"]) == [("NAME_CLASH", "a")]
    # Nothing overwrites anything, not even where a later rule would have moved it away.
    assert ("NAME_CLASH", "b") in problems_of([Rename("a", "b"), Rename("b", "c")], ["a", "b"])
    assert problems_of([Rename("a", "b"), Rename("b", "a")], ["a"]) == [("CYCLIC_RULES", "a")]
    assert problems_of([Rename("a", "b"), Rename("b", "c"), Rename("c", "a")], ["a", "d"]) == [("CYCLIC_RULES", "a")]
    rules = [Rename("a", "aside"), Rename("b", "a"), Rename("aside", "b")]
    assert renamed(rules, ["a", "b"]) == {"b": "a", "a": "b"}


def test_each_wildcard_matches_as_little_as_it_can() -> None:
    for text in map("".join, product("a.*", repeat=5)):
        lazy = re.compile("(.*?)".join(map(re.escape, text.split("*"))), re.DOTALL)
        for name in ("a", "a.a", "aa.a", "a.a.a", "..a.aa.", "aaa\naa"):
            match, filled = lazy.fullmatch(name), "|".join(["", *"*" * text.count("*"), ""])
            wanted = "|".join(["", *match.groups(), ""]) if match else None
            assert Rename(text, filled).rename(name) == wanted, (text, name)


def test_many_wildcards_on_a_long_name_that_does_not_match() -> None:
    """A search that tries all combinations of places takes more than a lifetime."""
    assert Rename("*.*.*.*.*.*.*.*.bias", "*.*.*.*.*.*.*.*.b").rename("a." * 2000 + "weight") is None


# What is a rule.


@pytest.mark.parametrize("wrap", [list, tuple, lambda rules: rules[0]])
def test_a_path_is_no_rule_though_it_has_a_rename(wrap: Any, tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    path.touch()
    with pytest.raises(OptionError, match="not a rule"):
        ms.load(nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), rules=wrap([path]))
    assert path.exists()


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (lambda name: name[99], "where the rule does not apply\n  found: IndexError"),
        (len, "where the rule does not apply\n  found: TypeError: it returned a int"),
    ],
)
def test_a_rule_of_ones_own_that_fails(rename: Any, says: str) -> None:
    model = nn.Linear(1, 1)
    was = [param.clone() for param in model.parameters()]
    rule = type("Mine", (), {"rename": staticmethod(rename)})()
    with pytest.raises(RuleError, match=re.escape(says)) as raised:
        ms.load(model, nn.Linear(1, 1).state_dict(), rules=[rule])
    assert raised.value.where == "Mine, weight"
    assert all(map(torch.equal, was, model.parameters()))


@pytest.mark.parametrize(
    "rules", ["abc", [Prefix], None, {"a": "b"}, 3, [Prefix("a"), "b"], [("a", "b")], ms.rules.Prefix]
)
def test_what_is_no_rule(rules: Any) -> None:
    with pytest.raises(OptionError, match="not a rule") as caught:
        ms.plan(nn.Linear(1, 1), {}, rules=rules)
    assert isinstance(caught.value, TypeError)
