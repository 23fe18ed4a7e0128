"""Protects mapped files with read leases (`F_SETLEASE`), so that overwriting a file does not change live tensors.

A private map shows what is written to its file later. Where the file is truncated, even the pages that the process has
written to itself are lost. A lease is therefore held on each file whose map stays: when another process opens the file
for writing, or truncates it, the kernel delays that process, for at most `/proc/sys/fs/lease-break-time` seconds
(usually 45), and sends a signal to this one. The watcher thread waits for the signal. It copies each map into anonymous
memory, moves that memory over the map, so that the addresses stay the same, and releases the lease. Renaming another
file over the mapped one breaks no lease, and needs none.

Invariants:

- The signal goes to the watcher thread alone, which blocks it. The signal is one that is ignored by default, and its
  owner is set before the lease, so that it cannot end the process at any moment.
- A lease is on an open file description of its own, which no map refers to: closing it releases the lease, also when
  the process dies, whatever a forked child has inherited.
- Memory is replaced only while the watcher has a reference to the `mmap` object, so that the memory cannot be freed and
  its addresses used again meanwhile.
- A forked child has leases and a watcher of its own from its first moment, since its maps are its own.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import fcntl
import gc
import logging
import math
import mmap
import operator
import os
import platform
import signal
import struct
import time
import weakref
from contextlib import suppress
from functools import partial

from modelstate.forks import at_fork, fork_safe_lock
from modelstate.io import system
from modelstate.io.system import IS_LINUX, MAP_FAILED, MAP_NORESERVE, Advice, Descriptor, filesystem_type, madvise
from modelstate.text_format import size

_log = logging.getLogger("modelstate")
_SIGNAL = signal.SIGURG
"""Ignored by default. A signal whose default ends the process would do so if it ever went to another thread."""
_F_SETOWN_EX, _F_OWNER_TID = 15, 0
_MREMAP_MAYMOVE_FIXED = 3
_SA_NODEFER_RESTART = 0x40000000 | 0x10000000
_PIECE_BYTES, _MOST_PIECES = 8 << 20, 512
"""The watcher holds the interpreter lock while it copies a piece; to get the lock may take 5 ms for each piece."""
_MARGIN_SECONDS = 2.0
_START_SECONDS = 10.0
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_BREAK_TIME = "/proc/sys/fs/lease-break-time"
_USUAL_BREAK_SECONDS = 45.0
NAMELESS = "it has no name, as memory of memfd_create, whose writers do not wait for a lease"
"""Why a file without a name gets no lease. The kernel would grant one for memory of `memfd_create`: it does not count
the descriptor that made the memory as open for writing."""


class Lease:
    """A read lease on the file of one map. Released when the map is freed, or its memory has been replaced."""

    __slots__ = ("address", "descriptor", "for_child", "mapped", "nbytes", "path")

    def __init__(self, path: str, descriptor: Descriptor, mapped: mmap.mmap) -> None:
        self.path, self.descriptor, self.nbytes = path, descriptor, len(mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.for_child: Descriptor | None = None
        """While the process is being forked: the descriptor that holds the child's lease."""
        self.mapped = weakref.ref(mapped, _release)


def hold(path: str, descriptor: int, mapped: mmap.mmap) -> str:
    """Holds a lease on a mapped file for as long as `mapped` lives.

    Args:
        path: The path of the file, for messages. The file has a name.
        descriptor: A descriptor that is open for reading, and is not the mapped one. The caller closes it.
        mapped: The map.

    Returns:
        An empty string, or the reason why no lease is held.
    """
    if not _CAN_REPLACE:
        return "this system has no file leases"
    with _lock:
        if len(_leases) >= system.most_open():
            return "a quarter of the file descriptors that this process may have (ulimit -n) hold leases already"
        if not _start_watcher():
            return "the thread that answers for leases cannot be started"
        try:
            _take(descriptor)
            lease = Lease(path, Descriptor.of(os.dup, descriptor), mapped)
        except OSError as error:  # where `dup` fails, the caller ends the lease, since it closes its own descriptor
            return _reason(error)
        _leases[lease.mapped] = lease
    return ""


# ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, tmpfs, overlayfs.
_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0xCA451A4E, 0x01021994, 0x794C7630}
"""File systems whose files only this machine changes. Others may grant a lease that other machines do not know of."""


