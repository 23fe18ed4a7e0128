"""The zip archives that `torch.save` has written since 1.6: `data.pkl`, and one record for each storage.

The archive reader of the standard library takes a second for 20,000 records, accepts sizes that contradict each other,
and does not tell where the data of a record begins. The writer writes files that `torch.load(weights_only=True)` reads.
After a save the complete file is on the disk, or nothing has changed.
"""

from __future__ import annotations

import io
import mmap
import os
import shlex
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NamedTuple

import torch

from modelstate.errors import (
    DamagedFileError,
    OpenError,
    TruncatedFileError,
    UnknownFormatError,
    UnsavableError,
    UnsupportedTensorError,
    code_errors,
    keep_interrupt,
)
from modelstate.formats.block_writer import LazyTensor, check_expanded, threads_within, write_blocks
from modelstate.formats.construct import construct, refusal
from modelstate.formats.safetensors import listed_problems
from modelstate.formats.torch_globals import TorchGlobals, storage_of
from modelstate.formats.tree import Checksums, Contents, flatten, leaves, map_leaves, nodes_of, refused_in
from modelstate.formats.unpickle import Storage, check_protocol, damaged, invalid, places_in, unpickle
from modelstate.formats.writing import write_file
from modelstate.io import system
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS, Output, unfinished_file, write_errors
from modelstate.io.files import SourceFile
from modelstate.process import deferred_signals
from modelstate.spec import GAP_BYTES, ByteRange, Checksum, Refused
from modelstate.text_format import excerpt, listed
from modelstate.torch_compat.plain import remedies_for, why_not_saved

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT = "torch zip"
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s4x2H4x3I4H6xI")
_LOCAL = struct.Struct("<4s2x2H8x2I2H")
_MAX_COMMENT = 0xFFFF
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _SIZES_FOLLOW, _IS_UTF8 = 0x1, 0x8, 0x800
_ALIGN_BYTES = 64
"""The alignment of the data that torch writes."""
_TOGETHER_BYTES = 8 << 10
"""What is read at once from a header on, with the small records behind it and their headers."""
_HEADER_BYTES = 256
"""More than torch writes in a header, unless an option of torch aligns the data to more."""


class ZipRecord(NamedTuple):
    """A record of the archive, as its entry in the directory describes it."""

    header: int
    """Bytes from the beginning of the archive to the local header."""
    name: str
    raw_name: bytes
    method: int
    flags: int
    crc32: int
    """The checksum of the data; torch writes 0 if it was configured not to compute it."""
    packed_nbytes: int
    nbytes: int


