"""The state of several objects: modules, optimizers, schedulers, generators and plain values, under names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from modelstate.errors import ModelStateError, ObjectStateError, OptimizerStateError, OptionError
from modelstate.place.optimizer_state import optimizer_state
from modelstate.plan.torch_private import unwrapped
from modelstate.store.bundle import Objects, bundle
from modelstate.store.loaders import is_loader_without_state, state_of

MODULE, OPTIMIZER, STATEFUL = "module", "optimizer", "stateful"
GENERATOR, VALUE = "generator", "value"
KINDS = (MODULE, OPTIMIZER, STATEFUL, GENERATOR, VALUE)


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one object."""

    kind: str
    """"module", "optimizer", "stateful" (by its `state_dict` and `load_state_dict`), "generator" or "value"."""
    tree: Any
    """A module's `state_dict()` with its `_metadata`, or a `Checkpoint`; an optimizer's state by the names of its
    parameters, which begin with the path of the module; what `state_dict()` gave; a generator's state as a tensor of
    bytes; or the value itself. Nothing of it is copied."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The state of several objects. Made by `captured`."""

    parts: Mapping[str, Part]
    """By the paths of the objects: the keys that lead to them, joined with dots."""


class Target(NamedTuple):
    """One of the objects."""

    kind: str
    it: Any

    @property
    def is_late(self) -> bool:
        """Whether it is what others may draw from while their state is taken or given."""
        return self.kind == GENERATOR or bool(getattr(type(self.it), "restored_last", False))


def captured(objects: Mapping[str, Any]) -> Captured:
    """The state of all objects, with nothing copied: its tensors and containers are the live ones.


    A mapping that holds objects is one of objects; any other is a plain value. The parameters of an optimizer go by
    their names in the modules among the objects. Generators, and objects whose class says `restored_last`, are asked
    last, since the `state_dict` of others may draw from them.

    Raises `OptionError` for names and objects that cannot be, `OptimizerStateError` for an optimizer of a module that
    is not among the objects, and `ObjectStateError` where an object's own code raises.
    """
    targets = targets_of(objects)
    modules = modules_of(targets)
    check_owners(targets, modules)
    found = {path: Part(target.kind, _tree(path, target, modules)) for path, target in in_turn(targets)}
    return Captured({path: found[path] for path in targets})


def targets_of(objects: Mapping[str, Any]) -> dict[str, Target]:
    """The objects by their paths. Raises `OptionError`."""
    if not isinstance(objects, Mapping) or isinstance(objects, nn.Module):
        raise OptionError(
            "objects come under names",
            expected='a mapping, as {"model": model, "optimizer": optimizer}',
            found=type(objects).__name__,
        )
    return dict(_walk(objects, "", 0))


def in_turn(targets: Mapping[str, Target]) -> list[tuple[str, Target]]:
    """The targets in the order in which their states are taken and given: each after what it depends on."""
    return sorted(targets.items(), key=lambda item: (_ORDER.index(item[1].kind), item[1].is_late))


_ORDER = (VALUE, MODULE, OPTIMIZER, STATEFUL, GENERATOR)


def modules_of(targets: Mapping[str, Target]) -> Objects:
    """All modules among the targets as one."""
    return bundle({path: target.it for path, target in targets.items() if target.kind == MODULE})


def check_owners(targets: Mapping[str, Target], modules: nn.Module) -> None:
    """Raises `OptimizerStateError` for an optimizer with parameters of no module among the objects."""
    owned = set(modules.parameters())
    for path, target in targets.items():
        if target.kind == OPTIMIZER:
            params = [param for group in target.it.param_groups for param in group["params"]]
            foreign = sum(param not in owned for param in params)
            if foreign:
                raise OptimizerStateError(
                    "the optimizer has parameters of a module that is not among the objects, so they have no names",
                    where=path,
                    found=f"{foreign} of {len(params)}",
                    remedy='add the module that holds them: {"model": model, ...}',
                )


