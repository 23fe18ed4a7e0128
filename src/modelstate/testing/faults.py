"""System calls that fail on demand, for tests of reads and writes of checkpoints.

`faulty_reads` and `faulty_writes` replace the functions of `io.system` and `io.write_system`, through which modelstate
makes all its system calls, so that every call can be counted, delayed, shortened or made to fail.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from modelstate.errors import OptionError
from modelstate.io import system, write_system

READ_CALLS = ("open", "stat", "fstat", "pread", "preadv", "mmap")


@dataclass(frozen=True, slots=True)
class Request:
    """A system call that is about to be made."""

    number: int
    """Counted from 1 in the order of the calls, over all threads."""
    call: str
    """The name of the call: "open", "stat", "fstat", "pread", "preadv", "mmap", or one of `faulty_writes`."""
    path: str
    """The file; for a rename or a link the existing one."""
    start: int = 0
    """Of a read or write: the offset in the file, in bytes."""
    nbytes: int = 0
    """Of a read or write: the number of bytes."""


class Faults:
    """The requests that `faulty_reads` or `faulty_writes` has seen."""

    requests: list[Request]
    """Every request so far, including those that were made to fail."""

    def __init__(
        self,
        at: int | None = None,
        error: BaseException | type[BaseException] | None = None,
        short: int | None = None,
        before: Callable[[Request], object] | None = None,
    ) -> None:
        if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 1):
            raise OptionError("at= is the number of a request", expected="1 or more, or None", found=repr(at))
        if short is not None and (not isinstance(short, int) or isinstance(short, bool) or short < 0):
            raise OptionError("short= is a number of bytes", expected="0 or more, or None", found=repr(short))
        is_class = isinstance(error, type) and issubclass(error, BaseException)
        if not (error is None or is_class or isinstance(error, BaseException)):
            raise OptionError("error= is raised", expected="an exception, or None", found=repr(error))
        if before is not None and not callable(before):
            raise OptionError("before= is called with a request", expected="a function, or None", found=repr(before))
        self.requests = []
        self._at, self._error, self._short, self._before = at, error, short, before
        self._lock = threading.Lock()

    def handle(self, call: str, path: str, start: int = 0, nbytes: int = 0) -> int | None:
        """Counts a request, delays it or makes it fail; returns the most bytes that it may move, None for all."""
        with self._lock:
            request = Request(len(self.requests) + 1, call, path, start, nbytes)
            self.requests.append(request)
        if self._at not in (None, request.number):
            return None
        if self._before is not None:
            self._before(request)
        if self._error is not None:
            raise self._error
        return self._short


@contextmanager
def faulty_reads(
    *,
    at: int | None = None,
    error: BaseException | type[BaseException] | None = None,
    short: int | None = None,
    before: Callable[[Request], object] | None = None,
) -> Iterator[Faults]:
    """Makes the system calls fail by which checkpoints are opened and read.

    Without arguments it only counts them: a load that is repeated with `at=1`, `at=2`, ... up to
    `len(faults.requests)` fails at each in turn. A request is one system call: `open`, `stat`, `fstat`, `pread`,
    `preadv` or `mmap` of a file that is opened or loaded. Page faults of a mapped file are not requests, and
    `userfaultfd`, which would fill memory without requests, is not available in the context. The context holds for
    all threads of the process. Contexts can be nested: a request that the inner one makes reaches the outer one.

    Args:
        at: the number of the request to change, from 1; all requests by default.
        error: raised instead of making the request: usually an `OSError`, such as `OSError(errno.EIO, "...")`.
        short: the most bytes that a `pread` or `preadv` returns, as at the end of a file, on a network file system or
            after a signal; 0 is the end of the file.
        before: called with the `Request` before it is made, in the thread that makes it: to change the file at that
            moment, to wait, or to raise.

    Raises `OptionError` for invalid arguments.

    Example:
        >>> with modelstate.testing.faulty_reads(at=3, error=OSError(errno.EIO, "bad sector")) as faults:
        ...     modelstate.load(model, path)
    """
    faults = Faults(at, error, short, before)
    with replaced(system, _read_calls(faults)):
        yield faults


@contextmanager
def replaced(module: ModuleType, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replaces functions of a module within the context."""
    before = {name: getattr(module, name) for name in calls}
    for name, call in calls.items():
        setattr(module, name, call)
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(module, name, call)


