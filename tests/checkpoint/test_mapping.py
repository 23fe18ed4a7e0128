"""Mappings in memory: passed through as they are."""

import warnings
from collections import OrderedDict, UserDict

import torch

import modelstate as ms


def test_the_mapping_itself_is_the_tree() -> None:
    state = {"weight": torch.ones(2), "nested": {"list": [torch.zeros(1), 3]}}
    found = ms.open(state).contents
    assert found.tree is state
    assert found.format == "mapping"
    assert found.files == {}
    assert found.metadata == {}


def test_metadata_stays_where_it_is() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = ms.open(state).contents
    assert isinstance(found.tree, OrderedDict)
    assert found.tree._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]


def test_any_mapping_will_do() -> None:
    state = UserDict({"weight": torch.ones(2)})
    assert ms.open(state).contents.tree is state


def test_tensors_of_every_kind_are_passed_as_they_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    state = {
        "quantized": quantized,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "parameter": torch.nn.Parameter(torch.ones(1)),
        "value": object(),
    }
    tree = ms.open(state).contents.tree
    assert isinstance(tree, dict)
    assert all(tree[name] is state[name] for name in state)
