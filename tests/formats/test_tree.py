"""The tree of a checkpoint and its flat view: every leaf is there once, under a path that leads back to it."""

from collections import Counter, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import modelstate as ms
from modelstate.errors import AmbiguousCheckpointError, KeyNotFoundError, SourceTypeError
from modelstate.formats.tree import flatten, rebuild, same_value, subtree

keys = st.one_of(st.text("ab.", max_size=3), st.integers(0, 2))
leaves = st.one_of(
    st.builds(lambda: torch.zeros(1)), st.sampled_from([None, True, 1.5, "text", b"b", torch.Size([2])]), st.integers()
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3), st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)
roots = st.dictionaries(keys, trees, max_size=4)


def children(node: object) -> list[tuple[str, Any]] | None:
    """What is in a container, by name; None for a leaf. The test's own notion of it."""
    if isinstance(node, dict):
        return [(str(key), value) for key, value in node.items()]
    if type(node) in (list, tuple):
        return [(str(index), value) for index, value in enumerate(node)]
    return None


def nodes(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, node
    for name, child in children(node) or ():
        yield from nodes(child, (*path, name))


def tensors_in(node: object) -> int:
    return sum(isinstance(found, torch.Tensor) for _, found in nodes(node))


def expected(root: object) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]], list[str]]:
    """Tensors, largest parts without tensors, and dicts with tensors, each by its path."""
    inner = [(path, node) for path, node in nodes(root) if not path or tensors_in(node)]
    tensors = [(".".join(path), node) for path, node in inner if isinstance(node, torch.Tensor)]
    values = [
        (".".join((*path, name)), child)
        for path, node in inner
        for name, child in children(node) or ()
        if not tensors_in(child)
    ]
    return tensors, values, [".".join(path) for path, node in inner if isinstance(node, dict)]


@pytest.mark.slow
@given(roots)
def test_every_leaf_is_there_once(root: dict[Any, Any]) -> None:
    tensors, values, containers = expected(root)
    names = [name for name, _ in tensors + values]
    if len(set(names)) < len(names):
        with pytest.raises(AmbiguousCheckpointError) as caught:
            flatten(root, "somewhere")
        assert Counter(names)[caught.value.found] > 1
        assert caught.value.where == "somewhere"
        return
    flat = flatten(root, "somewhere")
    assert list(flat.tensors) == [name for name, _ in tensors]
    assert all(flat.tensors[name] is tensor for name, tensor in tensors)
    assert flat.values.keys() == {name for name, _ in values}
    assert all(flat.values[name] is value for name, value in values)
    assert flat.containers == containers


@pytest.mark.slow
@given(roots)
@settings(max_examples=200)
def test_every_path_leads_to_its_node(root: dict[Any, Any]) -> None:
    at: dict[str, list[Any]] = {}
    for path, node in nodes(root):
        at.setdefault(".".join(path), []).append(node)
    for path, candidates in at.items():
        found = subtree(root, path, "somewhere")
        assert any(found is node for node in candidates)
    for path in ("c", *(f"{path}.c" for path in at)):
        with pytest.raises(KeyNotFoundError) as caught:
            subtree(root, path, "somewhere")
        assert caught.value.found == path


def test_a_long_key_comes_before_a_short_one_where_both_fit() -> None:
    root = {"a": {"b": 1, "d": 2}, "a.b": {"c": 3}}
    assert subtree(root, "a.b", "") == {"c": 3}
    assert subtree(root, "a.d", "") == 2
    assert subtree(root, "a.b.c", "") == 3
    assert subtree({"a.b": {"x": 1}, "a": {"b": {"y": 2}}}, "a.b.y", "") == 2


Point = namedtuple("Point", "x y")


def test_rebuilding_keeps_what_is_shared_and_what_holds_itself() -> None:
    shared = [1]
    itself: dict[str, Any] = {"list": [shared, shared]}
    itself["list"].append(itself)
    itself["tuple"] = (itself,)
    made = rebuild(itself, pytest.fail)
    assert made is not itself
    assert made["list"][0] is made["list"][1] is not shared
    assert made["list"][2] is made
    assert made["tuple"][0] is made


# Names.


