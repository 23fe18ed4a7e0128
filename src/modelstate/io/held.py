"""Files that are held while they are read into memory whose old values are not kept.

A load that reads straight into the memory of a live model is all or nothing only if no read fails. So all that can make
a read fail comes before the first byte is written:

1. What the page cache lacks is read into it (`bring_into_cache`). An I/O error shows here.
2. A read lease is taken on each file. A process that opens a file for writing, or truncates it, waits until the lease
   is released, or until `/proc/sys/fs/lease-break-time` is over (usually 45 seconds). Where a process has the file open
   for writing already, there is no lease.
3. Each file is compared with its fingerprint. From here on its bytes are those of the checkpoint.

Then the bytes are copied from locked maps (`modelstate.io.locked`), or read from the page cache alone: a page that was
evicted meanwhile is read from the disk into a buffer before memory is written to.

What remains: a page is evicted after the first step, and cannot be read again; or a writer waits, and the process is
stopped for longer than the break time. Both are errors (`ReadFailedError`), and `HeldFiles.failed` has the ranges.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from modelstate.errors import ReadFailedError
from modelstate.io import lease, linux, system
from modelstate.io.files import Descriptor, FileFingerprint, check_unchanged, open_unchanged, remedy_for_limit
from modelstate.io.locked import LEAST_COPIED_BYTES, LockedFiles
from modelstate.io.memory import new_mapping
from modelstate.io.prefetch import CacheLook, bring_into_cache
from modelstate.spec import ByteRange

_FILE_SYSTEMS = frozenset(
    {
        0xEF53: "ext2, ext3, ext4",
        0x58465342: "XFS",
        0x9123683E: "Btrfs",
        0xF2F52010: "F2FS",
        0xCA451A4E: "bcachefs",
        0x01021994: "tmpfs",
        0x794C7630: "overlayfs",
    }
)
"""File systems whose files only this machine changes. Others may grant a lease that other machines do not know of."""
_LEAST_SECONDS = 5.0
"""With a shorter break time there are no leases."""
_BYTES_PER_SECOND = 2e9
"""The least speed of a read from the page cache. A read must take at most half of the break time."""
_SCRATCH_BYTES = 1 << 20

_Read = Callable[[int, Sequence[memoryview], int], int]
"""As `os.preadv`."""


class _Scratch:
    """A buffer that all files of one load share: hardly any read needs it, so its pages are made when one does."""

    def __init__(self) -> None:
        self._memory, self._lock = memoryview(new_mapping(_SCRATCH_BYTES)), threading.Lock()

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `os.preadv`, but the buffers are written to only when the read has succeeded."""
        with self._lock:
            count = system.preadv(descriptor, [self._memory[: sum(map(len, buffers))]], offset)
            done = 0
            for buffer in buffers:
                part = self._memory[done : min(done + len(buffer), count)]
                buffer[: len(part)] = part
                done += len(part)
            return count


