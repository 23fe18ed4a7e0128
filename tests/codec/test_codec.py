"""What is encoded comes back, in type and content, whichever way the tree has gone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from modelstate.codec.codec import KINDS, decode, encode
from tests.codec.values import ANY_VALUE, EXAMPLES, WAYS, Config, same

every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@every_way
@pytest.mark.parametrize("name", EXAMPLES)
def test_values_come_back(name: str, way: Callable[[Any], Any]) -> None:
    assert same(way(EXAMPLES[name]), EXAMPLES[name])


@pytest.mark.slow
@every_way
@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANY_VALUE)
def test_every_value_comes_back(way: Callable[[Any], Any], value: Any) -> None:
    assert same(way(value), value)


def test_every_kind_has_an_example() -> None:
    found: set[str] = set()

    def look(tree: Any) -> None:
        if isinstance(tree, dict):
            found.update(key[1:] for key in tree if key.startswith("$"))
            tree = list(tree.values())
        for part in tree if isinstance(tree, list) else ():
            look(part)

    look(encode(EXAMPLES))
    assert set(KINDS.by_tag) - found <= {"object", "dict"}


def test_what_json_can_say_is_plain() -> None:
    plain = {"step": 3, "rates": [0.1, -0.0, 1e300], "name": "é", "none": None, "flag": True, "nested": {"a": {}}}
    assert encode(plain) == plain
    assert encode((1, 2)) == {"$tuple": [1, 2]}
    assert encode({1: "a"}) == {"$dict": [[1, "a"]]}
    assert encode({"$tuple": 3}) == {"$dict": [["$tuple", 3]]}
    assert encode(float("inf")) == {"$float": "7ff0000000000000"}
    assert encode(Config("x"))["$dataclass"]["fields"] == {"name": "x", "items": [], "hidden": 3}


def test_sets_are_written_in_one_order() -> None:
    names = [f"n{index}" for index in range(50)]
    assert encode(set(names)) == {"$set": sorted(names)}
    assert encode({(name, 1) for name in names})["$set"][0] == {"$tuple": ["n0", 1]}


def test_a_tree_is_a_snapshot() -> None:
    tensor, items = torch.ones(3), [1]
    tree = encode({"tensor": tensor, "items": items})
    tensor.zero_()
    items.append(2)
    assert torch.equal(tree["tensor"], torch.ones(3))
    assert tree["items"] == [1]
    value = decode(tree)
    value["tensor"].zero_()
    assert torch.equal(tree["tensor"], torch.ones(3))


@every_way
def test_a_view_takes_what_it_shows(way: Callable[[Any], Any]) -> None:
    large = torch.zeros(1000, 1000)
    tree = encode({"view": large[5, :110]})
    assert tree["view"].untyped_storage().nbytes() == 440
    assert way(large[5, :110]).untyped_storage().nbytes() == 440


@every_way
def test_one_tensor_stays_one(way: Callable[[Any], Any]) -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.zeros(2))
    a, b, c, d, e = way([tensor, {"again": tensor}, torch.ones(2), parameter, (parameter,)])
    assert a is b["again"]
    assert c is not a
    assert d is e[0]


def test_inference_mode_leaves_no_trace() -> None:
    with torch.inference_mode():
        tree = encode([torch.ones(2)])
        value = decode(tree)
    assert not tree[0].is_inference()
    assert not value[0].is_inference()