def test_one_name_twice() -> None:
    for root in (
        {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
        {"a": [torch.ones(1)], "a.0": 3},
        {1: torch.ones(1), "1": torch.ones(1)},
    ):
        with pytest.raises(AmbiguousCheckpointError, match="one name when their keys are joined"):
            flatten(root, "")


def test_the_remedy_for_one_name_twice_works(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"model": {"w": torch.ones(1)}, "a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, path)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        ms.open(path, key="model")  # the names of the whole file are joined, whatever the part
    assert caught.value.remedy.endswith("give the part that is meant as a mapping, as torch.load returns it for a file")
    assert list(ms.open(torch.load(path)["model"])) == ["w"]


def test_empty_keys_are_names_too() -> None:
    inner, outer = torch.ones(1), torch.ones(1)
    flat = flatten({"": outer, "a": {"": inner}, "tensor": inner, "b": {"": {"": inner}}}, "")
    assert list(flat.tensors) == ["", "a.", "tensor", "b.."]
    assert flat.tensors[""] is outer


def test_a_tensor_alone_is_called_tensor() -> None:
    assert list(flatten(torch.ones(1), "").tensors) == ["tensor"]
    assert list(flatten([torch.ones(1), 3], "").tensors) == ["0"]


@pytest.mark.parametrize("root", [5, {}, [], {"a": {}}, {"a": [1, (2,)], "b": None}], ids=repr)
def test_trees_without_tensors(root: Any) -> None:
    flat = flatten(root, "")
    assert flat.tensors == {}
    assert flat.values == (root if isinstance(root, dict) else {})
    assert flat.containers == ([""] if isinstance(root, dict) else [])


# Extra state.


def test_extra_state_is_kept_whole() -> None:
    state = {"scale": torch.ones(1), "steps": [1, torch.ones(2)]}
    flat = flatten({"layer": {"weight": torch.ones(1), "_extra_state": state}, "other._extra_state": [state]}, "")
    assert list(flat.tensors) == ["layer.weight"]
    assert flat.values["layer._extra_state"] is state
    assert flat.values["other._extra_state"] == [state]


def test_extra_state_that_is_a_tensor_is_one() -> None:
    assert list(flatten({"layer": {"_extra_state": torch.ones(1)}}, "").tensors) == ["layer._extra_state"]


def test_what_holds_nothing_but_extra_state_is_a_container() -> None:
    flat = flatten({"model": {"a._extra_state": {"x": 1}, "n": 2}}, "")
    assert flat.values == {"model.a._extra_state": {"x": 1}, "model.n": 2}
    assert flat.containers == ["", "model"]


def test_similar_names_are_not_extra_state() -> None:
    flat = flatten({"my_extra_state": {"a": torch.ones(1)}, "_extra_state": {"a": torch.ones(1)}}, "")
    assert (list(flat.tensors), list(flat.values)) == (["my_extra_state.a"], ["_extra_state"])


# Bounds.


def nested(levels: int) -> list[Any]:
    node: list[Any] = []
    for _ in range(levels):
        node = [node]
    return node


def test_depth_is_bounded() -> None:
    root = {"deep": nested(498), "weight": torch.ones(1)}
    assert rebuild(flatten(root, "").values["deep"], pytest.fail) == nested(498)
    with pytest.raises(SourceTypeError, match="too deeply"):
        flatten({"deep": nested(501), "weight": torch.ones(1)}, "")


def test_a_tree_that_holds_itself() -> None:
    root: dict[str, Any] = {"weight": torch.ones(1)}
    root["again"] = [root]
    with pytest.raises(SourceTypeError, match="too deeply") as caught:
        flatten(root, "somewhere")
    assert caught.value.where.startswith("somewhere, at 'again.0.again.0.")
    assert len(caught.value.where) < 200


@dataclass
class Config:
    scale: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [np.array([n, np.nan])],
        lambda n: Config(np.array([1.0, n])),
        lambda n: Config(torch.tensor([1.0, n])),
        lambda n: {float("nan"), n},
    ],
    ids=["array in a list", "dataclass of an array", "dataclass of a tensor", "set of NaN"],
)
def test_objects_are_equal_if_they_are_saved_as_the_same(make: Any, tmp_path: Path) -> None:
    assert same_value(make(3), make(3))
    assert not same_value(make(3), make(4))
    ms.save({"w": torch.ones(1), "value": make(3)}, tmp_path / "a.safetensors")
    ms.save({"w": torch.ones(1), "value": make(4)}, tmp_path / "b.safetensors")
    assert ms.diff(tmp_path / "a.safetensors", tmp_path / "a.safetensors").is_equal
    assert ms.diff({"w": torch.ones(1), "value": make(3)}, tmp_path / "a.safetensors").is_equal
    assert not ms.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").is_equal
    assert not same_value(Config(object()), Config(object()))
