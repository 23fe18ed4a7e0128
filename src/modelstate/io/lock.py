"""The lock that keeps a second writer out of a directory.

It is a POSIX record lock on the file `.lock`: the operating system releases it when the process ends, however it ends,
and a forked child does not inherit it. Two properties of record locks need care. They never conflict within one
process, so `_held` lists the directories that this process has locked. And a process loses its lock when it closes any
descriptor of the file, so the lock file of a listed directory is not opened again; `confirm` finds out whether other
code did that.

The file stays when the lock is released. If it were removed, two other processes could lock two files of the same name.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Self

from modelstate.errors import StoreAccessError, StoreLockedError, StoreMovedError
from modelstate.text_format import printable

LOCK_FILE = ".lock"
_MAX_TEXT_BYTES = 4096
_TRIES = 100
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_REMEDIES = {
    errno.ENOENT: "make the directory first",
    errno.ENOTDIR: "give the path of a directory",
    errno.EACCES: "ask for the permission to write to the directory, or take another one",
    errno.EPERM: "ask for the permission to write to the directory, or take another one",
    errno.EROFS: "take a directory on another disk",
    errno.ELOOP: f"remove {LOCK_FILE}, which is a symbolic link",
    errno.EISDIR: f"remove {LOCK_FILE}, which is a directory",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
}
_MOUNT = "mount it with locks (Lustre: -o flock; NFS: with lockd), or take a directory on another file system"

_Key = tuple[int, int]
"""Device and inode of a directory, since a directory may have many paths."""


@dataclass(slots=True)
class _Held:
    descriptor: int
    directory: int
    """A descriptor of the directory: while it is open, no other directory gets the inode."""
    since: float
    locked: bool
    """False where the file system has no locks and `allow_unlocked` is set."""


_guard = threading.RLock()
_held: dict[_Key, _Held] = {}
_watching_forks = False


class WriterLock:
    """The right of one writer to change a directory: one object of one process at a time.

    An object that is garbage collected releases its lock.

    Args:
        directory: The directory to lock.
        allow_unlocked: Whether a file system without locks is accepted. Then the lock only keeps the writers of this
            process apart, and `exclusive` is False.
    """

    def __init__(self, directory: str | os.PathLike[str], *, allow_unlocked: bool = False) -> None:
        self.directory = os.fspath(directory)
        self._allow_unlocked = allow_unlocked
        self._key: _Key = (0, 0)
        self._mine: _Held | None = None
        self._finalizer: weakref.finalize[[_Key, _Held], WriterLock] | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock. The copy in a forked child does not."""
        return self._mine is not None and _held.get(self._key) is self._mine

    @property
    def exclusive(self) -> bool:
        """Whether this object holds the lock, and writers of other processes are kept out as well."""
        return self.held and self._mine is not None and self._mine.locked

    def acquire(self) -> None:
        """Acquires the lock without waiting.

        Raises:
            StoreLockedError: Another writer holds the lock; the error names it and since when.
            StoreAccessError: The directory cannot be written to, or its file system has no locks.
        """
        with _guard:
            _watch_forks()
            try:
                directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise self._no_access(error) from error
            try:
                status = os.fstat(directory)
                key = status.st_dev, status.st_ino
                if key in _held:
                    raise self._locked(f"this process ({os.getpid()}), {_since(_held[key].since)}")
                mine = self._lock_file(directory)
            except BaseException:
                os.close(directory)
                raise
            _held[key] = mine
            self._key, self._mine = key, mine
            self._finalizer = weakref.finalize(self, _release, key, mine)
            self._finalizer.atexit = False  # the end of the process releases it, after everything else

    def release(self) -> None:
        """Releases the lock. Does nothing where this object does not hold it."""
        if self._finalizer is not None:
            self._finalizer()
        self._mine = None

    def confirm(self) -> None:
        """Checks that this object still holds the lock, and acquires it again if it was lost and is free.

        The lock is lost when other code of this process opens and closes the lock file, for example by copying the
        directory, and when the file is removed.

        Raises:
            StoreLockedError: The lock is no longer this object's.
            StoreMovedError: As `check_directory`; this object still holds the lock of the directory that was moved.
        """
        with _guard:
            mine = self._mine
            if mine is None or not self.held:
                raise self._locked("this object does not have it, or it is the copy in a forked process")
            self.check_directory()
            if not _is_at(mine.descriptor, self._path):
                raise self._locked(f"{LOCK_FILE} has been removed or replaced")
            if mine.locked:
                self._take(mine.descriptor)

    def check_directory(self) -> None:
        """Raises `StoreMovedError` where the directory that this object has locked is no longer at its path."""
        with _guard:
            mine = self._mine
            if mine is None or not self.held:
                return
            try:
                check_directory(self.directory, os.fstat(mine.directory))
            except StoreAccessError:
                raise
            except OSError as error:
                raise self._no_access(error) from error

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    @property
    def _path(self) -> str:
        return os.path.join(self.directory, LOCK_FILE)

    def _lock_file(self, directory: int) -> _Held:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _ in range(_TRIES):
            try:
                descriptor = os.open(LOCK_FILE, flags, 0o666, dir_fd=directory)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    raise self._not_a_file() from error
                raise self._no_access(error) from error
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._not_a_file()
                locked = self._take(descriptor)
                if _is_at(descriptor, self._path):
                    now = time.time()
                    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
                    with suppress(OSError):  # a full disk: only the text of an error depends on it
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, holder.encode(), 0)
                    return _Held(descriptor, directory, now, locked)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the file was removed or replaced between the two calls
        raise self._no_access(OSError(errno.ESTALE, os.strerror(errno.ESTALE)))

    def _take(self, descriptor: int) -> bool:
        """Locks the open file. Returns False where the file system has no locks, and `allow_unlocked` is set."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._locked(_holder(descriptor)) from None
            if error.errno not in _NO_LOCKS:
                raise self._no_access(error) from error
            if not self._allow_unlocked:
                raise self._no_locks(error) from error
            return False
        return True

    def _locked(self, found: str) -> StoreLockedError:
        return StoreLockedError(
            "another writer uses this directory",
            where=self.directory,
            expected="one writer at a time",
            found=found,
            remedy="end the other writer, or take another directory; a writer that has ended keeps no lock",
        )

    def _no_locks(self, error: OSError) -> StoreAccessError:
        return StoreAccessError(
            "the file system has no locks, which keep two writers apart",
            where=self.directory,
            found=error,
            remedy=_MOUNT,
        )

    def _not_a_file(self) -> StoreAccessError:
        return StoreAccessError(
            "the directory cannot be locked for writing",
            where=self._path,
            expected="a regular file, or none",
            found="a pipe, a socket or a device",
            remedy=f"remove {LOCK_FILE}",
        )

    def _no_access(self, error: OSError) -> StoreAccessError:
        return StoreAccessError(
            "the directory cannot be locked for writing",
            where=self.directory,
            found=error,
            remedy=_REMEDIES.get(error.errno or 0, ""),
        )


def check_directory(directory: str, before: os.stat_result) -> None:
    """Raises `StoreMovedError` where the path has no directory or another one than `before`, and `OSError`."""
    try:
        status = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise _moved(directory, "nothing is there") from None
    if not os.path.samestat(before, status):
        raise _moved(directory, "something else is there")


def _moved(directory: str, found: str) -> StoreMovedError:
    return StoreMovedError(
        "the store's directory has been renamed, removed or replaced since it was taken into use",
        where=directory,
        expected="the directory that this store has used so far",
        found=found,
        remedy="put it back, and save again; or make another Store, of the path where it is now or of a new one",
    )


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _release(key: _Key, mine: _Held) -> None:
    with _guard:
        if _held.get(key) is mine:  # false in a forked child
            del _held[key]
            with suppress(OSError):
                os.ftruncate(mine.descriptor, 0)
            os.close(mine.descriptor)
            os.close(mine.directory)


def _watch_forks() -> None:
    global _watching_forks
    if not _watching_forks:
        os.register_at_fork(after_in_child=_forget)
        _watching_forks = True


def _forget() -> None:
    """Runs in a forked child: the locks are the parent's, and another thread may have held the guard."""
    global _guard
    _guard = threading.RLock()
    for mine in _held.values():
        for descriptor in (mine.descriptor, mine.directory):
            with suppress(OSError):
                os.close(descriptor)
    _held.clear()


def _holder(descriptor: int) -> str:
    """Describes the holder of the lock, as it has written itself into the file."""
    try:
        holder = json.loads(os.pread(descriptor, _MAX_TEXT_BYTES, 0))
        pid, host, since = holder["pid"], holder["host"], holder["since"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return f"{LOCK_FILE} does not say who has it"
    return printable(f"process {pid} on {host}, {_since(since)}")[:300]


def _since(when: object) -> str:
    try:
        return f"since {datetime.fromtimestamp(when).astimezone().isoformat(' ', 'seconds')}"  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return "since a time that cannot be read"
