"""The safetensors format: length of the header, JSON header, bytes of the tensors; reader and writer.

The format is that of https://github.com/huggingface/safetensors, and a file that its library refuses is refused here,
but for the number -0.
This reader is stricter in these points: it refuses a tensor name or a key of `__metadata__` that appears twice; fields
other than the three of the format, since they could change the meaning of the bytes; an entry that is written as an
array; more than `MAX_ENTRIES` entries; and shapes that no tensor of PyTorch can have (over 1,024 dimensions, sizes that
overflow although one of them is 0).

Invariants:

- Reading a header takes time and memory proportional to the number of its tensors: its lists, objects and commas are
  counted before it is parsed, since a parser builds gigabytes of small objects from a hostile header of 100 MB.
- The writer stores tensors with wide elements first, so that every tensor lies at a multiple of its element size and
  can be mapped.
- The writer ends the header at a multiple of the alignment of tensors in memory. Where offsets in the file and in
  memory differ by less than a cache line, the kernel's copy was measured to take up to 1.5 times as long.
- The header is written last, since it contains the digests of the tensors and a seal, which is its own digest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from math import prod
from operator import mul, sub
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from modelstate.errors import (
    CUT_SHORT,
    DamagedFileError,
    TruncatedFileError,
    UnsupportedTensorError,
    WriteFailedError,
    keep_interrupt,
)
from modelstate.formats import manifest
from modelstate.formats.manifest import (
    BLOCK_BYTES,
    HEX,
    OPEN_SEAL,
    SEAL,
    JsonError,
    check_seal,
    digest,
    parse_json,
    sealed,
)
from modelstate.formats.tree import Contents
from modelstate.io.atomic import Output
from modelstate.io.files import SourceFile
from modelstate.io.memory import TENSOR_ALIGN_BYTES
from modelstate.spec import StoredTensors, TensorColumns
from modelstate.text_format import is_unicode, listed, quote, short_repr

if TYPE_CHECKING:
    import torch

    from modelstate.formats.block_writer import LazyTensor
    from modelstate.remote.upload import ObjectWriter

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
MAX_ENTRIES = 1_000_000
"""Tensors, and keys of `__metadata__`: about ten times the number that the largest models have in all their files."""
MAX_DIMENSIONS = 1024


DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F4": ("float4_e2m1fn_x2", 1),
}
"""The name of the dtype in torch, and the bytes of its elements, by the name in the format. An element of
`float4_e2m1fn_x2` holds two elements of `F4`."""
_ITEMSIZES = {name: itemsize for name, (_, itemsize) in DTYPES.items()}
_TORCH_NAMES = {name: torch_name for name, (torch_name, _) in DTYPES.items()}
_WITHOUT_DTYPE = {"F6_E2M3", "F6_E3M2"}
"""Dtypes of the format that PyTorch lacks."""

METADATA_NAME = "__metadata__"
"""The entry of the header that has text instead of a tensor."""


def begins(head: bytes) -> bool:
    """Whether a file with this beginning can be of no other format. A file of the format may begin in other ways."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def read(file: SourceFile, *, allow: Sequence[object] = ()) -> Contents:
    """Reads the table of contents of a safetensors file: one flat dict, in the order of the bytes.

    Args:
        file: The file.
        allow: Additional tensor classes that may be created, as for `modelstate.open`.

    Raises:
        DamagedFileError: The header ends behind the file, exceeds a limit or is not the JSON of the format; a name
            appears twice; a dtype is unknown; a shape is impossible, or does not match the number of bytes; or the
            bytes of the tensors overlap, leave a hole, or do not end with the file.
        UnsupportedTensorError: 6-bit floats, and 4-bit floats whose last dimension is odd.
        TruncatedFileError: The file ends within the tensors.
        ChecksumError: The header is not the one that was sealed.

    Also raises what `modelstate.formats.manifest.apply` raises for the manifest, and what `SourceFile` raises.
    """
    path = file.path
    if file.nbytes < 8:
        raise file.truncated("the length of its header", 8)
    (length,) = struct.unpack_from("<Q", file.head)
    begin = 8 + length
    if length > MAX_HEADER_BYTES or begin > file.nbytes:
        limit = "the header would be larger than the format allows; the length before it is probably damaged"
        raise DamagedFileError(
            limit if length > MAX_HEADER_BYTES else "the file ends within its header",
            where=path,
            expected=f"at most {min(MAX_HEADER_BYTES, file.nbytes - 8):,} bytes",
            found=f"{length:,} bytes announced, in a file of {file.nbytes:,}",
        )
    header = file.read(8, length, "its header")
    try:
        tensors, metadata = _parse_header(header, path, begin, file.nbytes)
    except JsonError as error:
        expected = "JSON as the safetensors format has it"
        raise error.damaged("the header is damaged", f"{path}: header", expected) from error
    seal = metadata.pop(SEAL, None)
    if seal is not None:
        check_seal(header, seal, path)
    text = metadata.pop(manifest.KEY, None)
    files = {path: file.fingerprint}
    contents = Contents("safetensors", tensors, files, metadata, is_sealed=seal is not None)
    return contents if text is None else manifest.apply(contents, text, path, "__metadata__", allow)


