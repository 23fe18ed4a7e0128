"""Names that nearly match: which part is meant, and what would make the rest fit."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import modelstate as ms
from modelstate.errors import AmbiguousKeyError
from modelstate.plan.differences import regular_differences
from modelstate.plan.matching import matching_part, nearest
from modelstate.plan.problems import OtherNames
from modelstate.plan.rules.chain import renamed_by
from modelstate.plan.rules.known import WRAPPERS
from modelstate.plan.rules.rule import Rule
from tests.plan.rules.naming import renamed

Shapes = dict[str, tuple[int, ...] | None]
LAYERS: Shapes = {
    name: shape
    for i in range(3)
    for name, shape in (
        (f"layers.{i}.attn.weight", (4, 4)),
        (f"layers.{i}.attn.bias", (4,)),
        (f"layers.{i}.norm", (4,)),
    )
}


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def within(wrapper: str, shapes: Shapes) -> Shapes:
    return {name.replace("attn.", f"attn.{wrapper}."): shape for name, shape in shapes.items() if "attn." in name}


def pasted(problem: OtherNames) -> Rule:
    """The rule, from the code that the problem proposes."""
    rule: Rule = eval(problem.rule, {"ms": ms, "re": re})
    return rule


def assert_explained(problem: OtherNames, missing: Shapes, unexpected: Shapes) -> None:
    """The proposed rule makes the model's names of the checkpoint's."""
    assert problem.count == len(missing)
    assert renamed([pasted(problem)], unexpected) == dict(zip(missing, unexpected, strict=True))


# Differences that a rule takes back.


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "a.b.c.", "odd'name."])
def test_a_prefix_of_the_checkpoint(prefix: str) -> None:
    (problem,), explained = regular_differences(LAYERS, under(prefix, LAYERS))
    assert problem.difference == f"the prefix {prefix!r} of the checkpoint"
    assert pasted(problem) == ms.Prefix(strip=prefix)
    assert_explained(problem, LAYERS, under(prefix, LAYERS))
    assert explained == {name: prefix + name for name in LAYERS}
    assert problem.name in LAYERS


@pytest.mark.parametrize("prefix", ["module.", "encoder.", "a.b."])
def test_a_prefix_of_the_model(prefix: str) -> None:
    (problem,), explained = regular_differences(under(prefix, LAYERS), LAYERS)
    assert problem.difference == f"the prefix {prefix!r} of the model"
    assert pasted(problem) == ms.Prefix(add=prefix)
    assert_explained(problem, under(prefix, LAYERS), LAYERS)
    assert explained == {prefix + name: name for name in LAYERS}


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "module.module", "module._orig_mod"])
def test_a_wrapper_within_the_names_of_the_checkpoint(wrapper: str) -> None:
    wrapped = within(wrapper, LAYERS)
    bare = {name.replace(f"{wrapper}.", ""): shape for name, shape in wrapped.items()}
    (problem,), explained = regular_differences(bare, wrapped)
    assert "within" in problem.difference
    assert_explained(problem, bare, wrapped)
    assert explained == dict(zip(bare, wrapped, strict=True))
    assert isinstance(pasted(problem), ms.Rename)


def test_wrappers_in_several_places() -> None:
    bare: Shapes = {"a.b.w": (1,), "a.c.w": (2,), "d.w": (3,)}
    wrapped: Shapes = {"module.a.module.b.w": (1,), "module.a.c.module.w": (2,), "module.d.w": (3,)}
    (problem,), explained = regular_differences(bare, wrapped)
    assert problem.count == 3
    assert explained == dict(zip(bare, wrapped, strict=True))
    assert_explained(problem, bare, wrapped)


def test_several_groups_at_once() -> None:
    missing: Shapes = {**under("", LAYERS), "head.weight": (7, 4), "head.bias": (7,)}
    unexpected: Shapes = {**under("backbone.", LAYERS), "old.head.weight": (7, 4), "old.head.bias": (7,)}
    problems, explained = regular_differences(missing, unexpected)
    assert [(problem.count, problem.rule) for problem in problems] == [
        (9, "ms.Prefix(strip='backbone.')"),
        (2, "ms.Prefix(strip='old.')"),
    ]
    assert explained.keys() == missing.keys()
    assert set(explained.values()) == unexpected.keys()
    rules = [pasted(problem) for problem in problems]
    assert set(renamed(rules, unexpected)) == missing.keys()


def test_names_that_are_left_over_stay_unexplained() -> None:
    missing: Shapes = {**LAYERS, "extra.weight": (3,)}
    unexpected: Shapes = {**under("module.", LAYERS), "module.other": (3,), "third": (4,)}
    (problem,), explained = regular_differences(missing, unexpected)
    assert problem.count == len(LAYERS)
    assert "extra.weight" not in explained
    assert not {"module.other", "third"} & set(explained.values())


def test_one_name_of_another_shape_goes_with_the_others() -> None:
    unexpected = under("module.", LAYERS) | {"module.layers.0.norm": (9,)}
    (problem,), explained = regular_differences(LAYERS, unexpected)
    assert problem.count == len(LAYERS)
    assert explained["layers.0.norm"] == "module.layers.0.norm"


@pytest.mark.parametrize(
    "change", [lambda n: "module." + n, lambda n: n.replace("attn.", "attn.module."), lambda n: "a." + n]
)
def test_nothing_is_proposed_where_shapes_disagree(change: Callable[[str], str]) -> None:
    unexpected = {change(name): (*(shape or ()), 5) for name, shape in LAYERS.items()}
    assert regular_differences(LAYERS, unexpected) == ([], {})
    back = {change(name): shape for name, shape in LAYERS.items()}
    assert regular_differences(back, {name: (*(shape or ()), 5) for name, shape in LAYERS.items()}) == ([], {})


@pytest.mark.parametrize(
    ("missing", "unexpected"),
    [
        ({}, {}),
        (LAYERS, {}),
        ({}, LAYERS),
        ({"weight": (1,)}, {"my_weight": (1,)}),
        ({"a.weight": (1,)}, {"b.weight": (1,)}),
        ({"module": (1,)}, {"module.": (2,)}),
    ],
)
def test_what_differs_in_no_regular_way(missing: Shapes, unexpected: Shapes) -> None:
    assert regular_differences(missing, unexpected) == ([], {})


def test_a_rule_leaves_names_alone_that_fit_already() -> None:
    model = {"encoder.a": (1,), "encoder.b": (2,), "head": (3,)}
    checkpoint = {"a": (1,), "b": (2,), "head": (3,)}
    lacking: Shapes = {"encoder.a": (1,), "encoder.b": (2,)}
    (problem,), _ = regular_differences(lacking, {"a": (1,), "b": (2,)}, fitting=["head"])
    assert renamed([pasted(problem)], checkpoint).keys() == model.keys()


def test_several_proposals_work_together() -> None:
    missing: Shapes = {"enc.a": (1,), "enc.b": (2,), "c": (3,), "d": (4,)}
    unexpected: Shapes = {"a": (1,), "b": (2,), "module.c": (3,), "module.d": (4,)}
    problems, _ = regular_differences(missing, unexpected)
    assert renamed([pasted(problem) for problem in problems], unexpected).keys() == missing.keys()


def test_a_wrapper_within_the_names_of_the_model() -> None:
    bare = {name: shape for name, shape in LAYERS.items() if "attn." in name}
    problems, explained = regular_differences(within("module", LAYERS), bare)
    assert len(problems) == 1
    assert set(explained.values()) == set(bare)


def test_a_prefix_of_a_single_name_among_many_is_not_regular() -> None:
    problems, _ = regular_differences({f"w{i}": (1,) for i in range(40)}, {f"p{i}.w{i}": (1,) for i in range(40)})
    assert len(problems) <= 8


names = st.lists(st.text("ab.", min_size=1, max_size=4), unique=True, max_size=6)


@given(names, names)
def test_explanations_are_a_matching_of_the_two_sides(missing: list[str], unexpected: list[str]) -> None:
    over = [name for name in unexpected if name not in missing]
    problems, explained = regular_differences(dict.fromkeys(missing, (1,)), dict.fromkeys(over, (1,)))
    assert explained.keys() <= set(missing)
    assert set(explained.values()) <= set(over)
    assert sum(problem.count for problem in problems) == len(explained)
    for target, source in explained.items():
        assert any(renamed_by([pasted(problem)], source) == target for problem in problems)


# The cost.


def calls_of(function: Callable[[], object]) -> int:
    """How many calls of Python and C functions it takes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


