"""Writes files atomically.

A file is written beside its target under a temporary name, synced and renamed, and the directory is synced: a reader of
the path sees the old file or the new one, also after a crash. Maps of the old file keep showing it. A symbolic link is
replaced, not followed, so no other file ever changes.

Invariants:

- A process that is killed leaves files named `.NAME.*.unfinished`; the next save to the same path removes them. A lock
  on the first of these files, which ends with its process, tells whether the writer is alive. Only the process that
  holds the lock of the directory creates such files, renames them, and removes them.
- Locks are released, and closed in a forked child, as `modelstate.io.lock` describes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress

from modelstate.errors import LockedError, ModelStateError, TargetExistsError, UnsavableError, WriteFailedError
from modelstate.io import system
from modelstate.io.files import mode_of
from modelstate.io.lock import WRITE_REMEDIES, LockDescriptor
from modelstate.io.memory import DIRECT_ALIGN_BYTES
from modelstate.io.system import Descriptor
from modelstate.text_format import printable

_UNTOUCHED = "what was there before is untouched"
SUFFIX = ".unfinished"
_BEGINNING_BYTES = 200
LOCK_TIMEOUT_SECONDS = 60.0
"""How long a save waits for the lock of the directory, which other saves hold for a few file operations."""


LEAST_UNCACHED_BYTES = 64 << 20
"""A smaller file stays in the page cache, where it takes little room."""

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
"""The errors of a file system that cannot sync a directory. After any other one its names may not be durable."""


@contextmanager
def _if_supported(numbers: Container[int | None] = system.UNSUPPORTED) -> Iterator[None]:
    """Ends the block at the error of a file system that lacks what a call needs: one that has one of these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


class Output:
    """An open file that any thread can write to at any offset."""

    def __init__(self, descriptor: Descriptor, path: str) -> None:
        self.descriptor, self.path = descriptor, path
        self.nbytes = 0
        """The end of the farthest write."""
        self._growing = threading.Lock()
        self.is_synced = False
        self._direct: Descriptor | None = None
        """The file once more, with O_DIRECT."""
        self.is_uncached = False
        """Whether most of the file is written past the page cache. Then `sync` takes the rest out of it: around single
        pages that are there already, the kernel reads ahead in small pages, from which a read takes twice as long."""

    def reserve(self, nbytes: int) -> None:
        """Allocates the blocks of the file, so that a full disk is an error before anything is written."""
        with _if_supported():
            system.fallocate(self.descriptor, nbytes)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of `data` at `offset`, in as many calls as it takes."""
        left = memoryview(data)
        while left:
            count = self._write(offset, left)
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            offset, left = offset + count, left[count:]
        with self._growing:
            self.nbytes = max(self.nbytes, offset)

    def _write(self, offset: int, data: memoryview) -> int:
        """Writes a part of `data`. O_DIRECT needs pages of memory that begin where pages of the file begin."""
        direct = self._direct
        if direct is not None:
            before, nbytes = -offset % DIRECT_ALIGN_BYTES, len(data) // DIRECT_ALIGN_BYTES * DIRECT_ALIGN_BYTES
            if not before and nbytes:
                try:
                    return system.pwritev(direct, [data[:nbytes]], offset)
                except OSError as error:
                    # A file system may accept the flag and refuse the write, or require larger blocks.
                    if error.errno not in system.UNSUPPORTED:
                        raise
                    self._direct = None
            data = data[: before or len(data)]
        return system.pwritev(self.descriptor, [data], offset)

    @contextmanager
    def past_page_cache(self, nbytes: int) -> Iterator[None]:
        """A block in which whole pages are written with O_DIRECT, if the file gets many bytes and its system can.

        A save counts only when its bytes are on the disk, so a copy in the page cache saves no time: it needs memory,
        which evicts the data of other processes, and another copy.
        """
        descriptor: Descriptor | None = None
        if system.O_DIRECT and nbytes >= LEAST_UNCACHED_BYTES:
            with suppress(OSError):
                descriptor = Descriptor.of(system.open_to_write, self.path, os.O_WRONLY | system.O_DIRECT)
        with descriptor or nullcontext():
            self._direct, self.is_uncached = descriptor, descriptor is not None
            try:
                yield
            finally:
                self._direct = None

    def sync(self) -> None:
        """Flushes the file to the disk."""
        system.fsync(self.descriptor)
        if self.is_uncached:
            system.advise(self.descriptor, "POSIX_FADV_DONTNEED")
        self.is_synced = True

    def append(self, data: bytes | memoryview) -> None:
        """Writes `data` at the end of the farthest write."""
        self.write_at(self.nbytes, data)

    def numbered_path(self, number: int) -> str:
        """Returns the path of an additional unfinished file, which the lock of this one covers."""
        return f"{self.path.removesuffix(SUFFIX)}.{number}{SUFFIX}"


@contextmanager
def atomic_file(path: str, *, overwrite: bool) -> Iterator[Output]:
    """Yields a file to write to, which is put at `path` when the block ends, and removed when the block raises.

    Args:
        path: The target.
        overwrite: Whether an existing file is replaced.

    Raises:
        TargetExistsError: Something is at the path, and `overwrite` is False.
        UnsavableError: Something that is not a regular file is at the path.
        LockedError: The lock of the directory is not free in time.
        WriteFailedError: An I/O error. What was at the path before is untouched, or the error says that it is not.
    """
    check_target(path, overwrite=overwrite)
    with write_errors(path), unfinished_file(path, existing_mode(path), LOCK_TIMEOUT_SECONDS) as output:
        yield output
        output.sync()
        with locked_directory(os.path.dirname(path), LOCK_TIMEOUT_SECONDS):
            put_durably(output.path, path, overwrite)


@contextmanager
def unfinished_file(path: str, mode: int | None, lock_timeout_seconds: float) -> Iterator[Output]:
    """Creates a file beside a path. While it is open, it is not taken for the leftover of a killed process.

    The same holds for the files named by `Output.numbered_path`. For `mode` see `new_file`.
    """
    with ExitStack() as opened:
        with locked_directory(os.path.dirname(path), lock_timeout_seconds):
            _remove_leftovers(path)
            directory, name = os.path.split(path)
            unfinished = os.path.join(directory, f".{_beginning(name)}.{os.urandom(6).hex()}{SUFFIX}")
            output = opened.enter_context(new_file(unfinished, mode, LockDescriptor))
            with _if_supported():  # on a file system without locks no leftover is ever removed
                fcntl.flock(output.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield output


@contextmanager
def new_file(path: str, mode: int | None = None, kind: type[Descriptor] = Descriptor) -> Iterator[Output]:
    """Creates a file, which is on the disk when the block ends, and removed when the block raises.

    Its name is durable only after its directory has been synced, too. With `mode` it has exactly these permission
    bits, and at no time more of them; otherwise it has those of new files.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    descriptor = kind(system.open_to_write(path, flags, 0o666 if mode is None else mode))
    try:
        with descriptor:
            if mode is not None:  # the umask may have removed permission bits, which some file systems lack
                with _if_supported():
                    system.fchmod(descriptor, mode)
            output = Output(descriptor, path)
            yield output
            if not output.is_synced:
                output.sync()
    except BaseException:
        remove_all([path])
        raise


