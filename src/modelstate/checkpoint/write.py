"""Writes a state to a file: the options and the report of a save, and states whose tensors are read while written."""

from __future__ import annotations

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Literal, cast

import msgspec
import torch
from msgspec.structs import asdict, replace
from torch.nn.parameter import is_lazy

from modelstate.arguments import check_integer, invalid_option, seconds_of
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.reduction import kind_of
from modelstate.errors import OptionError, SourceTypeError, TargetExistsError, UnsavableError
from modelstate.formats.block_writer import LazyTensor, OnCast, bytes_stored, lazy_tensor, threads_within, whole
from modelstate.formats.serialize import serialize
from modelstate.formats.sharded import INDEX_SUFFIX
from modelstate.formats.tree import EXTRA_STATE, empty_like, leaves, rebuild, refused_in
from modelstate.formats.writing import CheckpointWriter, Files, write_checkpoint
from modelstate.html.page import Page, Shown
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS
from modelstate.io.engine import read_ranges
from modelstate.io.files import local_path
from modelstate.problems import glob_patterns
from modelstate.process import progress_bar
from modelstate.remote.location import is_remote, locate, redacted_url
from modelstate.remote.upload import check_writable
from modelstate.spec import Encoded, Refused, Stored, bytes_key, set_version_metadata, version_metadata
from modelstate.text_format import as_given, count, listed, printable, seconds, short_repr, size
from modelstate.torch_compat.dtypes import Overflows, is_numeric
from modelstate.torch_compat.plain import is_quantized
from modelstate.torch_compat.private import sparse_values


