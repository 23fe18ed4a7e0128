"""Stretches of code that no signal may interrupt."""

import signal
import threading
from collections.abc import Iterator, Mapping
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

    handlers = {number: handler for number in _HANDLED if callable(handler := _handler_of(number))}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        try:
            _install(handlers)
        except BaseException:
            _install(handlers)  # the first that was put back has been called
            raise
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


def _install(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_handler_of = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
"""Without a look for the member of an enumeration, which takes twenty times as long, and there are 60 signals."""
_HANDLED: list[int] = sorted({int(number) for number in signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP})