class ZipDirectory:
    """The records of an archive by name. Each lies within the archive, and none overlap."""

    def __init__(self, file: SourceFile) -> None:
        """Reads the central directory and the local headers of an archive, which is a file or a section of one.

        Raises `TruncatedFileError`, and `DamagedFileError` for any other damage.
        """
        self.file, self._path, self._start = file, file.path, file.start
        count, start, nbytes = self._end()
        entries = self._entries(file.read(start, nbytes, "the archive's directory"), count)
        self.starts = self._local_headers(sorted(entries), start)
        """Bytes from the beginning of the archive to the data of each record."""
        self.records = {entry.name: entry for entry in entries}

    def region(self, name: str) -> ByteRange:
        """The place of a record's data. Raises `DamagedFileError`."""
        record = self.records.get(name)
        if record is None:
            raise DamagedFileError("a record of the archive is missing", where=self.file.path, expected=name)
        if record.method or record.flags & _ENCRYPTED or record.packed_nbytes != record.nbytes:
            raise DamagedFileError(
                "a record of the archive is compressed or encrypted, so it cannot be mapped",
                where=f"{self.file.path}: {name}",
                remedy=f"pack it again without compression: unzip -q {shlex.quote(self._path)} -d unpacked && "
                "(cd unpacked && zip -0 -r ../stored.pt .); or save it anew",
            )
        # The constructor of a named tuple takes twice as long.
        return tuple.__new__(ByteRange, (self._path, self._start + self.starts[name], record.nbytes))

    def checksums(self, names: Iterable[str]) -> dict[ByteRange, Checksum]:
        """The CRC-32 checksums of records by their places, as far as there are any. Raises `DamagedFileError`."""
        stated = ((name, self.records[name].crc32) for name in names)
        return {self.region(name): Checksum("crc32", 0, f"{crc32:08x}") for name, crc32 in stated if crc32}

    def read(self, name: str) -> bytes:
        """The data of a record. Raises `DamagedFileError` where it does not match its checksum."""
        nbytes = self.region(name).nbytes
        data = self.file.read(self.starts[name], nbytes, name)
        stated = self.records[name].crc32
        if stated and zlib.crc32(data) != stated:
            raise DamagedFileError(
                "a record of the archive does not have its checksum: the file was damaged",
                where=f"{self.file.path}: {name}",
                expected=f"CRC-32 {stated:08x}",
                found=f"{zlib.crc32(data):08x}",
            )
        return data

    def _damaged(self, what: str, found: object = "") -> DamagedFileError:
        return DamagedFileError(f"the archive is damaged: {what}", where=self.file.path, found=found)

    def _size_error(self, name: str, expected: object, found: object) -> DamagedFileError:
        return DamagedFileError(
            "the archive contradicts itself about a record",
            where=f"{self.file.path}: {name}",
            expected=expected,
            found=found,
        )

    def _end(self) -> tuple[int, int, int]:
        """Number of entries, start and size of the central directory."""
        size = self.file.nbytes
        # torch writes no comment. A checkpoint of many ranks has an archive for each part of a tensor.
        for ahead_bytes in (0, _MAX_COMMENT):
            tail_start = max(0, size - _END.size - ahead_bytes - _END64_LOCATOR.size)
            tail = self.file.read(tail_start, size - tail_start, "the end of the archive")
            at = tail.rfind(b"PK\5\6")
            if at >= _END64_LOCATOR.size:
                break
        if at < 0 or at + _END.size > len(tail):
            raise TruncatedFileError("the archive has no end", where=self.file.path, expected="a directory at its end")
        _, disk, directory_disk, here, count, nbytes, start, comment = _END.unpack_from(tail, at)
        if at + _END.size + comment > len(tail):
            raise self.file.truncated("the archive's comment", tail_start + at + _END.size + comment)
        if disk not in (0, _MAX16) or directory_disk not in (0, _MAX16) or here != count:
            raise self._damaged("it is one of several volumes")
        end = tail_start + at
        locator = at - _END64_LOCATOR.size
        if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
            _, _, end, _ = _END64_LOCATOR.unpack_from(tail, locator)
            where = "the archive's 64-bit directory"
            magic, _, _, _, _, _, here, count, nbytes, start = _END64.unpack(self.file.read(end, _END64.size, where))
            if magic != b"PK\6\6" or here != count:
                raise self._damaged("its 64-bit directory is not where it says")
        elif _MAX32 in (nbytes, start) or count == _MAX16:
            raise self._damaged("it has no 64-bit directory, and needs one")
        if start + nbytes != end:
            raise self._damaged("its directory is not where it says", f"{start} + {nbytes} bytes, end at {end}")
        return count, start, nbytes

    def _entries(self, data: bytes, count: int) -> list[ZipRecord]:
        entries: list[ZipRecord] = []
        pos, size = 0, len(data)
        for _ in range(count):
            if pos + _ENTRY.size > size:
                raise self._damaged("its directory is too short", f"{size} bytes")
            magic, flags, method, crc32, packed, nbytes, name_size, extra_size, comment, disk, header = (
                _ENTRY.unpack_from(data, pos)
            )
            name_end = pos + _ENTRY.size + name_size
            raw_name = data[pos + _ENTRY.size : name_end]
            pos = name_end + extra_size + comment
            if magic != b"PK\1\2" or pos > size:
                raise self._damaged("an entry of its directory is not valid")
            try:
                name = raw_name.decode("utf-8")  # some writers leave out the flag
            except UnicodeDecodeError as error:
                if flags & _IS_UTF8:
                    raise self._damaged("the name of a record is not UTF-8", raw_name[:100]) from error
                name = raw_name.decode("cp437")
            if _MAX32 in (packed, nbytes, header) or disk == _MAX16:
                extra = data[name_end : name_end + extra_size]
                nbytes, packed, header = self._zip64(name, extra, nbytes, packed, header)
            fields = header, name, raw_name, method, flags, crc32, packed, nbytes
            entries.append(tuple.__new__(ZipRecord, fields))  # the constructor takes twice as long
        names = [entry.name for entry in entries]
        if len(set(names)) < count:
            twice = next(name for name, times in Counter(names).items() if times > 1)
            raise DamagedFileError("a record stands twice in the archive", where=self.file.path, found=twice)
        return entries

    def _zip64(self, name: str, extra: bytes, *fields: int) -> list[int]:
        """The fields of an entry, with those that exceed 32 bits from its extra field, where they are in this order."""
        values: list[int] = []
        pos = 0
        while pos + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, pos)
            if kind == 1 and pos + 4 + size <= len(extra):
                values = list(struct.unpack_from(f"<{size // 8}Q", extra, pos + 4))
            pos += 4 + size
        result = []
        for field in fields:
            if field != _MAX32:
                result.append(field)
            elif values:
                result.append(values.pop(0))
            else:
                raise self._size_error(name, "a size of 64 bits", "none")
        return result

    def _local_headers(self, ordered: list[ZipRecord], directory: int) -> dict[str, int]:
        """Reads the local headers, the only place that tells where the data begins; they repeat all other fields.

        Returns the beginnings of the data, in bytes from the beginning of the archive.
        """
        starts: dict[str, int] = {}
        block, first = b"", 0
        is_remote, fixed_bytes, unpack = self.file.fingerprint.is_remote, _LOCAL.size, _LOCAL.unpack_from
        begins = [entry.header for entry in ordered[1:]] + [directory]
        for entry, begin in zip(ordered, begins, strict=False):
            if is_remote and (known := _start_before(entry, begin)) is not None:
                starts[entry.name] = known
                continue
            header, name, true_name, method, true_flags, _, true_packed, true_nbytes = entry
            at = header - first
            if at + _HEADER_BYTES > len(block):
                ahead_bytes = _TOGETHER_BYTES if true_packed < GAP_BYTES else _HEADER_BYTES
                block, first, at = self._header(entry, fixed_bytes, ahead_bytes, directory), header, 0
            magic, _, stated_method, packed, nbytes, name_size, extra_size = unpack(block, at)
            header_bytes = fixed_bytes + name_size + extra_size
            if at + header_bytes > len(block):
                block, first, at = self._header(entry, header_bytes, header_bytes, directory), header, 0
            raw_name = block[at + fixed_bytes : at + fixed_bytes + name_size]
            if magic != b"PK\3\4" or raw_name != true_name or stated_method != method:
                raise self._size_error(name, "the same name and method in front of the data", raw_name[:100])
            starts[name] = start = header + header_bytes
            end = start + true_packed
            if true_flags & _SIZES_FOLLOW:
                is_wide = _MAX32 in (packed, nbytes) or max(header, true_packed, true_nbytes) >= _MAX32
                end += 24 if is_wide else 16
            # A header that is off by a few bytes would shift the data; only the bytes left over reveal that.
            if end != begin:
                expected = f"an end at byte {begin}, where the next record or the directory begins"
                raise self._size_error(name, expected, end)
        return starts

    def _header(self, entry: ZipRecord, least_bytes: int, nbytes: int, directory: int) -> bytes:
        """Reads the local header of an entry, of at least `least_bytes`, with what lies behind it."""
        if entry.header + least_bytes > directory:
            raise self._size_error(
                entry.name, "a header before the directory", f"one of {least_bytes} bytes at byte {entry.header}"
            )
        return self.file.read(entry.header, min(nbytes, directory - entry.header), "a header")


