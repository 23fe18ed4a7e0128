"""Captures the state of several named objects, and registers how to undo a restore of it.

An object is a module, an optimizer, a `torch.Generator`, anything with `state_dict` and `load_state_dict`, or a plain
value. Its path is the keys that lead to it, joined with dots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from modelstate.checkpoint.checkpoint import Checkpoint, join
from modelstate.errors import KeyNotFoundError, ModelStateError, ObjectStateError, OptionError, code_errors
from modelstate.formats.tree import deep_copy, is_container, items_of, same_value, subtree
from modelstate.objects.optimizer_state import optimizer_state
from modelstate.objects.optimizer_values import parameter_names
from modelstate.objects.parts import Kind, Part
from modelstate.objects.stateful import load_state, own_generator, state_of
from modelstate.objects.whole_optimizer import is_saved_whole, whole_state
from modelstate.planning.recorder import ModuleContainer
from modelstate.text_format import listed, short_repr
from modelstate.torch_compat.modules import (
    broadcast_buffers,
    has_own_state_dict,
    names_not_loaded,
    tensors_of,
    unwrapped,
)
from modelstate.torch_compat.modules import modules_of as modules_within
from modelstate.torch_compat.sharding import reshard
from modelstate.torch_compat.values import set_version_metadata
from modelstate.transaction.transaction import Transaction

_MAX_DEPTH = 100
_MAX_NAME_BYTES = 200
_NOT_IN_NAMES = frozenset("./\\")


_ORDER = tuple(Kind)


class Target(NamedTuple):
    """An object whose state is captured or restored."""

    kind: Kind
    obj: Any
    given: Any = None
    """Of a module what was given: the module, or a wrapper around it."""

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
    modules: nn.Module | None = None
    if any(target.kind is Kind.OPTIMIZER for target in targets.values()):
        modules = modules_of(targets)
    parts = {}
    for path, target in restore_order(targets):
        parts[path] = Part(target.kind, _state_of(path, target, modules))
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
                assert modules is not None
                if is_saved_whole(target.obj):
                    return whole_state(target.obj, parameter_names(modules, target.obj))
                return optimizer_state(modules, target.obj)
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
    if not isinstance(state, Mapping) or has_own_state_dict(module):
        return
    for name, inner in module.named_modules():
        is_lost = name and has_own_state_dict(inner) and not any(str(key).startswith(f"{name}.") for key in state)
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
    return dict(_walk(objects, "", 0))


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
                reshard(value)
            yield from tensors_of(modules_within(value))
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and not isinstance(value, Checkpoint) and id(value) not in seen:
            seen.add(id(value))
            stack += value.values() if isinstance(value, Mapping) else value


@contextmanager
def object_code(path: str, message: str) -> Iterator[None]:
    """Runs the own code of the object at `path`: an error names the path, or becomes `ObjectStateError(message)`."""
    with code_errors(ObjectStateError, message, where=path):
        try:
            yield
        except ModelStateError as error:
            error.where = f"{path}: {error.where}" if error.where else path
            raise


def _walk(objects: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Target]]:
    if depth > _MAX_DEPTH:
        raise OptionError(
            f"mappings nested deeper than {_MAX_DEPTH}", where=prefix[:80], remedy="look for one that holds itself"
        )
    for name, value in objects.items():
        path = f"{prefix}{name}"
        _check_name(name, prefix)
        if len(path.encode()) > _MAX_NAME_BYTES:
            raise OptionError(
                "a name that is too long: files are called by it",
                where=path[:80],
                expected=f"at most {_MAX_NAME_BYTES} bytes, with the names above it",
                found=len(path.encode()),
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
            yield from _walk(value, f"{path}.", depth + 1)
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
            is_module = isinstance(value, nn.Module)
            yield (
                path,
                Target(kind or Kind.VALUE, unwrapped(value) if is_module else value, value if is_module else None),
            )


def _check_name(name: object, prefix: str) -> None:
    if not isinstance(name, str) or not name or not name.isprintable() or not _NOT_IN_NAMES.isdisjoint(name):
        raise OptionError(
            "not a name for an object: files are called by it",
            where=prefix.rstrip("."),
            expected="printable text without a dot or a slash, as 'optimizer'",
            found=short_repr(name),
        )


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


def combined_checkpoint(checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """Returns the checkpoints of modules as the checkpoint of their `ModuleContainer`.

    Raises `ReadFailedError` where a file changed between the opening of two of the checkpoints.
    """
    tree: OrderedDict[str, object] = OrderedDict()
    versions: dict[str, object] = {}
    for path, checkpoint in checkpoints.items():
        flat = checkpoint.flat
        whole: object = None
        with suppress(KeyNotFoundError):  # the key ends within a name
            whole = subtree(checkpoint.contents.tree, checkpoint.key, checkpoint.source)
        items = items_of(whole) if is_container(whole) else (*flat.tensors.items(), *flat.values.items())
        for name, node in items:
            tree[f"{path}.{name}"] = node
        for name, version in (checkpoint.versions or {}).items():
            versions[f"{path}.{name}" if name else path] = version
    set_version_metadata(tree, versions)
    opened = list(checkpoints.values())
    formats = {checkpoint.format for checkpoint in opened}
    sources = {checkpoint.source: None for checkpoint in opened}
    source = listed(sources, 3) if len(sources) > 1 else next(iter(sources), "mapping")
    return join(opened, tree, source, format=formats.pop() if len(formats) == 1 else "mapping")


Undo = Callable[[], None]


def register_undo(targets: list[tuple[str, Target]], transaction: Transaction) -> None:
    """Registers with the transaction how to undo a restore of the targets, which come in the order of the restore.

    The plan of an optimizer registers its own undo. Code of other objects may change optimizers, too.

    Raises `ObjectStateError` for an object whose state cannot be copied.
    """
    transaction.others += [target.obj for _, target in targets if target.kind is Kind.OPTIMIZER]
    transaction.register_undo(partial(torch.set_rng_state, torch.get_rng_state()))
    with torch.random.fork_rng(devices=[]):  # an object may draw a seed when it is asked for its state
        # Reversed: generators are captured before another object draws from them, and undone after it.
        for path, target in reversed(targets):
            if target.kind is Kind.STATEFUL:
                transaction.register_undo(_undo_of_stateful(path, target.obj))
            elif target.kind is Kind.GENERATOR:
                transaction.register_undo(partial(target.obj.set_state, target.obj.get_state()))


def _undo_of_stateful(path: str, obj: object) -> Undo:
    generator = own_generator(obj)
    random = None if generator is None else generator.get_state()
    with object_code(
        path, "its state cannot be copied, so that a restore could not be undone; nothing has been changed"
    ):
        before = deep_copy(state_of(obj))
    attributes = getattr(obj, "__dict__", None)
    bindings = dict(attributes) if isinstance(attributes, dict) else None

    def undo() -> None:
        if isinstance(attributes, dict) and bindings is not None:
            attributes.clear()
            attributes.update(bindings)
        if generator is not None and random is not None:
            generator.set_state(random)
        with suppress(Exception):
            if same_value(state_of(obj), before):
                return  # unchanged, or restored with its attributes
        with object_code(path, "its load_state_dict does not take what its own state_dict gave before"):
            load_state(obj, before)

    return undo