def _read_calls(faults: Faults) -> dict[str, Callable[..., Any]]:
    """Returns the present functions by name, each wrapped so that `faults.handle` is called first."""
    real_open, real_stat, real_fstat = system.open, system.stat, system.fstat
    real_pread, real_preadv, real_mmap = system.pread, system.preadv, system.mmap

    def open(path: str, flags: int) -> int:
        faults.handle("open", path)
        return real_open(path, flags)

    def stat(path: str) -> os.stat_result:
        faults.handle("stat", path)
        return real_stat(path)

    def fstat(descriptor: int) -> os.stat_result:
        faults.handle("fstat", path_of(descriptor))
        return real_fstat(descriptor)

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        most = faults.handle("pread", path_of(descriptor), offset, nbytes)
        return real_pread(descriptor, nbytes if most is None else min(nbytes, most), offset)

    def preadv(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        most = faults.handle("preadv", path_of(descriptor), offset, sum(len(buffer) for buffer in buffers))
        return real_preadv(descriptor, buffers if most is None else first(buffers, most), offset)

    def map(descriptor: int, nbytes: int, flags: int, offset: int = 0) -> mmap.mmap:
        faults.handle("mmap", path_of(descriptor), offset, nbytes)
        return real_mmap(descriptor, nbytes, flags, offset)

    def userfaultfd() -> int:
        raise OSError(errno.EPERM, "not available within faulty_reads")

    calls: tuple[Callable[..., Any], ...] = (open, stat, fstat, pread, preadv, map)
    return dict(zip(READ_CALLS, calls, strict=True)) | {"userfaultfd": userfaultfd}


def first(buffers: Sequence[Any], nbytes: int) -> list[Any]:
    """Returns the first `nbytes` bytes of the buffers."""
    kept: list[Any] = []
    for buffer in buffers:
        kept.append(buffer[:nbytes])
        nbytes -= len(kept[-1])
    return kept


def path_of(descriptor: int) -> str:
    """Returns the path of an open file."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return f"descriptor {descriptor}"


WRITE_CALLS = (
    "open",
    "fallocate",
    "pwritev",
    "fchmod",
    "fsync",
    "close",
    "replace",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)


@contextmanager
def faulty_writes(
    *,
    at: int | None = None,
    error: BaseException | type[BaseException] | None = None,
    short: int | None = None,
    before: Callable[[Request], object] | None = None,
) -> Iterator[Faults]:
    """Makes the system calls fail by which checkpoints are saved.

    Without arguments it only counts them. They are `open` (of files that are written, and of directories), `fallocate`,
    `pwritev`, `fchmod`, `fsync`, `close`, `replace`, `link`, `unlink`, `mkdir` and `rmdir`, of all threads of the
    process. Contexts can be nested, as those of `faulty_reads`.

    Args:
        at: the number of the call to change, from 1; all calls by default.
        error: raised instead of making the call: an `OSError`, such as `OSError(errno.ENOSPC, "...")`, or a
            `KeyboardInterrupt`. A descriptor is closed before `close` raises, as Linux does.
        short: the most bytes that a `pwritev` writes, as on a disk that is nearly full.
        before: called with the `Request` before the call is made, in the thread that makes it: to look at the
            directory at that moment, to kill the process, to wait, or to raise.

    Raises `OptionError` for invalid arguments.

    Example:
        >>> with modelstate.testing.faulty_writes(at=5, error=OSError(errno.ENOSPC, "disk full")):
        ...     modelstate.save(model, path)
    """
    faults = Faults(at, error, short, before)
    with replaced(write_system, _write_calls(faults)):
        yield faults


def _write_calls(faults: Faults) -> dict[str, Callable[..., Any]]:
    """Returns the present functions by name, each wrapped so that `faults.handle` is called first."""
    real = {name: getattr(write_system, name) for name in WRITE_CALLS}

    def of_path(name: str) -> Callable[..., Any]:
        def call(path: str, *args: Any) -> Any:
            faults.handle(name, os.fspath(path))
            return real[name](path, *args)

        return call

    def fallocate(descriptor: int, nbytes: int) -> None:
        faults.handle("fallocate", path_of(descriptor), 0, nbytes)
        real["fallocate"](descriptor, nbytes)

    def pwritev(descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> Any:
        most = faults.handle("pwritev", path_of(descriptor), offset, sum(len(buffer) for buffer in buffers))
        return real["pwritev"](descriptor, buffers if most is None else first(buffers, most), offset)

    def fchmod(descriptor: int, mode: int) -> None:
        faults.handle("fchmod", path_of(descriptor))
        real["fchmod"](descriptor, mode)

    def fsync(descriptor: int) -> None:
        faults.handle("fsync", path_of(descriptor))
        real["fsync"](descriptor)

    def close(descriptor: int) -> None:
        path = path_of(descriptor)
        try:
            faults.handle("close", path)
        finally:
            real["close"](descriptor)

    paths = ("open", "replace", "link", "unlink", "mkdir", "rmdir")
    others: dict[str, Callable[..., Any]] = {
        "fallocate": fallocate,
        "pwritev": pwritev,
        "fchmod": fchmod,
        "fsync": fsync,
        "close": close,
    }
    return {**{name: of_path(name) for name in paths}, **others}
