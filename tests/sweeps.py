"""Sweeps over the places where something can fail visit a sample of them, and with MODELSTATE_EXHAUSTIVE=1 all."""

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

EXHAUSTIVE = os.environ.get("MODELSTATE_EXHAUSTIVE", "0") != "0"

_Place = TypeVar("_Place")


def examples(all: int) -> int:
    """Returns how many examples of a law hypothesis tries: a third of all."""
    return all if EXHAUSTIVE else all // 3


def spread(places: Sequence[_Place], most: int) -> Sequence[_Place]:
    """Returns so many places at the most, evenly apart."""
    return places if EXHAUSTIVE else places[:: -(-len(places) // most)]


def sample(places: Iterable[_Place], kind: Callable[[_Place], Hashable], more: int = 1) -> list[_Place]:
    """Returns, in their order, the first, the middle and the last place of each kind, and some others.

    Args:
        places: Where something can fail.
        kind: What is to be visited for sure, such as the name of a system call.
        more: How many others are drawn. The draw depends on nothing but the number of places.
    """
    every = list(places)
    if EXHAUSTIVE:
        return every
    by_kind: dict[Hashable, list[int]] = {}
    for index, place in enumerate(every):
        by_kind.setdefault(kind(place), []).append(index)
    chosen = {found[at] for found in by_kind.values() for at in (0, len(found) // 2, -1)}
    others = [index for index in range(len(every)) if index not in chosen]
    chosen.update(random.Random(len(every)).sample(others, min(more, len(others))))
    return [every[index] for index in sorted(chosen)]