def strings_of(members: object, limit: int, different: int = MAX_ENTRIES) -> dict[str, str]:
    """The strings of a JSON object by key. Equal values become one object.

    Raises `JsonError`, also for more keys than `limit`, or more different values than `different`.
    """
    if not isinstance(members, dict):
        raise JsonError("not an object of strings", str(members)[:60], '{"key": "value", ...}')
    strings: dict[str, str] = {}
    known: dict[str, str] = {}
    for key, value in members.items():
        if type(value) is not str:
            raise JsonError(f"the value of {quote(key)} is no text", ascii(value)[:60], '"key": "value"')
        strings[key] = known.setdefault(value, value)
        if len(strings) > limit or len(known) > different:
            what = f"more than {limit:,} keys or {different:,} different values, which this reader does not read"
            remedy = "write the checkpoint again in fewer, larger shards, or as several checkpoints"
            raise JsonError(what, remedy=remedy)
    return strings


def _parse_header(header: bytes, path: str, begin: int, file_bytes: int) -> tuple[StoredTensors, dict[str, str]]:
    """The tensors and the `__metadata__` of a header; the bytes of the tensors begin at `begin`.

    Checks whole columns, which takes a fraction of the time of checking each entry. Where a column is not as it must
    be, the entries are checked one by one, so that the error names the tensor.
    """
    if len(header) > manifest.MAX_PARTS:  # otherwise it has no more parts than that
        _check_parts(header)
    names, (kinds, shapes, firsts, lasts), metadata = _usual_header(header) or _any_header(header)
    if "F4" in kinds or not _WITHOUT_DTYPE.isdisjoint(kinds):
        _check_supported(names, kinds, shapes, path)
        shapes = [
            (*shape[:-1], shape[-1] // 2) if kind == "F4" else shape for kind, shape in zip(kinds, shapes, strict=True)
        ]
    nbytes = _sizes(names, kinds, shapes, firsts, lasts)
    rows = dict(zip(names, range(len(names)), strict=True))
    if firsts != (0, *lasts)[: len(firsts)]:
        rows = dict(sorted(rows.items(), key=lambda item: (firsts[item[1]], nbytes[item[1]])))
        _check_order(rows, firsts, lasts)
    end = begin + max(lasts, default=0)
    if end > file_bytes:
        missing = sum(begin + last > file_bytes for last in lasts)
        raise TruncatedFileError(
            f"the file is cut short: {missing} of its {len(lasts)} tensors are not there, or not in full",
            where=path,
            expected=f"{end:,} bytes",
            found=f"{file_bytes:,} bytes",
        )
    if end < file_bytes:
        remedy = f"something was appended to the file, or a tensor is missing in its header: {CUT_SHORT}"
        what = "the file goes on behind its last tensor"
        raise JsonError(what, f"{file_bytes:,} bytes", f"{end:,} bytes", remedy=remedy)
    dtype_names = [*map(_TORCH_NAMES.__getitem__, kinds)]
    columns = TensorColumns(dtype_names, shapes, [path] * len(rows), [begin + first for first in firsts], nbytes)
    return StoredTensors(rows, columns), metadata


_Texts = tuple[str, ...]
_Shapes = Sequence[tuple[int, ...]]
_Numbers = tuple[int, ...]
_Columns = tuple[_Texts, _Shapes, _Numbers, _Numbers]


_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, gc=False):
    """What is known of an entry: all of it is None for the metadata."""

    dtype: str | None = None
    shape: tuple[_Whole, ...] | None = None
    data_offsets: tuple[_Whole, _Whole] | None = None


class _Metadata(msgspec.Struct):
    members: dict[str, str] = msgspec.field(name=METADATA_NAME, default_factory=dict)


_entries_of = msgspec.json.Decoder(dict[str, _Entry]).decode
_metadata_of = msgspec.json.Decoder(_Metadata).decode


