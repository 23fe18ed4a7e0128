"""The trees of encoded values. That each kind of value comes back is tested with files, in `tests/objects`."""

import torch

from modelstate.codec.codec import decode, encode
from tests.codec.values import Config


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


def test_a_view_takes_what_it_shows() -> None:
    large = torch.zeros(1000, 1000)
    tree = encode({"view": large[5, :110]})
    assert tree["view"].untyped_storage().nbytes() == 440
    assert decode(tree)["view"].untyped_storage().nbytes() == 440


def test_one_tensor_stays_one() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.zeros(2))
    a, b, c, d, e = decode(encode([tensor, {"again": tensor}, torch.ones(2), parameter, (parameter,)]))
    assert a is b["again"]
    assert c is not a
    assert d is e[0]


def test_inference_mode_leaves_no_trace() -> None:
    with torch.inference_mode():
        tree = encode([torch.ones(2)])
        value = decode(tree)
    assert not tree[0].is_inference()
    assert not value[0].is_inference()
