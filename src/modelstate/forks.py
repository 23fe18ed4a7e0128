"""What the library does around a fork of the process.

A forked child has one thread. A lock that another thread held, or an import that it had begun, never ends there. So a
fork waits for both. This file is the only one that registers functions with `os.register_at_fork`. `import modelstate`
imports it, so that it also sees the first call of the library in another thread.
"""

import importlib
import os
import time
from _thread import allocate_lock, get_ident

TYPE_CHECKING = False  # as in `modelstate/__init__.py`
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Lock
    from typing import Any

_locks: "list[Lock]" = []
_acquired: "list[Lock]" = []
_before: "list[Callable[[], None]]" = []
_in_parent: "list[Callable[[], None]]" = []
_in_child: "list[Callable[[], None]]" = []
_is_forked = False
_MOST_IMPORT_SECONDS = 10.0
"""The longest wait of a fork for imports of other threads. An import may wait for the thread that forks."""


def is_forked() -> bool:
    """Returns whether this process was forked, and therefore lacks threads that torch relies on."""
    return _is_forked


def fork_safe_lock() -> "Lock":
    """Returns a lock for the state of a Python module. A fork waits until the lock is free.

    So the lock is free in a forked child, and the state that it guards is complete. The lock must be held only for
    moments.
    """
    lock = allocate_lock()
    _locks.append(lock)
    return lock


def at_fork(
    *,
    before: "Callable[[], None] | None" = None,
    in_parent: "Callable[[], None] | None" = None,
    in_child: "Callable[[], None] | None" = None,
) -> None:
    """Registers functions that are called around each fork, in the thread that forks, while it holds the locks."""
    for function, functions in ((before, _before), (in_parent, _in_parent), (in_child, _in_child)):
        if function is not None:
            functions.append(function)


def _prepare() -> None:
    """Waits for imports of other threads and for the locks, and acquires the locks."""
    until = time.monotonic() + _MOST_IMPORT_SECONDS
    while True:
        for lock in _locks:
            lock.acquire()
            _acquired.append(lock)
        if not _is_importing_elsewhere() or time.monotonic() >= until:
            break
        _release_locks()
        time.sleep(0.001)
    for function in _before:
        function()


def _is_importing_elsewhere() -> bool:
    """Returns whether another thread is importing a module."""
    module_locks: Any = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
    owners = [getattr(reference(), "owner", None) for reference in list(module_locks.values())]
    return any(owner not in (None, get_ident()) for owner in owners)


def _release_locks() -> None:
    acquired = _acquired[::-1]
    _acquired.clear()  # before the first lock is free, with which a fork in another thread begins
    for lock in acquired:
        lock.release()


def _after_in_parent() -> None:
    for function in _in_parent:
        function()
    _release_locks()


def _after_in_child() -> None:
    global _is_forked
    _is_forked = True
    for function in _in_child:
        function()
    _release_locks()


os.register_at_fork(before=_prepare, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