def hold_for_now(descriptor: int) -> str:
    """Sets a read lease that no thread waits for: the caller asks `is_intact`, and calls `release`.

    The kernel sends no signal when another process opens the file for writing; that process waits.

    Returns:
        An empty string, or the reason why no lease is held.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return "this system has no file leases"
    if filesystem_type(descriptor) not in _FILE_SYSTEMS:
        return "other machines may write to its file system"
    try:
        _take(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, 0)
    except OSError as error:
        return _reason(error)
    return ""


def is_intact(descriptor: int) -> bool:
    """Whether no process waits, or has waited, for the lease on an open file."""
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def _reason(error: OSError) -> str:
    return _REASONS.get(error.errno or 0, os.strerror(error.errno or errno.EIO))


_REASONS = {
    errno.EAGAIN: "a process has the file open for writing",
    errno.EACCES: "the file belongs to another user",
    errno.EINVAL: "its file system has no leases",
    errno.ENOLCK: "its file system has no leases",
}


def _take(descriptor: int) -> None:
    """Sets a read lease whose signal goes to the watcher. Raises `OSError`."""
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, _SIGNAL)  # the default, SIGIO, would end the process
    _set_owner(descriptor)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def _set_owner(descriptor: int) -> None:
    fcntl.fcntl(descriptor, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, _watcher))


# The registry. `_lock` guards what is added to it; any thread may take a lease out of it, in one step.

_leases: dict[weakref.ref[mmap.mmap], Lease] = {}
"""By their maps."""
_lock = fork_safe_lock()
_watcher = 0
"""The kernel's number of the watcher thread; 0 until it runs."""


def _release(mapped: weakref.ref[mmap.mmap]) -> None:
    """Releases the lease of a map. Called when the map is freed, at any point of any thread.

    The descriptor is closed with its last reference, which the watcher may have. Where an interrupt ends the call, the
    watcher releases the lease when a writer waits for it.
    """
    if _leases:  # None at the end of the interpreter
        lease = _leases.pop(mapped, None)
        if lease is not None:
            release(lease.descriptor)


def release(descriptor: Descriptor) -> None:
    """Ends a lease. Closing alone would leave it to a copy of the descriptor that a child may have."""
    with suppress(OSError):  # the kernel has broken the lease already
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


# The watcher.


def _start_watcher() -> bool:
    """Starts the watcher, unless it runs. Returns False where the system starts no more threads."""
    if not _watcher:
        waiting = _thread.allocate_lock()
        waiting.acquire()
        with suppress(RuntimeError):
            _thread.start_new_thread(_watch, (waiting,))
            waiting.acquire(timeout=_START_SECONDS)
    return _watcher != 0


def _watch(waiting: _thread.LockType) -> None:
    global _watcher
    # The kernel sends SIGIO where it cannot queue the signal that was asked for.
    signals = {_SIGNAL, signal.SIGIO}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _watcher = _thread.get_native_id()
    waiting.release()
    while True:
        try:
            _answer_all()
        except Exception:
            _log.exception("a lease on a mapped file could not be answered for")
        signal.sigwaitinfo(signals)


def _answer_all() -> None:
    """Answers all writers that wait. The caller keeps no reference to a lease, whose file is closed with the last."""
    until = 0.0
    with _lock:
        for lease in [*_leases.values()]:
            if fcntl.fcntl(lease.descriptor, fcntl.F_GETLEASE) == fcntl.F_UNLCK:
                until = until or time.monotonic() + safe_seconds()
                _answer(lease, until)


def _answer(lease: Lease, until: float) -> None:
    """Replaces the map of a file that a writer waits for, and releases its lease."""
    try:
        mapped = lease.mapped()  # keeps the memory from being freed; None while it is being freed
        if mapped is not None:
            started = time.monotonic()
            copied = _replace(lease.address, lease.nbytes, until)
            lost = "" if copied == lease.nbytes else ", and the tensors in the rest change, or end it with SIGBUS"
            _log.log(
                logging.ERROR if lost else logging.WARNING,
                "%s is opened for writing: the %s of it that this process had mapped are in memory of their own now "
                "(%.2f s)%s",
                *(lease.path, size(copied), time.monotonic() - started, lost),
            )
    finally:
        mapped = None  # the writer continues from here; by then only the tensors refer to the memory again
        _release(lease.mapped)


