"""Lazy buffers in trees of modules, in copies and in programs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelstate as ms
from modelstate.problems import ProblemKind
from tests.objects.test_lazy import Lazy, Load, every_load, same, saved, stock

# Trees of modules.


@every_load
def test_shared_modules(load: Load) -> None:
    def build(p: torch.Tensor | None) -> nn.Module:
        shared = Lazy(p)
        return nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, Lazy(torch.zeros(1))])})

    for value in (None, torch.arange(3.0)):
        for there in (None, torch.zeros(2), torch.zeros(3)):
            target: Any = build(there)
            load(target, build(value).state_dict())
            assert same(target["a"].p, value)
            assert target["a"] is target["b"][0]


@every_load
def test_two_states_for_a_shared_module(load: Load) -> None:
    shared = Lazy()
    target = nn.ModuleDict({"a": shared, "b": shared})
    one, other = (
        nn.ModuleDict({"a": Lazy(torch.ones(3)), "b": Lazy()}),
        nn.ModuleDict({"a": Lazy(), "b": Lazy(torch.ones(3))}),
    )
    for source in (one, other):
        state: Any = source.state_dict()
        for name in ("weight", "bias"):
            state[f"b.linear.{name}"] = state[f"a.linear.{name}"]
        with pytest.raises(RuntimeError, match="set under one name of a shared module, and None under another"):
            load(target, state)


def test_two_shapes_for_a_shared_module() -> None:
    shared = Lazy()
    state = nn.ModuleDict({"a": Lazy(torch.ones(3)), "b": Lazy(torch.ones(2))}).state_dict()
    for name in ("weight", "bias"):
        state[f"b.linear.{name}"] = state[f"a.linear.{name}"]
    target = nn.ModuleDict({"a": shared, "b": shared})
    assert ProblemKind.TIE_CONFLICT in {problem.kind for problem in ms.plan(target, state).problems}
    assert shared.p is None


def test_names_that_are_not_lazy_stay_strict() -> None:
    target = Lazy()
    target.register_buffer("q", None)
    target.register_buffer("r", torch.zeros(2))
    state = {**Lazy(torch.ones(3)).state_dict(), "q": torch.ones(1), "r": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"q"'):
        target.load_state_dict(state)
    plan = ms.plan(target, state)
    assert {problem.name for problem in plan.problems} == {"q", "r"}
    assert [problem.why for problem in plan.problems if problem.kind is ProblemKind.UNEXPECTED] == [
        "registered as None in the model"
    ]


class Node(nn.Module):
    """A node of a tree: two lazy buffers, perhaps a parameter, and children."""

    def __init__(self, weight: bool, children: list["Node"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2)) if weight else None
        ms.register_lazy_buffer(self, "p")
        self.below = nn.ModuleList(children)
        ms.register_lazy_buffer(self, "q")


trees = st.recursive(
    st.tuples(st.booleans(), st.just([])),
    lambda below: st.tuples(st.booleans(), st.lists(below, max_size=3)),
    max_leaves=6,
)
tensors = st.none() | st.tuples(
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.float32, torch.float64])
).map(lambda drawn: torch.randn(drawn[0], dtype=drawn[1]))


def grown(tree: Any) -> Node:
    return Node(tree[0], [grown(below) for below in tree[1]])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(tree=trees, data=st.data(), form=st.sampled_from(["state dict", "plain dict", "torch file", "safetensors"]))
@pytest.mark.parametrize("load", [ms.load, ms.load_state_dict, stock], ids=["load", "load_state_dict", "stock"])
def test_after_a_load_the_target_is_what_the_source_was(
    load: Load, tree: Any, data: st.DataObject, form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, target = (
        nn.ModuleDict({"net": grown(tree), "other": nn.Linear(1, 1)}),
        nn.ModuleDict({"net": grown(tree), "other": nn.Linear(1, 1)}),
    )
    expected: list[torch.Tensor | None] = []
    nodes = [(a, b) for a, b in zip(source.modules(), target.modules(), strict=True) if isinstance(a, Node)]
    for a, b in nodes:
        for name in ("p", "q"):
            value, there = data.draw(tensors), data.draw(tensors)
            if value is not None and there is not None and there.dtype is torch.float32:
                value = value.float()  # no cast that loses
            setattr(a, name, value)
            setattr(b, name, there)
            expected.append(None if value is None else value if there is None else value.to(there.dtype))
    state = saved(source.state_dict(), form, tmp_path_factory.mktemp("law"))
    if load is not ms.load and isinstance(state, Path):
        checkpoint = ms.open(state)
        state = torch.load(state) if form == "torch file" else {name: checkpoint.tensor(name) for name in checkpoint}
    load(target, state)
    found = [getattr(b, name) for _, b in nodes for name in ("p", "q")]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert target.state_dict().keys() == source.state_dict().keys()


# Copies, and programs.


@pytest.mark.slow
def test_a_whole_module_in_a_file_of_another_process(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    ms.register_lazy_buffer(module, "p")
    torch.save(module, tmp_path / "module.pt")
    code = (
        "import sys, torch\n"
        "module = torch.load(sys.argv[1], weights_only=False)\n"
        "state = module.state_dict()\n"
        "assert state._metadata['']['modelstate.lazy_buffers'] == {'p': False}\n"
        "module.load_state_dict({**state, 'p': torch.ones(3)})\n"
        "assert module.p.tolist() == [1, 1, 1]\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "module.pt"], check=True)
