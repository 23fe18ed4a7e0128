"""Comparing bytes with the checksums that a file keeps of them. This finds damage, not tampering."""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from modelstate.errors import ChecksumError, ReadFailedError
from modelstate.read import system
from modelstate.read.ranges import read_threads
from modelstate.read.stamp import Stamp, check_unchanged, open_unchanged
from modelstate.spec import ByteRange, StoredTensor, pieces

if TYPE_CHECKING:
    from modelstate.read.checkpoint import Checkpoint

_CHUNK_BYTES = 4 << 20


def verify(checkpoint: "Checkpoint", on_read: Callable[[int], None] | None = None) -> int:
    """The body of `Checkpoint.verify`; `on_read` hears of the bytes of each storage, and ends it by raising."""
    names_of, expected = what_to_verify(checkpoint), checkpoint.checksums
    found: dict[ByteRange, int] = {}
    with ThreadPoolExecutor(read_threads(), "modelstate-verify") as pool:
        crcs = pool.map(lambda storage: _crc32(storage, checkpoint.stamps.get(storage.path)), names_of)
        try:
            for storage, crc in zip(names_of, crcs, strict=True):
                found[storage] = crc
                if on_read:
                    on_read(storage.nbytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    damaged = [name for storage, names in names_of.items() if found[storage] != expected[storage] for name in names]
    if damaged:
        raise ChecksumError(
            f"{len(damaged)} tensors are not what their checksums say",
            where=checkpoint.source,
            found=", ".join(damaged[:8]) + (", ..." if len(damaged) > 8 else ""),
            remedy="the file is damaged (or was saved with checksums switched off): get it again from where it came",
        )
    return sum(storage.nbytes for storage in names_of)


def what_to_verify(checkpoint: "Checkpoint") -> dict[ByteRange, list[str]]:
    """The storages of all tensors, with their names. Raises `ChecksumError` where one of them has no checksum."""
    names_of: dict[ByteRange, list[str]] = {}
    for name, spec in checkpoint.items():
        for part in pieces(spec.stored):
            if isinstance(part, StoredTensor) and part.storage.nbytes:
                names_of.setdefault(part.storage, []).append(name)
    expected = checkpoint.checksums
    without = [names[0] for storage, names in names_of.items() if storage not in expected]
    if without or not names_of:
        listed = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        raise ChecksumError(
            "there is nothing to verify the tensors against",
            where=checkpoint.source,
            expected="a checksum for every tensor",
            found=f"none for {listed}" if expected else f"{checkpoint.format}, which keeps none",
            remedy="load without verify=True",
        )
    return names_of


def _crc32(storage: ByteRange, stamp: Stamp | None) -> int:
    crc, at, end = 0, storage.start, storage.start + storage.nbytes
    buffer = bytearray(min(_CHUNK_BYTES, storage.nbytes))
    view = memoryview(buffer)
    try:
        descriptor = open_unchanged(storage.path, stamp)
        try:
            while at < end:
                got = system.preadv(descriptor, [view[: end - at]], at)
                if not got:
                    raise ReadFailedError("the file ends before the tensor does", where=f"{storage.path}, byte {at}")
                crc = zlib.crc32(view[:got], crc)
                at += got
            check_unchanged(descriptor, storage.path, stamp)
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, ReadFailedError):
            raise
        raise ReadFailedError("reading failed", where=f"{storage.path}, byte {at}", found=error) from error
    return crc
