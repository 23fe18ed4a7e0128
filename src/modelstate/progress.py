"""The progress bar of calls that read or write many bytes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_DELAY_SECONDS = 0.5


@contextmanager
def progress_bar(wanted: bool | None, total_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr, and yields a function that adds a number of bytes to it.

    The bar shows bytes, bytes per second and the time left.

    Args:
        wanted: True shows the bar at once, False never. None shows it on a terminal after half a second.
        total_bytes: The number of bytes in all.
        what: The activity, such as "loading".
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield lambda _: None
        return
    bar = _Bar(wanted, total_bytes, what)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    def __init__(self, wanted: bool | None, total_bytes: int, what: str) -> None:
        self._what = what
        self._delay_seconds = _DELAY_SECONDS if wanted is None else 0.0
        self._total, self._done = total_bytes, 0
        self._started = time.monotonic()
        self._shown: Any = None
        if wanted:
            self.advance(0)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._shown is None and time.monotonic() - self._started >= self._delay_seconds:
            self._shown = self._show()
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=self._done)

    def _show(self) -> Any:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        bar = Progress(
            TextColumn(self._what),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        bar.add_task(self._what, total=self._total)
        bar.start()
        return bar

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
