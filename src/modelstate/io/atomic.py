"""Writes files atomically.

It is written beside its place under a name of its own, synced, renamed, and the directory is synced: whoever opens the
path sees the old file or the new one, also after a crash. Maps of the old file keep showing it. A symbolic link is
replaced, not followed, so no other file ever changes.

A process that is killed leaves files behind, as `.NAME.*.unfinished`; the next one that writes to the path takes them
away. Whether their writer lives, a lock on the first of them tells, which goes with its process. Files of that name are
made, put in place and taken away by one process at a time, which has the lock of the directory.

A lock of `flock` belongs to the open file, which a forked child shares. So a lock is released by `LOCK_UN`, which holds
for all copies of the descriptor, and a forked child closes its copies, which would keep a lock after its owner is
killed.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from modelstate.errors import (
    DirectoryLockedError,
    ModelStateError,
    SaveTargetError,
    TargetExistsError,
    WriteFailedError,
)
from modelstate.io import write_system
from modelstate.text_format import printable

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
            write_system.fallocate(self.descriptor, nbytes)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of it."""
        left = memoryview(data)
        while left:
            count = write_system.pwritev(self.descriptor, [left], offset)
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            offset, left = offset + count, left[count:]
        with self._growing:
            self.nbytes = max(self.nbytes, offset)

    def sync(self) -> None:
        """Has what was written put on the disk."""
        write_system.fsync(self.descriptor)
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
    output = Output(write_system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode), path)
    try:
        try:
            if mode is not None:
                _set_mode(output, mode)
            yield output
            if not output.is_synced:
                output.sync()
        finally:
            try:
                write_system.close(output.descriptor)
            except OSError:
                if not output.is_synced:  # else nothing can be lost any more
                    raise
    except BaseException:
        remove_all([path])
        raise


def _set_mode(output: Output, mode: int) -> None:
    """Sets the permission bits that the umask has taken off, where the file system has such bits."""
    try:
        write_system.fchmod(output.descriptor, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    descriptor = write_system.open(path or ".", os.O_RDONLY)
    try:
        write_system.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        with suppress(OSError):  # the sync has been answered
            write_system.close(descriptor)


def remove_all(paths: Iterable[str]) -> None:
    """Takes files away, as many as can be; an interrupt waits until all have been tried."""
    interrupt: BaseException | None = None
    for path in paths:
        for _ in range(2):
            try:
                write_system.unlink(path)
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


SUFFIX = ".unfinished"
_BEGINNING_BYTES = 200
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
LOCK_TIMEOUT_SECONDS = 60.0
"""How long a save waits for the lock of the directory, which others hold for a few file operations."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
_locked: set[int] = set()
"""Descriptors of this process that have a lock or wait for one. No lock guards the set, since a signal handler may save
in the middle of another save; each change is one operation."""


@contextmanager
def atomic_file(path: str, *, overwrite: bool, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Iterator[Output]:
    """A file to write to, which comes to be at the path when the block ends, and does not when it raises.

    Raises `TargetExistsError` where something is at the path that may not be replaced, `SaveTargetError` where it is
    no file, `DirectoryLockedError`, and `WriteFailedError` for an I/O error, which takes away what was written.
    """
    check(path, overwrite=overwrite)
    with write_errors(path), unfinished_file(path, mode_of(path), lock_timeout_seconds) as output:
        yield output
        output.sync()
        with alone_in(os.path.dirname(path), lock_timeout_seconds):
            put_durably(output.path, path, overwrite)


@contextmanager
def unfinished_file(
    path: str, mode: int | None = None, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS
) -> Iterator[Output]:
    """A new file beside a path. As long as it is open, nobody takes it for what a killed process has left.

    Neither are those that are named after it by `part_of`. `mode` as `new_file` has it.
    """
    with ExitStack() as opened:
        with alone_in(os.path.dirname(path), lock_timeout_seconds):
            clear(path)
            output = opened.enter_context(new_file(_beside(path), mode))
            opened.callback(_locked.discard, output.descriptor)
            _locked.add(output.descriptor)
            with _but_for_no_locks():  # where there are none, nothing is ever taken away
                fcntl.flock(output.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield output


def mode_of(*paths: str) -> int | None:
    """The permission bits of the first of the paths that has a file; None where none has.

    A file that replaces it gets the same, so that nobody can read the new one who could not read the old one.
    """
    for path in paths:
        with suppress(OSError):
            there = os.stat(path)  # of a link, what it leads to: that is what could be read at the path
            if stat.S_ISREG(there.st_mode):
                return stat.S_IMODE(there.st_mode) & 0o777
    return None


def part_of(unfinished: Output, number: int) -> str:
    """The path of another unfinished file, which lives as long as the first one."""
    return f"{unfinished.path.removesuffix(SUFFIX)}.{number}{SUFFIX}"


@contextmanager
def alone_in(directory: str, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
    """Within it no other save, of this process or another, puts files into a directory or takes some away.

    This needs a file system with locks. Raises `DirectoryLockedError` where the lock is not free in time: any process
    that can read the directory can hold it.
    """
    descriptor, pid = write_system.open(directory or ".", os.O_RDONLY), os.getpid()
    try:
        _locked.add(descriptor)
        with _but_for_no_locks():
            _lock(descriptor, directory or ".", timeout_seconds)
        yield
    finally:
        if os.getpid() == pid:  # a forked child has closed its copy
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            _locked.discard(descriptor)
            with suppress(OSError):  # nothing is lost by it
                write_system.close(descriptor)


def _close_locked() -> None:
    """In a forked child: closes the descriptors of the parent's saves. `LOCK_UN` would release the parent's locks."""
    while _locked:
        with suppress(OSError):
            os.close(_locked.pop())


os.register_at_fork(after_in_child=_close_locked)


def _lock(descriptor: int, directory: str, timeout_seconds: float) -> None:
    end, pause = time.monotonic() + timeout_seconds, 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left = end - time.monotonic()
        if left <= 0:
            pids = _holding_pids(descriptor)
            remedy = "end that process, or wait longer: lock_timeout_seconds="
            if os.getpid() in pids:
                remedy = "let the other thread finish its save, or wait longer: lock_timeout_seconds="
            raise DirectoryLockedError(
                "the directory stays locked, so nothing can be put into it; what was there before is untouched",
                where=directory,
                expected=f"its lock (flock) to be free within {timeout_seconds:g} s",
                found=", ".join(map(_named, pids)) or "a process that the system does not name",
                remedy=remedy,
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.1)


def _holding_pids(descriptor: int) -> list[int]:
    """The processes that hold a lock (flock) on an open file, as far as Linux says."""
    there = os.fstat(descriptor)
    file = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
    pids: list[int] = []
    with suppress(OSError, ValueError, IndexError), open("/proc/locks", encoding="ascii") as locks:
        held = (line.split() for line in locks if "->" not in line)
        pids += [int(fields[4]) for fields in held if fields[1] == "FLOCK" and fields[5] == file]
    return [pid for pid in dict.fromkeys(pids) if pid > 0]


def _named(pid: int) -> str:
    if pid == os.getpid():
        return f"another thread of this process ({pid}), or another open file of it"
    return f"process {pid}{_command_of(pid)}"


def _command_of(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        if command := file.read(200).replace(b"\0", b" ").decode(errors="replace").strip():
            return f" ({printable(command)})"
    return ""


@contextmanager
def _but_for_no_locks() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _beside(path: str) -> str:
    """A new name beside a path."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{_beginning(name)}.{secrets.token_hex(6)}{SUFFIX}")


