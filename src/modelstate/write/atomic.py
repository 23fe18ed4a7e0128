"""A file that is there in full, on the disk, or not at all.

It is written beside its place under a name of its own, synced, renamed, and the directory is synced: whoever opens the
path sees the old file or the new one, also after a crash. Maps of the old file keep showing it. A symbolic link is
replaced, not followed, so no other file ever changes. A process that is killed leaves its unfinished file behind, as
`.NAME.*.unfinished`.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from modelstate.errors import ModelStateError, SaveTargetError, TargetExistsError, WriteFailedError

SUFFIX = ".unfinished"
_BEGINNING_BYTES = 200
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems answer that have no way to sync a directory."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk; what was there before is untouched",
    errno.EDQUOT: "free some of your quota, or write to another disk; what was there before is untouched",
    errno.ENOENT: "make the directory first",
    errno.ENOTDIR: "give a path in a directory",
    errno.EACCES: "ask for the permission to write to the directory, or write to another one",
    errno.EROFS: "write to another disk",
    errno.ENAMETOOLONG: "give the file a shorter name",
}


class Output:
    """An open file that is written from its beginning to its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.nbytes = 0
        """Bytes that have been written."""

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while rest:
            count = os.write(self._descriptor, rest)
            rest = rest[count:]
            self.nbytes += count


@contextmanager
def atomic_file(path: str, *, overwrite: bool) -> Iterator[Output]:
    """A file to write to, which comes to be at the path when the block ends, and does not when it raises.

    Raises `TargetExistsError` where something is at the path that may not be replaced, `SaveTargetError` where it is
    no file, and `WriteFailedError` for an I/O error, which takes away what was written.
    """
    check(path, overwrite=overwrite)
    directory, name = os.path.split(path)
    beside = os.path.join(directory, f".{_beginning(name)}.{secrets.token_hex(6)}{SUFFIX}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise _failed(path, error) from error
    try:
        try:
            yield Output(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _put(beside, path, overwrite)
        _sync(directory)
    except OSError as error:
        if isinstance(error, ModelStateError):
            raise
        raise _failed(path, error) from error
    finally:
        with suppress(OSError):
            os.unlink(beside)  # nothing is there any more after the rename


def _beginning(name: str) -> str:
    """As much of a name as leaves room for more: file systems count bytes."""
    return name.encode("utf-8", "surrogateescape")[:_BEGINNING_BYTES].decode("utf-8", "ignore")


def check(path: str, *, overwrite: bool) -> None:
    """Raises what keeps a file from being put at the path, before anything is written."""
    if os.path.isdir(path) or (os.path.exists(path) and not os.path.isfile(path)):
        kind = "a directory" if os.path.isdir(path) else "no ordinary file"
        raise SaveTargetError("a file cannot be put here", where=path, found=kind, remedy="give the path of a file")
    if not overwrite and os.path.lexists(path):
        raise _exists(path)


def _put(beside: str, path: str, overwrite: bool) -> None:
    if overwrite:
        os.replace(beside, path)
        return
    try:
        # Unlike a rename, a link never replaces what somebody else has put there meanwhile.
        os.link(beside, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check(path, overwrite=False)
        os.replace(beside, path)


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _exists(path: str) -> TargetExistsError:
    return TargetExistsError(
        "something is there already", where=path, remedy="take another path, or overwrite=True to replace it"
    )


def _failed(path: str, error: OSError) -> WriteFailedError:
    return WriteFailedError(
        "the file cannot be written", where=path, found=error, remedy=_REMEDIES.get(error.errno or 0, "")
    )