@contextmanager
def code_of(path: str, what: str) -> Iterator[None]:
    """Around code of one of the objects: what it raises becomes an error that says which it was."""
    try:
        yield
    except ModelStateError as error:
        error.where = f"{path}: {error.where}" if error.where else path
        raise
    except Exception as error:
        raise ObjectStateError(
            what, where=path, found=f"{type(error).__name__}: {error}", remedy="see the traceback of the cause"
        ) from error


def _tree(path: str, target: Target, modules: nn.Module) -> Any:
    with code_of(path, "the object's own code raised when it was asked for its state"):
        if target.kind == OPTIMIZER:
            return optimizer_state(modules, target.it)
        if target.kind == GENERATOR:
            return target.it.get_state()
        return target.it if target.kind == VALUE else state_of(target.it)


def _walk(objects: Mapping[Any, Any], above: str, depth: int) -> Iterator[tuple[str, Target]]:
    if depth > _MAX_DEPTH:
        raise OptionError(
            f"mappings nested deeper than {_MAX_DEPTH}", where=above[:80], remedy="look for one that holds itself"
        )
    for name, it in objects.items():
        path = f"{above}{name}"
        _check_name(name, above)
        if len(path.encode()) > _MAX_NAME_BYTES:
            raise OptionError(
                "a name that is too long: files are called by it",
                where=path[:80],
                expected=f"at most {_MAX_NAME_BYTES} bytes, with the names above it",
                found=len(path.encode()),
            )
        kind = _kind(it)
        if kind is None and _holds_objects(it, 0):
            if not isinstance(it, Mapping):
                raise OptionError(
                    "objects in a list have no names",
                    where=path,
                    found=f"a {type(it).__name__} that holds {_first_object(it)}",
                    remedy='give a mapping: {"first": ..., "second": ...}',
                )
            yield from _walk(it, f"{path}.", depth + 1)
        elif is_loader_without_state(it):
            raise OptionError(
                "a DataLoader of torch has no state that could be saved",
                where=path,
                expected="a loader with state_dict and load_state_dict, as torchdata's StatefulDataLoader",
                found=type(it).__name__,
                remedy="use StatefulDataLoader, which takes the same arguments; or save between epochs, and leave the "
                "loader out: with generator=g, give ms.RNG({'loader': g})",
            )
        else:
            yield path, Target(kind or VALUE, unwrapped(it) if isinstance(it, nn.Module) else it)


def _kind(it: object) -> str | None:
    """The kind of an object; None for what is none."""
    if isinstance(it, type | torch.Tensor):
        return None
    for cls, kind in _CLASSES:
        if isinstance(it, cls):
            return kind
    methods = (getattr(it, name, None) for name in ("state_dict", "load_state_dict"))
    return STATEFUL if all(map(callable, methods)) else None


_CLASSES: tuple[tuple[Any, str], ...] = (
    (nn.Module, MODULE),
    (torch.optim.Optimizer, OPTIMIZER),
    (torch.Generator, GENERATOR),
)
_MAX_DEPTH = 100
_MAX_NAME_BYTES = 200


def _holds_objects(it: object, depth: int = 0) -> bool:
    """Whether there is an object in a mapping, or at the first level of a list."""
    if isinstance(it, list | tuple):
        return any(_kind(one) is not None for one in it)
    if not isinstance(it, Mapping) or depth > _MAX_DEPTH:
        return False
    return any(_kind(one) is not None or _holds_objects(one, depth + 1) for one in it.values())


def holds_stateful(it: object, depth: int = 0) -> bool:
    """Whether there is an object in a mapping, or in one within it, that only its own `state_dict` can tell of."""
    if not isinstance(it, Mapping) or depth > _MAX_DEPTH:
        return False
    return any(_kind(one) not in (None, GENERATOR) or holds_stateful(one, depth + 1) for one in it.values())


def _first_object(several: Any) -> str:
    return next(type(one).__name__ for one in several if _kind(one) is not None)


def _check_name(name: object, above: str) -> None:
    if not isinstance(name, str) or not name or not name.isprintable() or not _NOT_IN_NAMES.isdisjoint(name):
        raise OptionError(
            "not a name for an object: files are called by it",
            where=above.rstrip("."),
            expected="printable text without a dot or a slash, as 'optimizer'",
            found=repr(name),
        )


_NOT_IN_NAMES = frozenset("./\\")
