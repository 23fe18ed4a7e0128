"""Trees come back as they were: containers, keys, values, tensors, ties and versions."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

import modelstate as ms
from tests.codec.values import ANY_VALUE, EXAMPLES, same
from tests.objects import nets
from tests.objects.saves import NAME


def again(tmp_path: Path, tree: Any, **options: Any) -> Any:
    ms.save(tree, tmp_path / NAME, **options)
    return ms.open(tmp_path / NAME).value()


def plain(tree: Any) -> Any:
    """A tree with its parameters as the tensors that they come back as, as those of a state dict do."""
    if type(tree) in (dict, OrderedDict):
        made = type(tree)((key, plain(value)) for key, value in tree.items())
        if hasattr(tree, "_metadata"):
            made._metadata = tree._metadata
        return made
    if type(tree) in (list, tuple):
        return type(tree)(map(plain, tree))
    return tree.detach() if isinstance(tree, torch.Tensor) and not is_lazy(tree) else tree


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, nets.trained(model, model.parameters())


@pytest.mark.parametrize("shard_size_bytes", [None, 40])
def test_a_training_checkpoint(tmp_path: Path, shard_size_bytes: int | None) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    tree = {"model": model, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": 7}
    ms.save(tree, tmp_path / NAME, shard_size_bytes=shard_size_bytes)
    checkpoint = ms.open(tmp_path / NAME)
    assert checkpoint.verify()
    assert checkpoint.extra["step"] == 7
    found = checkpoint.value()
    assert same(found["optimizer"], optimizer.state_dict())
    assert same(found["scheduler"], scheduler.state_dict())
    assert list(found["optimizer"]["state"]) == [0, 1, 2, 3]
    other, other_optimizer = trained()
    ms.load(other, checkpoint.select("model"))
    other_optimizer.load_state_dict(found["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert checkpoint.select("model").versions == dict(model.state_dict()._metadata)
    assert type(found["model"]) is OrderedDict


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_of_every_kind(tmp_path: Path, name: str) -> None:
    tree = {"a": torch.ones(2), "b": [EXAMPLES[name], {"c": torch.zeros(1)}], "d": (EXAMPLES[name],)}
    assert same(again(tmp_path, tree), plain(tree))


_KEYS = st.integers(-5, 5) | st.text("ab", min_size=1, max_size=2) | st.tuples(st.integers(0, 2)) | st.none()
_TENSORS = st.integers(0, 50).map(lambda n: torch.full((n % 4,), float(n)))
_TREES = st.recursive(
    _TENSORS | ANY_VALUE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text("abc._$", max_size=3), _TREES, max_size=3), st.sampled_from([None, 1, 8]))
def test_any_tree_comes_back(tmp_path: Path, tree: dict[str, Any], shard_size_bytes: int | None) -> None:
    try:
        ms.save(tree, tmp_path / NAME, shard_size_bytes=shard_size_bytes)
    except ms.errors.UnsavableError as error:
        assert "two values have this name" in str(error) or "not a name" in str(error)  # noqa: PT017
        return
    found = ms.open(tmp_path / NAME).value()
    # What is as flat as a module's state comes back as such.
    assert same(dict(found) if type(found) is OrderedDict else found, plain(tree))


_ONE = torch.ones(1)


@pytest.mark.parametrize(
    "tree",
    [
        {"_.b": [], "_": {"b": torch.ones(1)}},
        {"_.b": torch.ones(1), "_": {"b": 1, "c": torch.ones(1)}},
        {"_.b": 1, "_": {"b": 2, "c": torch.ones(1)}},
        {"a": _ONE, "_.b": _ONE, "_": {"b": torch.zeros(1)}},
        {1: torch.ones(1), "1": "a"},
        {"": {"b": torch.ones(1)}, ".b": []},
        {"_._extra_state": 1, "_": {"_extra_state": {"a": torch.ones(1)}}},
    ],
)
def test_two_values_with_one_name_are_not_saved(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(ms.errors.UnsavableError, match="two values have this name"):
        ms.save(tree, tmp_path / NAME)
    assert not any(tmp_path.iterdir())


def test_ties_in_a_tree(tmp_path: Path) -> None:
    one = torch.ones(3)
    found = again(tmp_path, {"a": one, "b": [one, {"c": one}]})
    assert len(load_file(tmp_path / NAME)) == 1
    assert ms.open(tmp_path / NAME).aliases == (("a", "b.0", "b.1.c"),)
    assert same(found, {"a": one, "b": [one, {"c": one}]})


@pytest.mark.parametrize("target", [{"a": 1}, {"a": {}}, {"a": None, "b": []}, {"a": [[[]]]}])
def test_trees_without_tensors(tmp_path: Path, target: Any) -> None:
    assert same(again(tmp_path, target), target)
    assert same(dict(ms.open(tmp_path / NAME).extra), target)


def test_extra(tmp_path: Path) -> None:
    extra = {"git": "abc", "when": (1, 2), "mean": torch.ones(3), "rng": np.random.default_rng(1).bit_generator.state}
    for options in ({}, {"shard_size_bytes": 8}):
        ms.save(nn.Linear(2, 2), tmp_path / NAME, extra=extra, schema="3", **options)  # type: ignore[arg-type]
        checkpoint = ms.open(tmp_path / NAME)
        assert same(checkpoint.metadata["extra"], extra)
        assert checkpoint.metadata["schema"] == "3"
        assert set(checkpoint) == {"weight", "bias"}
        ms.load(nn.Linear(2, 2), checkpoint, verify=True)
