"""Objects with `state_dict` and `load_state_dict`: data loaders and schedulers need more than these two methods.

A loader draws a seed for its workers each time that it builds an iterator: from its own `generator`, or from torch's
default generator. An iterator that is built only because a run was resumed draws a seed that the uninterrupted run did
not draw, so that all random numbers after it differ. This file keeps both runs the same. All private names of loaders
that the project uses are in it.

A scheduler takes the state of any other class: most of torch's do, without an error, and compute other rates then. So
the saved state has the class. A scheduler computes the next rate from its saved base rates, or from the current rate.
Where a restore keeps the rate of the optimizer, all rates that the schedule is computed from are multiplied by the
ratio of the kept rate and the saved one. Schedules of torch are proportional to these rates: the schedule goes on from
the kept rate.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from modelstate.errors import ObjectStateError, OptionError, ResumeWarning
from modelstate.objects.parts import class_name, is_related, is_same_class, start_anew
from modelstate.objects.rng import RNG

GENERATOR_KEY = "modelstate.generator"
"""The key, in the saved state of a loader, of the state of the loader's own generator."""
CLASSES_KEY = "modelstate.classes"
"""The key, in the saved state of a scheduler, of the names of its class and of those of the schedulers within."""
_BUILD = "_get_iterator"
"""The method of a loader that builds an iterator."""
_ITERATOR = "_iterator"
"""The attribute in which a loader keeps its last iterator."""
_PENDING_STATE = "next_iter_state"
"""The attribute in which `StatefulDataLoader` keeps a restored state until it builds the iterator from it."""

Loader = DataLoader[Any]
T = TypeVar("T")


def state_of(obj: Any) -> object:
    """Returns the `state_dict()` of an object, with the state of a loader's own generator, and a scheduler's class.

    A loader without an iterator would build one, and start its workers. Its state is the one that it was restored to,
    or an empty one, which `load_state_dict` takes as the state of a loader that has not begun.
    """
    is_unbuilt = _is_stateful_loader(obj) and getattr(obj, _ITERATOR, None) is None
    state = getattr(obj, _PENDING_STATE) or {} if is_unbuilt else obj.state_dict()
    generator, classes = own_generator(obj), [class_name(type(each)) for each in _combined_schedulers(obj)]
    added: dict[str, object] = {} if generator is None else {GENERATOR_KEY: generator.get_state()}
    added |= {CLASSES_KEY: classes} if classes else {}
    return {**state, **added} if added else state


def load_state(obj: Any, state: Any, generators: Iterable[object] = ()) -> None:
    """Restores an object from the result of `state_of`.

    When a loader later builds an iterator from the state, these generators stay as they are: those of Python, NumPy
    and torch, the loader's own, and the given `generators` (`torch.Generator` and `RNG`).
    """
    own_state = state
    if isinstance(state, Mapping) and (GENERATOR_KEY in state or CLASSES_KEY in state):
        own_state = {key: value for key, value in state.items() if key not in (GENERATOR_KEY, CLASSES_KEY)}
    if _is_stateful_loader(obj) and not own_state:
        setattr(obj, _PENDING_STATE, None)  # load_state_dict does not clear it for an empty state
    obj.load_state_dict(own_state)
    rewind(obj, state)
    for loader in _values_of(obj, DataLoader):
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
    if generator is not None and isinstance(state, Mapping) and GENERATOR_KEY in state:
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
    objects = [obj for saved in _saved_objects.copy() for obj in saved]
    last = getattr(loader, _ITERATOR, None)
    is_saved = _is_stateful_loader(loader) and any(
        inner is loader for obj in objects for inner in _values_of(obj, DataLoader)
    )
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


def _is_stateful_loader(obj: object) -> bool:
    return isinstance(obj, DataLoader) and hasattr(obj, _PENDING_STATE)


# Schedulers.

_RATES_OF_GROUPS = ("base_lrs", "max_lrs", "_last_lr")
"""Attributes of torch's schedulers with a rate for each group."""
_RATE_OPTIONS = {"OneCycleLR": ("initial_lr", "max_lr", "min_lr"), "SWALR": ("swa_lr",)}
"""The options of groups in which a class of torch's schedulers keeps rates."""
_RATE_OF_ALL = "eta_min"
"""The attribute of torch's schedulers with one rate for all groups."""


def check_class(path: str, obj: object, state: object) -> None:
    """Raises `ObjectStateError` for the state of a scheduler of another class, unless one is derived from the other.

    Args:
        path: The path of the object.
        obj: The object that is restored.
        state: Its saved state. One that another tool has saved has no class, and is not checked.
    """
    saved = state.get(CLASSES_KEY) if isinstance(state, Mapping) else None
    live = [type(scheduler) for scheduler in _combined_schedulers(obj)]
    if not live or not isinstance(saved, list):
        return
    if len(saved) != len(live) or not all(
        is_same_class(name, cls) or is_related(name, cls) for name, cls in zip(saved, live, strict=True)
    ):
        raise ObjectStateError(
            "the state is of another class of scheduler, which computes other rates from it; nothing has been changed",
            where=path,
            expected=", ".join(map(class_name, live)),
            found=", ".join(map(str, saved)),
            remedy=f"build the scheduler that was saved; to begin with a new one: {start_anew(path)}; or to load this "
            f"state all the same, leave the scheduler out of the objects, with allow_unexpected=[{path!r}], and call "
            f"its own load_state_dict with ms.open(file).value({path!r}), or with store.open({path!r}).value()",
        )


