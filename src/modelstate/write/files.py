"""Files that are new: written, synced and closed, or taken away again; and the directories that name them."""

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from modelstate.errors import ModelStateError, WriteFailedError
from modelstate.write import system

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems answer that have no way to sync a directory."""
_NO_PREALLOCATION = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENODEV)
_UNTOUCHED = "what was there before is untouched"
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_REMEDIES = {
    errno.ENOSPC: f"free some space, or write to another disk; {_UNTOUCHED}",
    errno.EDQUOT: f"free some of your quota, or write to another disk; {_UNTOUCHED}",
    errno.EIO: f"look at the disk (dmesg), or write to another one; {_UNTOUCHED}",
    errno.ENOENT: "make the directory first",
    errno.ENOTDIR: "give a path in a directory",
    errno.EACCES: "ask for the permission to write to the directory, or write to another one",
    errno.EPERM: "ask for the permission to write to the directory, or write to another one",
    errno.EROFS: "write to another disk",
    errno.ENAMETOOLONG: "give the file a shorter name",
}


class Output:
    """An open file that is written to at any place, by any thread."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor, self.path = descriptor, path
        self.nbytes = 0
        """To the end of what has been written at the farthest."""
        self._growing = threading.Lock()
        self.is_synced = False

    def reserve(self, nbytes: int) -> None:
        """Has the file system set so many bytes aside, so that a full disk is known before anything is written."""
        try:
            system.fallocate(self.descriptor, nbytes)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of it."""
        left = memoryview(data)
        while left:
            count = system.pwritev(self.descriptor, [left], offset)
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            offset, left = offset + count, left[count:]
        with self._growing:
            self.nbytes = max(self.nbytes, offset)

    def sync(self) -> None:
        """Has what was written put on the disk."""
        system.fsync(self.descriptor)
        self.is_synced = True

    def append(self, data: bytes | memoryview) -> None:
        """Writes behind what has been written."""
        self.write_at(self.nbytes, data)


@contextmanager
def new_file(path: str, mode: int | None = None) -> Iterator[Output]:
    """A file that is not there yet; it is on the disk when the block ends, and gone when it raises.

    Its name is durable only when its directory has been synced, too. With `mode` it has exactly these permission bits,
    and at no time more of them; otherwise those of new files.
    """
    output = Output(system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode), path)
    try:
        try:
            if mode is not None:
                _set_mode(output, mode)
            yield output
            if not output.is_synced:
                output.sync()
        finally:
            try:
                system.close(output.descriptor)
            except OSError:
                if not output.is_synced:  # else nothing can be lost any more
                    raise
    except BaseException:
        remove_all([path])
        raise


def _set_mode(output: Output, mode: int) -> None:
    """Sets the permission bits that the umask has taken off, where the file system has such bits."""
    try:
        system.fchmod(output.descriptor, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    descriptor = system.open(path or ".", os.O_RDONLY)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        with suppress(OSError):  # the sync has been answered
            system.close(descriptor)


def remove_all(paths: Iterable[str]) -> None:
    """Takes files away, as many as can be; an interrupt waits until all have been tried."""
    interrupt: BaseException | None = None
    for path in paths:
        for _ in range(2):
            try:
                system.unlink(path)
            except OSError:
                pass
            except BaseException as error:
                interrupt = error
                continue
            break
    if interrupt is not None:
        raise interrupt


@contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Within it an `OSError` comes through as a `WriteFailedError` that names the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ModelStateError):
            raise
        raise write_failed(path, error) from error


def write_failed(path: str, error: OSError) -> WriteFailedError:
    """The error of a system call, in the words of who saves."""
    return WriteFailedError(
        "the file cannot be written", where=path, found=error, remedy=_REMEDIES.get(error.errno or 0, _UNTOUCHED)
    )
