"""The memory that a load holds at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Held:
    """Bytes that a load holds beyond the final tensors, and the most that it has held at once.

    It is told of buffers, of values that wait to be copied, and of what is kept to undo; not of each tensor that is
    read to where it stays, so that very many small ones cost nothing.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._now, self._lock = 0, threading.Lock()

    def take(self, nbytes: int) -> None:
        """Hears of memory that has been made; of some that is gone, where it is less than 0."""
        if nbytes:
            with self._lock:
                self._now += nbytes
                self.peak_bytes = max(self.peak_bytes, self._now)

    @contextmanager
    def during(self, nbytes: int) -> Iterator[None]:
        """Counts memory as long as the context lasts."""
        self.take(nbytes)
        try:
            yield
        finally:
            self.take(-nbytes)