def _usual_header(header: bytes) -> tuple[list[str], _Columns, dict[str, str]] | None:
    """The names, the columns and the metadata of a header, by a parser that takes less time than a strict one.

    None for a header that it might read in another way: `_any_header` parses such a header, and says what is wrong. The
    parser keeps only the last of equal keys, and passes over keys that an entry must not have. So that neither goes
    unnoticed, the quotation marks are counted: each key and each text has two. It refuses half of a surrogate pair.
    """
    if b"\\\\" in header:
        return None  # a quotation mark after two backslashes ends a text
    try:
        entries = _entries_of(header)
        has_metadata = entries.pop(METADATA_NAME, None) is not None
        metadata = _metadata_of(header).members if has_metadata else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    texts = 5 * len(entries) + has_metadata + 2 * len(metadata)
    marks = header.count(b'"') - (header.count(b'\\"') if b"\\" in header else 0)
    values = entries.values()
    kinds = tuple([entry.dtype for entry in values])
    shapes = [entry.shape for entry in values]
    offsets = [entry.data_offsets for entry in values]
    is_whole = bool(entries) and not (None in kinds or None in shapes or None in offsets)
    if not is_whole or marks != 2 * texts or len(metadata) > MAX_ENTRIES:
        return None
    firsts, lasts = zip(*cast("list[tuple[int, int]]", offsets), strict=True)
    return [*entries], cast("_Columns", (kinds, shapes, firsts, lasts)), metadata


def _any_header(header: bytes) -> tuple[list[str], _Columns, dict[str, str]]:
    """As `_usual_header`, of any header. Raises `JsonError`."""
    entries = parse_json(header)
    metadata = entries.pop(METADATA_NAME, None)
    rows = [_fields_of(name, fields) for name, fields in entries.items()]
    kinds, shapes, firsts, lasts = zip(*rows, strict=True) if rows else ((), (), (), ())
    return [*entries], (kinds, shapes, firsts, lasts), {} if metadata is None else strings_of(metadata, MAX_ENTRIES)


def _fields_of(name: str, fields: Any) -> tuple[str, tuple[int, ...], int, int]:
    """The dtype, shape, first and last byte of an entry, checked to be of these types. Raises `JsonError`."""
    try:
        kind, shape, (first, last) = fields["dtype"], fields["shape"], fields["data_offsets"]
        if (
            (len(fields) == 3 and type(kind) is str and type(shape) is list)
            and {int}.issuperset(map(type, (*shape, first, last)))
            and first >= 0 <= last
        ):
            return kind, tuple(shape), first, last
    except (TypeError, ValueError, KeyError) as error:
        keep_interrupt(error)
    raise JsonError(
        f"the entry of {quote(name)} is not what it must be",
        ascii(fields)[:60],
        '"name": {"dtype": string, "shape": [sizes], "data_offsets": [begin, end]}, whole numbers from 0',
    )


def _check_parts(header: bytes) -> None:
    """Limits the objects that the parser creates to those that the tensors, and a manifest, need."""
    count = header.count(b'"data_offsets"')
    if count > MAX_ENTRIES:
        remedy = "split the file into shards"
        raise JsonError("it has more tensors than any model", f"{count:,}", f"at most {MAX_ENTRIES:,}", remedy=remedy)
    brackets, commas = header.count(b"[") + header.count(b"{"), header.count(b",")
    if brackets > manifest.MAX_PARTS + 3 * count:
        raise JsonError("it has far more lists and objects than tensors", f"{brackets:,} for {count:,} tensors")
    if commas > manifest.MAX_PARTS + 16 * count:
        expected = f"at most {manifest.MAX_PARTS:,}, and 16 for each tensor"
        raise JsonError("it has more numbers than the shapes of its tensors", f"{commas:,} for {count:,}", expected)


def _sizes(names: Sequence[str], kinds: _Texts, shapes: _Shapes, firsts: _Numbers, lasts: _Numbers) -> list[int]:
    """The numbers of bytes of the tensors, which are those of their ranges. Raises `JsonError`."""
    if unknown := set(kinds) - DTYPES.keys():
        row = min(map(kinds.index, unknown))
        remedy = f"a newer version of modelstate may know it; or {CUT_SHORT}"
        expected = f"one of {', '.join(sorted(DTYPES))}"
        raise JsonError(f"the dtype of {quote(names[row])} is unknown", short_repr(kinds[row]), expected, remedy=remedy)
    if max(map(len, shapes), default=0) <= MAX_DIMENSIONS:  # the product of a million numbers would take minutes
        nbytes = list(map(mul, map(prod, shapes), [_ITEMSIZES[kind] for kind in kinds]))
        # The library multiplies all sizes, even those of an empty tensor.
        empty = {shape for shape, size in zip(shapes, nbytes, strict=True) if not size} if 0 in nbytes else ()
        if (
            list(map(sub, lasts, firsts)) == nbytes
            and all(prod(filter(None, shape)) < 2**56 for shape in empty)
            and min(chain.from_iterable(shapes), default=0) >= 0
        ):
            return nbytes
    return [_size(*entry) for entry in zip(names, kinds, shapes, firsts, lasts, strict=True)]


