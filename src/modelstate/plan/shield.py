"""Stretches of code that no signal may interrupt."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off the Python handlers of all signals, Ctrl-C among them, to the end of the block.

    Python runs them in the main thread only, so in other threads there is nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    handlers: dict[int, Any] = {}
    for number in _HANDLED:
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, note)
            handlers[number] = handler
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


_HANDLED: list[int] = sorted({int(number) for number in signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP})
