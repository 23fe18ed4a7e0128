"""Names that nearly match: which part of a checkpoint is meant."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import AmbiguousCheckpointError
from modelstate.planning.matching import matching_part
from modelstate.rules.rule import Rule
from modelstate.rules.schema import renaming

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


# The part of a checkpoint that is meant.


def state(names: list[str]) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1) for name in names}


NAMES = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.weight"]


def key_of(tree: dict[str, Any], wanted: list[str] = NAMES, *rules: Rule) -> str:
    return matching_part(ms.open(tree), wanted, [renaming(rules)]).key


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
        ({"model": state([f"net.{name}" for name in NAMES]), "ema": state(["x"])}, "model"),
        ({"run": {"model": state([f"net.{name}" for name in NAMES])}, "epoch": 1}, "run.model"),
        ({"model": state([f"net.{name}" for name in NAMES]), "ema": state([f"net.{name}" for name in NAMES])}, ""),
        ({"model": state([f"net.{name}" for name in [*NAMES, "x"]])}, ""),
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
    assert key_of(tree, NAMES, ms.rules.Prefix(strip="old.")) == "a"


def test_several_state_dicts_that_fit() -> None:
    tree = {"model": state(NAMES), "ema": state(NAMES), "half": state(NAMES[:3]), "little": state(NAMES[:1])}
    with pytest.raises(AmbiguousCheckpointError) as caught:
        key_of(tree)
    assert caught.value.candidates == (("model", 5), ("ema", 5), ("half", 3))
    assert "'ema' (5 of 5 names match)" in caught.value.found
    assert "little" not in str(caught.value)
    assert str(caught.value.remedy).startswith("say which one is meant, for example key='model'; ")


def test_the_whole_as_one_of_several() -> None:
    with pytest.raises(AmbiguousCheckpointError, match=re.escape("'(the whole)' (5 of 5 names match)")) as caught:
        key_of({**state(NAMES), "ema": state(NAMES)})
    assert dict(caught.value.candidates) == {"": 5, "ema": 5}


@pytest.mark.parametrize(("others", "clear"), [(2, True), (3, False)])
def test_twice_as_many_names_are_clear(others: int, clear: bool) -> None:
    tree = {"model": state(NAMES), "ema": state(NAMES[:others])}
    if clear:
        assert key_of(tree) == "model"
    else:
        with pytest.raises(AmbiguousCheckpointError):
            key_of(tree)


def test_the_cost_of_a_part_grows_with_the_names() -> None:
    def calls(count: int) -> int:
        wanted = [f"layers.{i}.weight" for i in range(count)]
        checkpoint = ms.open({"model": state(wanted), "optimizer": {"state": {i: state(["m"]) for i in range(count)}}})
        return calls_of(lambda: matching_part(checkpoint, wanted, [lambda name: name]))

    assert calls(1200) < 5 * calls(300)