def _size(name: str, kind: str, shape: tuple[int, ...], first: int, last: int) -> int:
    """The number of bytes of a tensor. Raises `JsonError`."""
    torch_name, itemsize = DTYPES[kind]
    if min(shape, default=0) < 0:
        raise JsonError(f"the shape of {quote(name)} has a negative size", str([*shape])[:60], "whole numbers from 0")
    # The library multiplies all sizes, even those of an empty tensor.
    span = itemsize * prod(max(size, 1) for size in shape) if len(shape) <= MAX_DIMENSIONS else 2**63
    if span >= 2**63:
        found = f"{len(shape)} dimensions: {kind} of shape {str([*shape[:8]])[:60]}"
        expected = f"at most {MAX_DIMENSIONS} dimensions and fewer than 2**63 bytes"
        raise JsonError(f"{quote(name)} has a shape that no tensor can have", found, expected)
    nbytes = 0 if 0 in shape else span
    if last - first != nbytes:
        what = f"the bytes of {quote(name)} are not as many as its shape and dtype need"
        expected = f"{nbytes:,} bytes for torch.{torch_name} of shape {shape}"
        raise JsonError(what, f"{last - first:,} bytes, from {first} to {last}", expected)
    return nbytes


def _check_supported(names: Sequence[str], kinds: _Texts, shapes: _Shapes, path: str) -> None:
    """Raises `UnsupportedTensorError` for 6-bit floats, and for 4-bit floats whose last dimension is odd."""
    for name, kind, shape in zip(names, kinds, shapes, strict=True):
        if kind in _WITHOUT_DTYPE or (kind == "F4" and (not shape or shape[-1] % 2)):
            raise UnsupportedTensorError(
                f"{quote(name)} is stored as {kind} of shape {shape}, which PyTorch does not have",
                where=path,
                expected="a dtype of PyTorch, which has 4-bit floats in pairs: with an even last dimension",
                remedy="convert it to such a dtype, or pad its last dimension, with the tool that wrote the file",
            )


def _check_order(rows: Mapping[str, int], firsts: _Numbers, lasts: _Numbers) -> None:
    """Checks that the tensors, in this order, follow each other without gaps. Raises `JsonError`."""
    before: str | None = None
    end = 0
    for name, row in rows.items():
        first = firsts[row]
        if first != end:
            kind = "overlap those of" if first < end else "leave a hole behind"
            what = f"the bytes of {quote(name)} {kind} {quote(before) if before is not None else 'the header'}"
            raise JsonError(what, f"a begin at {first}", f"a begin at {end}")
        end, before = lasts[row], name


NAMES = {f"torch.{torch_name}": name for name, torch_name in _TORCH_NAMES.items()}
"""The dtype names of the format by the texts of torch's dtypes."""

Tensors = list[tuple[str, "torch.Tensor | LazyTensor"]]
Metadata = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Makes the `__metadata__` of a file from the digests of its tensors by name; its length depends on no digest."""
NOT_A_NAME = "not a name that the format has"


def why_not(name: object, tensor: torch.Tensor | LazyTensor) -> str:
    """The reason why the format does not have a plain tensor under a name; empty if it has."""
    if not isinstance(name, str) or not (name.isascii() or is_unicode(name)) or name == METADATA_NAME:
        return NOT_A_NAME
    if str(tensor.dtype) not in NAMES:
        return f"{tensor.dtype}, which safetensors does not have"
    if NAMES[str(tensor.dtype)] == "F4" and not tensor.shape:
        return f"{tensor.dtype} without dimensions, which safetensors does not have"
    return ""


class FileLayout(msgspec.Struct, frozen=True):
    """A file that is about to be written."""

    tensors: Tensors
    """The tensors in the order of their bytes."""
    metadata: Metadata
    header_bytes: int
    """Includes the eight bytes of the length."""

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.header_bytes + sum(tensor.nbytes for _, tensor in self.tensors)


def layout(tensors: Mapping[str, torch.Tensor | LazyTensor], metadata: Metadata) -> FileLayout:
    """Plans a file. Raises `ValueError` where the header would be larger than the format allows."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    return FileLayout(ordered, metadata, len(_header(ordered, metadata(blank_digests(tensors)))))


