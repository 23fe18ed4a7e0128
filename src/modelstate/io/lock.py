"""The lock that keeps a second writer out of a directory.

It is an flock lock on the file `.lock`: the operating system releases it when the process ends, however it ends. Such a
lock belongs to the open file, which a forked child shares. So a lock is released by `LOCK_UN`, which holds for all
copies of the descriptor, and a forked child closes its copies: they would keep a lock after its owner was killed.

The file stays when the lock is released. If it were removed, two other processes could lock two files of the same name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from contextlib import suppress
from datetime import datetime
from functools import partial

from modelstate.errors import LockedError, ModelStateError, StoreMovedError, WriteFailedError
from modelstate.forks import at_fork
from modelstate.io import system
from modelstate.io.system import Descriptor
from modelstate.text_format import printable

LOCK_FILE = ".lock"
_MAX_TEXT_BYTES = 4096
_TRIES = 100
WRITE_REMEDIES = {
    errno.ENOENT: "create the directory first; if it is there, its file system takes no new files",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "give a path in a directory"),  # a file stands in the place of one
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "ask for the permission to write to the directory, or take another one"
    ),
    errno.EROFS: "take a directory on another disk",
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write to another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or write smaller files: shard_size_bytes=",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or close some",
    errno.EIO: "look at the disk (dmesg), or write to another one",
    errno.ENAMETOOLONG: "give the file a shorter name",
}
"""What to do where nothing can be written."""
_REMEDIES = WRITE_REMEDIES | {
    errno.ELOOP: f"remove {LOCK_FILE}, which is a symbolic link",
    errno.EISDIR: f"remove {LOCK_FILE}, which is a directory",
    errno.ENXIO: f"remove {LOCK_FILE}, which is a pipe, a socket or a device",
}

_locking: set[LockDescriptor] = set()
"""Descriptors of this process that hold a lock, or wait for one; a forked child closes them. No lock guards the set,
since a signal handler may save in the middle of another save; each change is a single operation."""


class LockDescriptor(Descriptor):
    """The descriptor of an open file that is locked, or will be. A forked child closes its copy."""

    def __new__(cls, descriptor: int) -> LockDescriptor:
        self = super().__new__(cls, descriptor)
        _locking.add(self)
        return self

    def close(self) -> None:
        """Unlocks and closes the file, if it is open."""
        if self.is_open:
            with suppress(OSError):
                fcntl.flock(self, fcntl.LOCK_UN)
            _locking.discard(self)
            super().close()


def _close_in_child() -> None:
    while _locking:
        Descriptor.close(_locking.pop())  # to unlock the file would unlock it for the parent


at_fork(in_child=_close_in_child)


class WriterLock:
    """The right of one writer to change a directory: one object of one process at a time.

    An object that is garbage collected releases its lock.

    Args:
        directory: The directory to lock.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self._path = os.path.join(self.directory, LOCK_FILE)
        self._opened = list[LockDescriptor]()
        """The descriptors of the directory, whose inode no other one gets while it is open, and of the lock file."""

    @property
    def held(self) -> bool:
        """Whether this object holds the lock. The copy in a forked child does not."""
        return bool(self._opened) and self._opened[0].is_open

    def acquire(self) -> None:
        """Acquires the lock without waiting.

        Raises:
            LockedError: Another writer holds the lock; the error names it and since when.
            WriteFailedError: The directory cannot be written to, or its file system has no locks.
        """
        opened = list[LockDescriptor]()
        try:
            opened.append(LockDescriptor.of(os.open, self.directory, os.O_RDONLY | os.O_DIRECTORY))
            for _ in range(_TRIES):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                opened.append(LockDescriptor.of(partial(os.open, dir_fd=opened[0]), LOCK_FILE, flags, 0o666))
                if not stat.S_ISREG(os.fstat(opened[1]).st_mode):
                    raise OSError(errno.ENXIO, "not a regular file")
                self._lock(opened[1])
                if is_at(opened[1], self._path):
                    break
                opened.pop().close()  # the file was removed or replaced between the two calls
            else:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            with suppress(OSError):  # a full disk: only the text of an error depends on it
                os.ftruncate(opened[1], 0)
                os.pwrite(opened[1], f"{json.dumps(holder)}\n".encode(), 0)
            weakref.finalize(self, _release, opened).atexit = False  # the end of the process releases it
            self._status, self._opened = os.fstat(opened[0]), opened
        except BaseException as error:
            _close_all(opened)
            if isinstance(error, OSError) and not isinstance(error, ModelStateError):
                raise WriteFailedError(
                    "the directory cannot be locked for writing",
                    where=self.directory,
                    found=error,
                    remedy=_REMEDIES.get(error.errno or 0, ""),
                ) from error
            raise

    def _lock(self, descriptor: Descriptor) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, _MAX_TEXT_BYTES, 0)
            raise self._locked(holder_text(text, f"{LOCK_FILE} does not name the process that has locked it")) from None
        except OSError as error:
            if error.errno not in system.UNSUPPORTED:
                raise
            raise WriteFailedError(
                "the file system has no locks, which keep two writers apart",
                where=self.directory,
                found=error,
                remedy="mount it with locks (Lustre: -o flock; NFS: with lockd), or take a directory on another file "
                "system",
            ) from error

    def release(self) -> None:
        """Releases the lock. Does nothing where this object does not hold it."""
        _release(self._opened)

    def confirm(self) -> None:
        """Checks that this object still holds the lock of the directory at its path.

        Raises:
            LockedError: This object does not have the lock, or the lock file has been removed.
            StoreMovedError: As `check_directory`; this object still holds the lock of the directory that was moved.
        """
        if not self.held:
            raise self._locked("this object does not have it, or it is the copy in a forked process")
        self.check_directory()
        if not is_at(self._opened[1], self._path):
            raise self._locked(f"{LOCK_FILE} has been removed or replaced")

    def check_directory(self) -> None:
        """Raises `StoreMovedError` where the directory that this object has locked is no longer at its path."""
        if self.held:
            check_directory(self.directory, self._status)

    def _locked(self, found: str) -> LockedError:
        other = "close the other Store of this process (close(), or `with`)"
        if not found.startswith(_THIS_PROCESS):
            other = "end the other writer"
        return LockedError(
            "another writer uses this directory",
            where=self.directory,
            expected="one writer at a time",
            found=found,
            remedy=f"{other}, or take another directory; a writer that has ended keeps no lock",
        )


