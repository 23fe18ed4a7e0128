"""Saves and restores data loaders: torch's `DataLoader`, and `StatefulDataLoader` of torchdata.

A loader draws a seed for its workers each time that it builds an iterator: from its own `generator`, or from torch's
default generator. An iterator that is built only because a run was resumed draws a seed that the uninterrupted run did
not draw, so that all random numbers after it differ. This file keeps both runs the same. All private names of loaders
that the project uses are in it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.data import DataLoader

from modelstate.errors import ResumeWarning
from modelstate.objects.rng import RNG

GENERATOR_KEY = "modelstate.generator"
"""The key, in the saved state of a loader, of the state of the loader's own generator."""
_BUILD = "_get_iterator"
"""The method of a loader that builds an iterator."""
_ITERATOR = "_iterator"
"""The attribute in which a loader keeps its last iterator."""
_PENDING_STATE = "next_iter_state"
"""The attribute in which `StatefulDataLoader` keeps a restored state until it builds the iterator from it."""

Loader = DataLoader[Any]


def state_of(obj: Any) -> object:
    """Returns the `state_dict()` of an object; of a loader that has its own generator, with the generator's state.

    A loader without an iterator would build one, and start its workers. Its state is the one that it was restored to,
    or an empty one, which `load_state_dict` takes as the state of a loader that has not begun.
    """
    is_unbuilt = _is_stateful_loader(obj) and getattr(obj, _ITERATOR, None) is None
    state = getattr(obj, _PENDING_STATE) or {} if is_unbuilt else obj.state_dict()
    generator = own_generator(obj)
    if generator is None or not isinstance(state, Mapping):
        return state
    return {**state, GENERATOR_KEY: generator.get_state()}


def load_state(obj: Any, state: Any, generators: Iterable[object] = ()) -> None:
    """Restores an object from the result of `state_of`.

    When a loader later builds an iterator from the state, these generators stay as they are: those of Python, NumPy
    and torch, the loader's own, and the given `generators` (`torch.Generator` and `RNG`).
    """
    own_state = {key: state[key] for key in state if key != GENERATOR_KEY} if _has_generator(obj, state) else state
    if _is_stateful_loader(obj) and not own_state:
        setattr(obj, _PENDING_STATE, None)  # load_state_dict does not clear it for an empty state
    obj.load_state_dict(own_state)
    rewind(obj, state)
    for loader in _loaders(obj):
        if getattr(loader, _PENDING_STATE, None) is not None:
            setattr(loader, _BUILD, partial(_build_from_state, loader, tuple(generators)))


def _build_from_state(loader: Any, generators: tuple[object, ...]) -> object:
    """Replaces the method `_get_iterator` of a loader, until the restored state has been used."""
    build: Callable[[Loader], object] = getattr(type(loader), _BUILD)
    own = own_generator(loader)
    is_pending = getattr(loader, _PENDING_STATE) is not None
    with preserved_generators((*generators, *([own] if own else []))) if is_pending else nullcontext():
        iterator = build(loader)
    loader.__dict__.pop(_BUILD, None)
    return iterator


def rewind(obj: object, state: Any) -> None:
    """Sets the own generator of a loader to its state in the saved state of the loader."""
    generator = own_generator(obj)
    if generator is not None and _has_generator(obj, state):
        generator.set_state(state[GENERATOR_KEY])


def own_generator(obj: object) -> torch.Generator | None:
    """Returns the generator that a loader was built with; None for other objects."""
    generator = obj.generator if isinstance(obj, DataLoader) else None
    return generator if isinstance(generator, torch.Generator) else None


@contextmanager
def preserved_generators(generators: Iterable[object]) -> Iterator[None]:
    """Restores the generators of Python, NumPy and torch on the CPU, and the given ones, when the block ends."""
    given = list(generators)
    by_name = {str(number): item for number, item in enumerate(given) if isinstance(item, torch.Generator)}
    rngs = [RNG(by_name, cuda=False), *(item for item in given if isinstance(item, RNG))]
    states = [rng.state_dict() for rng in rngs]
    try:
        yield
    finally:
        for rng, state in zip(rngs, states, strict=True):
            rng.load_state_dict(state)