def clear(path: str) -> None:
    """Takes away what those have left beside a path that were killed. The caller is `alone_in` the directory."""
    directory, name = os.path.split(path)
    mine = re.compile(rf"(\.{re.escape(_beginning(name))}\.[0-9a-f]{{12}})(?:\.\d+)?{re.escape(SUFFIX)}")
    with suppress(OSError):
        found: dict[str, list[str]] = {}
        for entry in os.listdir(directory or "."):
            if match := mine.fullmatch(entry):
                found.setdefault(os.path.join(directory, match[1] + SUFFIX), []).append(os.path.join(directory, entry))
        for first, paths in found.items():
            with suppress(OSError):
                _take_away_if_dead(first, paths)


def _take_away_if_dead(first: str, paths: list[str]) -> None:
    """Takes unfinished files away where the lock on the first one of them is free; it goes last."""
    descriptor = None
    if os.path.isfile(first) and not os.path.islink(first):  # else it is the second name of a link, and has no writer
        descriptor = os.open(first, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_all([*(path for path in paths if path != first), first])
    finally:
        if descriptor is not None:
            os.close(descriptor)


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


def put_durably(beside: str, path: str, overwrite: bool, instead_of: str | None = None) -> None:
    """Puts a finished file in its place, and takes away the one at `instead_of`.

    Where that cannot be made durable, what was there is put back. The caller is `alone_in` the directory.
    """
    directory, there = os.path.dirname(path), os.path.lexists(path)
    kept = _named_twice(path, f"{beside.removesuffix(SUFFIX)}.0{SUFFIX}") if there else None
    is_other = instead_of is not None and os.path.lexists(instead_of)
    moved = f"{beside.removesuffix(SUFFIX)}.00{SUFFIX}" if is_other else None
    try:
        put(beside, path, overwrite)
        try:
            sync_directory(directory)
            if instead_of is not None and moved is not None:
                write_system.replace(instead_of, moved)
                sync_directory(directory)
        except BaseException:
            with suppress(OSError):
                if instead_of is not None and moved is not None and os.path.lexists(moved):
                    write_system.replace(moved, instead_of)
                if kept is not None:
                    write_system.replace(kept, path)
                elif not there:
                    write_system.unlink(path)
            raise
    finally:
        remove_all(one for one in (kept, moved) if one is not None and os.path.lexists(one))


def _named_twice(path: str, other: str) -> str | None:
    """`other`, which is then another name of what is at a path; None where the file system has no such."""
    try:
        write_system.link(path, other)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return None
    except BaseException:
        remove_all([other])
        raise
    return other


def is_at(output: Output, path: str) -> bool:
    """Whether what stands at a path is this file."""
    try:
        return os.path.samestat(os.fstat(output.descriptor), os.lstat(path))
    except OSError:
        return False


def put(beside: str, path: str, overwrite: bool) -> None:
    """Renames a finished file to its place. It is durable when the directory has been synced."""
    if overwrite:
        write_system.replace(beside, path)
        return
    try:
        # Unlike a rename, a link never replaces what somebody else has put there meanwhile.
        write_system.link(beside, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check(path, overwrite=False)
        write_system.replace(beside, path)
        return
    remove_all([beside])


def _exists(path: str) -> TargetExistsError:
    return TargetExistsError(
        "something is there already", where=path, remedy="take another path, or overwrite=True to replace it"
    )
