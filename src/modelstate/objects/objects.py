"""Captures the state of several named objects, and describes the result of a restore of it.

An object is a module, an optimizer, a `torch.Generator`, anything with `state_dict` and `load_state_dict`, or a plain
value. Its path is the keys that lead to it, joined with dots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import nn
from torch.utils.data import DataLoader

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import KeyNotFoundError, ModelStateError, ObjectStateError, OptionError, code_errors
from modelstate.formats.tree import deep_copy
from modelstate.html.page import Page, Shown
from modelstate.objects.parts import Kind, Part
from modelstate.objects.stateful import rewind, state_of
from modelstate.planning.options import LoadOptions
from modelstate.text_format import listed, short_repr
from modelstate.torch_compat.modules import (
    ModuleContainer,
    broadcast_buffers,
    modules_of as modules_within,
    names_not_loaded,
    overrides,
    tensors_of,
    unwrapped,
)
from modelstate.torch_compat.sharding import gathered_shards, reshard

if TYPE_CHECKING:
    from modelstate.planning.plan import LoadReport
    from modelstate.rules.rule import Rule
    from modelstate.rules.schema import Schema

_MAX_DEPTH = 100
_MAX_NAME_BYTES = 200
_NOT_IN_NAMES = frozenset("./\\")


_ORDER = tuple(Kind)


class Target(NamedTuple):
    """An object whose state is captured or restored."""

    kind: Kind
    obj: Any
    given: Any
    """What was given: the object, or a wrapper around a module."""

    def buffers_of_first(self, ranks: Sequence[int]) -> frozenset[str]:
        """Returns the names of the buffers that DistributedDataParallel copies from the first of these ranks to all.

        It does so before each forward pass. Until then they may differ, as the statistics of BatchNorm do.
        """
        synced = {id(buffer) for buffer in broadcast_buffers(self.given, ranks)} if self.kind is Kind.MODULE else set()
        named = self.obj.named_buffers(remove_duplicate=False) if synced else ()
        return frozenset(name for name, buffer in named if id(buffer) in synced)

    @property
    def is_restored_last(self) -> bool:
        """Whether other objects may draw random numbers from this one while their state is captured or restored."""
        return self.kind is Kind.GENERATOR or bool(getattr(type(self.obj), "restored_last", False))


def capture(targets: Mapping[str, Target]) -> dict[str, Part]:
    """Captures the state of all objects without a copy: its tensors and containers are the live ones.

    Generators, and objects whose class has `restored_last = True`, are captured last, because the `state_dict` of
    another object may draw from them.

    Args:
        targets: what `targets_of` returns. The modules of the optimizers have to be among them: their parameter names
            are the keys of the optimizers' states.

    Returns:
        The state of each object by its path, in the order of `targets`.

    Raises:
        OptimizerStateError: An optimizer has parameters of a module that is not among the objects.
        ObjectStateError: The own code of an object raised.
    """
    has_optimizer = any(target.kind is Kind.OPTIMIZER for target in targets.values())
    modules = modules_of(targets) if has_optimizer else None
    parts = {path: Part(target.kind, _state_of(path, target, modules)) for path, target in restore_order(targets)}
    return {path: parts[path] for path in targets}


def _state_of(path: str, target: Target, modules: nn.Module | None) -> object:
    """Returns the state of an object. `modules` has the parameters of an optimizer."""
    with object_code(path, "the object's own code raised when it was asked for its state"):
        match target.kind:
            case Kind.VALUE:
                return target.obj
            case Kind.MODULE:
                state = target.obj.state_dict()
                check_loadable(path, target.obj, state)
                return state
            case Kind.OPTIMIZER:
                from modelstate.objects.optimizer_state import captured_optimizer  # imports all of loading

                assert modules is not None
                return captured_optimizer(modules, target.obj)
            case Kind.GENERATOR:
                return target.obj.get_state()
            case _:
                return state_of(target.obj)


def check_loadable(path: str, module: nn.Module, state: object) -> None:
    """Raises `ObjectStateError` where a restore would miss some of a module's state.

    Its `state_dict()` has names that nothing of it would load, or lacks the state of a module within.
    """
    names = names_not_loaded(module, state) if isinstance(state, Mapping) else []
    if names:
        raise ObjectStateError(
            "the module's own state_dict gives names that nothing of the module loads, so it could not be restored",
            where=path,
            found=listed(names),
            remedy="override load_state_dict, too, so that it takes them; of an extra state, set_extra_state. Or save "
            "the state dict, which a restore returns as a value: model.state_dict() in place of the model",
        )
    if not isinstance(state, Mapping) or overrides(module, "state_dict"):
        return
    for name, inner in module.named_modules():
        is_lost = name and overrides(inner, "state_dict") and not any(str(key).startswith(f"{name}.") for key in state)
        if is_lost and (names := list(inner.state_dict())):
            raise ObjectStateError(
                "a module within the model has a state_dict of its own that does not reach the state dict of the model",
                where=f"{path}.{name}" if path else name,
                expected=f"names that begin with {name!r} in the state dict of the model",
                found=f"none of {listed(names, 4)}",
                remedy="let its state_dict write into the argument destination, under names that begin with prefix, as "
                "torch's own does",
            )


def targets_of(objects: Mapping[str, object]) -> dict[str, Target]:
    """Returns the objects by path, without wrappers around modules.

    Args:
        objects: objects and plain values by name. A mapping that holds objects is a group of them; any other mapping
            is a plain value.

    Raises:
        OptionError: A name or an object cannot be saved.
    """
    if not isinstance(objects, Mapping) or isinstance(objects, nn.Module):
        raise OptionError(
            "objects= must be a mapping from names to objects",
            expected='such as {"model": model, "optimizer": optimizer}',
            found=type(objects).__name__,
        )
    return dict(_walk(objects, ""))


def restore_order(targets: Mapping[str, Target]) -> list[tuple[str, Target]]:
    """Returns the targets in the order of capture and restore: each one after those that it depends on."""
    return sorted(targets.items(), key=lambda item: (_ORDER.index(item[1].kind), item[1].is_restored_last))


def modules_of(targets: Mapping[str, Target]) -> ModuleContainer:
    """Returns all modules among the targets as submodules of one container."""
    return ModuleContainer({path: target.obj for path, target in targets.items() if target.kind is Kind.MODULE})


def tensors_within(objects: object, reshards: bool = False) -> Iterator[torch.Tensor]:
    """Yields the tensors of the modules in nested containers, and those in the containers. Nothing is checked.

    Args:
        objects: Modules, tensors, containers and other values. A container that occurs twice is visited once.
        reshards: Whether modules whose parameters are gathered are sharded again first.
    """
    seen: set[int] = set()
    stack = [objects]
    while stack:
        value = stack.pop()
        if isinstance(value, nn.Module):
            if reshards:
                reshard(value.modules())
            yield from tensors_of(modules := modules_within(value))
            yield from gathered_shards(modules)
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and not isinstance(value, Checkpoint) and id(value) not in seen:
            seen.add(id(value))
            stack += value.values() if isinstance(value, Mapping) else value


@contextmanager
def object_code(path: str, message: str) -> Iterator[None]:
    """Runs the own code of the object at `path`: an error names the path, or becomes `ObjectStateError(message)`."""
    try:
        yield
    except ModelStateError as error:
        error.where = f"{path}: {error.where}" if error.where else path
        raise
    except Exception:
        with code_errors(ObjectStateError, message, where=path):
            raise


def _walk(objects: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Target]]:
    for name, value in objects.items():
        path = f"{prefix}{name}"
        nbytes = len(path.encode(errors="replace"))
        is_text = isinstance(name, str) and name != "" and name.isprintable() and _NOT_IN_NAMES.isdisjoint(name)
        if not is_text or nbytes > _MAX_NAME_BYTES:
            raise OptionError(
                "not a name for an object: files are called by it",
                where=prefix.rstrip(".")[:80],
                expected=f"printable text without a dot or a slash, as 'optimizer', of at most {_MAX_NAME_BYTES} bytes "
                "with the names above it",
                found=f"{short_repr(name)}, {nbytes} bytes",
                remedy="look for a mapping that holds itself" if prefix.count(".") > 20 else "",
            )
        kind = _kind(value)
        listed_objects = [item for item in value if _kind(item) is not None] if isinstance(value, list | tuple) else []
        if listed_objects:
            raise OptionError(
                "objects in a list have no names",
                where=path,
                found=f"a {type(value).__name__} that holds {type(listed_objects[0]).__name__}",
                remedy='give a mapping: {"first": ..., "second": ...}',
            )
        if kind is None and holds_objects(value):
            yield from _walk(value, f"{path}.")
        elif isinstance(value, DataLoader) and not hasattr(value, "state_dict"):
            raise OptionError(
                "a DataLoader of torch has no state that could be saved",
                where=path,
                expected="a loader with state_dict and load_state_dict, as torchdata's StatefulDataLoader",
                found=type(value).__name__,
                remedy="use StatefulDataLoader, which takes the same arguments; or save between epochs, and leave the "
                "loader out: with generator=g, give ms.RNG({'loader': g})",
            )
        else:
            yield path, Target(kind or Kind.VALUE, unwrapped(value) if kind is Kind.MODULE else value, value)


def _kind(value: object) -> Kind | None:
    """Returns the kind of an object; None for a value that is not an object, such as a tensor or a class."""
    if isinstance(value, type | torch.Tensor):
        return None
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, torch.optim.Optimizer):
        return Kind.OPTIMIZER
    if isinstance(value, torch.Generator):
        return Kind.GENERATOR
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return Kind.STATEFUL if all(map(callable, methods)) else None


def holds_objects(value: object, depth: int = 0) -> bool:
    """Whether a mapping holds an object at any depth of mappings."""
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH:
        return False
    return any(_kind(item) is not None or holds_objects(item, depth + 1) for item in value.values())


RulesOf: TypeAlias = "Rule | Iterable[Rule] | Schema | Mapping[str, Rule | Iterable[Rule] | Schema]"


@dataclass(frozen=True, slots=True, eq=False)
class Restored(Mapping[str, Any], Shown):
    """The result of a restore: a mapping from the paths of the plain values that were asked for to their values.

    Examples:
        >>> restored = ms.restore({"model": model, "epoch": 0}, "run.safetensors")
        >>> restored["epoch"]
        3
    """

    plain: Mapping[str, Any] = field(repr=False)
    """The plain values by path, as this object maps them itself."""
    report: LoadReport = field(repr=False)
    """What happened to the tensors of all modules; their names begin with the paths of the modules."""
    missing: tuple[str, ...] = ()
    """Paths of objects that were not saved, as `allow_missing` allows. These objects are unchanged."""
    unexpected: tuple[str, ...] = ()
    """Paths that were saved and are not among the objects, as `allow_unexpected` allows."""
    _drawn_from: tuple[tuple[str, Target, object], ...] = field(default=(), repr=False)
    """Path, target and saved state of each random generator, and of each loader that has a generator of its own."""

    def rewind_generators(self) -> None:
        """Sets the random generators among the objects to their saved states once more.

        Call it before the first step where random numbers are drawn between the restore and that step, as when a
        validation pass is made or another model is initialised. `modelstate.resumable` does it by itself. Generators
        are `torch.Generator`s, `RNG`s, objects whose class has `restored_last = True`, and the generators of loaders.

        Raises:
            ObjectStateError: An `RNG` or another generator does not take its state.

        Examples:
            >>> restored = store.restore({"model": model, "rng": ms.RNG()})
            >>> validate(model)
            >>> restored.rewind_generators()
        """
        for path, target, tree in self._drawn_from:
            with object_code(path, "the generator does not take the state"):
                if target.kind is Kind.GENERATOR:
                    target.obj.set_state(tree)
                elif target.is_restored_last:
                    target.obj.load_state_dict(deep_copy(tree))
                else:
                    rewind(target.obj, tree)

    def _page(self) -> Page:
        return self.report._page()

    def __bool__(self) -> bool:
        """Always true, also where no plain values were asked for."""
        return True

    def __getitem__(self, path: str) -> Any:
        try:
            return self.plain[path]
        except KeyError:
            raise KeyNotFoundError(
                "no plain value of this name was restored",
                expected=", ".join(map(repr, self.plain)) or "no names: none was asked for",
                found=short_repr(path),
                remedy="restore changes models and other objects in place: use the objects that were passed to it",
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


class ModuleArguments(TypedDict, total=False):
    """The keyword arguments of `restore` that are options of the load of the modules."""

    allow_missing: Iterable[str]
    allow_unexpected: Iterable[str]
    device: torch.device | str | None
    map: bool | None
    in_place: Literal[False] | None
    init_missing: bool
    progress: bool | None
    max_memory_bytes: int | None


class RestoreArguments(ModuleArguments, total=False):
    """The keyword arguments of `restore` and of `Store.restore`, but for `verify` and `cache`."""

    rules: RulesOf
    keep_options: Iterable[str]


class RestoreOptions(LoadOptions, frozen=True, kw_only=True):
    """The options of a restore: those of a load, and those of optimizers."""

    keep_options: tuple[str, ...] = ()
