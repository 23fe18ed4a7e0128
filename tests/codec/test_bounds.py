"""No small tree takes long to decode, or much memory; and what is refused then is refused when it is encoded."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from modelstate.codec.codec import decode, encode
from modelstate.errors import CodecError
from tests.codec.values import Point, same

PRIME = 2**61 - 1
"""Ints that differ by a multiple of it have the same hash."""


def ints(count: int) -> list[Any]:
    return [PRIME * n for n in range(count)]


@pytest.mark.parametrize("make", [lambda n: n, lambda n: (n, "a"), lambda n: Point(n, (0,)), lambda n: frozenset([n])])
def test_keys_of_one_hash(make: Callable[[int], Any]) -> None:
    keys = [make(number) for number in ints(65)]
    assert decode(encode(set(keys[1:]))) == set(keys[1:])
    trees = [encode(key) for key in keys]
    for function, value in (
        (encode, set(keys)),
        (encode, dict.fromkeys(keys)),
        (decode, {"$set": trees}),
        (decode, {"$dict": [[tree, 1] for tree in trees]}),
    ):
        with pytest.raises(CodecError, match="have the same hash"):
            function(value)


def test_ordinary_keys() -> None:
    for keys in (
        [2.0**n for n in range(-1000, 1000)],
        [-1, -2, 1.5, *range(2_000)],
        [1 << n for n in range(1000)],
        [(a, b / 8) for a in range(40) for b in range(40)],
        [str(n) for n in range(2_000)],
    ):
        assert decode(encode(set(keys))) == set(keys)
        assert decode(encode({**dict.fromkeys(keys), 1: 2})) == {**dict.fromkeys(keys), 1: 2}


def array_tree(tensor: Any, **changed: Any) -> Any:
    return {"$numpy.array": {"dtype": "<f4", "shape": [1000, 1000], "order": "C", "data": tensor, **changed}}


@pytest.mark.parametrize("shape", [[10**4000] * 500, [10] * 500_000, [2**63], [-1], [1] * 65, [0, 2**64]])
def test_shapes(shape: list[int]) -> None:
    with pytest.raises(CodecError):
        decode(array_tree(torch.zeros(0, dtype=torch.uint8), shape=shape))


def test_arrays_of_one_tensor_are_one() -> None:
    stored = torch.zeros(4_000_000, dtype=torch.uint8)
    tracemalloc.start()
    values = decode([array_tree({"$tensor": "x"}) for _ in range(500)], leaf={"x": stored}.__getitem__)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 40_000_000
    assert len({id(value) for value in values}) == 1
    values[0][:] = 1
    assert not stored.any()
    for changed in ({"dtype": "<i4"}, {"shape": [10**6]}, {"order": "F"}):
        with pytest.raises(CodecError, match="differ"):
            decode([array_tree(stored), array_tree(stored, **changed)])


def test_a_tensor_that_is_far_larger_than_its_memory() -> None:
    with pytest.raises(CodecError, match="over and over"):
        decode(torch.zeros(1000).expand(10**12, 1000))


def test_one_array_stays_one() -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    a, b, c = decode(encode([array, {"again": array}, array.copy("F")]))
    assert a is b["again"]
    assert c is not a
    assert same(a, array)
    assert same(c, a)
