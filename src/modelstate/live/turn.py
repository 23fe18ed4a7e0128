"""One swap at a time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from modelstate.errors import SwapBusyError, SwapTimeoutError

_LOOK_SECONDS = 1.0
"""How often those that wait look by themselves, should an interrupt have kept somebody from waking them."""


class Turn:
    """Serialises swaps: a second one waits, or is refused."""

    def __init__(self) -> None:
        self._moved = threading.Condition(threading.Lock())
        self._owner: int | None = None

    @contextmanager
    def taken(self, wait: bool, timeout_s: float | None) -> Iterator[None]:
        """Raises `SwapBusyError` and `SwapTimeoutError`."""
        here = threading.get_ident()
        if self._owner == here:
            raise SwapBusyError(
                "a swap was called from within a swap, by its canary or by code of the model",
                remedy="call it when that one has ended",
            )
        # Who has the turn is one attribute, and not whether a lock is held: wherever an interrupt comes, it tells.
        try:
            with self._moved:
                self._wait_for_it(wait, timeout_s)
                self._owner = here
            yield
        finally:
            if self._owner == here:
                self._owner = None
                with self._moved:
                    self._moved.notify()

    def _wait_for_it(self, wait: bool, timeout_s: float | None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._owner is not None:
            if not wait:
                raise SwapBusyError("another swap is under way", remedy="try again later, or leave when_busy='wait'")
            left = _LOOK_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                raise SwapTimeoutError("another swap did not end in time", remedy="give more time with timeout_s=")
            self._moved.wait(min(left, _LOOK_SECONDS))
