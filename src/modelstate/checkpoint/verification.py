"""Comparing the bytes of a checkpoint with the digests that were stored when it was saved."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from modelstate.errors import ChecksumError
from modelstate.formats.manifest import ALGORITHM
from modelstate.formats.tree import referred_to
from modelstate.io.engine import RangeFile, for_each, open_files, read_fully, threads_for
from modelstate.spec import GAP_BYTES, ByteRange, StoredTensor, pieces

if TYPE_CHECKING:
    from modelstate.checkpoint.checkpoint import Checkpoint

_CHUNK_BYTES = 256 << 10
"""The size of the buffer of each thread that verifies checksums."""
_REMOTE_CHUNK_BYTES = 4 << 20
"""The same, where each read is a request."""


def verify(checkpoint: Checkpoint, on_read: Callable[[int], None] | None = None, share: slice = slice(None)) -> int:
    """Implements `Checkpoint.verify`. `on_read` is called with the size of each storage, and may raise to end it.

    Small storages that lie next to each other are read at once. Several ranks verify a checkpoint together with a
    `share` of these reads each.
    """
    names_of, expected = what_to_verify(checkpoint), checkpoint.checksums
    is_remote = any(checkpoint.fingerprints[storage.path].is_remote for storage in names_of)
    chunk_bytes = _REMOTE_CHUNK_BYTES if is_remote else _CHUNK_BYTES
    runs = _runs(names_of, chunk_bytes)[share]
    computed: dict[ByteRange, str] = {}

    @contextmanager
    def worker() -> Iterator[Callable[[list[ByteRange]], None]]:
        buffer = memoryview(bytearray(chunk_bytes))

        def compute(run: list[ByteRange]) -> None:
            path, start, nbytes = run[0]
            nbytes = run[-1].start + run[-1].nbytes - start
            is_read = nbytes <= chunk_bytes
            if is_read:
                read_fully(files[path], [buffer[:nbytes]], start, nbytes)
            for storage in run:
                checksum, values = expected[storage], []
                for first, end in checksum.blocks(storage.nbytes):
                    begin, stop = storage.start + first, storage.start + end
                    read = (
                        [buffer[begin - start : stop - start]] if is_read else _chunks(files[path], begin, stop, buffer)
                    )
                    values.append(_checksum(read, checksum.algorithm))
                computed[storage] = "".join(values)

        yield compute

    def on_done(run: list[ByteRange], _: float) -> None:
        for storage in run:
            if on_read:
                on_read(storage.nbytes)

    with open_files({run[0].path for run in runs}, checkpoint.fingerprints) as files:
        for_each(runs, worker, min(threads_for(is_remote), len(runs)), on_done)
    damaged = [
        name
        for storage, names in names_of.items()
        for name in names
        if storage in computed and computed[storage] != expected[storage].value
    ]
    if damaged:
        raise ChecksumError(
            f"{len(damaged)} tensors are not what their checksums say",
            where=checkpoint.source,
            found=", ".join(damaged[:8]) + (", ..." if len(damaged) > 8 else ""),
            remedy="the file is damaged (or was saved with checksums switched off): get it again from where it came",
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


def what_to_verify(checkpoint: Checkpoint) -> dict[ByteRange, list[str]]:
    """The storages of all tensors, including those within other values, with the names of the tensors in them.

    Raises `ChecksumError` where a storage has no checksum.
    """
    names_of: dict[ByteRange, list[str]] = {}
    for name, spec in checkpoint.items():
        for part in pieces(spec.stored):
            if isinstance(part, StoredTensor) and part.storage.nbytes:
                names_of.setdefault(part.storage, []).append(name)
    for place, value in checkpoint.encoded():
        for stored in referred_to(value):
            if stored.storage.nbytes:
                names_of.setdefault(stored.storage, []).append(place)
    expected = checkpoint.checksums
    if not checkpoint.key:
        for storage in expected:
            if storage.nbytes:
                names_of.setdefault(storage, ["a value that is not a tensor"])
    without = [names[0] for storage, names in names_of.items() if storage not in expected]
    if without or not (names_of or checkpoint.contents.is_sealed):
        listed = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        raise ChecksumError(
            "there is nothing to verify the tensors against",
            where=checkpoint.source,
            expected="a checksum for every tensor",
            found=f"none for {listed}" if expected else f"{checkpoint.format}, which keeps none",
            remedy="modelstate.save(modelstate.open(path), new_path) writes a file that keeps checksums of what is "
            "here now; a load without verify=True asks for none",
        )
    return names_of


def _chunks(file: RangeFile, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yields a part of a file in pieces, each of them in the buffer."""
    for at in range(start, end, len(buffer)):
        chunk = buffer[: min(len(buffer), end - at)]
        read_fully(file, [chunk], at, len(chunk))
        yield chunk


def _checksum(chunks: Iterable[memoryview], algorithm: str) -> str:
    crc, hashed = 0, xxhash.xxh3_128()
    for chunk in chunks:
        if algorithm == ALGORITHM:
            hashed.update(chunk)
        else:
            crc = zlib.crc32(chunk, crc)
    return hashed.hexdigest() if algorithm == ALGORITHM else f"{crc:08x}"
