"""Read leases

A private map shows what is written to its file later, and a file that becomes shorter takes even those pages with it
that the process has written to itself. So a lease is held on files whose maps stay: the kernel has whoever opens the
file for writing, or truncates it, wait, for at most `/proc/sys/fs/lease-break-time` seconds (usually 45), and sends a
signal. A thread waits for that signal. It copies each map into anonymous memory, moves that over the map, so that the
addresses stay what they are, and gives the lease back. A rename over the file breaks no lease, and needs none.

Invariants:

- The signal goes to that thread alone, which blocks it. It is one that is ignored by default, and the owner is set
  before the lease, so that no moment is left in which it could end the process.
- A lease is on a description of its own, which no map refers to: closing it gives the lease back, also where the
  process dies, whatever a forked child has inherited.
- Memory is only replaced while the watcher has a reference to the `mmap` object, so that it cannot be freed meanwhile
  and its addresses used again.
- A forked child has leases and a watcher of its own from its first moment, since its maps are its own.
"""

import _thread
import ctypes
import errno
import fcntl
import logging
import mmap
import operator
import os
import platform
import signal
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from modelstate.io import system
from modelstate.process import gc_paused
from modelstate.text_format import size

_log = logging.getLogger("modelstate")
_SIGNAL = signal.SIGURG
"""Ignored by default; a signal of its own would end the process if it ever went to another thread."""
_F_SETOWN_EX, _F_OWNER_TID = 15, 0
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MREMAP_MAYMOVE_FIXED = 3
_SA_NODEFER_RESTART = 0x40000000 | 0x10000000
_PIECE_BYTES, _MOST_PIECES = 8 << 20, 512
"""Each piece is copied while the watcher holds Python's lock; to get it may take 5 ms each time."""
_MARGIN_SECONDS = 2.0
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
_BREAK_TIME = "/proc/sys/fs/lease-break-time"
_USUAL_BREAK_SECONDS = 45.0

_Mapped = weakref.ref[mmap.mmap]


