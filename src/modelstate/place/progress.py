"""A progress bar for loads that take long enough to want one."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE_SECONDS = 0.5


@contextmanager
def progress_bar(wanted: bool | None, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes bytes as they are done.

    With None a bar appears on a terminal after half a second; True shows it at once, False never.
    """
    bar = _Bar(wanted, total_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    def __init__(self, wanted: bool | None, total_bytes: int) -> None:
        self._allowed = sys.stderr.isatty() if wanted is None else wanted
        self._patience = _PATIENCE_SECONDS if wanted is None else 0.0
        self._total, self._done = total_bytes, 0
        self._started = time.monotonic()
        self._shown: Any = None
        if wanted:
            self.advance(0)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if not self._allowed:
            return
        if self._shown is None and time.monotonic() - self._started >= self._patience:
            self._shown = self._show()
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=self._done)

    def _show(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        bar = Progress(
            TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)
        )
        bar.add_task("loading", total=self._total)
        bar.start()
        return bar

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