def _start_before(entry: ZipRecord, begin: int) -> int | None:
    """The beginning of a record's data, from where the next header begins; None where that leaves a doubt.

    A local header of another machine takes a request, and a file has thousands. torch aligns the data, and other
    writers put it right behind the name.
    """
    is_wide = max(entry.header, entry.packed_nbytes, entry.nbytes) >= _MAX32
    start = begin - entry.packed_nbytes - ((24 if is_wide else 16) if entry.flags & _SIZES_FOLLOW else 0)
    least = entry.header + _LOCAL.size + len(entry.raw_name)
    is_aligned = start % _ALIGN_BYTES == 0 and least <= start < least + _MAX16
    return start if is_aligned or start == least else None


def is_foreign(file: SourceFile) -> bool:
    """Whether a zip archive is known not to be a file of `torch.save`. False for a damaged archive."""
    try:
        _prefix(ZipDirectory(file))
    except UnknownFormatError:
        return True
    except OpenError:
        return False
    return False


def read(file: SourceFile, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """Reads the table of contents of a file of `torch.save`.

    Reads the directory of the archive, its headers and the pickle, but no tensor. A storage that was saved by itself
    becomes a one-dimensional tensor; an untyped storage becomes a tensor of bytes. Tensors of other devices are read
    like those of the CPU.

    Args:
        file: The file.
        allow: Classes and functions that the pickle may use, or their qualified names, in addition to torch's own
            `weights_only` list and `torch.serialization.add_safe_globals`.
        skip_forbidden: Leave placeholders for other classes and functions, instead of raising.

    Raises:
        ForbiddenGlobalError: The pickle asks for a class or function that is not allowed.
        UnknownFormatError: The file is a TorchScript program, an archive of another kind, or has a pickle of protocol
            0 or 1.
        UnsupportedTensorError: A file of a big-endian machine.
        OpenError: The file is damaged; a subclass says how.
    """
    names, path = TorchGlobals(allow), file.path
    if path.endswith(".distcp"):
        raise UnknownFormatError(
            "this is a part of a checkpoint of torch.distributed.checkpoint; what is in it stands in .metadata",
            where=path,
            remedy=f"open its directory: {os.path.dirname(path) or '.'}",
        )
    with places_in(path, "data.pkl"):
        archive = read_archive(file, names)
        tree = construct(
            archive.value, path=path, data_nbytes=archive.pickle_nbytes, names=names, skip_forbidden=skip_forbidden
        )
    return Contents(FORMAT, tree, {path: file.fingerprint}, checksums=archive.checksums)


class Archive(NamedTuple):
    """The contents of an archive of `torch.save`."""

    value: object
    """The value that the pickle describes, which `construct` checks and creates."""
    pickle_nbytes: int
    checksums: Checksums
    """Returns the CRC-32 checksums of the storages."""


def read_archive(file: SourceFile, names: TorchGlobals) -> Archive:
    """Reads an archive from a file or a section of one. Raises what `read` raises for a damaged file."""
    directory = ZipDirectory(file)
    prefix = _prefix(directory)
    name = f"{prefix}byteorder"
    order = directory.read(name) if name in directory.records else b"little"
    if order == b"big":
        raise UnsupportedTensorError(
            "the file was written on a big-endian machine, which is not supported",
            where=file.path,
            remedy="load and save it once with torch.load and torch.save on this machine",
        )
    if order != b"little":
        raise damaged("the byte order is unknown", excerpt(order[:20]))
    data = directory.read(f"{prefix}data.pkl")
    check_protocol(data)
    storages: dict[tuple[object, ...], Storage] = {}
    records: list[str] = []

    def find(key: tuple[object, ...]) -> object:
        """Returns the storage that a persistent id names."""
        description = storage_of(key, 5)
        if isinstance(description, Refused):
            return description
        dtype, name, numel = short = description
        storage = storages.get(short)
        if storage is None:
            region = directory.region(record := f"{prefix}data/{name}")
            nbytes = numel * dtype.itemsize
            if nbytes > region.nbytes:
                return invalid(
                    DamagedFileError(
                        "a storage is shorter in the archive than in the pickle",
                        expected=f"{numel} elements of {dtype}",
                        found=f"{region.nbytes} bytes in data/{name}",
                    )
                )
            records.append(record)
            region = region if nbytes == region.nbytes else region._replace(nbytes=nbytes)
            storage = storages[short] = Storage(dtype, region, 0, numel)
        return storage

    value, _ = unpickle(data, 0, find, names.find)
    return Archive(value, len(data), lambda: directory.checksums(records))


def _prefix(directory: ZipDirectory) -> str:
    """What the names of all records begin with: the directory of the first record, as in torch, and a slash.

    Empty for an archive that was packed again without its directory.
    """
    records = directory.records
    first = next(iter(records), "")
    prefix = first.partition("/")[0]
    is_script = any(name.startswith((f"{prefix}/constants.pkl", f"{prefix}/code/")) for name in records)
    if "/" in first and f"{prefix}/data.pkl" in records and not is_script:
        return f"{prefix}/"
    if {"data.pkl", "version"} <= records.keys() and "constants.pkl" not in records:
        return ""
    kind, remedy = _SCRIPT if is_script else _kind(records, prefix)
    if not kind:
        what = "the archive has tensors, and no pickle that says what they are"
        raise DamagedFileError(what, where=directory.file.path, expected=f"{prefix}/data.pkl")
    raise UnknownFormatError(
        f"{kind}, not a checkpoint",
        where=directory.file.path,
        expected="a file that torch.save wrote",
        found=listed(records, 5) or "no records",
        remedy=remedy,
    )


_SCRIPT = ("a TorchScript program", 'torch.save(torch.jit.load(path).state_dict(), "state.pt"), and open that')


def _kind(records: Mapping[str, object], prefix: str) -> tuple[str, str]:
    """What another archive is, and what to do; empty texts for one of torch.save that lacks its pickle."""
    if not records:
        return "an empty zip archive", "get the file again"
    if f"{prefix}/archive_format" in records:
        return "a PyTorch program package (.pt2)", "torch.export.load(path).state_dict, saved with torch.save"
    if f"{prefix}/.data/extern_modules" in records:
        return "a torch.package archive", "torch.package.PackageImporter(path).load_pickle(...)"
    if any(name.startswith(f"{prefix}/data/") for name in records):
        return "", ""
    if all(name.endswith(".npy") for name in records):
        return "a NumPy archive (.npz)", "open the mapping {name: torch.from_numpy(array)} that numpy.load(path) gives"
    if "model.weights.h5" in records:
        return "a Keras 3 model (.keras)", "save its weights with safetensors"
    if "[Content_Types].xml" in records:
        return "an office document", "give the path of the checkpoint"
    if any(name.endswith((".dist-info/METADATA", "META-INF/MANIFEST.MF")) for name in records):
        return "a package of programs", "unpack it, and open the checkpoint in it"
    if any(name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")) for name in records):
        return "an archive with checkpoints in it", "unpack it, and open one of them"
    return "a zip archive of another kind", "give the path of the checkpoint"


# Writing.


def write_torch_file(
    state: Mapping[str, object],
    path: str,
    *,
    overwrite: bool,
    max_memory_bytes: int | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    on_written: Callable[[int], None] = lambda _: None,
) -> dict[str, int]:
    """Saves a state with `torch.save`, and returns the path of the file and its size.

    Lazy tensors are written to a temporary file first, which is mapped, so that they need no memory; `on_written` is
    called with numbers of their bytes.

    Raises:
        UnsavableError: A value cannot be pickled, or `torch.load(weights_only=True)` does not read it.
        MemoryBudgetError: A lazy tensor does not fit into `max_memory_bytes`.

    Also raises what `write_file` raises.
    """
    _check_tensors(state, path)
    with _without_lazy_tensors(state, path, max_memory_bytes, lock_timeout_seconds, on_written) as complete:
        return write_file(
            path,
            lambda output: _save(complete, output, path),
            overwrite=overwrite,
            lock_timeout_seconds=lock_timeout_seconds,
        )


_CONVERT = (
    "leave them out, or save others in their place: the dequantize() of a quantized tensor, the values() and offsets() "
    "of a nested one, tensors with values for those on meta"
)


def _check_tensors(state: Mapping[str, object], path: str) -> None:
    """Raises `UnsavableError` for tensors that pickle accepts, and `modelstate.open` would not read."""
    tensors = {name: value for name, value in leaves(state) if isinstance(value, torch.Tensor)}
    refused = {name: why for name, tensor in tensors.items() if (why := why_not_saved(tensor))}
    if refused:
        raise UnsavableError(
            "tensors have no values here, or only a part of them, or are of a kind that is not read",
            where=path,
            found=listed_problems(refused),
            remedy="; ".join(remedies_for(tensors[name] for name in refused)) or _CONVERT,
        )


def _save(state: Mapping[str, object], output: Output, path: str) -> None:
    with archive_file(output) as file:
        remedy = "leave out what cannot be pickled"
        with code_errors(UnsavableError, "torch.save cannot save this", where=path, remedy=remedy):
            torch.save(state, file)
    failure = _load_error(output.path)  # torch.load maps the file, so it reads no tensor
    if failure is not None:
        loaded = (dict, OrderedDict, list, tuple, torch.Tensor, torch.nn.Parameter)
        others = ((name, value) for name, value in nodes_of(state) if type(value) not in loaded)
        refused = {name: type(value) for name, value in others if _load_error(pickled(value)) is not None}
        raise UnsavableError(
            "torch.load(weights_only=True) does not read this",
            where=path,
            found=listed_problems({name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in refused.items()})
            or f"{type(failure).__name__}: {failure}",
            remedy="save to a path that ends in .safetensors, which keeps every value that has an encoding, or leave "
            "these out",
        ) from failure
    try:
        with SourceFile(output.path) as written:
            tree = read(written).tree
        if unread := refused_in(tree):
            raise refusal(unread, path)
        flatten(tree, "")
    except OpenError as error:
        raise UnsavableError(
            "modelstate.open would not read the file",
            where=path,
            found=": ".join(filter(None, (error.where.removeprefix(f"{output.path}: "), error.what, error.found))),
            remedy=f"leave it out; or {error.remedy}",
            names=error.names,
        ) from error


def _load_error(source: str | io.BytesIO) -> Exception | None:
    """The exception of `torch.load(weights_only=True)` for a file, or None."""
    try:
        torch.load(source, map_location="cpu", mmap=isinstance(source, str), weights_only=True)
    except Exception as error:
        keep_interrupt(error)
        return error
    return None


def pickled(value: object) -> io.BytesIO:
    """Returns a file in memory that `torch.save` has written."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@contextmanager
def _without_lazy_tensors(
    state: Mapping[str, object],
    path: str,
    max_memory_bytes: int | None,
    lock_timeout_seconds: float,
    on_written: Callable[[int], None],
) -> Iterator[Mapping[str, object]]:
    """Yields the state with tensors that are mapped from a temporary file in place of the lazy tensors.

    torch.save needs all tensors at once. The mapped tensors are in memory only as far as the pages of a file are. The
    file is removed from its directory before the block begins.
    """
    named = {name: value for name, value in leaves(state) if isinstance(value, LazyTensor)}
    if not named:
        yield state
        return
    first = {tensor.key: name for name, tensor in reversed(named.items())}
    # Tensors with wide elements come first, so that every tensor lies at a multiple of its element size.
    lazy = {name: named[name] for name in sorted(first.values(), key=lambda name: -named[name].itemsize)}
    check_expanded(lazy, path)
    threads = threads_within(lazy, max_memory_bytes, path)
    end = sum(tensor.nbytes for tensor in lazy.values())
    # Only this process reads the file.
    with write_errors(path), unfinished_file(path, 0o600, lock_timeout_seconds) as output:
        output.reserve(end)
        write_blocks(output, 0, [*lazy.values()], threads, on_written)
        memory = mmap.mmap(output.descriptor, end, mmap.MAP_PRIVATE) if end else b""
        system.unlink(output.path)
        output.is_synced = True  # the file is not needed after a crash
    tensors, offset = {}, 0
    for tensor in lazy.values():
        if count := tensor.numel():
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
            tensors[tensor.key] = flat.view(tensor.shape)
        else:
            tensors[tensor.key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        offset += tensor.nbytes
    yield map_leaves(state, lambda _, leaf: tensors[leaf.key] if isinstance(leaf, LazyTensor) else leaf)


_PENDING_BYTES = 1 << 20
"""Bytes that wait to be written together: torch writes five small pieces for each tensor."""


@contextmanager
def archive_file(output: Output) -> Iterator[IO[bytes]]:
    """The file object for torch to write an archive to. At the end of the block, the first error is raised.

    torch's writer must not see an error, nor an interrupt: it would report its next failure instead of the first, or
    end the process. So handlers of signals are called between writes, and nothing is written after an error.
    """
    with deferred_signals() as deliver:
        raw = _ArchiveFile(output, deliver)
        file = io.BufferedWriter(raw, _PENDING_BYTES)
        try:
            yield file
            file.flush()
            if raw.failed is not None:
                raise raw.failed
        finally:
            raw.failed = EOFError()  # what is still pending is not written


class _ArchiveFile(io.RawIOBase):
    def __init__(self, output: Output, deliver: Callable[[], None]) -> None:
        self._output, self._deliver = output, deliver
        self.failed: BaseException | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Does nothing: `torch.export.save` goes to the beginning when it has written everything."""
        return 0

    def write(self, data: Buffer) -> int:
        if self.failed is None:
            try:
                self._deliver()
                self._output.append(memoryview(data).cast("B"))
            except BaseException as error:
                self.failed = error
        return memoryview(data).nbytes
