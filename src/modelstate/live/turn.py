"""One swap at a time."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from modelstate.errors import SwapBusyError, SwapTimeoutError
from modelstate.live.watched import Watched


class Taken:
    """A turn, as a context: it ends with its block, or when whoever has it is gone."""

    __slots__ = ("__weakref__", "_timeout_s", "_turn", "_wait", "_watched", "thread")

    def __init__(self, turn: "Turn", wait: bool, timeout_s: float | None) -> None:
        self.thread = threading.get_ident()
        self._turn, self._wait, self._timeout_s = turn, wait, timeout_s
        self._watched = Watched(self)

    def __enter__(self) -> None:
        try:
            self._turn._begin(self._watched, self._wait, self._timeout_s)
        except BaseException:
            self._turn._end(self._watched)
            raise

    def __exit__(self, *_: object) -> None:
        self._turn._end(self._watched)


class Turn:
    """Serialises swaps: a second one waits, or is refused.

    The turn has whoever came first of those that are there, which is no state that an interrupt could leave behind.
    """

    def __init__(self) -> None:
        self._queue: list[Watched[Taken]] = []

    def taken(self, wait: bool, timeout_s: float | None) -> Taken:
        """Within the block this thread has it. Raises `SwapBusyError` and `SwapTimeoutError`."""
        return Taken(self, wait, timeout_s)

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

    def _there(self) -> Iterator[Taken]:
        for one in tuple(self._queue):
            taken = one.get()
            if taken is not None:
                yield taken

    def _begin(self, mine: Watched[Taken], wait: bool, timeout_s: float | None) -> None:
        self.check()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._queue.append(mine)
        while (first := self._first()) is not mine:
            if not wait:
                raise SwapBusyError("another swap is under way", remedy="try again later, or leave when_busy='wait'")
            if until is not None and time.monotonic() >= until:
                raise SwapTimeoutError("another swap did not end in time", remedy="give more time with timeout_s=")
            first.wait(until)

    def _end(self, mine: Watched[Taken]) -> None:
        with suppress(ValueError):
            self._queue.remove(mine)
        mine.forget()

    def _first(self) -> Watched[Taken]:
        while not (first := self._queue[0]).is_there:
            with suppress(ValueError):
                self._queue.remove(first)
        return first
