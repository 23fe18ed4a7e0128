"""Saves a module, a state dict, or a tree of objects and values to a file: `modelstate.save`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import checked_call
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.write import SaveOptions, SaveReport, StateToWrite, streamed, target_path, write_state
from modelstate.distributed.agreement import PLANNING, TIMEOUT_SECONDS, Agreement, agreement_of
from modelstate.errors import UnsavableError
from modelstate.formats.writing import check_both
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS
from modelstate.objects.objects import capture, check_loadable, holds_objects, targets_of, tensors_within
from modelstate.objects.parts import Part
from modelstate.problems import GATHER
from modelstate.torch_compat.modules import state_dict_of, unwrapped


def _agreement(
    state: object, process_group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Agreement:
    """Returns the ranks that save the state."""
    return agreement_of(tensors_within(state, reshards=True), process_group, timeout_seconds, "modelstate.save")


@checked_call(
    "ms.save",
    within=lambda *args, process_group=None, **options: _agreement((args, options), process_group).phase(PLANNING),
)
def save(
    state: nn.Module | Mapping[str, object] | Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    shard_size_bytes: int | None = None,
    extra: Mapping[str, object] | None = None,
    schema: str | None = None,
    overwrite: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    progress: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> SaveReport:
    """Saves a module, a state dict, or a tree of objects and values, and returns when it is on the disk.

    The suffix of the path says the format: ".safetensors", or no suffix, is safetensors; ".pt", ".pth", ".bin" and
    ".ckpt" are files of `torch.save`, which `torch.load(path, weights_only=True)` reads. Another suffix is an error.

    At any time the path holds the old checkpoint or the new one, in full: files are written beside it, synced and
    renamed. Every tool that reads safetensors reads the tensors of such a file. `modelstate.open` also gives back what
    safetensors cannot express: tied tensors, which are written once, under all their names; tensors of classes that
    are made of plain ones (by `__tensor_flatten__`); torch's versions of modules; the results of `get_extra_state`;
    the containers and values of a tree; and a digest of every tensor, which `load(verify=True)` compares. Several
    threads write the tensors, with a few megabytes of memory each. Of a view, only the elements that it shows are
    written.

    Args:
        state: a module; its state dict; a mapping of objects, as `Store.save` takes them, and of tensors, containers
            and values; or a `Checkpoint`, whose tensors are read while they are written, a few megabytes at a time.
        path: the file to write. It is opened by the same path, also when it is in shards.
        format: "safetensors" or "torch", for a path whose suffix does not say it. A file of `torch.save` has none of
            the additions to safetensors above, and no values that `torch.load(weights_only=True)` refuses.
        shard_size_bytes: a larger state goes into several files of at most so many bytes of tensors (or one larger
            tensor), and an index beside them, `PATH.index.json`, in the layout of Hugging Face's tools.
        extra: values to keep with the state; they come back in `Checkpoint.metadata["extra"]`.
        schema: a name, not empty, for the naming scheme of the state; it comes back in `Checkpoint.metadata`.
        overwrite: whether an existing checkpoint may be replaced.
        lock_timeout_seconds: how long to wait for the lock of the directory, by which processes that save take turns.
        progress: whether to show a progress bar, which a save on one rank has. None shows one on a terminal after half
            a second.
        process_group: the ranks that save together, where the state has DTensors. None stands for the ranks of their
            mesh.
        timeout_seconds: how long a rank waits for the other ranks.

    Returns:
        What was written, and how long it took.

    Raises:
        UnsavableError: The state cannot be saved, or the path cannot be a file, or its suffix is not known.
        UnsavableError: The format does not have the kind of a tensor, a name or a value.
        CodecError: A value has no encoding (see `register_codec`).
        ModelCodeError: The module's own `state_dict` raised.
        ObjectStateError: The own code of another object raised.
        TargetExistsError: The path exists, and `overwrite` is false.
        OptionError: An option cannot be used.
        LockedError: Another process keeps the directory locked.
        WriteFailedError: An I/O error.

    On any error the old checkpoint is as it was and no new file is left. An interrupt (Ctrl-C) that comes when the new
    checkpoint is in place leaves the new one, in full.

    Examples:
        >>> ms.save(model, "model.safetensors")
        >>> ms.save({"model": model, "optimizer": optimizer, "epoch": 3}, "run.safetensors")
    """
    options = SaveOptions(
        format=format,
        shard_size_bytes=shard_size_bytes,
        extra=extra,
        schema=schema,
        overwrite=overwrite,
        lock_timeout_seconds=lock_timeout_seconds,
        progress=progress,
    )
    return save_with(_agreement(state, process_group, timeout_seconds), state, path, options)


def save_with(
    agreement: Agreement,
    state: nn.Module | Mapping[str, object] | Checkpoint,
    path: str | os.PathLike[str],
    options: SaveOptions,
) -> SaveReport:
    """Saves as `save` does, with the ranks of an agreement, and its connections."""
    begin = perf_counter()
    with agreement.before(PLANNING):
        where = target_path(path)
        options = options.checked(where)
        if agreement.is_first:
            check_both(where, options.overwrite)
        if agreement.ranks and options.format == "torch":
            raise UnsavableError(
                "a file of torch.save cannot be written by several ranks, and cannot have DTensors",
                where=where,
                remedy=f"give a path that ends in .safetensors, or {GATHER}",
            )
        to_write = streamed(state) if isinstance(state, Checkpoint) else StateToWrite(_tree_of(state))
    if not agreement.ranks:
        return write_state(to_write, where, begin, options)
    from modelstate.distributed.uploading import writer_of

    with agreement.collective():
        return write_state(to_write, where, begin, replace(options, progress=False), writer_of(agreement, where))


def _tree_of(state: object) -> Mapping[Any, object]:
    if isinstance(state, Mapping) and holds_objects(state):
        return _tree_of_objects(state, capture(targets_of(state)))
    tree = state
    if isinstance(state, nn.Module):
        tree = state_dict_of(unwrapped(state))
        check_loadable(type(state).__name__, unwrapped(state), tree)
    if isinstance(tree, Mapping):
        return tree
    is_class = isinstance(state, type)
    cls = state if isinstance(state, type) else type(tree)
    remedy = ""
    if is_class and issubclass(cls, nn.Module):
        remedy = f"pass a module: {cls.__name__}(...)"
    elif isinstance(tree, list | tuple | torch.Tensor) or (not is_class and hasattr(tree, "state_dict")):
        remedy = f"give it a name: ms.save({{'{cls.__name__.lower()}': state}}, path)"
    raise UnsavableError(
        f"cannot save {'the class' if is_class else 'an object of type'} {cls.__name__}",
        expected="a module, a state dict, a mapping of several, or a Checkpoint",
        found=f"{cls.__module__}.{cls.__qualname__}",
        remedy=remedy,
    )


def _tree_of_objects(objects: Mapping[str, Any], parts: Mapping[str, Part], prefix: str = "") -> dict[str, object]:
    """Returns the states of objects in the mappings that the objects are in."""
    paths = {name: f"{prefix}{name}" for name in objects}
    return {
        name: parts[path].tree if path in parts else _tree_of_objects(objects[name], parts, f"{path}.")
        for name, path in paths.items()
    }
