"""One swap at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from modelstate.errors import SwapBusyError, SwapTimeoutError


class Turn:
    """Serialises swaps: a second one waits, or is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        if not self._lock.acquire(wait, -1 if timeout_s is None or not wait else timeout_s):
            if not wait:
                raise SwapBusyError("another swap is under way", remedy="try again later, or leave when_busy='wait'")
            raise SwapTimeoutError("another swap did not end in time", remedy="give more time with timeout_s=")
        try:
            self._owner = here
            yield
        finally:
            self._owner = None
            self._lock.release()