class StateToWrite(msgspec.Struct):
    """A state to be written, whose tensors may be lazy, and its metadata."""

    state: Mapping[str, object]
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The text metadata of the file that the state was read from."""
    attached: Mapping[str, object] | None = None
    schema: str | None = None
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    """Counts the values that a cast makes infinite or NaN while they are written."""
    notes: Sequence[str] = ()
    """Further notes for the report."""


def streamed(checkpoint: Checkpoint, cast: torch.dtype | None = None) -> StateToWrite:
    """A whole checkpoint as a lazy state, with its floating point tensors `cast` to a dtype.

    Raises `OptionError` for a cast that torch does not support, and `CodecError` for a value that cannot be decoded.
    """
    builder = LazyStateBuilder(checkpoint, cast)
    root = checkpoint.tree
    if not isinstance(root, Mapping):
        root = OrderedDict[str, object]({**checkpoint.flat.tensors, **checkpoint.flat.values})
    state = builder.node(root, "")
    assert isinstance(state, Mapping)
    return around(checkpoint, state, builder)


def around(checkpoint: Checkpoint, state: Mapping[str, object], builder: LazyStateBuilder) -> StateToWrite:
    """A state that was built from a checkpoint, with the metadata of the checkpoint."""
    metadata = {key: value for key, value in checkpoint.contents.metadata.items() if type(value) is str}
    schema = metadata.pop("schema", None)
    has_extra = isinstance(checkpoint.contents.metadata.get("extra"), Encoded)
    attached = checkpoint.metadata["extra"] if has_extra else None
    return StateToWrite(state, metadata, attached, schema, builder.overflows, builder.notes())


class LazyStateBuilder:
    """Replaces the tensors of a checkpoint by lazy tensors, which are read when they are written."""

    def __init__(self, checkpoint: Checkpoint, cast: torch.dtype | None = None) -> None:
        self._checkpoint, self._cast = checkpoint, cast
        self._read_all = partial(read_ranges, files=checkpoint.fingerprints, threads=1)
        self._values = checkpoint.flat.values
        self.overflows = Overflows()
        self._in_memory: dict[int, torch.Tensor] = {}
        """Tensors that are read at once, by the ids of the stored tensors."""
        self._uncast: dict[str, list[str]] = {}
        """The names of tensors that are not cast, by the names of their classes."""
        self._left_out: dict[str, Refused] = {}
        """Values that are not read, by their paths."""

    def node(self, node: object, path: str, *, in_value: bool = False) -> object:
        """The lazy copy of a node of the tree, without what is not read; a `Refused` where nothing is left to write.

        A list or a tuple of a value with an item that is not read is left out as a whole, and so is an extra state, so
        that a load misses it.

        Args:
            node: The node.
            path: Its dotted path.
            in_value: Whether it is a value, or in one, and has been read.
        """
        if not in_value and path in self._values:  # as every extra state is
            return self.node(rebuild(node, self._checkpoint.read), path, in_value=True)
        if path.rpartition(".")[2] == EXTRA_STATE and (found := refused_in(node, path)):
            self._left_out |= found
            return next(iter(found.values()))
        if isinstance(node, Refused):
            self._left_out[path] = node
        elif isinstance(node, Mapping) and (not in_value or type(node) in (dict, OrderedDict)):
            mapping: dict[object, object] = OrderedDict() if isinstance(empty_like(node), OrderedDict) else {}
            for key, item in node.items():
                item_path, kept = f"{path}.{key}" if path else str(key), key if isinstance(key, Refused) else item
                if not isinstance(lazy := self.node(kept, item_path, in_value=in_value), Refused):
                    mapping[key] = lazy
            if (versions := version_metadata(node)) is not None:
                set_version_metadata(mapping, versions)
            return mapping
        elif type(node) in (list, tuple) or (isinstance(node, list | tuple) and not in_value):
            assert isinstance(node, list | tuple)
            paths = (f"{path}.{index}" if path else str(index) for index in range(len(node)))
            items = [self.node(item, at, in_value=in_value) for item, at in zip(node, paths, strict=True)]
            refused = next((item for item in items if isinstance(item, Refused)), None)
            if refused is not None and not in_value:
                from modelstate.formats.construct import refusal

                raise refusal(self._left_out, self._checkpoint.source)  # without them, the others had another index
            return refused or (items if isinstance(node, list) else tuple(items))
        return node if in_value or isinstance(node, Refused) else self.tensor(cast("Stored", node), path)

    def tensor(self, stored: Stored, path: str) -> object:
        """The lazy tensor for a stored one. A tensor that consists of several parts is read at once."""
        if kind_of(stored) != "strided":
            if id(stored) not in self._in_memory:
                value = stored if isinstance(stored, torch.Tensor) else self._checkpoint.read(stored)
                self._in_memory[id(stored)] = self._cast_now(value, path)
            return self._in_memory[id(stored)]
        cast = self.cast_of(stored.dtype, path)
        if isinstance(stored, torch.Tensor):
            if cast is None:
                return stored
            shape, key = tuple(stored.shape), bytes_key(stored, path)
            return whole(cast, shape, key, stored.detach, 0, bytes_stored(stored), self.on_cast(path))
        return lazy_tensor(stored, bytes_key(stored, path), self._read_all, cast, self.on_cast(path))

    def _cast_now(self, value: torch.Tensor, path: str) -> torch.Tensor:
        """Casts a sparse tensor; leaves a tensor subclass as it is. Raises `OptionError` for a quantized tensor."""
        to = self.cast_of(value.dtype, path)
        if to is None:
            return value
        if is_quantized(value):
            raise OptionError(
                "a quantized tensor cannot be cast",
                where=f"{self._checkpoint.source}: {path}",
                expected=f"a tensor of {to}, or one that can be cast to it",
                found=f"{type(value).__name__} of {value.dtype}",
                remedy="leave out dtype=, or name another part with key=",
            )
        if type(value) not in _PLAIN or value.layout not in _SPARSE:
            self._uncast.setdefault(type(value).__name__, []).append(path)
            return value
        with torch.inference_mode(False), torch.no_grad():
            cast = value.detach().to(to)
            self.overflows.check(path, _elements(value), _elements(cast))
        return cast

    def notes(self) -> list[str]:
        """Notes for the report, about tensors that are not cast, and about values that are left out.

        Raises the error of a value that is not read although no class of it was skipped.
        """
        if flawed := {path: value for path, value in self._left_out.items() if value.error is not None}:
            from modelstate.formats.construct import refusal

            error = refusal(flawed, self._checkpoint.source)
            values = self._checkpoint.flat.values
            names = [name for name in values if any(f"{path}.".startswith(f"{name}.") for path in flawed)]
            rules = ", ".join(f"ms.rules.Ignore({name!r})" for name in glob_patterns(names))
            error.remedy = (
                f"name another part with key=, or leave it out: in ms.convert_checkpoint, rules=[{rules}]; or "
                f"{error.remedy}"
            )
            raise error
        skipped = [f"{path} ({value.name})" for path, value in self._left_out.items()]
        return [f"left out, as classes of them are not allowed: {listed(skipped, 10)}"] * bool(skipped) + [
            f"{count(len(paths), 'tensor')} of the class {name} {'is' if len(paths) == 1 else 'are'} not cast: "
            f"{listed(paths, 3)}"
            for name, paths in self._uncast.items()
        ]

    def on_cast(self, path: str) -> OnCast:
        """The function that counts the overflows of a tensor's casts."""
        return partial(self.overflows.check, path)

    def cast_of(self, dtype: torch.dtype, path: str) -> torch.dtype | None:
        """The dtype that a plain tensor is cast to, or None. Raises `OptionError` where torch does not support it."""
        to = self._cast
        if to is None or dtype == to or not dtype.is_floating_point:
            return None
        if not (is_numeric(dtype) and is_numeric(to)):
            raise OptionError(f"torch cannot cast {dtype} to {to}", where=f"{self._checkpoint.source}: {path}")
        return to


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a sparse tensor stores."""
    return sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.detach().values()


SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
"""The formats that are written, by the suffix of the path; a path without a suffix is written as safetensors."""
_LISTED = "no suffix or .safetensors for safetensors; .pt, .pth, .bin or .ckpt for a file that torch.load reads"


class SaveReport(Shown, msgspec.Struct, frozen=True):
    """Describes what a save has written. Returned by `modelstate.save`."""

    path: str
    """The path of the save, which `modelstate.open` accepts."""
    files: tuple[str, ...]
    """The files that were written: one file, or the index and the shards."""
    tensors: int
    """The number of tensor names that were saved; tied tensors count once for each name."""
    bytes: int
    """Bytes of the files."""
    seconds: float
    """The duration of the call, until everything is on the disk."""
    notes: tuple[str, ...] = ()
    """Further remarks, for example about values that a cast made infinite."""

    def __repr__(self) -> str:
        notes = f", {count(len(self.notes), 'note')}" if self.notes else ""
        return f"<{type(self).__name__}: {self._line()}{notes}>"

    def __str__(self) -> str:
        return "\n".join([self._line(), *(f"  note: {printable(note)}" for note in self.notes)])

    def _page(self) -> Page:
        facts = (("Tensors", f"{self.tensors:,}"), ("Bytes", size(self.bytes)), ("Time", seconds(self.seconds)))
        files = [(as_given(path),) for path in self.files]
        return Page(as_given(self.path), facts, ("File",), files, "Files", notes=self.notes)

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def _line(self) -> str:
        shards = f", {len(self.files) - 1} shards" if len(self.files) > 1 else ""
        written = f"{count(self.tensors, 'tensor')}, {size(self.bytes)}{shards}"
        return f"{as_given(self.path)}: {written} in {self.seconds:.3f} s"


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a save, as `modelstate.save` and `convert_checkpoint` describe them."""

    format: str | None = None
    shard_size_bytes: int | None = None
    extra: Mapping[str, object] | None = None
    schema: str | None = None
    overwrite: bool = True
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS
    max_memory_bytes: int | None = None
    progress: bool | None = False

    def checked(self, where: str) -> SaveOptions:
        """Returns the options of a save to a path, with the format that is written.

        Raises `OptionError`, and `UnsavableError` for a path whose suffix no format has.
        """
        schema, extra = self.schema, self.extra
        if schema is not None and (not isinstance(schema, str) or not schema):
            raise invalid_option("schema", "must be text", schema, expected='such as "2.0"')
        check_integer("shard_size_bytes", self.shard_size_bytes, least=1, accepts_none=True)
        if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
            raise invalid_option("extra", "must be a mapping", extra, expected="a mapping")
        seconds_of("lock_timeout_seconds", self.lock_timeout_seconds)
        format = format_of(where, self.format)
        if format == "torch" and (self.shard_size_bytes, extra, schema) != (None, None, None):
            raise OptionError(
                "a file of torch.save has no shards, no extra= and no schema=",
                where=where,
                remedy="give a path that ends in .safetensors, or leave these options out",
            )
        return replace(self, format=format)