CASES: dict[str, Callable[[int], tuple[Shapes, Shapes]]] = {
    "prefix": lambda n: ({f"l.{i}.w": (1,) for i in range(n)}, {f"module.l.{i}.w": (1,) for i in range(n)}),
    "wrapper": lambda n: ({f"l.{i}.w": (1,) for i in range(n)}, {f"l.{i}.module.w": (1,) for i in range(n)}),
    "three": lambda n: ({f"l.{i}.w": (1,) for i in range(n)}, {f"p{i % 3}.l.{i}.w": (1,) for i in range(n)}),
    "none": lambda n: ({f"l.{i}.w": (1,) for i in range(n)}, {f"k.{i}.v": (1,) for i in range(n)}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cost_grows_with_the_names(case: str) -> None:
    small, large = (calls_of(lambda n=n: regular_differences(*CASES[case](n))) for n in (500, 2000))  # type: ignore[misc]
    assert large < 5 * small


def test_many_names() -> None:
    missing, unexpected = CASES["prefix"](20_000)
    (problem,), explained = regular_differences(missing, unexpected)
    assert problem.count == len(explained) == 20_000


# The nearest name.


def test_the_nearest_name() -> None:
    assert nearest("layer.wieght", ["layer.bias", "layer.weight"]) == "layer.weight"
    assert nearest("layer.weight", ["something.else"]) == ""
    assert nearest("a", []) == ""
    assert nearest("name7", [f"name{i}" for i in range(2000)]) == "name7"
    assert nearest("name7", [f"name{i}" for i in range(2001)]) == ""


# The part of a checkpoint that is meant.


def state(names: list[str]) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1) for name in names}