def write_new_file(path: str, content: bytes) -> None:
    """Creates a file with this content, which is on the disk when the function returns, as of `new_file`."""
    with new_file(path) as output:
        output.append(content)


def check_target(path: str, *, overwrite: bool) -> None:
    """Raises `UnsavableError` or `TargetExistsError` where no file can be put at the path."""
    mode = mode_of(path)
    is_dir = stat.S_ISDIR(mode)
    if mode and not stat.S_ISREG(mode):
        kind = "a directory" if is_dir else "no ordinary file"
        remedy = "give the path of a file" + (f", such as {os.path.join(path, 'model.safetensors')}" if is_dir else "")
        raise UnsavableError("a file cannot be put here", where=path, found=kind, remedy=remedy)
    if not overwrite and os.path.lexists(path):
        raise TargetExistsError("the target exists already", where=path)


def put_durably(unfinished: str, path: str, overwrite: bool, instead_of: str | None = None) -> None:
    """Renames a finished file to its target, and removes the file at `instead_of`.

    Where this cannot be made durable, the previous files are put back. On a file system without hard links the file
    that was replaced cannot be: the new one stays. The caller holds the lock of the directory.

    Raises `WriteFailedError` where the new file stays, and `OSError` or `TargetExistsError` where it does not.
    """
    directory, stem, is_new = os.path.dirname(path), unfinished.removesuffix(SUFFIX), not os.path.lexists(path)
    kept, moved = f"{stem}.0{SUFFIX}", f"{stem}.00{SUFFIX}"
    if not is_new:
        with _if_supported():
            system.link(path, kept)
    is_put_back = is_new or os.path.lexists(kept)
    try:
        put(unfinished, path, overwrite)
        try:
            sync_directory(directory)
            if instead_of is not None and os.path.lexists(instead_of):
                system.replace(instead_of, moved)
                sync_directory(directory)
        except BaseException as error:
            try:
                for file, original in ((moved, instead_of), (kept, path)):
                    if original is not None and os.path.lexists(file):
                        system.replace(file, original)
                if is_new:
                    system.unlink(path)
            except OSError:
                is_put_back = False
            if is_put_back or not isinstance(error, OSError):
                raise
            raise WriteFailedError(
                "the new file is at the path, and the system does not confirm that the disk has its name",
                where=path,
                found=error,
                remedy="look at the disk (dmesg), and save again: a crash may bring back what was there before",
            ) from error
    finally:
        remove_all(file for file in (kept, moved) if os.path.lexists(file))


def put(unfinished: str, path: str, overwrite: bool) -> None:
    """Renames a finished file to its target. The name is durable only after the directory has been synced."""
    if overwrite:
        system.replace(unfinished, path)
        return
    try:
        # Unlike a rename, a link never replaces a file that another process has put there meanwhile.
        system.link(unfinished, path)
    except FileExistsError:
        raise TargetExistsError("the target exists already", where=path) from None
    except OSError as error:
        if error.errno not in system.UNSUPPORTED:
            raise
        check_target(path, overwrite=False)
        system.replace(unfinished, path)
        return
    remove_all([unfinished])


