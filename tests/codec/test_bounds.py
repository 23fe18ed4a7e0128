"""No small tree takes long to decode, or much memory; and what is refused then is refused when it is encoded."""

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch

from modelstate.codec.codec import decode, encode
from modelstate.errors import CodecError
from tests.codec.values import Point, same

PRIME = 2**61 - 1
"""Ints that differ by a multiple of it have the same hash."""


@contextmanager
def quickly() -> Iterator[None]:
    """Each of these took many seconds, or all memory, without a bound."""
    begin = process_time()
    yield
    assert process_time() - begin < 8


def same_words(tree: Any, value: Any, match: str) -> None:
    with quickly():
        with pytest.raises(CodecError, match=match) as decoding:
            decode(tree)
        with pytest.raises(CodecError, match=match) as encoding:
            encode(value)
    assert decoding.value.what == encoding.value.what


# Large ints.


def test_large_ints_of_other_values() -> None:
    large = encode(1 << 4_000_000)
    for tree in (
        {"$timedelta": [0, 0, large]},
        {"$torch.Size": [large]},
        {"$datetime": ["2020-01-01T00:00:00", 1 << 4_000_000, None]},
    ):
        with quickly(), pytest.raises(CodecError):
            decode(tree)
    assert decode(large) == 1 << 4_000_000


@pytest.mark.parametrize("shape", [[10**4000] * 500, [10] * 500_000, [2**63], [-1], [1] * 65, [0, 2**64]])
def test_shapes(shape: list[int]) -> None:
    tree = {"$numpy.array": {"dtype": "u1", "shape": shape, "order": "C", "data": torch.zeros(0, dtype=torch.uint8)}}
    with quickly(), pytest.raises(CodecError):
        decode(tree)


# Keys of one hash.


def ints(count: int) -> list[Any]:
    return [PRIME * n for n in range(count)]


def complexes(count: int) -> list[Any]:
    return [complex(-1_000_003.0 * n, float(n)) for n in range(count)]


KEYS: dict[str, Callable[[int], list[Any]]] = {
    "ints": ints,
    "complex": complexes,
    "tuples": lambda count: [(n, "a") for n in ints(count)],
    "points": lambda count: [Point(n, (0,)) for n in ints(count)],
    "sets": lambda count: [frozenset([n]) for n in ints(count)],
}
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "dict": dict.fromkeys,
    "Counter": Counter,
}


def tree_of(keys: list[Any], container: str) -> Any:
    trees = [encode(key) for key in keys]
    return {f"${container}": trees if "set" in container else [[tree, 1] for tree in trees]}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "container"), [*((kind, "set") for kind in KEYS), *(("ints", c) for c in CONTAINERS)])
def test_keys_of_one_hash(kind: str, container: str) -> None:
    few = KEYS[kind](45)
    assert len({hash(key) for key in few}) == 1
    made = CONTAINERS[container](few)
    assert decode(encode(made)) == made
    many = CONTAINERS[container](KEYS[kind](300))
    same_words(tree_of(KEYS[kind](3_000), container), many, "have the same hash")


@pytest.mark.slow
def test_many_small_groups_are_bounded_too() -> None:
    keys = [PRIME * n + h for h in range(300) for n in range(100)]
    same_words(tree_of(keys, "set"), set(keys), "have the same hash")


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


# Memory.


def array_tree(tensor: Any, **changed: Any) -> Any:
    return {"$numpy.array": {"dtype": "<f4", "shape": [1000, 1000], "order": "C", "data": tensor, **changed}}


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


def test_arrays_that_differ_are_not_of_one_tensor() -> None:
    stored = torch.zeros(4_000_000, dtype=torch.uint8)
    for changed in ({"dtype": "<i4"}, {"shape": [10**6]}, {"order": "F"}):
        with pytest.raises(CodecError, match="differ"):
            decode([array_tree(stored), array_tree(stored, **changed)])


def test_views_of_one_memory_are_bounded() -> None:
    base = torch.zeros(1_000_000)
    with pytest.raises(CodecError, match="over and over"):
        decode(torch.zeros(1000).expand(10**12, 1000))
    assert len(decode([base[n : n + 1000] for n in range(0, 1_000_000, 1000)])) == 1000


def test_one_array_stays_one() -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    a, b, c = decode(encode([array, {"again": array}, array.copy("F")]))
    assert a is b["again"]
    assert c is not a
    assert same(a, array)
    assert same(c, a)


def test_every_error_here_has_its_place() -> None:
    with pytest.raises(CodecError) as caught:
        decode([0, tree_of(ints(300), "set")], "file")
    assert caught.value.where == "file[1]"
