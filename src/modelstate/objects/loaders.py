"""Data loaders among the objects: torch's `DataLoader`, and `StatefulDataLoader` of torchdata.

A loader draws a seed for its workers each time that it builds an iterator: from its own `generator`, or from torch's
default generator. An iterator that is built only because a run was resumed draws a seed that the uninterrupted run did
not draw, so that all random numbers behind it differ. What keeps both runs the same is in this file, with all that is
known here of the inside of loaders.
"""

import sys
import threading
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


@contextmanager
def checked_iterators(objects: Iterable[Any]) -> Iterator[None]:
    """Within it, an iterator of a data loader that a resumed run would not make in the same way is a `ResumeWarning`.

    `objects` are those whose state is saved. Two kinds of iterators make a resumed run differ:

    - The first iterator of a loader with persistent workers, where the state of the loader is not saved. An
      uninterrupted run makes it once. A resumed run makes it again, which draws one more seed, and the workers' own
      generators begin with that seed.
    - A new iterator of a loader whose state is saved, while the last one is in the middle of the data. In the resumed
      run it is the first one, which goes on in the middle.

    Loaders that are not among the objects are seen as well: for as long as it lasts, `__iter__` of the loaders'
    classes is wrapped.
    """
    saved = list(objects)
    with _lock:
        _saved.append(saved)
        for cls in _loader_classes():
            if cls not in _unwrapped:
                _unwrapped[cls] = cls.__iter__
                cls.__iter__ = _checking(cls.__iter__)
    try:
        yield
    finally:
        with _lock:
            _saved[:] = [other for other in _saved if other is not saved]
            for cls in [] if _saved else list(_unwrapped):
                if getattr(cls.__iter__, "__wrapped__", None) is _unwrapped[cls]:  # no one else has wrapped it since
                    cls.__iter__ = _unwrapped[cls]
                del _unwrapped[cls]


_lock = threading.Lock()
_saved: list[list[Any]] = []
"""The objects of each `checked_iterators` that is entered."""
_unwrapped: dict[Any, Callable[[Any], Any]] = {}
"""`__iter__` of the classes that are wrapped now."""


def _loader_classes() -> list[Any]:
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    stateful = getattr(torchdata, "StatefulDataLoader", None)
    return [DataLoader] if stateful is None else [DataLoader, stateful]


def _checking(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(make)
    def __iter__(loader: Any) -> Any:
        if problem := _resume_problem(loader):
            warnings.warn(problem, ResumeWarning, stacklevel=2)
        return make(loader)

    return __iter__


def _resume_problem(loader: Any) -> str:
    """Why a resumed run would not make the iterator that the loader makes next; empty where it would."""
    if not _saved:
        return ""
    objects = [it for saved in _saved for it in saved]
    last, has_state = getattr(loader, "_iterator", None), _is_loader_with_state(loader)
    is_saved = has_state and any(found is loader for it in objects for found in _loaders(it))
    if loader.persistent_workers and loader.num_workers > 0 and last is None and not is_saved:
        return (
            "a data loader with persistent_workers=True starts its workers in a step of the loop, and its state is not "
            "saved: a resumed run starts them again, with other random numbers, so its losses differ from those of an "
            "uninterrupted run. Leave out persistent_workers=True, or put a StatefulDataLoader among the objects. "
            "Where the workers draw no random numbers, iter(loader) before the loop is enough"
        )
    if (
        any(it is loader for it in objects)
        and getattr(last, "_num_yielded", 0) > 0
        and not getattr(last, "_finished", True)
    ):
        return (
            "a data loader among the objects begins anew, while its last iterator is in the middle of the data: a run "
            "that is resumed from a checkpoint goes on in the middle, so its data differ from those of an "
            "uninterrupted run. Leave the loader out of the objects, or read it to its end"
        )
    return ""


def _loaders(it: object) -> Iterator[Any]:
    """The loader that an object is, and those that it holds as attributes."""
    attributes = getattr(it, "__dict__", None)
    for found in (it, *(attributes.values() if isinstance(attributes, dict) else ())):
        if isinstance(found, DataLoader):
            yield found


def _is_loader_with_state(it: object) -> bool:
    return isinstance(it, DataLoader) and hasattr(it, _WAITING)


def _is_unbuilt(it: object) -> bool:
    return _is_loader_with_state(it) and getattr(it, "_iterator", None) is None


def _has_generator(it: object, state: Any) -> bool:
    return isinstance(it, DataLoader) and isinstance(state, Mapping) and GENERATOR_KEY in state


def _stateful_loaders(it: object) -> Iterator[Any]:
    """The loader that an object is, and those that it holds as attributes, if a restored state waits in them."""
    return (found for found in _loaders(it) if getattr(found, _WAITING, None) is not None)


def _build(loader: Any, generators: tuple[Any, ...]) -> Any:
    """In place of a loader's own method, until the restored state has been used."""
    build: Callable[[Any], Any] = getattr(type(loader), _BUILD)
    own = own_generator(loader)
    is_waiting = getattr(loader, _WAITING) is not None
    with preserved_generators((*generators, *([own] if own else []))) if is_waiting else nullcontext():
        iterator = build(loader)
    loader.__dict__.pop(_BUILD, None)
    return iterator
