"""Comparing the bytes of a checkpoint with the digests that were stored when it was saved."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import msgspec
import xxhash

from modelstate.errors import ChecksumError
from modelstate.formats.manifest import ALGORITHM
from modelstate.io.engine import RangeFile, for_each, open_files, read_fully, read_threads
from modelstate.io.files import FileFingerprint
from modelstate.remote.location import CONNECTIONS
from modelstate.spec import GAP_BYTES, ByteRange, Checksum
from modelstate.text_format import listed

_CHUNK_BYTES = 256 << 10
"""The size of the buffer of each thread that verifies checksums."""
_REMOTE_CHUNK_BYTES = 4 << 20
"""The same, where each read is a request."""


class DigestCheck(msgspec.Struct, frozen=True):
    """What there is to compare of a checkpoint. Created by `Checkpoint.verification`."""

    source: str
    """The path of the checkpoint, for messages."""
    fingerprints: Mapping[str, FileFingerprint]
    """The files that are read."""
    names_of: Mapping[ByteRange, list[str]]
    """The storages to read, and for each of them the names of the tensors in it."""
    checksums: Mapping[ByteRange, Checksum]
    """The stored digest of each of these storages."""
    what: str = "tensors"
    """What the storages are, for messages."""

    def run(self, on_read: Callable[[int], None] | None = None, share: slice = slice(None)) -> int:
        """Reads the storages, compares them with their digests, and returns the number of bytes that were compared.

        Small storages that lie next to each other are read at once. Several ranks verify a checkpoint together with a
        `share` of these reads each. `on_read` is called with the size of each storage, and may raise to end it.

        Raises:
            ChecksumError: A storage differs from its digest.
            ReadFailedError: A file cannot be read, or has changed since it was opened.
        """
        is_remote = any(self.fingerprints[storage.path].is_remote for storage in self.names_of)
        chunk_bytes = _REMOTE_CHUNK_BYTES if is_remote else _CHUNK_BYTES
        runs = _runs(self.names_of, chunk_bytes)[share]
        computed: dict[ByteRange, str] = {}

        def compute(buffer: memoryview, run: list[ByteRange]) -> None:
            path, start, nbytes = run[0]
            nbytes = run[-1].start + run[-1].nbytes - start
            is_read = nbytes <= chunk_bytes
            if is_read:
                read_fully(files[path], [buffer[:nbytes]], start, nbytes)
            for storage in run:
                checksum, values = self.checksums[storage], []
                for first, end in checksum.blocks(storage.nbytes):
                    begin, stop = storage.start + first, storage.start + end
                    part = [buffer[begin - start : stop - start]]
                    chunks = part if is_read else _chunks(files[path], begin, stop, buffer)
                    crc, hashed = 0, xxhash.xxh3_128()
                    for chunk in chunks:
                        if checksum.algorithm == ALGORITHM:
                            hashed.update(chunk)
                        else:
                            crc = zlib.crc32(chunk, crc)
                    values.append(hashed.hexdigest() if checksum.algorithm == ALGORITHM else f"{crc:08x}")
                computed[storage] = "".join(values)

        def on_done(run: list[ByteRange], _: float) -> None:
            for storage in run:
                if on_read:
                    on_read(storage.nbytes)

        with open_files({run[0].path for run in runs}, self.fingerprints) as files:
            threads = min(CONNECTIONS if is_remote else read_threads(), len(runs))
            for_each(runs, [partial(compute, memoryview(bytearray(chunk_bytes))) for _ in range(threads)], on_done)
        damaged = [
            name
            for storage, names in self.names_of.items()
            for name in names
            if storage in computed and computed[storage] != self.checksums[storage].value
        ]
        if damaged:
            raise ChecksumError(
                f"{self.what} that are not what their checksums say ({len(damaged):,})",
                where=self.source,
                found=listed(damaged, 8),
                remedy="the file is damaged, or was saved with checksums switched off: get it again from its source",
            )
        return sum(storage.nbytes for storage in computed)


def _runs(storages: Iterable[ByteRange], most_bytes: int) -> list[list[ByteRange]]:
    """Groups storages in the order of the files: one alone, or neighbours that are within `most_bytes` of a file."""
    runs: list[list[ByteRange]] = []
    end = 0
    for storage in sorted(storages):
        run = runs[-1] if runs else []
        is_next = run and run[0].path == storage.path and 0 <= storage.start - end <= GAP_BYTES
        end = storage.start + storage.nbytes
        if is_next and end - run[0].start <= most_bytes:
            run.append(storage)
        else:
            runs.append([storage])
    return runs


def _chunks(file: RangeFile, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yields a part of a file in pieces, each of them in the buffer."""
    for at in range(start, end, len(buffer)):
        chunk = buffer[: min(len(buffer), end - at)]
        read_fully(file, [chunk], at, len(chunk))
        yield chunk
