"""`modelstate.save`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from modelstate.errors import (
    ModelCodeError,
    ModelStateError,
    OptionError,
    SaveTargetError,
    SourceTypeError,
)
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.paths import local_path
from modelstate.read.tree import is_container, items_of
from modelstate.words import size
from modelstate.write.checkpoint import check_both, write_checkpoint
from modelstate.write.draft import draft
from modelstate.write.later import Later
from modelstate.write.streamed import Streamed, streamed, threads_within
from modelstate.write.torch_file import write_torch_file

FORMATS = ("safetensors", "torch")
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save has written. Made by `modelstate.save`."""

    path: str
    """Where it was saved to, and where it can be opened."""
    files: tuple[str, ...]
    """The files that it is in: that of the path, or its index and the shards."""
    tensors: int
    """Names of tensors that were saved, tied ones under each of theirs."""
    bytes: int
    """Bytes of the files."""
    seconds: float
    """From the call to the return, when all of it is on the disk."""

    def __str__(self) -> str:
        shards = f", {len(self.files) - 1} shards" if len(self.files) > 1 else ""
        return f"{self.path}: {self.tensors} tensors, {size(self.bytes)}{shards} in {self.seconds:.3f} s"


def save(
    target: nn.Module | Mapping[str, Any] | Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    shard_size_bytes: int | None = None,
    extra: Mapping[str, Any] | None = None,
    schema: str | None = None,
    overwrite: bool = True,
) -> SaveReport:
    """Saves a module, a state dict, or a tree of them, and returns when it is on the disk.

    What is at the path is the old checkpoint or the new one, in full, at any time: files are written beside it, synced
    and renamed. Every tool that reads safetensors reads the tensors; `modelstate.open` also gives back what the format
    has no word for: tied tensors, which are written once, under all their names, tensors of classes that are made of
    plain ones (by `__tensor_flatten__`), torch's versions of modules, what `get_extra_state` returned, the containers
    and values of a tree, and a digest of every tensor, with which `load(verify=True)` compares. Tensors are written
    from their own memory, by several threads; of a view, what it shows.

    Args:
        target: a module, its state dict, or a mapping with modules, tensors, containers and values in it; or a
            `Checkpoint`, whose tensors are read while they are written, a few megabytes at a time.
        path: where it is saved to. It is opened by the same path, also when it is in shards.
        format: "safetensors"; or "torch" for what `torch.load` reads, with none of the above but that what is at the
            path is whole.
        shard_size_bytes: what is larger goes into several files of at most so many bytes of tensors (or one larger
            tensor), and an index beside them, `PATH.index.json`, as Hugging Face's tools have it.
        extra: values to be kept with it; they come back in `Checkpoint.metadata["extra"]`.
        schema: a text of yours, not empty, by which the file says how its state is to be understood; it comes back in
            `Checkpoint.metadata`.
        overwrite: whether it may replace what is there.

    Raises `SaveTargetError` for what is nothing that can be saved, and for a path where no file can be,
    `UnsavableError` for tensors and names that the format does not have, all of them at once,
    `UnsupportedValueError` for values without an encoding (see `register_codec`), `ModelCodeError` where the module's
    own `state_dict` raises, `TargetExistsError`, `OptionError`, and `WriteFailedError` for an I/O error. Whatever
    raises, the old checkpoint is as it was and nothing new is left; an interrupt (Ctrl-C) that comes when the new one
    is in place leaves that, in full.
    """
    begin = perf_counter()
    check_options(format, shard_size_bytes, extra, schema)
    where = target_path(path)
    check_both(where, overwrite)
    state = streamed(target) if isinstance(target, Checkpoint) else Streamed(_state_of(target))
    state.attached = state.attached if extra is None else extra
    state.schema = state.schema if schema is None else schema
    return write_state(state, where, begin, format=format, shard_bytes=shard_size_bytes, overwrite=overwrite)


def write_state(
    it: Streamed,
    where: str,
    begin: float,
    *,
    format: str,
    shard_bytes: int | None,
    overwrite: bool,
    max_memory_bytes: int | None = None,
) -> SaveReport:
    """Writes what has been checked. Raises what `save` raises, and `MemoryBudgetError`."""
    if format == "torch":
        files = write_torch_file(it.state, where, overwrite=overwrite, max_memory_bytes=max_memory_bytes)
        tensors = _tensors_in(it.state)
    else:
        made = draft(it.state, where, it.attached)
        files = write_checkpoint(
            made,
            where,
            schema=it.schema,
            shard_bytes=shard_bytes,
            overwrite=overwrite,
            threads=threads_within(made.tensors, max_memory_bytes, where),
            metadata=it.metadata,
        )
        tensors = made.names
    return SaveReport(where, tuple(files), tensors, sum(files.values()), perf_counter() - begin)


def _tensors_in(node: object, depth: int = 0) -> int:
    """How many names of tensors a tree has, as far down as one can be opened."""
    if isinstance(node, torch.Tensor | Later):
        return 1
    if not is_container(node) or depth > _MAX_DEPTH:
        return 0
    return sum(_tensors_in(one, depth + 1) for _, one in items_of(node))


def check_options(format: object, shard_size_bytes: object, extra: object = None, schema: object = None) -> None:
    """Raises `OptionError`."""
    if schema is not None and (not isinstance(schema, str) or not schema):
        raise OptionError("schema= is a text", expected='such as "2.0"', found=repr(schema))
    if format not in FORMATS:
        raise OptionError("format= is unknown", expected=" or ".join(map(repr, FORMATS)), found=repr(format)[:80])
    number = isinstance(shard_size_bytes, int) and not isinstance(shard_size_bytes, bool) and shard_size_bytes > 0
    if shard_size_bytes is not None and not number:
        raise OptionError("shard_size_bytes= is a number of bytes", expected="1 or more", found=repr(shard_size_bytes))
    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
        raise OptionError("extra= has values under names", expected="a mapping", found=repr(extra)[:80])
    if format == "torch" and (shard_size_bytes, extra, schema) != (None, None, None):
        raise OptionError("a torch file has no shards, no extra= and no schema=", remedy='format="safetensors"')


def target_path(path: object) -> str:
    """The path of a file to be. Raises `SaveTargetError`."""
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, str):
        raise SaveTargetError("a file is saved to a path", expected="a str or a pathlib.Path", found=repr(path)[:80])
    try:
        return local_path(given)
    except SourceTypeError as error:
        remedy = "give the path of a file; save there, and copy it to its place"
        raise SaveTargetError(
            "a file cannot be put here", where=error.where, found=error.what, remedy=remedy
        ) from error


def _state_of(target: object) -> Mapping[Any, Any]:
    state = _state_dict(target) if isinstance(target, nn.Module) else target
    if isinstance(state, Mapping):
        return _with_states(state) if any(isinstance(value, nn.Module) for value in state.values()) else state
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


def _with_states(target: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return {key: _state_dict(value) if isinstance(value, nn.Module) else value for key, value in target.items()}
