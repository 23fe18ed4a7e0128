"""Who is still there: by the life of an object, and by nothing that somebody would have to take back.

An interrupt may come between any two steps of a thread, also behind the one that counts and before the one that sees to
counting back. An object that a frame has goes with the frame, whatever ends it.
"""

import time
import weakref
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""How often those that wait look by themselves, should an interrupt have kept somebody from waking them."""


class Watched(Generic[T]):
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


def wait_all(watched: Iterable[Watched[Any]], until: float | None) -> bool:
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
