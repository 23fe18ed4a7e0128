"""System calls that fail on demand, for tests of reads and writes of checkpoints.

`faulty_reads` and `faulty_writes` replace the functions of `io.system`, through which modelstate makes all its system
calls on files, so that every call can be counted, delayed, shortened or made to fail.
"""

import _thread
import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from modelstate.io import system

count_threads = _thread._count
"""Returns the number of threads that Python runs, without the main thread, also of those that `threading` lacks."""


def until(holds: Callable[[], object]) -> None:
    """Waits until something holds, for a minute at the most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.002)


def wait_for_threads(most: int) -> None:
    """Waits until Python runs no more threads than these: one whose work is done needs a moment to end."""
    until(lambda: count_threads() <= most)


READ_CALLS = ("open", "stat", "fstat", "pread", "preadv", "preadv_cached", "mmap")
_VECTORED_CALLS = ("preadv", "preadv_cached", "pwritev")
_PATH_CALLS = ("open_to_write", "replace", "link", "unlink", "mkdir", "rmdir")
WRITE_CALLS = (*_PATH_CALLS, "fallocate", "pwritev", "fchmod", "fsync", "close")


@dataclass(frozen=True, slots=True)
class Request:
    """A system call that is about to be made."""

    number: int
    """Counted from 1 in the order of the calls, over all threads."""
    call: str
    """The name of the call: "open", "stat", "fstat", "pread", "preadv", "preadv_cached", "mmap", or one of
    `faulty_writes`."""
    path: str
    """The file; for a rename or a link the existing one."""
    start: int = 0
    """Of a read or write: the offset in the file, in bytes."""
    nbytes: int = 0
    """Of a read or write: the number of bytes."""


class Faults:
    """The requests that `faulty_reads` or `faulty_writes` has seen.

    Args:
        at: The number of the request to change, from 1; all requests by default.
        error: Raised instead of making the request.
        short: The most bytes that a request moves; 0 is the end of a file that is read.
        before: Called with the request before it is made, in the thread that makes it.
    """

    requests: list[Request]
    """Every request so far, including those that were made to fail."""

    def __init__(
        self,
        at: int | None = None,
        error: BaseException | type[BaseException] | None = None,
        short: int | None = None,
        before: Callable[[Request], object] | None = None,
    ) -> None:
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
        if self._error is not None:  # a copy, whose traceback no test keeps
            raise copy(self._error)
        return self._short


@contextmanager
def faulty_reads(**fault: Any) -> Iterator[Faults]:
    """Makes the system calls fail by which checkpoints are opened and read, in all threads of the process.

    Without arguments it only counts them: a load that is repeated with `at=1`, `at=2`, ... up to
    `len(faults.requests)` fails at each in turn. Page faults of a mapped file are not requests. Where `preadv_cached`
    fails, the read of a block that the page cache is known to have, the block is read with `preadv`. Contexts can be
    nested: a request that the inner one makes reaches the outer one.

    Args:
        fault: the arguments of `Faults`.
    """
    faults = Faults(**fault)
    with replaced(system, _counted(system, READ_CALLS, faults)):
        yield faults


@contextmanager
def faulty_writes(**fault: Any) -> Iterator[Faults]:
    """Makes the system calls fail by which checkpoints are saved, as `faulty_reads` does with those of reads.

    A descriptor is closed before `close` raises, as Linux does.
    """
    faults = Faults(**fault)
    with replaced(system, _counted(system, WRITE_CALLS, faults)):
        yield faults


@contextmanager
def failing(error: BaseException, call: str, path: str = "") -> Iterator[None]:
    """Has each system call of a name, on a path that has a match of a pattern, raise an error."""

    def fail(request: Request) -> None:
        if request.call == call and re.search(path, request.path):
            raise error

    with (faulty_reads if call in READ_CALLS else faulty_writes)(before=fail):
        yield


def killed_at(number: int, use: Callable[[], object], faults: Callable[..., Any] = faulty_writes) -> bool:
    """Whether a fork of this process, in which one thread writes, was killed before a call of `use`."""
    process = os.fork()
    if not process:
        with faults(at=number, before=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            use()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return os.WIFSIGNALED(status)


@contextmanager
def replaced(module: ModuleType, calls: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Replaces functions of a module within the context."""
    before = {name: getattr(module, name) for name in calls}
    for name, call in calls.items():
        setattr(module, name, call)
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(module, name, call)


def _counted(module: ModuleType, names: Sequence[str], faults: Faults) -> dict[str, Callable[..., object]]:
    """Returns the present functions of a module by name, each wrapped so that `faults.handle` is called first."""

    def wrapped(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(target: str | int, *args: Any) -> object:
            path = _path_of(target) if isinstance(target, int) else os.fspath(target)
            if name == "close" and os.path.isfile(path) and not fcntl.fcntl(target, fcntl.F_GETFL) & os.O_ACCMODE:
                return real(target)  # of a file that was read
            start, nbytes = _extent(name, args)
            try:
                most = faults.handle(name, path, start, nbytes)
            except BaseException:
                if name == "close":  # Linux closes a descriptor also where it reports an error
                    real(target)
                raise
            if most is not None and name in _VECTORED_CALLS:
                args = (_first(args[0], most), start)
            elif most is not None and name == "pread":
                args = (min(nbytes, most), start)
            return real(target, *args)

        return call

    return {name: wrapped(name, getattr(module, name)) for name in names}


def _extent(name: str, args: Sequence[Any]) -> tuple[int, int]:
    """Returns the offset and the number of bytes of a call, from its arguments after the descriptor or path."""
    if name in _VECTORED_CALLS:
        return args[1], sum(len(buffer) for buffer in args[0])
    if name == "pread":
        return args[1], args[0]
    if name == "mmap":
        return (args[2] if len(args) > 2 else 0), args[0]
    return 0, args[0] if name == "fallocate" else 0


def _first(buffers: Sequence[memoryview | bytes], nbytes: int) -> list[memoryview | bytes]:
    """Returns the first `nbytes` bytes of the buffers."""
    kept: list[memoryview | bytes] = []
    for buffer in buffers:
        kept.append(buffer[:nbytes])
        nbytes -= len(kept[-1])
    return kept


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return f"descriptor {descriptor}"