def write_state(
    source: StateToWrite, where: str, begin: float, options: SaveOptions, writer: CheckpointWriter | None = None
) -> SaveReport:
    """Writes a state, with options that have been checked. Raises what `save` raises, and `MemoryBudgetError`.

    All ranks of a `writer` write it together.
    """
    overwrite, lock_timeout_seconds = options.overwrite, options.lock_timeout_seconds
    attached = source.attached if options.extra is None else options.extra
    if options.format == "torch":
        from modelstate.formats.torch_zip import write_torch_file

        written = [leaf for _, leaf in leaves(source.state) if isinstance(leaf, torch.Tensor | LazyTensor)]
        # A lazy module of torch has tensors without a shape.
        sized = (tensor for tensor in written if isinstance(tensor, LazyTensor) or not is_lazy(tensor))
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in sized)  # sparse tensors have no `nbytes`
        with progress_bar(options.progress, nbytes, "writing") as advance:
            write = partial(
                write_torch_file,
                source.state,
                overwrite=overwrite,
                max_memory_bytes=options.max_memory_bytes,
                lock_timeout_seconds=lock_timeout_seconds,
                on_written=advance,
            )
            files = _uploaded(write, where, overwrite) if is_remote(where) else write(where)
        tensors = len(written)
    else:
        with writer.planning() if writer else nullcontext():
            of_shard = writer.of_shard if writer else None
            serialized = serialize(source.state, where, attached, of_shard=of_shard)
        with progress_bar(options.progress, serialized.nbytes, "writing") as advance:
            counted = dict(source.overflows.counts)
            if writer is None:
                threads = threads_within(serialized.tensors, options.max_memory_bytes, where)
                writer = CheckpointWriter(threads, on_written=advance)
            files = write_checkpoint(
                serialized,
                where,
                schema=source.schema if options.schema is None else options.schema,
                shard_bytes=options.shard_size_bytes,
                overwrite=overwrite,
                writer=writer,
                metadata=source.metadata,
                lock_timeout_seconds=lock_timeout_seconds,
            )
        if is_remote(where):  # lazy tensors are computed twice there
            counts = source.overflows.counts
            counts |= {key: (count + counted.get(key, 0)) // 2 for key, count in counts.items()}
        tensors = serialized.names
    notes = (*source.notes, *source.overflows.notes())
    return SaveReport(where, tuple(files), tensors, sum(files.values()), perf_counter() - begin, notes)


def _uploaded(write: Callable[[str], Files], where: str, overwrite: bool) -> Files:
    """Has a file written on this machine, where torch.load checks it, and uploads it."""
    from modelstate.formats.writing import index_of_object, remove_index
    from modelstate.remote.upload import PART_BYTES, head, new_object

    if not overwrite and head(locate(where)) is not None:
        raise TargetExistsError("the target exists already", where=locate(where).url)
    with tempfile.TemporaryDirectory(prefix="modelstate-") as directory:
        path = os.path.join(directory, os.path.basename(where))
        (nbytes,) = write(path).values()
        old_index = index_of_object(where)
        with open(path, "rb") as file, new_object(locate(where), nbytes, overwrite=overwrite) as output:
            while part := file.read(PART_BYTES):
                output.append(part)
        if old_index is not None:
            remove_index(where, old_index)
    return {where: nbytes}


def format_of(path: str, format: object) -> str:
    """The format of a file that is written, "safetensors" or "torch", by the suffix of its path.

    `format` applies to a path without a suffix, or with one that is not in `SUFFIXES`; it must not contradict a known
    suffix. Raises `OptionError` for a format that is unknown or contradicts the suffix, and `UnsavableError` for an
    unknown suffix.
    """
    known = tuple(dict.fromkeys(SUFFIXES.values()))
    if format is not None and not (isinstance(format, str) and format in known):
        expected = " or ".join(map(repr, known))
        raise invalid_option("format", "is unknown", format, expected=expected)
    name = os.path.basename(path)
    suffix = name if name.lower() in SUFFIXES else os.path.splitext(name)[1]  # a file may be named just ".pt"
    by_suffix = SUFFIXES.get(suffix.lower())
    if by_suffix is not None and format not in (None, by_suffix):
        raise OptionError(
            "format= and the suffix of the path contradict each other",
            where=path,
            expected=f"{by_suffix!r} for a path that ends in {suffix}",
            found=repr(format),
            remedy="leave format= out, or give a path with another suffix",
            names=("format",),
        )
    if suffix and by_suffix is None and format is None:
        remedy = "give a path with one of these suffixes, or pass format='safetensors' or format='torch'"
        options = f"give a path with {_LISTED}; or --format safetensors or --format torch"
        if path.lower().endswith(INDEX_SUFFIX):
            shards = path[: -len(INDEX_SUFFIX)]
            remedy = f"give {shards!r} and shard_size_bytes=: the index is written beside the shards"
            options = f"give {shards!r} and --shard-size: the index is written beside the shards"
        raise UnsavableError(
            "no format that modelstate writes has this suffix",
            where=path,
            expected=_LISTED,
            found=suffix,
            remedy=remedy,
            options=options,
        )
    return str(format or by_suffix or "safetensors")


def target_path(path: object, kind: Literal["file", "directory"] = "file") -> str:
    """The absolute path of a file or directory that is going to be written. Raises `UnsavableError`."""
    target = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(target, str):
        raise UnsavableError(f"a {kind} is saved to a path", expected="a str or a pathlib.Path", found=short_repr(path))
    is_bucket = is_remote(target) and target.count("/") < 3
    if kind == "file" and (target.endswith(os.sep) or is_bucket):
        raise UnsavableError(
            "a file cannot be put here",
            where=redacted_url(target[:200]) if is_remote(target) else target[:200],
            found="the path of a directory, as it ends with a slash" if not is_bucket else "the root of a bucket",
            remedy="give the path of a file",
        )
    try:
        if is_remote(target):
            check_writable(locate(target))  # an error shows it as it was given: s3:// ends with slashes
            return locate(target.rstrip("/")).url
        return local_path(target)
    except SourceTypeError as error:
        remedy = f"give the path of a {kind}" + ("; save there, and copy it to its place" if kind == "file" else "")
        where = error.where or redacted_url(target[:200])
        raise UnsavableError(f"a {kind} cannot be put here", where=where, found=error.what, remedy=remedy) from error
