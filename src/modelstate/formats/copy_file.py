"""Copies a file byte for byte from and to this machine and buckets, and compares it with digests on the way."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from modelstate.errors import ChecksumError
from modelstate.formats.manifest import ALGORITHM
from modelstate.formats.uploading import index_of_object, remove_index
from modelstate.formats.writing import write_file
from modelstate.io.atomic import atomic_file, make_directory, write_errors
from modelstate.io.engine import Request, read_ranges
from modelstate.io.files import FileFingerprint
from modelstate.process import prefetch_one
from modelstate.remote.location import is_remote, locate
from modelstate.remote.upload import PART_BYTES, new_object
from modelstate.spec import ByteRange, Checksum
from modelstate.text_format import listed

_WINDOW_BYTES = 16 << 20
"""What is read at once, by all connections; the next window is read while one is written."""


def copy_file(
    path: str,
    target: str,
    fingerprint: FileFingerprint,
    *,
    overwrite: bool,
    digests: StreamedDigests | None = None,
    replaces_shards: bool = True,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copies one file; the target has all of it, or what it had before.

    Args:
        path: The file.
        target: The path or the URL that it is written to.
        fingerprint: What the file must be.
        overwrite: Whether a file at the target is replaced.
        digests: What the bytes are compared with.
        replaces_shards: Whether an index and its shards at the target are removed.
        advance: Called with the numbers of bytes.
    """

    def stream(output: Any) -> None:
        def fetch(window: tuple[int, bytearray], _: Callable[[], None]) -> None:
            start, buffer = window
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            request = Request(ByteRange(path, start, len(buffer)), address)
            read_ranges([request], fingerprints={path: fingerprint})

        def use(window: tuple[int, bytearray]) -> None:
            start, buffer = window
            view = memoryview(buffer)
            if digests is not None:
                digests.add(start, view)
            for at in range(0, len(view), PART_BYTES):
                output.append(view[at : at + PART_BYTES])
            advance(len(view))

        starts = range(0, fingerprint.nbytes, _WINDOW_BYTES)
        windows = ((start, bytearray(min(_WINDOW_BYTES, fingerprint.nbytes - start))) for start in starts)
        prefetch_one(windows, fetch, use, is_fetched=lambda _: True)
        if digests is not None:
            digests.check()

    if is_remote(target):
        old_index = index_of_object(target) if replaces_shards else None
        with new_object(locate(target), fingerprint.nbytes, overwrite=overwrite) as output:
            stream(output)
        if old_index is not None:
            remove_index(target, old_index)
        return
    with write_errors(target):
        make_directory(os.path.dirname(target))
    if replaces_shards:
        write_file(target, stream, overwrite=overwrite)
        return
    with atomic_file(target, overwrite=overwrite) as local:
        stream(local)


class StreamedDigests:
    """Compares the bytes of a file, which come in their order, with the digests of the checkpoint."""

    def __init__(self, path: str, checksums: Mapping[ByteRange, Checksum]) -> None:
        self.verified_bytes, self.algorithms = 0, set[str]()
        self._blocks: list[tuple[int, int, ByteRange]] = []
        self._checksums = {storage: checksum for storage, checksum in checksums.items() if storage.path == path}
        self._values = dict.fromkeys(self._checksums, "")
        self._next, self._hash, self._crc = 0, xxhash.xxh3_128(), 0
        end = 0
        for storage in sorted(self._checksums):
            if storage.start < end or not storage.nbytes:
                del self._values[storage]  # it overlaps the one before
                continue
            end = storage.start + storage.nbytes
            blocks = self._checksums[storage].blocks(storage.nbytes)
            self._blocks += [(storage.start + first, storage.start + last, storage) for first, last in blocks]

    def add(self, start: int, view: memoryview) -> None:
        """Takes the bytes that follow."""
        end = start + len(view)
        while self._next < len(self._blocks):
            first, last, storage = self._blocks[self._next]
            if first >= end:
                return
            part, algorithm = view[max(first - start, 0) : last - start], self._checksums[storage].algorithm
            if algorithm == ALGORITHM:
                self._hash.update(part)
            else:
                self._crc = zlib.crc32(part, self._crc)
            self.verified_bytes += len(part)
            if last > end:
                return
            self._values[storage] += self._hash.hexdigest() if algorithm == ALGORITHM else f"{self._crc:08x}"
            self.algorithms.add(algorithm)
            self._next, self._hash, self._crc = self._next + 1, xxhash.xxh3_128(), 0

    def check(self) -> None:
        """Raises `ChecksumError` where the bytes of the whole file are not what the digests say."""
        damaged = [storage for storage, value in self._values.items() if value != self._checksums[storage].value]
        if damaged:
            raise ChecksumError(
                f"parts of the file that are not what their checksums say ({len(damaged):,}); nothing has been copied",
                where=damaged[0].path,
                found=listed((f"bytes {part.start} to {part.start + part.nbytes}" for part in damaged), 4),
                remedy="the file is damaged: get it again from where it came; `modelstate verify` names the tensors",
            )
