"""The state of several objects under names: capture it, put it back, undo it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import ModelStateError, ObjectStateError, OptimizerStateError, OptionError, ReadFailedError
from modelstate.formats.tree import same_value
from modelstate.io.files import FileFingerprint
from modelstate.objects.loaders import is_loader_without_state, load_state, own_generator, state_of
from modelstate.objects.optimizer_state import optimizer_state
from modelstate.spec import Contents
from modelstate.torch_compat.private import unwrapped
from modelstate.transaction.journal import Journal


class Objects(nn.Module):
    """Modules under keys of any spelling; what is inside has the names "key.name"."""

    def get_submodule(self, target: str) -> nn.Module:
        # torch asks for attributes, and a key may be the name of a method.
        head, _, rest = target.partition(".")
        child = self._modules.get(head) if head else self
        if child is None:
            raise AttributeError(f"no module {head!r}")
        return child.get_submodule(rest) if rest else child


def bundle(modules: Mapping[str, nn.Module]) -> Objects:
    """The modules under their dotted paths."""
    root = Objects()
    for path, module in modules.items():
        *above, key = path.split(".")
        place = root
        for name in above:
            place = place._modules.setdefault(name, Objects())  # type: ignore[assignment]
        place._modules[key] = module
    return root


def bundled(checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """The checkpoints of the modules as that of their bundle.

    Raises `ReadFailedError` where a file has changed between the opening of two of them.
    """
    tree: OrderedDict[str, Any] = OrderedDict()
    versions: dict[str, Any] = {}
    for path, checkpoint in checkpoints.items():
        flat = checkpoint.flat
        tree.update((f"{path}.{name}", stored) for name, stored in flat.tensors.items())
        tree.update((f"{path}.{name}", value) for name, value in flat.values.items())
        for name, version in (checkpoint.versions or {}).items():
            versions[f"{path}.{name}" if name else path] = version
    tree._metadata = versions  # type: ignore[attr-defined]
    several = list(checkpoints.values())
    formats = {checkpoint.format for checkpoint in several}
    contents = Contents(
        formats.pop() if len(formats) == 1 else "mapping",
        tree,
        tuple(dict.fromkeys(file for checkpoint in several for file in checkpoint.files)),
        checksums={place: crc for checkpoint in several for place, crc in checkpoint.checksums.items()},
    )
    names = list(dict.fromkeys(checkpoint.source for checkpoint in several))
    source = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Checkpoint(contents, source=source or "mapping", stamps=_stamps(several))


def _stamps(checkpoints: list[Checkpoint]) -> dict[str, FileFingerprint]:
    stamps: dict[str, FileFingerprint] = {}
    for checkpoint in checkpoints:
        for path, stamp in checkpoint.stamps.items():
            if stamps.setdefault(path, stamp) != stamp:
                raise ReadFailedError(
                    "the file changed between the opening of two parts of it",
                    where=path,
                    remedy="open it again, when nothing writes to it any more",
                )
    return stamps


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
    found = {path: Part(target.kind, _tree(path, target, modules)) for path, target in restore_order(targets)}
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


def restore_order(targets: Mapping[str, Target]) -> list[tuple[str, Target]]:
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


Undo = Callable[[], None]


def register_undo(targets: list[tuple[str, Target]], journal: Journal) -> None:
    """Has the journal undo what becomes of the targets, which are in the order in which they are restored.

    Raises `ObjectStateError` for an object whose state cannot be copied.
    """
    random = torch.get_rng_state()
    journal.undo(lambda: torch.set_rng_state(random))
    with torch.random.fork_rng(devices=[]):  # an object may draw a seed when it is asked for its state
        # Generators come first, before anybody draws from them, and so are undone last.
        for path, target in reversed(targets):
            if target.kind in _UNDO:
                journal.undo(_UNDO[target.kind](path, target.it))
    journal.protect(tensor for _, target in targets if target.kind == OPTIMIZER for tensor in _tensors(target.it))


def _of_optimizer(_: str, optimizer: torch.optim.Optimizer) -> Undo:
    """Loading replaces what is in these, and leaves the old tensors alone."""
    state: dict[Any, Any] = optimizer.state
    kept = [(param, values, dict(values) if isinstance(values, dict) else None) for param, values in state.items()]
    groups = [(group, dict(group)) for group in optimizer.param_groups]

    def undo() -> None:
        state.clear()
        for param, values, items in kept:
            if items is not None:
                values.clear()
                values.update(items)
            state[param] = values
        for group, options in groups:
            group.clear()
            group.update(options)

    return undo


def _of_stateful(path: str, it: Any) -> Undo:
    generator = own_generator(it)
    random = None if generator is None else generator.get_state()
    with code_of(path, "its state cannot be copied, so that a restore could not be undone; nothing has been changed"):
        kept = deepcopy(state_of(it))
    attributes = getattr(it, "__dict__", None)
    bindings = dict(attributes) if isinstance(attributes, dict) else None

    def undo() -> None:
        if isinstance(attributes, dict) and bindings is not None:
            attributes.clear()
            attributes.update(bindings)
        if generator is not None and random is not None:
            generator.set_state(random)
        with suppress(Exception):
            if same_value(state_of(it), kept):
                return  # nothing has happened to it, or it was done with its attributes
        with code_of(path, "its load_state_dict does not take what its own state_dict gave before"):
            load_state(it, kept)

    return undo


def _of_generator(_: str, generator: torch.Generator) -> Undo:
    kept = generator.get_state()

    def undo() -> None:
        generator.set_state(kept)

    return undo


_UNDO: Mapping[str, Callable[[str, Any], Undo]] = {
    OPTIMIZER: _of_optimizer,
    STATEFUL: _of_stateful,
    GENERATOR: _of_generator,
}


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting: list[Any] = [*optimizer.state.values()]
    waiting += [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    while waiting:
        found = waiting.pop()
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, dict):
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