def safe_seconds() -> float:
    """The seconds for which a writer certainly waits for a lease to end."""
    seconds = _USUAL_BREAK_SECONDS
    with suppress(OSError, ValueError), Descriptor.of(os.open, _BREAK_TIME, os.O_RDONLY) as file:
        seconds = float(os.read(file, 32)) or math.inf  # with 0 the kernel never ends a lease by itself
    return seconds - _MARGIN_SECONDS


# Forks, which have the lock.


def _before_fork() -> None:
    """Takes a second lease on each file, so that the child has it from its first moment."""
    for lease in [*_leases.values()]:
        try:
            again = f"/proc/self/fd/{lease.descriptor}"
            descriptor = Descriptor.of(system.open, again, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            _take(descriptor)
            lease.for_child = descriptor
        except OSError as error:
            if error.errno == errno.EAGAIN:  # a writer waits for the first lease
                _answer(lease, time.monotonic() + safe_seconds())
            else:
                _log.warning("%s is not protected in a forked process: %s", lease.path, error.strerror)


def _after_fork_in_parent() -> None:
    for lease in [*_leases.values()]:
        lease.for_child = None


def _after_fork_in_child() -> None:
    global _watcher
    _watcher = 0
    for lease in [*_leases.values()]:
        lease.descriptor.close()  # its lease is the parent's
        if lease.for_child is None:
            del _leases[lease.mapped]
        else:
            lease.descriptor, lease.for_child = lease.for_child, None
    if _leases and _start_watcher():
        for lease in [*_leases.values()]:
            _set_owner(lease.descriptor)


at_fork(before=_before_fork, in_parent=_after_fork_in_parent, in_child=_after_fork_in_child)


# Replacing memory.


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _replace(address: int, nbytes: int, until: float) -> int:
    """Replaces a private map by anonymous memory with the same bytes. Returns the number of bytes that it replaced.

    No write of another thread is lost: a piece is read-only while it is copied, and a thread that writes to it waits.
    The only way to make it wait is in the handler of SIGSEGV, after which it tries again; the handler is a function of
    the C library that sleeps. Each piece is copied and replaced without releasing the interpreter lock: otherwise the
    thread that holds the interpreter lock could be one that waits.
    """
    end, done = _whole_pages(nbytes), 0
    step = max(_PIECE_BYTES, _whole_pages(end // _MOST_PIECES))
    sleep = ctypes.cast(_libc.usleep, ctypes.c_void_p).value
    waiting, before = _SigAction(handler=sleep, flags=_SA_NODEFER_RESTART), _SigAction()
    # Pieces of one map stay one map for the kernel, which limits the number of maps of a process.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    memory = _libc.mmap(None, ctypes.c_size_t(end), access, _ANONYMOUS, -1, ctypes.c_long(0))
    if memory == MAP_FAILED:
        return 0
    while done < end and time.monotonic() < until:
        count, old, new = min(step, end - done), address + done, memory + done
        if madvise(old, count, Advice.POPULATE_READ) not in (0, errno.EINVAL):
            break  # an I/O error, or the file has been truncated since the kernel stopped delaying the writer
        madvise(new, count, Advice.POPULATE_WRITE)
        length, source, target = ctypes.c_size_t(count), ctypes.c_void_p(old), ctypes.c_void_p(new)
        calls = (
            partial(_libc.sigaction, signal.SIGSEGV, ctypes.byref(waiting), ctypes.byref(before)),
            partial(_libc.mprotect, source, length, mmap.PROT_READ),
            partial(_libc.memcpy, target, source, length),
            partial(_libc.mremap, target, length, length, _MREMAP_MAYMOVE_FIXED, source),
            partial(_libc.mprotect, source, length, access),
            partial(_libc.sigaction, signal.SIGSEGV, ctypes.byref(before), None),
        )
        is_enabled = gc.isenabled()
        gc.disable()  # a finalizer might write to the protected memory
        results = tuple(map(operator.call, calls))  # the interpreter runs no other thread between the calls
        if is_enabled:
            gc.enable()
        if results[3] != old:
            break
        done += count
    _libc.munmap(ctypes.c_void_p(memory + done), ctypes.c_size_t(end - done))
    return min(done, nbytes)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_CAN_REPLACE = IS_LINUX and platform.machine() in ("x86_64", "aarch64")
"""Elsewhere the layout of `struct sigaction` may differ."""
_libc = ctypes.PyDLL(None, use_errno=True)
"""The C library, whose functions keep the interpreter lock."""
if _CAN_REPLACE:
    _libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