def existing_mode(*paths: str) -> int | None:
    """The permission bits of the first of the paths that has a file, or None.

    A file that replaces it gets the same bits, so that only users who could read the old file can read the new one.
    """
    modes = map(mode_of, paths)  # of a link that of its target, which is what could be read at the path
    return next((mode & 0o777 for mode in modes if stat.S_ISREG(mode)), None)


def sync_directory(path: str) -> None:
    """Makes the names of files in a directory durable."""
    with Descriptor.of(system.open_to_write, path or ".", os.O_RDONLY) as descriptor, _if_supported(_NO_SYNC):
        system.fsync(descriptor)


def make_directory(path: str) -> None:
    """Creates a directory and its parents, durably. Does nothing where it is in use already. Raises `OSError`.

    An empty directory may be that of a process that was killed before its name was durable.
    """
    parent, is_new = os.path.dirname(path), not os.path.isdir(path or ".")
    if is_new:
        make_directory(parent)
        try:
            system.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
    with suppress(PermissionError):  # names can be added to a directory that cannot be opened
        if is_new or (path and _is_empty(path)):
            sync_directory(parent)


def _is_empty(path: str) -> bool:
    with os.scandir(path) as entries:  # a list of a large directory would take long
        return next(entries, None) is None


def remove_all(paths: Iterable[str]) -> None:
    """Removes as many of the files as possible."""
    for path in paths:
        with suppress(OSError):
            system.unlink(path)


@contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Converts an `OSError` of the block into a `WriteFailedError` that names the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ModelStateError):
            raise
        raise write_error(path, error) from error


def write_error(path: str, error: OSError) -> WriteFailedError:
    """The error for an I/O error of a write to a path."""
    remedy = "; ".join(filter(None, (WRITE_REMEDIES.get(error.errno or 0), _UNTOUCHED)))
    return WriteFailedError("the file cannot be written", where=path, found=error, remedy=remedy)


@contextmanager
def locked_directory(directory: str, timeout_seconds: float) -> Iterator[None]:
    """Holds the lock of a directory, so that no other save adds or removes files there. Needs a file system with locks.

    Raises `LockedError` where the lock is not free in time: any process that can read the directory can hold
    it.
    """
    with LockDescriptor.of(system.open_to_write, directory or ".", os.O_RDONLY) as descriptor:
        with _if_supported():
            _lock(descriptor, directory or ".", timeout_seconds)
        yield


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
            other = "let the other thread finish its save" if os.getpid() in pids else "end that process"
            raise LockedError(
                f"the directory stays locked, so nothing can be put into it; {_UNTOUCHED}",
                where=directory,
                expected=f"its lock (flock) to be free within {timeout_seconds:g} s",
                found=", ".join(map(_describe_process, pids)) or "a process that the system does not name",
                remedy=f"{other}, or wait longer: lock_timeout_seconds=",
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.1)


def _holding_pids(descriptor: int) -> list[int]:
    """The processes that hold an flock lock on an open file, as far as Linux reports them."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids: list[int] = []
    with suppress(OSError, ValueError, IndexError), open("/proc/locks", encoding="utf-8") as locks:
        held = (line.split() for line in locks if "->" not in line)
        pids += [int(fields[4]) for fields in held if fields[1] == "FLOCK" and fields[5] == file]
    return [pid for pid in dict.fromkeys(pids) if pid > 0]


def _describe_process(pid: int) -> str:
    if pid == os.getpid():
        return f"another thread of this process ({pid}), or another open file of it"
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        if command := file.read(200).replace(b"\0", b" ").decode(errors="replace").strip():
            return f"process {pid} ({printable(command)})"
    return f"process {pid}"


def _remove_leftovers(path: str) -> None:
    """Removes the files that killed processes have left beside a path. The caller holds the lock of the directory.

    A process that lives has a lock on the first one of its files, which is removed last.
    """
    directory, name = os.path.split(path)
    leftover = re.compile(rf"(\.{re.escape(_beginning(name))}\.[0-9a-f]{{12}})(?:\.\d+)?{re.escape(SUFFIX)}")
    groups: dict[str, list[str]] = {}
    with suppress(OSError):
        for entry in os.listdir(directory or "."):
            if match := leftover.fullmatch(entry):
                groups.setdefault(os.path.join(directory, match[1] + SUFFIX), []).append(os.path.join(directory, entry))
    for first, paths in groups.items():
        with suppress(OSError), ExitStack() as opened:
            if os.path.isfile(first) and not os.path.islink(first):  # else it is a link, and has no writer
                descriptor = Descriptor.of(os.open, first, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                fcntl.flock(opened.enter_context(descriptor), fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_all([*(path for path in paths if path != first), first])


def _beginning(name: str) -> str:
    """The beginning of a name, which leaves room for a suffix: file systems limit the bytes of a name."""
    return name.encode("utf-8", "surrogateescape")[:_BEGINNING_BYTES].decode("utf-8", "ignore")