def _combined_schedulers(obj: object) -> list[object]:
    """Returns a scheduler of torch and those that it combines; of a wrapper, as accelerate's, those within."""
    inner = getattr(obj, "scheduler", None) if hasattr(type(obj), "get_last_lr") else None
    inner = obj if isinstance(obj, LRScheduler) else inner
    return [*_within(inner)] if isinstance(inner, LRScheduler) else []


def go_on_from_kept_rates(
    path: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, object], keeps: Callable[[str], bool]
) -> None:
    """Scales the schedules of an optimizer's rates, which have been restored, so that they go on from the kept rates.

    Args:
        path: The path of the optimizer.
        optimizer: The optimizer, with its kept and restored options.
        objects: The other objects that have been restored, by path.
        keeps: Whether the optimizer keeps its own value of the option of this name.

    Raises:
        OptionError: A scheduler would set the kept rate to another one, and cannot be scaled, or cycles a momentum that
            is kept.
    """
    for name, obj in objects.items():
        for scheduler in _schedulers_of(obj, optimizer):
            inner = [*_within(scheduler)]
            for each in inner:
                momentum = "betas" if getattr(each, "use_beta1", False) else "momentum"
                # OneCycleLR takes its momenta from options, which may be kept as well.
                keeps_range = not hasattr(each, "max_momentums") and keeps("max_momentum")
                if getattr(each, "cycle_momentum", False) and keeps(momentum) and not keeps_range:
                    why = f"{type(each).__name__} cycles the momentum"
                    raise _refusal(path, momentum, name, why, f"keep the rate alone: keep_options=[{path + '.lr'!r}]")
            if not keeps("lr"):
                continue
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            last = [float(rate) for rate in getattr(scheduler, "_last_lr", ())]
            if rates == last:
                continue
            own = [each for each in inner if not type(each).__module__.startswith("torch.optim.")]
            if own or len(last) != len(rates):
                raise _refusal(path, "lr", name, f"{type((own or inner)[0]).__name__} is not a scheduler of torch's")
            if any((rate == 0) != (before == 0) for rate, before in zip(rates, last, strict=True)):
                why = f"the kept rates are {rates}, the saved ones {last}, and one is 0"
                remedies = ["before the restore, set the rate of each group to one that is not 0"] if all(last) else []
                raise _refusal(path, "lr", name, why, *remedies)
            factors = [rate / before if before else 1.0 for rate, before in zip(rates, last, strict=True)]
            if max(factors) > min(factors) * (1 + 1e-6) and any(getattr(each, _RATE_OF_ALL, 0) for each in inner):
                raise _refusal(
                    path, "lr", name, f"its {_RATE_OF_ALL} is one rate for groups whose rates change differently"
                )
            for each in inner:
                _scale(each, factors)
                options = [key for key in _RATE_OPTIONS.get(type(each).__name__, ()) if not keeps(key)]
                for group, factor in zip(optimizer.param_groups, factors, strict=True):
                    group.update({key: group[key] * factor for key in options})


def _scale(scheduler: object, factors: list[float]) -> None:
    for name in _RATES_OF_GROUPS:
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(factors):
            setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=True)])
    if getattr(scheduler, _RATE_OF_ALL, 0):
        setattr(scheduler, _RATE_OF_ALL, getattr(scheduler, _RATE_OF_ALL) * factors[0])


def _refusal(path: str, option: str, name: str, why: str, *remedies: str) -> OptionError:
    leave_out = (
        f"leave the scheduler out of the objects, with allow_unexpected=[{name!r}], and build one for the steps that "
        "are left"
    )
    return OptionError(
        "a scheduler that is restored would set an option that is kept to another value; nothing has been changed",
        where=f"keep_options of {path}.{option}",
        found=f"{name}: {why}",
        remedy="; or ".join([*remedies, leave_out, "restore without keep_options"]),
    )


def _schedulers_of(obj: object, optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """Yields the object, or the values of its attributes, that are schedulers of the optimizer."""
    groups = {id(group) for group in optimizer.param_groups}
    for value in _values_of(obj, object):
        driven = getattr(value, "optimizer", None)
        is_scheduler = isinstance(value, LRScheduler) or (hasattr(value, "get_last_lr") and hasattr(value, "step"))
        if is_scheduler and not groups.isdisjoint(map(id, getattr(driven, "param_groups", ()))):
            yield value


def _within(scheduler: object) -> Iterator[object]:
    """Yields a scheduler and those that it combines, at any depth."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _within(inner)


# Attributes.


def _values_of(obj: object, cls: type[T]) -> Iterator[T]:
    """Yields the object and the values of its attributes that are of a class."""
    for value in (obj, *getattr(obj, "__dict__", {}).values()):
        if isinstance(value, cls):
            yield value