def blank_digests(tensors: Mapping[str, torch.Tensor | LazyTensor]) -> dict[str, str]:
    """Zeros in place of the digests of tensors, which have the same length."""
    return {
        name: "0" * (HEX * sum(-(-part // BLOCK_BYTES) for part in parts_of(tensor) or (tensor.nbytes,)))
        for name, tensor in tensors.items()
    }


class Written(msgspec.Struct, frozen=True):
    """The digests of a file that was written."""

    digests: dict[str, str]
    """The digests of the tensors by name."""
    content: str
    """A digest of the whole file."""
    header: bytes = b""
    """The header with its length."""


def write(
    output: Output, planned: FileLayout, threads: int | None = None, on_written: Callable[[int], None] = lambda _: None
) -> Written:
    """Writes the file, and calls `on_written` with numbers of bytes of tensors. The caller syncs it."""
    from modelstate.formats.block_writer import write_blocks

    output.reserve(planned.nbytes)
    with output.past_page_cache(planned.nbytes):
        tensors = [tensor for _, tensor in planned.tensors]
        hashes = write_blocks(output, planned.header_bytes, tensors, threads, on_written)
    return write_header(output, planned, hashes)


def write_header(output: Output, planned: FileLayout, hashes: Sequence[str]) -> Written:
    """Writes the header of a file, whose tensors have these digests, in the order of their bytes."""
    written = finished_header(planned, hashes)
    output.write_at(0, written.header)
    return written


def finished_header(planned: FileLayout, hashes: Sequence[str]) -> Written:
    """Returns the header of a file whose tensors have these digests, and the digests. That of a shard has none."""
    digests = {name: value for (name, _), value in zip(planned.tensors, hashes, strict=True)}
    header = _header(planned.tensors, planned.metadata(digests))
    assert len(header) == planned.header_bytes
    return Written(digests, digest(header + "".join(hashes).encode()), header)


def write_in_order(
    upload: Callable[[Written], AbstractContextManager[ObjectWriter]],
    planned: FileLayout,
    threads: int | None = None,
    on_written: Callable[[int], None] = lambda _: None,
) -> Written:
    """Writes a file from its first byte to its last one, for places that take no other order.

    The header, which comes first, has the digests of the tensors. So the tensors are read twice, and lazy ones are
    computed twice.

    Args:
        upload: returns the object to write to, which may be named by its content.
        planned: what the file holds.
        threads: the number of threads that compute digests.
        on_written: called with numbers of bytes of tensors that were handed to the upload.

    Raises:
        WriteFailedError: A tensor was changed between the two times; the file is not written.
    """
    from modelstate.formats.block_writer import write_blocks

    tensors = [tensor for _, tensor in planned.tensors]
    hashes = write_blocks(None, 0, tensors, threads)
    written = finished_header(planned, hashes)
    with upload(written) as output:
        output.append(written.header)
        if write_blocks(output, planned.header_bytes, tensors, 1, on_written) != hashes:
            raise WriteFailedError(
                "tensors were changed while they were saved; nothing is written",
                where=output.location.url,
                remedy="save when no other thread changes them",
            )
    return written


def _header(tensors: Iterable[tuple[str, torch.Tensor | LazyTensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {METADATA_NAME: {SEAL: OPEN_SEAL, **metadata}}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        dtype, shape = dtype_and_shape(tensor)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % TENSOR_ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_ENTRIES:
        raise ValueError(f"{len(entries):,} tensors and a header of {len(text):,} bytes")
    return len(text).to_bytes(8, "little") + sealed(text)


def dtype_and_shape(tensor: torch.Tensor | LazyTensor) -> tuple[str, list[int]]:
    """The dtype and the shape of a tensor, as they stand in the header."""
    dtype, sizes = NAMES[str(tensor.dtype)], list(tensor.shape)
    return dtype, [*sizes[:-1], 2 * sizes[-1]] if dtype == "F4" else sizes


def parts_of(tensor: torch.Tensor | LazyTensor) -> tuple[int, ...]:
    """The bytes of the parts of a tensor that get digests of their own; empty where it is one part."""
    parts: tuple[int, ...] = getattr(tensor, "parts", ())
    return parts


def listed_problems(problems: Mapping[Any, str]) -> str:
    """Joins names and problems for a message, the first 8 of them in full."""
    lines = [f"{quote(str(name))}: {problem}" for name, problem in problems.items()]
    return listed(lines, 8, "; ")