def _release(opened: list[LockDescriptor]) -> None:
    """Unlocks and closes what a lock has opened. Another call does nothing, nor does one in a forked child."""
    if opened and opened[0].is_open:
        with suppress(OSError):  # a disk that fails
            os.ftruncate(opened[1], 0)
    _close_all(opened)


def _close_all(opened: list[LockDescriptor]) -> None:
    while opened:
        opened.pop().close()


def check_directory(directory: str, before: os.stat_result) -> None:
    """Raises `StoreMovedError` where the path has no directory or another one than `before`."""
    try:
        if os.path.samestat(before, os.stat(directory)):
            return
        found = "something else is there"
    except (FileNotFoundError, NotADirectoryError):
        found = "nothing is there"
    except OSError:  # the directory may be there: what is done in it next raises the error
        return
    raise StoreMovedError(
        "the store's directory has been renamed, removed or replaced since it was taken into use",
        where=directory,
        expected="the directory that this store has used so far",
        found=found,
        remedy="put it back, and save again; or make another Store, of the path where it is now or of a new one",
    )


def is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


_THIS_PROCESS = "this process"


def holder_text(content: bytes, unknown: str) -> str:
    """Describes the holder of a lock, as it has written itself; returns `unknown` where it has not."""
    try:
        holder = json.loads(content)
        pid, host, since = holder["pid"], holder["host"], holder["since"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return unknown
    try:
        when = f"since {datetime.fromtimestamp(since).astimezone().isoformat(' ', 'seconds')}"
    except (TypeError, ValueError, OverflowError, OSError):
        when = "since a time that cannot be read"
    is_own = pid == os.getpid() and host == socket.gethostname()
    process = f"{_THIS_PROCESS} ({pid})" if is_own else f"process {pid} on {host}"
    return printable(f"{process}, {when}")[:300]
