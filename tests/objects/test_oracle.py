"""Random trees of modules, random keys missing: what is reported and what is set, against a plain oracle."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelstate as ms
from modelstate.errors import PlanError
from modelstate.problems import ProblemKind
from tests.loading.fingerprint import described_module

pytestmark = pytest.mark.slow

BUILT, DEFAULT = "as built", "the default"


class Bare(nn.Module):
    """No extra state."""

    absent: Any = BUILT

    def __init__(self, children: "list[nn.Module]") -> None:
        super().__init__()
        self.value: Any = BUILT
        self.own: Any = BUILT
        self.weight = nn.Parameter(torch.zeros(1))
        for index, child in enumerate(children):
            self.add_module(f"child{index}", child)


@ms.extra_state("value")
class Required(Bare):
    """Missing, as for torch, where it is missing."""


@ms.extra_state("value", optional=True)
class Lenient(Bare):
    pass


@ms.extra_state("value", defaults={"value": DEFAULT})
class Defaulted(Bare):
    absent = DEFAULT


@ms.extra_state("own", optional=True)
class LenientOnRequired(Required):
    """One class of the two needs it."""


@ms.extra_state("own", defaults={"own": BUILT})
class DefaultedOnLenient(Lenient):
    pass


class Undeclared(Lenient):
    pass


KINDS = (Bare, Required, Lenient, Defaulted, LenientOnRequired, DefaultedOnLenient, Undeclared)
NEEDED = (Required, LenientOnRequired)
VALUES = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)

Tree = tuple[type[Bare], list[Any]]
trees = st.recursive(
    st.tuples(st.sampled_from(KINDS), st.just([])),
    lambda below: st.tuples(st.sampled_from(KINDS), st.lists(below, max_size=3)),
    max_leaves=8,
)


def build(tree: Tree) -> Bare:
    kind, below = tree
    return kind([build(child) for child in below])


@st.composite
def cases(draw: Callable[..., Any]) -> tuple[Tree, Bare, set[str]]:
    tree = draw(trees)
    source = build(tree)
    for module in source.modules():
        assert isinstance(module, Bare)
        module.value, module.own = draw(VALUES), draw(VALUES)
        nn.init.constant_(module.weight, draw(st.integers(1, 9)))
    keys = sorted(source.state_dict())
    extra = [key for key in keys if key.endswith("_extra_state")] or keys
    gone = draw(st.sets(st.sampled_from(extra)) | st.sets(st.sampled_from(keys)))
    return tree, source, gone


def expected_to_miss(model: nn.Module, gone: set[str]) -> set[str]:
    """The oracle: a key that is gone is missing, unless it is that of a module which may do without."""
    found = set()
    for key in gone:
        path, _, name = key.rpartition(".")
        if name != "_extra_state" or type(model.get_submodule(path)) in NEEDED:
            found.add(key)
    return found


def check_loaded(made: nn.Module, source: nn.Module, gone: set[str]) -> None:
    for path, module in made.named_modules():
        original = source.get_submodule(path)
        assert isinstance(module, Bare)
        assert isinstance(original, Bare)
        assert torch.equal(module.weight, original.weight)
        if type(module) is Bare:
            assert (module.value, module.own) == (BUILT, BUILT)
            continue
        absent = f"{path}._extra_state".lstrip(".") in gone
        assert module.value == (module.absent if absent else original.value)
        has_own = isinstance(module, LenientOnRequired | DefaultedOnLenient) and not absent
        assert module.own == (original.own if has_own else BUILT)


def torchs_missing(error: BaseException) -> set[str]:
    listed = re.search(r"Missing key\(s\) in state_dict: (.*)\. ", str(error))
    return set(re.findall(r'"([^"]+)"', listed[1])) if listed else set()


@settings(max_examples=75, deadline=None)
@given(cases(), st.sampled_from(["", "module."]))
def test_random_trees_with_random_keys_missing(case: tuple[Tree, Bare, set[str]], wrap: str) -> None:
    tree, source, gone = case
    missing = {wrap + key for key in expected_to_miss(source, gone)}
    state = {wrap + key: value for key, value in source.state_dict().items() if key not in gone}

    def model() -> nn.Module:
        made = build(tree)
        return nn.ModuleDict({"module": made}) if wrap else made

    plan = ms.plan(model(), state)
    found = {problem.name for problem in plan.problems if problem.kind is ProblemKind.MISSING}
    assert found == missing
    assert plan.ok is not bool(missing)
    for one in (nn.Module.load_state_dict, ms.load_state_dict, ms.load):
        made = model()
        was = described_module(made)
        if not missing:
            one(made, state)
            check_loaded(made.module if wrap else made, source, gone)  # type: ignore[arg-type]
            continue
        with pytest.raises(RuntimeError) as caught:
            one(made, state)
        if isinstance(caught.value, PlanError):
            assert caught.value.problems == plan.problems
        else:
            assert torchs_missing(caught.value) == missing
        if one is not nn.Module.load_state_dict:
            assert described_module(made) == was