NAMES = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.weight"]


def key_of(tree: dict[str, Any], wanted: list[str] = NAMES, *rules: Rule) -> str:
    return matching_part(ms.open(tree), wanted, [lambda name: renamed_by(rules, name)]).key


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (state(NAMES), ""),
        ({"model": state(NAMES), "step": 3}, "model"),
        ({"a": {"b": [state(NAMES)]}}, "a.b.0"),
        ({"a": {"b": {"c": state(NAMES)}}}, "a.b.c"),
        ({"state": state(NAMES), "optimizer": {"state": {0: state(["exp_avg"])}}}, "state"),
        ({"ema": state(NAMES[:2]), "model": state(NAMES)}, "model"),
        ({"other": state(["x", "y"]), "another": state(["z"])}, ""),
        ({**state(NAMES), "old": state(NAMES[:2])}, ""),
        ({"model": state([f"module.{name}" for name in NAMES])}, "model"),
        ({"model": state([f"net.{name}" for name in NAMES]), "ema": state(["x"])}, ""),
    ],
)
def test_the_part_with_the_names_of_the_model(tree: dict[str, Any], key: str) -> None:
    assert key_of(tree) == key


def test_a_model_with_a_prefix_that_the_checkpoint_lacks() -> None:
    wanted = [f"encoder.{name}" for name in NAMES]
    assert key_of({"net": state(NAMES), "optimizer": state(["x"])}, wanted) == "net"


def test_rules_decide_with() -> None:
    tree = {"a": state([f"old.{name}" for name in NAMES]), "b": state(NAMES[:1])}
    assert key_of(tree) == "b"
    assert key_of(tree, NAMES, ms.Prefix(strip="old.")) == "a"


def test_several_state_dicts_that_fit() -> None:
    tree = {"model": state(NAMES), "ema": state(NAMES), "half": state(NAMES[:3]), "little": state(NAMES[:1])}
    with pytest.raises(AmbiguousKeyError) as caught:
        key_of(tree)
    assert caught.value.candidates == (("model", 5), ("ema", 5), ("half", 3))
    assert "'ema' (5 of 5 names match)" in caught.value.found
    assert "little" not in str(caught.value)
    assert caught.value.remedy == "say which: key='model'"


def test_the_whole_as_one_of_several() -> None:
    with pytest.raises(AmbiguousKeyError, match=re.escape("'(the whole)' (5 of 5 names match)")) as caught:
        key_of({**state(NAMES), "ema": state(NAMES)})
    assert dict(caught.value.candidates) == {"": 5, "ema": 5}


@pytest.mark.parametrize(("others", "clear"), [(2, True), (3, False)])
def test_twice_as_many_names_are_clear(others: int, clear: bool) -> None:
    tree = {"model": state(NAMES), "ema": state(NAMES[:others])}
    if clear:
        assert key_of(tree) == "model"
    else:
        with pytest.raises(AmbiguousKeyError):
            key_of(tree)


def test_the_cost_of_a_part_grows_with_the_names() -> None:
    def calls(count: int) -> int:
        wanted = [f"layers.{i}.weight" for i in range(count)]
        checkpoint = ms.open({"model": state(wanted), "optimizer": {"state": {i: state(["m"]) for i in range(count)}}})
        return calls_of(lambda: matching_part(checkpoint, wanted, [lambda name: name]))

    assert calls(1200) < 5 * calls(300)
