"""System calls that fail on demand: reads and writes, each at any one of its calls."""

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

CALLS = ("open", "stat", "fstat", "pread", "preadv", "mmap")


@dataclass(frozen=True, slots=True)
class Request:
    """A system call that is about to be made."""

    number: int
    """From 1, in the order in which they are made, by whatever thread."""
    call: str
    """Its name: of reads "open", "stat", "fstat", "pread", "preadv" or "mmap", of writes one of `faulty_writes`."""
    path: str
    """The file; of two that are renamed or linked the one that is there already."""
    start: int = 0
    """Of what is read or written: bytes from the beginning of the file."""
    nbytes: int = 0
    """Of what is read or written: how many bytes it is about."""


class Faults:
    """What `faulty_reads` or `faulty_writes` has seen, and what it does about it."""

    requests: list[Request]
    """Every request so far, with those that were made to fail."""

    def __init__(
        self,
        at: int | None = None,
        error: BaseException | type[BaseException] | None = None,
        short: int | None = None,
        before: Callable[[Request], object] | None = None,
    ) -> None:
        _check(at, error, short, before)
        self.requests = []
        self._at, self._error, self._short, self._before = at, error, short, before
        self._lock = threading.Lock()

    def met(self, call: str, path: str, start: int = 0, nbytes: int = 0) -> int | None:
        """Counts a request and does to it what was asked for; returns the most bytes that it may move, if any."""
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
    """Within this context the requests by which checkpoints are opened and read can be made to fail.

    Without arguments it only counts them: a load that is repeated with `at=1`, `at=2`, ... up to
    `len(faults.requests)` fails at each in turn. A request is one system call: `open`, `stat`, `fstat`, `pread`,
    `preadv` or `mmap` of a file that is opened or loaded; what is read of a map later is none, and memory is not filled
    by `userfaultfd`, which would be none either. It holds for all
    threads of the process. Contexts can be nested: the inner one's requests come to the outer one, if they are made.

    Args:
        at: the number of the request that is meant, from 1; without it, all of them.
        error: raised instead of making the request: usually an `OSError`, as `OSError(errno.EIO, "...")`.
        short: the most bytes that a `pread` or `preadv` returns, as at the end of a file, on a network file system or
            after a signal; 0 is the end of the file.
        before: called with the `Request` before it is made, in the thread that makes it: to change the file just then,
            to wait, or to raise.

    Raises `OptionError` for arguments that mean nothing.
    """
    faults = Faults(at, error, short, before)
    with replaced(system, _calls(faults)):
        yield faults


@contextmanager
def replaced(module: ModuleType, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within it the functions of a module are others."""
    before = {name: getattr(module, name) for name in calls}
    for name, call in calls.items():
        setattr(module, name, call)
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(module, name, call)


def _calls(faults: Faults) -> dict[str, Callable[..., Any]]:
    """The calls that are there now, by their names, each behind `faults.met`."""
    real_open, real_stat, real_fstat = system.open, system.stat, system.fstat
    real_pread, real_preadv, real_mmap = system.pread, system.preadv, system.mmap

    def open(path: str, flags: int) -> int:
        faults.met("open", path)
        return real_open(path, flags)

    def stat(path: str) -> os.stat_result:
        faults.met("stat", path)
        return real_stat(path)

    def fstat(descriptor: int) -> os.stat_result:
        faults.met("fstat", path_of(descriptor))
        return real_fstat(descriptor)

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        most = faults.met("pread", path_of(descriptor), offset, nbytes)
        return real_pread(descriptor, nbytes if most is None else min(nbytes, most), offset)

    def preadv(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        most = faults.met("preadv", path_of(descriptor), offset, sum(len(buffer) for buffer in buffers))
        return real_preadv(descriptor, buffers if most is None else first(buffers, most), offset)

    def map(descriptor: int, nbytes: int, flags: int, offset: int = 0) -> mmap.mmap:
        faults.met("mmap", path_of(descriptor), offset, nbytes)
        return real_mmap(descriptor, nbytes, flags, offset)

    def userfaultfd() -> int:
        raise OSError(errno.EPERM, "what is read is read by calls that can be made to fail")

    calls: tuple[Callable[..., Any], ...] = (open, stat, fstat, pread, preadv, map)
    return dict(zip(CALLS, calls, strict=True)) | {"userfaultfd": userfaultfd}


def first(buffers: Sequence[Any], nbytes: int) -> list[Any]:
    """The first so many bytes of the buffers."""
    found: list[Any] = []
    for buffer in buffers:
        found.append(buffer[:nbytes])
        nbytes -= len(found[-1])
    return found


def path_of(descriptor: int) -> str:
    """Of an open file."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return f"descriptor {descriptor}"


def _check(at: object, error: object, short: object, before: object) -> None:
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 1):
        raise OptionError("at= is the number of a request", expected="1 or more, or None", found=repr(at))
    if short is not None and (not isinstance(short, int) or isinstance(short, bool) or short < 0):
        raise OptionError("short= is a number of bytes", expected="0 or more, or None", found=repr(short))
    is_class = isinstance(error, type) and issubclass(error, BaseException)
    if not (error is None or is_class or isinstance(error, BaseException)):
        raise OptionError("error= is raised", expected="an exception, or None", found=repr(error))
    if before is not None and not callable(before):
        raise OptionError("before= is called with a request", expected="a function, or None", found=repr(before))


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
    """Within this context the system calls by which checkpoints are saved can be made to fail.

    Without arguments it only counts them. They are `open` (of files that are written, and of directories), `fallocate`,
    `pwritev`, `fchmod`, `fsync`, `close`, `replace`, `link`, `unlink`, `mkdir` and `rmdir`, of all threads of the
    process. Contexts can be nested, as those of `faulty_reads`.

    Args:
        at: the number of the call that is meant, from 1; without it, all of them.
        error: raised instead of making the call: an `OSError`, as `OSError(errno.ENOSPC, "...")`, or a
            `KeyboardInterrupt`. A descriptor is closed before `close` raises, as Linux does.
        short: the most bytes that a `pwritev` writes, as on a disk that is nearly full.
        before: called with the `Request` before the call is made, in the thread that makes it: to look at the
            directory just then, to kill the process, to wait, or to raise.

    Raises `OptionError` for arguments that mean nothing.
    """
    faults = Faults(at, error, short, before)
    with replaced(write_system, _write_calls(faults)):
        yield faults


def _write_calls(faults: Faults) -> dict[str, Callable[..., Any]]:
    """The calls that are there now, by their names, each behind `faults.met`."""
    real = {name: getattr(write_system, name) for name in WRITE_CALLS}

    def of_path(name: str) -> Callable[..., Any]:
        def call(path: str, *args: Any) -> Any:
            faults.met(name, os.fspath(path))
            return real[name](path, *args)

        return call

    def fallocate(descriptor: int, nbytes: int) -> None:
        faults.met("fallocate", path_of(descriptor), 0, nbytes)
        real["fallocate"](descriptor, nbytes)

    def pwritev(descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> Any:
        most = faults.met("pwritev", path_of(descriptor), offset, sum(len(buffer) for buffer in buffers))
        return real["pwritev"](descriptor, buffers if most is None else first(buffers, most), offset)

    def fchmod(descriptor: int, mode: int) -> None:
        faults.met("fchmod", path_of(descriptor))
        real["fchmod"](descriptor, mode)

    def fsync(descriptor: int) -> None:
        faults.met("fsync", path_of(descriptor))
        real["fsync"](descriptor)

    def close(descriptor: int) -> None:
        path = path_of(descriptor)
        try:
            faults.met("close", path)
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