@contextmanager
def checked_iterators(objects: Iterable[object]) -> Iterator[None]:
    """Warns, while the block runs, of iterators of data loaders that a resumed run would not build in the same way.

    `objects` are those whose state is saved. Two kinds of iterators make a resumed run differ, and get a
    `ResumeWarning`:

    - The first iterator of a loader with persistent workers, where the state of the loader is not saved. An
      uninterrupted run builds it once. A resumed run builds it again, which draws one more seed, and the workers' own
      generators begin with that seed.
    - A new iterator of a loader whose state is saved, while the last one is in the middle of the data. In the resumed
      run it is the first one, which goes on in the middle.

    Loaders that are not among the objects are checked too: while the block runs, `__iter__` of the loader classes is
    wrapped.
    """
    saved = list(objects)
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    stateful = getattr(torchdata, "StatefulDataLoader", None)
    classes: list[Any] = [DataLoader] if stateful is None else [DataLoader, stateful]
    originals = [cls.__iter__ for cls in classes]
    _saved_objects.append(saved)
    try:
        for cls in classes:
            cls.__iter__ = _checking(cls.__iter__)
        yield
    finally:
        _saved_objects[:] = [other for other in _saved_objects if other is not saved]
        for cls, original in zip(classes, originals, strict=True):
            cls.__iter__ = original


_saved_objects: list[list[object]] = []
"""The objects of each `checked_iterators` block that is running."""


def _checking(iter_method: Callable[..., object]) -> Callable[..., object]:
    @wraps(iter_method)
    def __iter__(loader: Loader) -> object:
        if problem := _resume_problem(loader):
            warnings.warn(problem, ResumeWarning, stacklevel=2)
        return iter_method(loader)

    return __iter__


def _resume_problem(loader: Loader) -> str:
    """Returns why a resumed run would build the loader's next iterator in another way; empty where it would not."""
    if not _saved_objects:
        return ""
    objects = [obj for saved in _saved_objects.copy() for obj in saved]
    last = getattr(loader, _ITERATOR, None)
    is_saved = _is_stateful_loader(loader) and any(inner is loader for obj in objects for inner in _loaders(obj))
    if loader.persistent_workers and loader.num_workers > 0 and last is None and not is_saved:
        return (
            "a data loader with persistent_workers=True starts its workers in a step of the loop, and its state is not "
            "saved: a resumed run starts them again, with other random numbers, so its losses differ from those of an "
            "uninterrupted run. Leave out persistent_workers=True, or put a StatefulDataLoader among the objects. "
            "Where the workers draw no random numbers, iter(loader) before the loop is enough"
        )
    is_in_the_middle = getattr(last, "_num_yielded", 0) > 0 and not getattr(last, "_finished", True)
    if is_in_the_middle and any(obj is loader for obj in objects):
        return (
            "a data loader among the objects is left in the middle of the data: an uninterrupted run begins it anew, "
            "and a run that is resumed from a checkpoint goes on in the middle, so its data differ. Leave the loader "
            "out of the objects, or read it to its end"
        )
    return ""


def _loaders(obj: object) -> Iterator[Loader]:
    """Yields the object where it is a loader, and the loaders among its attributes."""
    attributes = getattr(obj, "__dict__", None)
    for value in (obj, *(attributes.values() if isinstance(attributes, dict) else ())):
        if isinstance(value, DataLoader):
            yield value


def _is_stateful_loader(obj: object) -> bool:
    return isinstance(obj, DataLoader) and hasattr(obj, _PENDING_STATE)


def _has_generator(obj: object, state: object) -> bool:
    return isinstance(obj, DataLoader) and isinstance(state, Mapping) and GENERATOR_KEY in state
