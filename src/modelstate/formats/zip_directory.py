"""Finds the records of an uncompressed zip archive.

The reader of the standard library takes a second for 20,000 records, accepts sizes that contradict each other, and does
not tell where the data of a record begins.
"""

from __future__ import annotations

import shlex
import struct
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from modelstate.errors import (
    DamagedFileError,
    TruncatedFileError,
)
from modelstate.io.files import SourceFile
from modelstate.spec import GAP_BYTES, ByteRange, Checksum

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
        is_remote, fixed_bytes, unpack = self.file.is_remote, _LOCAL.size, _LOCAL.unpack_from
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
