"""A state into files: what a save says of itself, its options, and the writing of what has been checked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter

import torch

from modelstate.errors import (
    OptionError,
    SaveTargetError,
    SourceTypeError,
)
from modelstate.read.paths import local_path
from modelstate.read.sharded import INDEX_SUFFIX
from modelstate.read.tree import is_container, items_of
from modelstate.words import size
from modelstate.write.atomic import LOCK_TIMEOUT_SECONDS
from modelstate.write.checkpoint import write_checkpoint
from modelstate.write.draft import draft
from modelstate.write.later import Later
from modelstate.write.streamed import Streamed, threads_within
from modelstate.write.torch_file import write_torch_file

SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
"""The formats that are written, by the suffixes of paths; a path without a suffix is written as safetensors."""
_LISTED = "no suffix or .safetensors for safetensors; .pt, .pth, .bin or .ckpt for a file that torch.load reads"
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, repr=False)
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
    notes: tuple[str, ...] = ()
    """What else is worth knowing, such as values that became infinite by a cast."""

    def __repr__(self) -> str:
        notes = f", {len(self.notes)} notes" if self.notes else ""
        return f"<{type(self).__name__}: {self._line()}{notes}>"

    def __str__(self) -> str:
        return "\n".join([self._line(), *(f"  note: {note}" for note in self.notes)])

    def _line(self) -> str:
        shards = f", {len(self.files) - 1} shards" if len(self.files) > 1 else ""
        return f"{self.path}: {self.tensors} tensors, {size(self.bytes)}{shards} in {self.seconds:.3f} s"


def write_state(
    it: Streamed,
    where: str,
    begin: float,
    *,
    format: str,
    shard_bytes: int | None,
    overwrite: bool,
    max_memory_bytes: int | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> SaveReport:
    """Writes what has been checked. Raises what `save` raises, and `MemoryBudgetError`."""
    if format == "torch":
        files = write_torch_file(
            it.state,
            where,
            overwrite=overwrite,
            max_memory_bytes=max_memory_bytes,
            lock_timeout_seconds=lock_timeout_seconds,
        )
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
            lock_timeout_seconds=lock_timeout_seconds,
        )
        tensors = made.names
    return SaveReport(
        where, tuple(files), tensors, sum(files.values()), perf_counter() - begin, (*it.notes, *it.overflows.notes())
    )


def _tensors_in(node: object, depth: int = 0) -> int:
    """How many names of tensors a tree has, as far down as one can be opened."""
    if isinstance(node, torch.Tensor | Later):
        return 1
    if not is_container(node) or depth > _MAX_DEPTH:
        return 0
    return sum(_tensors_in(one, depth + 1) for _, one in items_of(node))


def check_options(
    where: str,
    format: object,
    shard_size_bytes: object,
    lock_timeout_seconds: object,
    extra: object = None,
    schema: object = None,
) -> str:
    """Checks the options of a save to a path, and returns the format that is written.

    Raises `OptionError`, and `SaveTargetError` for a path whose suffix is that of no format.
    """
    if schema is not None and (not isinstance(schema, str) or not schema):
        raise OptionError("schema= is a text", expected='such as "2.0"', found=repr(schema))
    number = isinstance(shard_size_bytes, int) and not isinstance(shard_size_bytes, bool) and shard_size_bytes > 0
    if shard_size_bytes is not None and not number:
        raise OptionError("shard_size_bytes= is a number of bytes", expected="1 or more", found=repr(shard_size_bytes))
    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
        raise OptionError("extra= has values under names", expected="a mapping", found=repr(extra)[:80])
    seconds = lock_timeout_seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < inf:
        raise OptionError("lock_timeout_seconds= is a number of seconds", expected="0 or more", found=repr(seconds))
    chosen = format_of(where, format)
    if chosen == "torch" and (shard_size_bytes, extra, schema) != (None, None, None):
        raise OptionError(
            "a file of torch.save has no shards, no extra= and no schema=",
            where=where,
            remedy="give a path that ends in .safetensors, or leave these options out",
        )
    return chosen


def format_of(path: str, format: object = None) -> str:
    """The format of a file that is written: "safetensors" or "torch", as the suffix of its path says.

    `format` says it for a path without a suffix, or with one that is not in `SUFFIXES`; it may not contradict one that
    is. Raises `OptionError` for a format that is unknown or contradicts the suffix, and `SaveTargetError` for a suffix
    that is unknown.
    """
    known = tuple(dict.fromkeys(SUFFIXES.values()))
    if format is not None and format not in known:
        raise OptionError("format= is unknown", expected=" or ".join(map(repr, known)), found=repr(format)[:80])
    name = os.path.basename(path)
    suffix = name if name.lower() in SUFFIXES else os.path.splitext(name)[1]  # which takes ".pt" for a name without one
    by_suffix = SUFFIXES.get(suffix.lower())
    if by_suffix is not None and format not in (None, by_suffix):
        raise OptionError(
            "format= and the suffix of the path contradict each other",
            where=path,
            expected=f"{by_suffix!r} for a path that ends in {suffix}",
            found=f"format={format!r}",
            remedy="leave format= out, or give a path with another suffix",
        )
    if suffix and by_suffix is None and format is None:
        index = path.lower().endswith(INDEX_SUFFIX)
        raise SaveTargetError(
            "the suffix of the path is that of no format which is written here",
            where=path,
            expected=_LISTED,
            found=suffix,
            remedy=f"give {path[: -len(INDEX_SUFFIX)]!r} and shard_size_bytes=: the index is written beside the shards"
            if index
            else "give a path with one of these suffixes, or say format='safetensors' or format='torch'",
        )
    return str(format or by_suffix or "safetensors")


def target_path(path: object) -> str:
    """The path of a file to be. Raises `SaveTargetError`."""
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, str):
        raise SaveTargetError("a file is saved to a path", expected="a str or a pathlib.Path", found=repr(path)[:80])
    if given.endswith(os.sep):
        raise SaveTargetError(
            "a file cannot be put here",
            where=given[:200],
            found="the path of a directory, as it ends with a slash",
            remedy="give the path of a file",
        )
    try:
        return local_path(given)
    except SourceTypeError as error:
        remedy = "give the path of a file; save there, and copy it to its place"
        raise SaveTargetError(
            "a file cannot be put here", where=error.where, found=error.what, remedy=remedy
        ) from error