class HeldFile:
    """An open file with a read lease: a `RangeFile` of the engine."""

    def __init__(self, path: str, descriptor: Descriptor, seconds: float, read_missing: _Read) -> None:
        self.path, self.descriptor = path, descriptor
        self.failed: list[ByteRange] = []
        """The ranges that could not be read. Their destinations are unchanged, or have bytes of another file."""
        self._seconds = seconds
        """The time for which a writer waits."""
        self._intact_at = time.monotonic()
        """A time at which no writer waited."""
        self._reads_cached = True
        self._read_missing = read_missing

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """As `RangeFile.read_into`."""
        try:
            count = self._read_cached(buffers, offset) or self._read_again(buffers, offset)
            self.check_unchanged()
        except ReadFailedError:
            self.failed.append(ByteRange(self.path, offset, sum(map(len, buffers))))
            raise
        return count

    def _read_cached(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads what the page cache has at once; 0 where it lacks the first byte."""
        if not self._reads_cached:
            return 0
        try:
            return system.preadv_cached(self.descriptor, buffers, offset)
        except OSError as error:
            self._reads_cached = error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
            return 0

    def _read_again(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            if not self._reads_cached:
                return system.preadv(self.descriptor, buffers, offset)
            return self._read_missing(self.descriptor, buffers, offset)
        except OSError as error:
            raise ReadFailedError(
                "reading failed", where=f"{self.path}, byte {offset}", found=error, remedy=remedy_for_limit(error)
            ) from error

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a writer may have changed the file: it has waited for the whole break time."""
        now = time.monotonic()
        if lease.is_intact(self.descriptor):
            self._intact_at = now
        elif time.monotonic() - self._intact_at > self._seconds:
            raise ReadFailedError(
                "a process that waited to write to the file was let go on before the read was over",
                where=self.path,
                expected=f"at most {self._seconds:.0f} seconds",
                remedy="open the checkpoint again, when nothing writes to it any more",
            )

    def close(self) -> None:
        """Releases the lease: a writer that waits goes on."""
        lease.release(self.descriptor)


class HeldFiles(dict[str, HeldFile]):
    """The files that are held, by path. `refusal` says why they are not, and then there are none."""

    refusal = ""

    def __init__(self) -> None:
        super().__init__()
        self.locked = LockedFiles(self, ())

    @property
    def failed(self) -> list[ByteRange]:
        """The ranges that could not be read, and whose destinations are in doubt."""
        return [extent for file in self.values() for extent in file.failed]

    def hold(
        self,
        extents: Sequence[ByteRange],
        fingerprints: Mapping[str, FileFingerprint],
        read_missing: _Read = system.preadv,
    ) -> str:
        """Takes a lease on the file of each range; returns the reason where one cannot be had."""
        if any(extent.path in fingerprints and fingerprints[extent.path].is_remote for extent in extents):
            return "it is not a file of this machine"
        nbytes = sum(extent.nbytes for extent in extents)
        seconds = lease.safe_seconds()
        if seconds < max(_LEAST_SECONDS, 2 * nbytes / _BYTES_PER_SECOND):
            return "the kernel lets a writer wait for a shorter time than the read may take"
        for path in dict.fromkeys(extent.path for extent in extents):
            descriptor = open_unchanged(path, fingerprints.get(path))
            self[path] = HeldFile(path, descriptor, seconds, read_missing)
            if linux.filesystem_type(descriptor) not in _FILE_SYSTEMS:
                return "other machines may write to its file system"
            if refusal := lease.hold_for_now(descriptor):
                return refusal
            check_unchanged(descriptor, path, fingerprints.get(path))
        return ""

    def lock_all(self, extents: Sequence[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> bool:
        """Holds the files, and locks all ranges in memory, where that is fast: from then on, no read can fail.

        Returns whether it has; otherwise it holds nothing.
        """
        if sum(extent.nbytes for extent in extents) < LEAST_COPIED_BYTES:
            return False
        if not self.hold(extents, fingerprints, _Scratch().read):
            self.locked = LockedFiles(self, extents)
            if self.locked.lock_all():
                return True
        self.close()
        return False

    def close(self) -> None:
        """Unlocks what is locked, and releases all leases."""
        self.locked.close()
        while self:
            self.popitem()[1].close()


def why_not_held(extents: Sequence[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> str:
    """Why files cannot be held; empty where they can be. Takes the leases, and releases them at once.

    Raises `ReadFailedError` where a file has changed.
    """
    files = HeldFiles()
    try:
        return files.hold(extents, fingerprints)
    finally:
        files.close()


@contextmanager
def locked_files(extents: Sequence[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> Iterator[HeldFiles]:
    """Yields files that are held and locked in memory as a whole, where that is fast; without files elsewhere.

    For values that are read before the commit: what is not copied from the maps is read as from any file.
    """
    held = HeldFiles()
    try:
        with suppress(ReadFailedError, MemoryError):  # the read itself reports it
            held.lock_all(extents, fingerprints)
        yield held
    finally:
        held.close()


@contextmanager
def held_files(
    extents: Sequence[ByteRange],
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], None] = lambda _: None,
    look: CacheLook | None = None,
) -> Iterator[HeldFiles]:
    """Brings ranges of files into the page cache, and holds the files.

    Args:
        extents: The ranges that are going to be read.
        fingerprints: What each file must be.
        on_read: Called with numbers of bytes that are brought in from the disk; may raise.
        look: A look at the files that has been started (`look_ahead`).

    Yields:
        The files, for `read_ranges` and `stream`; without files, and with a `refusal`, where a read could fail.

    Raises:
        ReadFailedError: A range cannot be read, or a file has changed.
        MemoryBudgetError: The system has no memory for a buffer of 1 MiB.
    """
    held = HeldFiles()
    try:
        is_locked = look is None and held.lock_all(extents, fingerprints)
        if not is_locked and bring_into_cache(extents, fingerprints, on_read, look):
            held.refusal = held.hold(extents, fingerprints, _Scratch().read)
            held.locked = LockedFiles(held, extents)
        elif not is_locked:
            held.refusal = "the page cache has not all of it"
        if held.refusal:
            held.close()
        yield held
    finally:
        held.close()
