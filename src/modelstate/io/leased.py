"""Files that are read within a commit, into memory whose old values are not kept.

A load that reads straight into the memory of a live module is all or nothing only if no read fails. So all that can
make a read fail comes before the first byte is written:

1. What the page cache lacks is read into it. An I/O error shows here.
2. A read lease is taken on each file. A process that opens the file for writing, or truncates it, waits until the lease
   is released, or until `/proc/sys/fs/lease-break-time` is over (usually 45 seconds). Where a process has the file open
   for writing already, there is no lease.
3. Each file is compared with its fingerprint. From here on its bytes are those of the checkpoint.

Then the bytes are read from the page cache. What remains: the kernel evicts a page after the first step, and the disk
does not return it again; or a writer waits, and the process is stopped for longer than the break time. Both are errors,
after which some values are old or damaged. `in_place=False` excludes them.

The files are not copied from a map: each page of a map costs a page fault, and a disk that fails ends the process with
SIGBUS.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from modelstate.errors import ReadFailedError
from modelstate.io import lease, linux, system
from modelstate.io.engine import LocalFile, for_each, open_files, read_fully, read_threads
from modelstate.io.files import FileFingerprint
from modelstate.io.prefetch import merged, most_to_read
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
_LOOK_BYTES = 1 << 30
"""What the kernel is asked about at once. Between two calls, an interrupt ends the load."""
_READ_BYTES = 1 << 20
"""What a thread reads at once of a range that the page cache lacks."""


class LeasedFile(LocalFile):
    """An open file with a read lease."""

    _leased_at = 0.0

    def lease(self) -> str:
        """Takes the lease. Returns an empty string, or the reason why there is none.

        Raises `ReadFailedError` where the file has changed.
        """
        if linux.filesystem_type(self.descriptor) not in _FILE_SYSTEMS:
            return "other machines may write to its file system"
        if refusal := lease.hold_for_now(self.descriptor):
            return refusal
        self._leased_at = time.monotonic()
        super().check_unchanged()
        return ""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """As `RangeFile.read_into`. What the page cache does not return at once is read again."""
        try:
            count = system.preadv_cached(self.descriptor, buffers, offset)
        except OSError:
            count = 0
        return count or super().read_into(buffers, offset)

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a writer may have changed the file: it has waited for the whole break time."""
        seconds = lease.safe_seconds()
        if not lease.is_intact(self.descriptor) and time.monotonic() - self._leased_at > seconds:
            raise ReadFailedError(
                "a process that waited to write to the file was let go on before the read was over",
                where=self.path,
                expected=f"at most {seconds:.0f} seconds",
                remedy="open the checkpoint again, when nothing writes to it any more",
            )

    def close(self) -> None:
        """Releases the lease: a writer that waits goes on."""
        lease.release(self.descriptor)


class LeasedFiles(dict[str, LeasedFile]):
    """The files that are leased, by path. `refusal` says why they are not, and then there are none."""

    refusal = ""

    def lease(self, extents: Sequence[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> None:
        """Opens the file of each range, and takes the lease. Raises `ReadFailedError` where a file has changed."""
        if any(extent.path in fingerprints and fingerprints[extent.path].is_remote for extent in extents):
            self.refusal = "it is not a file of this machine"
            return
        nbytes = sum(extent.nbytes for extent in extents)
        if lease.safe_seconds() < max(_LEAST_SECONDS, 2 * nbytes / _BYTES_PER_SECOND):
            self.refusal = "the kernel lets a writer wait for a shorter time than the read may take"
            return
        for path in dict.fromkeys(extent.path for extent in extents):
            self[path] = LeasedFile(path, fingerprints.get(path))
            if refusal := self[path].lease():
                self.close()
                self.refusal = refusal
                return

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a writer may have changed a file."""
        for file in self.values():
            file.check_unchanged()

    def close(self) -> None:
        """Releases all leases."""
        while self:
            self.popitem()[1].close()


def why_no_lease(extents: Sequence[ByteRange], fingerprints: Mapping[str, FileFingerprint]) -> str:
    """Why files cannot be leased; empty where they can be. Takes the leases, and releases them at once.

    Raises `ReadFailedError` where a file has changed.
    """
    files = LeasedFiles()
    try:
        files.lease(extents, fingerprints)
        return files.refusal
    finally:
        files.close()


@contextmanager
def leased_files(
    extents: Sequence[ByteRange],
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], object] = lambda _: None,
) -> Iterator[LeasedFiles]:
    """Brings ranges of files into the page cache, and leases the files.

    Args:
        extents: The ranges that are going to be read.
        fingerprints: What each file must be.
        on_read: Called with numbers of bytes that are brought in from the disk; may raise.

    Yields:
        The files, for `read_ranges` and `stream`; without files, and with a `refusal`, where a read could fail.

    Raises:
        ReadFailedError: A range cannot be read, or a file has changed.
    """
    files = LeasedFiles()
    try:
        if bring_into_cache(extents, fingerprints, on_read):
            files.lease(extents, fingerprints)
        else:
            files.refusal = "the page cache has not all of it"
        yield files
    finally:
        files.close()


def bring_into_cache(
    extents: Sequence[ByteRange],
    fingerprints: Mapping[str, FileFingerprint],
    on_read: Callable[[int], object] = lambda _: None,
) -> bool:
    """Reads what the page cache lacks of the ranges, on several threads, and waits.

    Returns whether the page cache has all of the ranges now. It has not where they do not fit, and where the kernel
    does not say what it has.

    Args:
        extents: Ranges of files.
        fingerprints: What each file must be.
        on_read: Called with numbers of bytes that were read, by one thread at a time; may raise to end the reads.

    Raises:
        ReadFailedError: A range cannot be read, or a file has changed.
    """
    missing: list[ByteRange] = []
    with open_files((extent.path for extent in extents), fingerprints) as files:
        for path, first, nbytes in merged(extents):
            file = files[path]
            if not isinstance(file, LocalFile):
                return False
            for start in range(first, first + nbytes, _LOOK_BYTES):
                # `cachestat` is faster, and also counts pages whose read is not over or has failed.
                pages = linux.resident(file.descriptor, start, min(_LOOK_BYTES, first + nbytes - start))
                if pages is None:
                    return False
                missing += _absent(pages, path, start)
        if not missing:
            return True
        if sum(span.nbytes for span in missing) > most_to_read():
            return False
        pieces = [
            ByteRange(path, at, min(_READ_BYTES, start + nbytes - at))
            for path, start, nbytes in missing
            for at in range(start, start + nbytes, _READ_BYTES)
        ]

        @contextmanager
        def worker() -> Iterator[Callable[[ByteRange], None]]:
            buffer = memoryview(bytearray(_READ_BYTES))

            def read(piece: ByteRange) -> None:
                read_fully(files[piece.path], [buffer[: piece.nbytes]], piece.start, 1)

            yield read

        for_each(pieces, worker, min(read_threads(), len(pieces)), lambda piece, _: on_read(piece.nbytes))
    return True


def _absent(pages: bytes, path: str, start: int) -> Iterator[ByteRange]:
    """The runs of pages that are 0, of those from the one on that has the byte `start`."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    at = pages.find(b"\0")
    while at >= 0:
        present = pages.find(b"\1", at)
        until = len(pages) if present < 0 else present
        yield ByteRange(path, first + at * mmap.PAGESIZE, (until - at) * mmap.PAGESIZE)
        at = pages.find(b"\0", until)
