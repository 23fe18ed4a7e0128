"""Weak handles on requests, and the lock that lets one swap run at a time.

An interrupt may come between any two steps of a thread, also behind the one that counts and before the one that sees to
counting back. An object that a frame has goes with the frame, whatever ends it.
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

LOOK_SECONDS = 1.0
"""How often those that wait look by themselves, should an interrupt have kept somebody from waking them."""


class WeakHandle(Generic[T]):
    """Whether an object is there, and a way to wait until it is not. It does not keep it."""

    __slots__ = ("_gone", "_ref")

    def __init__(self, one: T) -> None:
        self._gone: SimpleQueue[Any] = SimpleQueue()  # to put something in is safe at any moment, also when memory goes
        self._ref: weakref.ref[T] | None = weakref.ref(one, self._gone.put)

    def get(self) -> T | None:
        """The object, which the caller then keeps."""
        return None if self._ref is None else self._ref()

    @property
    def is_there(self) -> bool:
        return self.get() is not None

    def forget(self) -> None:
        """From now on it counts as gone."""
        self._ref = None
        self._gone.put(None)

    def wait(self, until: float | None) -> bool:
        """Waits until it has gone. Returns whether it has."""
        while self.is_there:
            left = LOOK_SECONDS if until is None else min(until - time.monotonic(), LOOK_SECONDS)
            if left <= 0:
                return False
            self.look(left)
        return True

    def look(self, seconds: float) -> None:
        """Waits for a while, or less where it goes."""
        try:
            self._gone.get(timeout=seconds)
        except Empty:
            return
        self._gone.put(None)  # for the next of those that wait


def wait_all(watched: Iterable[WeakHandle[Any]], until: float | None) -> bool:
    """Waits until all of them have gone. Returns whether they have."""
    return all(one.wait(until) for one in watched)


class Bag(Generic[T]):
    """Objects as long as others have them. It may be asked and added to by any thread at any time."""

    __slots__ = ("__weakref__", "_refs")

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, one: T) -> None:
        self._refs.add(weakref.ref(one, self._refs.discard))

    def __iter__(self) -> Iterator[T]:
        for ref in tuple(self._refs):
            one = ref()
            if one is not None:
                yield one


class SwapLockGuard:
    """A turn, as a context: it ends with its block, or when whoever has it is gone."""

    __slots__ = ("__weakref__", "_timeout_s", "_turn", "_wait", "_watched", "thread")

    def __init__(self, turn: "SwapLock", wait: bool, timeout_s: float | None) -> None:
        self.thread = threading.get_ident()
        self._turn, self._wait, self._timeout_s = turn, wait, timeout_s
        self._watched = WeakHandle(self)

    def __enter__(self) -> None:
        try:
            self._turn._begin(self._watched, self._wait, self._timeout_s)
        except BaseException:
            self._turn._end(self._watched)
            raise

    def __exit__(self, *_: object) -> None:
        self._turn._end(self._watched)


class SwapLock:
    """Serialises swaps: a second one waits, or is refused.

    The turn has whoever came first of those that are there, which is no state that an interrupt could leave behind.
    """

    def __init__(self) -> None:
        self._queue: list[WeakHandle[SwapLockGuard]] = []

    def taken(self, wait: bool, timeout_s: float | None) -> SwapLockGuard:
        """Within the block this thread has it. Raises `SwapBusyError` and `SwapTimeoutError`."""
        return SwapLockGuard(self, wait, timeout_s)

    @property
    def is_mine(self) -> bool:
        """Whether this very thread has it, or waits for it."""
        here = threading.get_ident()
        return any(one.thread == here for one in self._there())

    def check(self) -> None:
        """Raises `SwapBusyError` within a turn of this very thread."""
        if self.is_mine:
            raise SwapBusyError(
                "a swap was called from within a swap, by its canary or by code of the model",
                remedy="call it when that one has ended",
            )

    def forked(self) -> None:
        """In the child of a fork: of the threads that are not there any more none is waited for."""
        here = threading.get_ident()
        self._queue = [one for one in self._queue if (taken := one.get()) is not None and taken.thread == here]

    def _there(self) -> Iterator[SwapLockGuard]:
        for one in tuple(self._queue):
            taken = one.get()
            if taken is not None:
                yield taken

    def _begin(self, mine: WeakHandle[SwapLockGuard], wait: bool, timeout_s: float | None) -> None:
        self.check()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._queue.append(mine)
        while (first := self._first()) is not mine:
            if not wait:
                raise SwapBusyError("another swap is under way", remedy="try again later, or leave when_busy='wait'")
            if until is not None and time.monotonic() >= until:
                raise SwapTimeoutError("another swap did not end in time", remedy="give more time with timeout_s=")
            first.wait(until)

    def _end(self, mine: WeakHandle[SwapLockGuard]) -> None:
        with suppress(ValueError):
            self._queue.remove(mine)
        mine.forget()

    def _first(self) -> WeakHandle[SwapLockGuard]:
        while not (first := self._queue[0]).is_there:
            with suppress(ValueError):
                self._queue.remove(first)
        return first
