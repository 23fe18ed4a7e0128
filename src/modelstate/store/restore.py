"""`modelstate.restore`: several objects out of one file."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from modelstate.errors import KeyNotFoundError, ObjectKindError
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.open import argument_order, is_objects, is_source
from modelstate.read.open import open as open_checkpoint
from modelstate.store.objects import MODULE, OPTIMIZER, STATEFUL, Part, Target, targets_of
from modelstate.store.restoring import Restored, RulesOf, restore_objects

Source = str | os.PathLike[str] | Mapping[str, Any] | Checkpoint


@argument_order("ms.restore", is_objects, is_source)
def restore(
    objects: Mapping[str, Any],
    source: Source,
    *,
    rules: RulesOf = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    keep_options: Iterable[str] = (),
    device: torch.device | str | None = None,
    map: bool | None = None,
    verify: bool = False,
    progress: bool | None = None,
    max_memory_bytes: int | None = None,
    init_missing: bool = False,
) -> Restored:
    """Gives several objects back what `modelstate.save` has written of them to one file: all of them, or none.

    The objects are found under the names that they were saved under. A plain value among them says that the value is
    wanted; it comes back in the result. The other arguments are those of `modelstate.load`, where patterns of names
    begin with the path of an object; `init_missing` initialises the parameters that the file lacks, for which the
    optimizers then have no state.

    Raises what opening raises, and what `restore_objects` raises; `ChecksumError` with `verify`.
    """
    targets = targets_of(objects)
    checkpoint = open_checkpoint(source)
    if verify:
        checkpoint.verify()
    saved = {path: part for path, target in targets.items() if (part := _part(checkpoint, path, target)) is not None}
    for path in _others([*checkpoint, *_extra_names(checkpoint.extra, targets)], targets):
        saved[path] = Part(STATEFUL, None)  # its kind makes no difference: there is no object for it
    return restore_objects(
        objects,
        saved,
        rules=rules,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        keep_options=keep_options,
        device=device,
        map=map,
        progress=progress,
        max_memory_bytes=max_memory_bytes,
        source_name="" if isinstance(source, str | os.PathLike) else "source",
        init_missing=init_missing,
    )


def _extra_names(extra: Mapping[str, Any], targets: Mapping[str, Target]) -> Iterator[str]:
    """The names of values, down to the objects: what holds no tensors is one value, however much is in it."""
    above = _above(targets)
    left = list(extra.items())
    while left:
        name, value = left.pop()
        if name in above and isinstance(value, Mapping) and value:
            left += [(f"{name}.{key}", one) for key, one in value.items()]
        else:
            yield name


def _above(targets: Mapping[str, Target]) -> set[str]:
    """What leads to the targets."""
    return {path[:at] for path in targets for at, char in enumerate(path) if char == "."}


def _others(names: Iterable[str], targets: Mapping[str, Target]) -> dict[str, None]:
    """Where the names lead that belong to none of the targets: to the first key that no target has."""
    above = _above(targets)
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        paths = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if targets.keys().isdisjoint(paths):
            found[next((path for path in paths if path not in above), name)] = None
    return found


def _module_state(checkpoint: Checkpoint, path: str) -> Checkpoint | Mapping[str, Any]:
    try:
        return checkpoint.select(path)
    except KeyNotFoundError:
        state = checkpoint.value(path)
        if state == {}:  # it had nothing to save, as a loss function
            return {}
        raise


def _part(checkpoint: Checkpoint, path: str, target: Target) -> Part | None:
    try:
        if target.kind == MODULE:
            return Part(MODULE, _module_state(checkpoint, path))
        value = checkpoint.value(path)
    except KeyNotFoundError:
        return None
    if target.kind == OPTIMIZER and not isinstance(value, Mapping):
        raise ObjectKindError(
            "what was saved is not the state of an optimizer",
            where=f"{checkpoint.source}: {path}",
            expected="a mapping with state and param_groups",
            found=type(value).__name__,
            remedy="look at what the file has there: modelstate.open(path).value(name)",
        )
    return Part(target.kind, value)
