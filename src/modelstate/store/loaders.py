"""Data loaders among the objects: torch's `DataLoader`, and `StatefulDataLoader` of torchdata.

A loader draws a seed for its workers each time that it builds an iterator: from its own `generator`, or from torch's
default generator. An iterator that is built only because a run was resumed draws a seed that the uninterrupted run did
not draw, so that all random numbers behind it differ. What keeps both runs the same is in this file, with all that is
known here of the inside of loaders.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from modelstate.store.rng import RNG

GENERATOR_KEY = "modelstate.generator"
"""Where the state of a loader has that of the loader's own generator."""
_BUILD = "_get_iterator"
_WAITING = "next_iter_state"
"""What `StatefulDataLoader` keeps a restored state in, until it has built the iterator of it."""


def is_loader_without_state(it: object) -> bool:
    """Whether it is a loader that cannot say where it is: torch's own."""
    return isinstance(it, DataLoader) and not hasattr(it, "state_dict")


def state_of(it: Any) -> Any:
    """The `state_dict()` of an object; of a loader that has a generator of its own, with the state of that.

    A loader that has no iterator would build one, and start its workers: its state is the one that it was restored to,
    or an empty one, which `load_state_dict` takes as that of a loader that has not begun.
    """
    state = getattr(it, _WAITING) or {} if _is_unbuilt(it) else it.state_dict()
    generator = own_generator(it)
    if generator is None or not isinstance(state, Mapping):
        return state
    return {**state, GENERATOR_KEY: generator.get_state()}


def load_state(it: Any, state: Any, generators: Iterable[Any] = ()) -> None:
    """Gives an object what `state_of` returned.

    The iterator that a loader builds of it later leaves Python's, NumPy's, torch's, the loader's own and the given
    generators (`torch.Generator` and `RNG`) as they are, whenever that is.
    """
    plain = {key: state[key] for key in state if key != GENERATOR_KEY} if _has_generator(it, state) else state
    if _is_loader_with_state(it) and not plain:
        setattr(it, _WAITING, None)  # an empty state leaves it
    it.load_state_dict(plain)
    rewind(it, state)
    for loader in _stateful_loaders(it):
        setattr(loader, _BUILD, partial(_build, loader, tuple(generators)))


def rewind(it: object, state: Any) -> None:
    """Sets the own generator of a loader to what it was in a state of the loader."""
    generator = own_generator(it)
    if generator is not None and _has_generator(it, state):
        generator.set_state(state[GENERATOR_KEY])


def own_generator(it: object) -> torch.Generator | None:
    """The generator that a loader was given."""
    generator = it.generator if isinstance(it, DataLoader) else None
    return generator if isinstance(generator, torch.Generator) else None


@contextmanager
def preserved_generators(generators: Iterable[Any] = ()) -> Iterator[None]:
    """Leaves the generators of Python, NumPy and torch's CPU, and the given ones, as they were before."""
    given = list(generators)
    own = {str(number): one for number, one in enumerate(given) if isinstance(one, torch.Generator)}
    rngs = [RNG(own, cuda=False), *(one for one in given if isinstance(one, RNG))]
    states = [rng.state_dict() for rng in rngs]
    try:
        yield
    finally:
        for rng, state in zip(rngs, states, strict=True):
            rng.load_state_dict(state)


def _is_loader_with_state(it: object) -> bool:
    return isinstance(it, DataLoader) and hasattr(it, _WAITING)


def _is_unbuilt(it: object) -> bool:
    return _is_loader_with_state(it) and getattr(it, "_iterator", None) is None


def _has_generator(it: object, state: Any) -> bool:
    return isinstance(it, DataLoader) and isinstance(state, Mapping) and GENERATOR_KEY in state


def _stateful_loaders(it: object) -> Iterator[Any]:
    """The loader that an object is, and those that it holds as attributes, if a restored state waits in them."""
    attributes = getattr(it, "__dict__", None)
    for found in (it, *(attributes.values() if isinstance(attributes, dict) else ())):
        if isinstance(found, DataLoader) and getattr(found, _WAITING, None) is not None:
            yield found


def _build(loader: Any, generators: tuple[Any, ...]) -> Any:
    """In place of a loader's own method, until the restored state has been used."""
    build: Callable[[Any], Any] = getattr(type(loader), _BUILD)
    own = own_generator(loader)
    is_waiting = getattr(loader, _WAITING) is not None
    with preserved_generators((*generators, *([own] if own else []))) if is_waiting else nullcontext():
        iterator = build(loader)
    loader.__dict__.pop(_BUILD, None)
    return iterator