class Lease:
    """A read lease on the file of one map. Given back when the map has gone, or its memory has been replaced."""

    __slots__ = ("address", "descriptor", "for_child", "mapped", "nbytes", "path")

    def __init__(self, path: str, descriptor: int, mapped: mmap.mmap) -> None:
        self.path, self.descriptor = path, descriptor
        self.nbytes = len(mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.for_child = -1
        """The descriptor with the lease that a child has, while the process is being forked."""
        self.mapped = weakref.ref(mapped, self._gone)

    def _gone(self, _: _Mapped) -> None:
        # Called in the middle of anything, perhaps in a thread that has the lock.
        _dropped.append(self)
        _release_dropped()


def hold(path: str, descriptor: int, mapped: mmap.mmap) -> str:
    """Holds a lease on a mapped file for as long as `mapped` lives. Returns why not, or "".

    `descriptor` is an open one of the file, for reading, and not the one that is mapped; it stays the caller's.
    """
    if _libc is None:
        return "this system has no file leases"
    with _registry():
        if len(_leases) >= os.sysconf("SC_OPEN_MAX") // 4:
            return "a quarter of the file descriptors that this process may have (ulimit -n) hold leases already"
        if not _start_watcher():
            return "the thread that answers for leases cannot be started"
        if failed := _take(descriptor, _watcher):
            return _REASONS.get(failed, os.strerror(failed))
        lease = Lease(path, os.dup(descriptor), mapped)
        _leases[id(lease)] = lease
    return ""


_REASONS = {
    errno.EAGAIN: "a process has the file open for writing",
    errno.EACCES: "the file belongs to another user",
    errno.EINVAL: "its file system has no leases",
    errno.ENOLCK: "its file system has no leases",
}


def _take(descriptor: int, watcher: int) -> int:
    """Sets a read lease whose signal goes to a thread; 0 for none yet, which `_watch` makes up for. Returns errno."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, _SIGNAL)
        if watcher:
            _set_owner(descriptor, watcher)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def _set_owner(descriptor: int, thread: int) -> None:
    fcntl.fcntl(descriptor, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, thread))


# The registry, which the lock guards.

_leases: dict[int, Lease] = {}
_dropped: deque[Lease] = deque()
"""Leases of maps that have gone, to be given back by whichever thread has the lock."""
_lock = _thread.allocate_lock()
_watcher = 0
"""The thread's number for the kernel; 0 until it runs."""
_watcher_started = False


@contextmanager
def _registry() -> Iterator[None]:
    with _lock:
        yield
    _release_dropped()


def _release_dropped() -> None:
    # A thread that finds the lock taken leaves its lease to the one that has it, which looks here after letting go.
    while _dropped and _lock.acquire(blocking=False):
        try:
            while _dropped:
                _release(_dropped.popleft())
        finally:
            _lock.release()


def _release(lease: Lease) -> None:
    if _leases.pop(id(lease), None) is not None:
        _give_back(lease.descriptor)


def _give_back(descriptor: int) -> None:
    try:
        # Closing alone would leave it to a copy of the descriptor that a child may have.
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        pass  # the kernel has taken it away
    finally:
        os.close(descriptor)


# The watcher.


def _start_watcher() -> bool:
    global _watcher_started
    if not _watcher_started:
        try:
            _thread.start_new_thread(_watch, ())
        except RuntimeError:
            return False
        _watcher_started = True
    return True


def _watch() -> None:
    global _watcher
    # The kernel sends SIGIO where it cannot queue the other one.
    signals = {_SIGNAL, signal.SIGIO}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with _registry():
        _watcher = _thread.get_native_id()
        for lease in _leases.values():
            _set_owner(lease.descriptor, _watcher)
    while True:
        try:
            with _registry():
                _answer()
        except Exception:
            _log.exception("a lease on a mapped file could not be answered for")
        signal.sigwaitinfo(signals)


def _answer() -> None:
    """Gives back the leases that a writer waits for, when the maps of their files are memory."""
    until = 0.0
    for lease in list(_leases.values()):
        if fcntl.fcntl(lease.descriptor, fcntl.F_GETLEASE) == fcntl.F_UNLCK:
            until = until or time.monotonic() + _break_seconds() - _MARGIN_SECONDS
            _give_way(lease, until)


def _give_way(lease: Lease, until: float) -> None:
    try:
        mapped = lease.mapped()  # keeps the memory from being freed; None where it is being freed
        if mapped is not None:
            started = time.monotonic()
            copied = _replace(lease.address, lease.nbytes, until)
            if copied == lease.nbytes:
                seconds = time.monotonic() - started
                _log.warning(
                    "%s is opened for writing: the %s of it that this process had mapped are in memory of their own "
                    "now (%.2f s)",
                    *(lease.path, size(copied), seconds),
                )
            else:
                _log.error(
                    "%s is opened for writing, and only %s of %s that this process had mapped could be copied into "
                    "memory: the tensors in the rest of it change, or end the process with SIGBUS",
                    *(lease.path, size(copied), size(lease.nbytes)),
                )
    finally:
        mapped = None  # the writer goes on from here; by then the memory is its tensors' alone again
        _release(lease)


def _break_seconds() -> float:
    try:
        with open(_BREAK_TIME, encoding="ascii") as file:
            return float(file.read())
    except (OSError, ValueError):
        return _USUAL_BREAK_SECONDS


# Forks.

_fork_has_lock = False


def _before_fork() -> None:
    """Takes a second lease on each file, which the child is going to have from its first moment."""
    global _fork_has_lock
    _fork_has_lock = _lock.acquire()
    for lease in list(_leases.values()):
        try:
            again = f"/proc/self/fd/{lease.descriptor}"
            lease.for_child = system.open(again, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            _log.warning("%s is not protected against overwriting in a forked process: %s", lease.path, error.strerror)
            continue
        if failed := _take(lease.for_child, _watcher):
            os.close(lease.for_child)
            lease.for_child = -1
            if failed == errno.EAGAIN:  # a writer waits for the first one
                _give_way(lease, time.monotonic() + _break_seconds() - _MARGIN_SECONDS)


def _after_fork_in_parent() -> None:
    global _fork_has_lock
    if _fork_has_lock:
        for lease in _leases.values():
            if lease.for_child >= 0:
                os.close(lease.for_child)
                lease.for_child = -1
        _fork_has_lock = False
        _lock.release()
    _release_dropped()


def _after_fork_in_child() -> None:
    global _fork_has_lock, _lock, _watcher, _watcher_started
    if not _fork_has_lock:  # an interrupt came while it was waited for
        _lock = _thread.allocate_lock()
        _lock.acquire()
    for lease in list(_leases.values()):
        os.close(lease.descriptor)  # the lease on it is the parent's
        lease.descriptor, lease.for_child = lease.for_child, -1
        if lease.descriptor < 0:
            del _leases[id(lease)]
    _watcher, _watcher_started, _fork_has_lock = 0, False, False
    if _leases and not _start_watcher():
        for lease in list(_leases.values()):
            _release(lease)
    _lock.release()
    _release_dropped()


# Replacing memory.


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _replace(address: int, nbytes: int, until: float) -> int:
    """Puts anonymous memory with the same bytes in the place of a private map. Returns the bytes that it has done.

    No write of another thread is lost: a piece cannot be written to while it is copied, and a thread that tries to
    waits. There is no way to have it wait but in the handler of SIGSEGV, after which it tries again; the handler is a
    function of the C library that sleeps. Each piece is copied and replaced without letting go of Python's lock, or a
    thread that has the lock might be one that waits.
    """
    assert _libc is not None
    end = _whole_pages(nbytes)
    memory = _libc.mmap(None, end, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS, -1, 0)
    if memory == _MAP_FAILED:
        return 0
    step = max(_PIECE_BYTES, _whole_pages(end // _MOST_PIECES))
    waiting, before = _SigAction(handler=_libc.usleep, flags=_SA_NODEFER_RESTART), _SigAction()
    done = 0
    try:
        while done < end and time.monotonic() < until:
            count, there, new = min(step, end - done), address + done, memory + done
            _libc.madvise(new, count, _MADV_POPULATE_WRITE)
            if _libc.madvise(there, count, _MADV_POPULATE_READ) and ctypes.get_errno() != errno.EINVAL:
                break  # the file has become shorter, for the kernel waits no longer; or an I/O error
            calls = (
                partial(_libc.sigaction, signal.SIGSEGV, ctypes.byref(waiting), ctypes.byref(before)),
                partial(_libc.mprotect, there, count, mmap.PROT_READ),
                partial(_libc.memcpy, new, there, count),
                partial(_libc.mremap, new, count, count, _MREMAP_MAYMOVE_FIXED, there),
                partial(_libc.mprotect, there, count, mmap.PROT_READ | mmap.PROT_WRITE),
                partial(_libc.sigaction, signal.SIGSEGV, ctypes.byref(before), None),
            )
            with gc_paused():  # a finalizer might write to what is protected
                results = tuple(map(operator.call, calls))  # the interpreter lets no other thread run between them
            if results[3] != there:
                break
            done += count
    finally:
        if done < end:
            _libc.munmap(memory + done, end - done)
    return min(done, nbytes)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _Libc:
    """The functions of the C library that replace memory; those of `held` do not let go of Python's lock."""

    def __init__(self) -> None:
        """Raises `OSError` and `AttributeError` where there are none."""
        pointer, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        free, held = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
        self.mmap, self.munmap, self.madvise = free.mmap, free.munmap, free.madvise
        self.mmap.argtypes, self.mmap.restype = (pointer, length, number, number, number, ctypes.c_long), pointer
        self.munmap.argtypes, self.madvise.argtypes = (pointer, length), (pointer, length, number)
        self.sigaction, self.mprotect, self.memcpy, self.mremap = (
            held.sigaction,
            held.mprotect,
            held.memcpy,
            held.mremap,
        )
        self.sigaction.argtypes, self.mprotect.argtypes = (number, pointer, pointer), (pointer, length, number)
        self.memcpy.argtypes, self.memcpy.restype = (pointer, pointer, length), pointer
        self.mremap.argtypes, self.mremap.restype = (pointer, length, length, number, pointer), pointer
        self.usleep = ctypes.cast(free.usleep, pointer).value


def _find_libc() -> _Libc | None:
    """None where leases are not supported."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None  # elsewhere a sigaction may be laid out in another way
    try:
        return _Libc()
    except (OSError, AttributeError):
        return None


_libc = _find_libc()
if _libc is not None:
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
