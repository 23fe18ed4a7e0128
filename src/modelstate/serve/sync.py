"""Weak handles on requests, and the lock that lets one swap run at a time.

An interrupt can arrive between any two instructions of a thread, also after the one that increments a counter and
before the `try` that would decrement it. So nothing here counts. An object that belongs to a frame stands for each
request and each lock holder, and disappears with that frame, whatever ends it. Weak references tell which exist.
"""

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from modelstate.errors import SwapBusyError, SwapTimeoutError

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""The longest wait without a check, in case an interrupt has prevented the wake-up."""


class WeakHandle(Generic[T]):
    """A weak reference on which threads can wait until the object is gone."""

    __slots__ = ("_gone", "_ref")

    def __init__(self, target: T) -> None:
        # `SimpleQueue.put` is reentrant, so it can be called at any moment, as by the garbage collector.
        self._gone: SimpleQueue[Any] = SimpleQueue()
        self._ref: weakref.ref[T] | None = weakref.ref(target, self._gone.put)

    def get(self) -> T | None:
        """The object, which the caller then keeps alive; None when it is gone."""
        return None if self._ref is None else self._ref()

    @property
    def is_alive(self) -> bool:
        return self.get() is not None

    def forget(self) -> None:
        """Drops the object. From now on it counts as gone."""
        self._ref = None
        self._gone.put(None)

    def wait(self, deadline: float | None) -> bool:
        """Waits until the object is gone. Returns whether it is."""
        while self.is_alive:
            seconds = CHECK_SECONDS if deadline is None else min(deadline - time.monotonic(), CHECK_SECONDS)
            if seconds <= 0:
                return False
            self.wait_once(seconds)
        return True

    def wait_once(self, seconds: float) -> None:
        """Waits for a time, or less where the object goes earlier."""
        try:
            self._gone.get(timeout=seconds)
        except Empty:
            return
        self._gone.put(None)  # wakes the next waiting thread


def wait_all(handles: Iterable[WeakHandle[Any]], deadline: float | None) -> bool:
    """Waits until all objects are gone. Returns whether they are."""
    return all(handle.wait(deadline) for handle in handles)


class ConcurrentWeakSet(Generic[T]):
    """A set of weak references that any thread can iterate while others add to it, unlike `weakref.WeakSet`."""

    __slots__ = ("__weakref__", "_refs")

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        self._refs.add(weakref.ref(item, self._refs.discard))

    def __iter__(self) -> Iterator[T]:
        for ref in tuple(self._refs):
            item = ref()
            if item is not None:
                yield item


class SwapLock:
    """Serializes swaps: a second swap waits, or is refused.

    The oldest live guard in a queue holds the lock. No separate state says so, which an interrupt could leave wrong.
    """

    def __init__(self) -> None:
        self._queue: list[WeakHandle[SwapLockGuard]] = []

    def held(self, wait: bool, timeout_seconds: float | None) -> "SwapLockGuard":
        """A context in which this thread holds the lock. Entering raises `SwapBusyError` and `SwapTimeoutError`."""
        return SwapLockGuard(self, wait, timeout_seconds)

    def check_not_nested(self) -> None:
        """Raises `SwapBusyError` where this thread already holds the lock, or waits for it."""
        # No local variable refers to a guard here: the traceback of the error would keep the guard alive.
        threads = {guard.thread for handle in tuple(self._queue) for guard in (handle.get(),) if guard is not None}
        if threading.get_ident() in threads:
            raise SwapBusyError(
                "a swap was called from within a swap, by its canary or by code of the model",
                remedy="call it when that one has ended",
            )

    def after_fork(self) -> None:
        """Drops the guards of threads that do not exist in the child of a fork."""
        this_thread = threading.get_ident()
        self._queue = [
            handle for handle in self._queue if (guard := handle.get()) is not None and guard.thread == this_thread
        ]

    def _acquire(self, mine: "WeakHandle[SwapLockGuard]", wait: bool, timeout_seconds: float | None) -> None:
        self.check_not_nested()
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._queue.append(mine)
        while (first := self._first()) is not mine:
            if not wait:
                raise SwapBusyError("another swap is under way", remedy="try again later, or leave when_busy='wait'")
            if deadline is not None and time.monotonic() >= deadline:
                raise SwapTimeoutError(
                    "another swap did not end in time", remedy="give more time with timeout_seconds="
                )
            first.wait(deadline)

    def _release(self, mine: "WeakHandle[SwapLockGuard]") -> None:
        with suppress(ValueError):
            self._queue.remove(mine)
        mine.forget()

    def _first(self) -> "WeakHandle[SwapLockGuard]":
        while not (first := self._queue[0]).is_alive:
            with suppress(ValueError):
                self._queue.remove(first)
        return first


class SwapLockGuard:
    """The context of `SwapLock.held`. The lock is released when the block ends, or when the guard is gone."""

    __slots__ = ("__weakref__", "_handle", "_lock", "_timeout_seconds", "_wait", "thread")

    def __init__(self, lock: SwapLock, wait: bool, timeout_seconds: float | None) -> None:
        self.thread = threading.get_ident()
        self._lock, self._wait, self._timeout_seconds = lock, wait, timeout_seconds
        self._handle = WeakHandle(self)

    def __enter__(self) -> None:
        try:
            self._lock._acquire(self._handle, self._wait, self._timeout_seconds)
        except BaseException:
            self._lock._release(self._handle)
            raise

    def __exit__(self, *_: object) -> None:
        self._lock._release(self._handle)
