"""`modelstate.save`."""

import os
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import argument_order, is_module, is_path
from modelstate.checkpoint.write import SaveReport, StateToWrite, check_options, streamed, target_path, write_state
from modelstate.errors import ModelCodeError, ModelStateError, SaveTargetError
from modelstate.formats.write import check_both
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS
from modelstate.objects.objects import captured, holds_stateful
from modelstate.torch_compat.private import unwrapped


@argument_order("ms.save", lambda value: is_module(value) or isinstance(value, Mapping), is_path)
def save(
    target: nn.Module | Mapping[str, Any] | Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    shard_size_bytes: int | None = None,
    extra: Mapping[str, Any] | None = None,
    schema: str | None = None,
    overwrite: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> SaveReport:
    """Saves a module, a state dict, or a tree of objects and values, and returns when it is on the disk.

    The suffix of the path says the format: ".safetensors", or none, is safetensors; ".pt", ".pth", ".bin" and ".ckpt"
    are files of `torch.save`, which `torch.load(path, weights_only=True)` reads. Another suffix is an error.

    What is at the path is the old checkpoint or the new one, in full, at any time: files are written beside it, synced
    and renamed. Every tool that reads safetensors reads the tensors of such a file; `modelstate.open` also gives back
    what the format has no word for: tied tensors, which are written once, under all their names, tensors of classes
    that are made of plain ones (by `__tensor_flatten__`), torch's versions of modules, what `get_extra_state` returned,
    the containers and values of a tree, and a digest of every tensor, with which `load(verify=True)` compares. Tensors
    are written by several threads, with a few megabytes of memory each; of a view, what it shows.

    Args:
        target: a module; its state dict; a mapping of objects, as `Store.save` takes them, and of tensors, containers
            and values; or a `Checkpoint`, whose tensors are read while they are written, a few megabytes at a time.
        path: where it is saved to. It is opened by the same path, also when it is in shards.
        format: "safetensors" or "torch", for a path whose suffix does not say it. A file of `torch.save` has none of
            what is said of safetensors above, and no values that `torch.load(weights_only=True)` refuses.
        shard_size_bytes: what is larger goes into several files of at most so many bytes of tensors (or one larger
            tensor), and an index beside them, `PATH.index.json`, as Hugging Face's tools have it.
        extra: values to be kept with it; they come back in `Checkpoint.metadata["extra"]`.
        schema: a text of yours, not empty, by which the file says how its state is to be understood; it comes back in
            `Checkpoint.metadata`.
        overwrite: whether it may replace what is there.
        lock_timeout_seconds: how long to wait for the lock of the directory, by which processes that save take turns.

    Raises `SaveTargetError` for what is nothing that can be saved, for a path where no file can be, and for a suffix
    that is not known, `UnsavableError` for tensors, names and values that the format does not have,
    `UnsupportedValueError` for values without an encoding (see `register_codec`), `ModelCodeError` where the module's
    own `state_dict` raises, `ObjectStateError` where another object's does, `TargetExistsError`, `OptionError`,
    `DirectoryLockedError` for a directory that another process keeps locked, and
    `WriteFailedError` for an I/O error. Whatever raises, the old checkpoint is as it was and nothing new is left; an
    interrupt (Ctrl-C) that comes when the new one is in place leaves that, in full.
    """
    begin = perf_counter()
    where = target_path(path)
    chosen = check_options(where, format, shard_size_bytes, lock_timeout_seconds, extra, schema)
    check_both(where, overwrite)
    state = streamed(target) if isinstance(target, Checkpoint) else StateToWrite(_state_of(target))
    state.attached = state.attached if extra is None else extra
    state.schema = state.schema if schema is None else schema
    return write_state(
        state,
        where,
        begin,
        format=chosen,
        shard_bytes=shard_size_bytes,
        overwrite=overwrite,
        lock_timeout_seconds=lock_timeout_seconds,
    )


def _state_of(target: object) -> Mapping[Any, Any]:
    if isinstance(target, Mapping) and holds_stateful(target):
        return _nested({path: part.tree for path, part in captured(target).parts.items()})
    state = _state_dict(unwrapped(target)) if isinstance(target, nn.Module) else target
    if isinstance(state, Mapping):
        return state
    raise SaveTargetError(
        "this is nothing that can be saved",
        expected="a module, a state dict, a mapping of several, or a Checkpoint",
        found=f"{type(state).__module__}.{type(state).__qualname__}",
    )


def _state_dict(module: nn.Module) -> object:
    try:
        return module.state_dict()
    except ModelStateError:
        raise
    except Exception as error:
        what = f"the module's own state_dict raised {type(error).__name__}"
        raise ModelCodeError(what, where=type(module).__qualname__, found=error) from error


def _nested(by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings within mappings again, of what goes by dotted paths."""
    made: dict[str, Any] = {}
    for path, tree in by_path.items():
        *above, name = path.split(".")
        place = made
        for key in above:
            place = place.setdefault(key, {})
        place[name] = tree
    return made
