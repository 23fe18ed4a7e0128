"""Comparing bytes with the checksums that a file keeps of them. This finds damage, not tampering."""

import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelstate.errors import ChecksumError, ReadFailedError
from modelstate.read import system
from modelstate.read.digests import ALGORITHM, hasher
from modelstate.read.ranges import open_files, read_threads
from modelstate.read.tree import referred_to
from modelstate.read.workers import work_together
from modelstate.spec import ByteRange, Checksum, StoredTensor, pieces

if TYPE_CHECKING:
    from modelstate.read.checkpoint import Checkpoint

_CHUNK_BYTES = 256 << 10
"""What each thread has in memory at a time."""


def verify(checkpoint: "Checkpoint", on_read: Callable[[int], None] | None = None) -> int:
    """The body of `Checkpoint.verify`; `on_read` hears of the bytes of each storage, and ends it by raising."""
    names_of, expected = what_to_verify(checkpoint), checkpoint.checksums
    found: dict[ByteRange, str] = {}
    waiting, lock = iter(names_of), threading.Lock()

    def work(stop: threading.Event) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while not stop.is_set():
            with lock:
                storage = next(waiting, None)
            if storage is None:
                return
            value = _read_checksum(descriptors[storage.path], storage, expected[storage], buffer)
            with lock:
                found[storage] = value
                if on_read:
                    on_read(storage.nbytes)

    with open_files((storage.path for storage in names_of), checkpoint.stamps) as descriptors:
        work_together(work, min(read_threads(), len(names_of)))
    damaged = [
        name for storage, names in names_of.items() if found[storage] != expected[storage].value for name in names
    ]
    if damaged:
        raise ChecksumError(
            f"{len(damaged)} tensors are not what their checksums say",
            where=checkpoint.source,
            found=", ".join(damaged[:8]) + (", ..." if len(damaged) > 8 else ""),
            remedy="the file is damaged (or was saved with checksums switched off): get it again from where it came",
        )
    return sum(storage.nbytes for storage in names_of)


def what_to_verify(checkpoint: "Checkpoint") -> dict[ByteRange, list[str]]:
    """The storages of all tensors and of those that other values hold, with the names of what is in them.

    Raises `ChecksumError` where one of them has no checksum.
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
                names_of.setdefault(storage, ["a value that is no tensor"])
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


def _read_checksum(descriptor: int, storage: ByteRange, kind: Checksum, buffer: memoryview) -> str:
    """What the checksum of a storage would be now."""
    blocks = kind.block_bytes or storage.nbytes
    end = storage.start + storage.nbytes
    runs = (ByteRange(storage.path, at, min(blocks, end - at)) for at in range(storage.start, end, blocks))
    return "".join(_of_run(descriptor, run, kind.algorithm, buffer) for run in runs)


def _of_run(descriptor: int, run: ByteRange, algorithm: str, buffer: memoryview) -> str:
    crc, hashed = 0, hasher()
    for at in range(0, run.nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), run.nbytes - at)]
        _read_all(descriptor, chunk, run.start + at, run.path)
        if algorithm == ALGORITHM:
            hashed.update(chunk)
        else:
            crc = zlib.crc32(chunk, crc)
    return hashed.hexdigest() if algorithm == ALGORITHM else f"{crc:08x}"


def _read_all(descriptor: int, into: memoryview, at: int, path: str) -> None:
    while into:
        try:
            got = system.preadv(descriptor, [into], at)
        except OSError as error:
            raise ReadFailedError("reading failed", where=f"{path}, byte {at}", found=error) from error
        if not got:
            raise ReadFailedError("the file ends before the tensor does", where=f"{path}, byte {at}")
        into, at = into[got:], at + got
