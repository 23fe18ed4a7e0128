"""What has happened while a store was followed, and who is told of it."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from modelstate.errors import FollowWarning

_EVENTS = 1000


class FollowEvent(NamedTuple):
    """What has happened while a store was followed: a row of `Following.events`."""

    action: str
    """ "swapped"; "skipped", a bad checkpoint; "waiting", for what is tried again; "ended", by an error; "callback",
    which raised."""
    step: int | None
    """The checkpoint's; None where it is about none."""
    source: str
    """The path of the checkpoint, or of the store."""
    time: float
    """Seconds since 1970."""
    seconds: float
    """For verifying the checkpoint and swapping it in."""
    version: int | None = None
    """The version that serves since."""
    error: str = ""
    """The class and text of the error; empty where there was none."""


class Telling:
    """Keeps events and calls callbacks, which cannot stop anything by raising."""

    def __init__(
        self, on_error: Callable[[Exception], Any] | None, on_swap: Callable[[FollowEvent], Any] | None
    ) -> None:
        self._on_error, self._on_swap = on_error, on_swap
        self.events: deque[FollowEvent] = deque(maxlen=_EVENTS)
        self._collected: list[FollowEvent] = []

    @contextmanager
    def collected(self) -> Iterator[list[FollowEvent]]:
        """Gives a list that gets the events within the block."""
        found: list[FollowEvent] = []
        self._collected = found
        try:
            yield found
        finally:
            self._collected = []

    def swapped(self, step: int, source: str, seconds: float, version: int | None) -> None:
        """A checkpoint serves."""
        event = self._note(FollowEvent("swapped", step, source, time.time(), seconds, version))
        if self._on_swap is not None:
            self._call(self._on_swap, event)

    def error(self, action: str, step: int | None, source: str, error: BaseException, seconds: float = 0.0) -> None:
        """Something went wrong, and what is done about it."""
        self._note(FollowEvent(action, step, source, time.time(), seconds, None, _text(error)))
        if self._on_error is not None and isinstance(error, Exception):
            self._call(self._on_error, error)
        else:
            _warn(_text(error))

    def _note(self, event: FollowEvent) -> FollowEvent:
        # Of an error the text alone: its traceback would keep the weights that were refused.
        self.events.append(event)
        self._collected.append(event)
        return event

    def _call(self, callback: Callable[[Any], Any], given: FollowEvent | Exception) -> None:
        try:
            callback(given)
        except Exception as failure:
            self._note(FollowEvent("callback", None, "", time.time(), 0.0, None, _text(failure)))
            _warn(f"a callback raised {_text(failure)}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _warn(text: str) -> None:
    with suppress(FollowWarning):  # where warnings are errors, there is nobody here to get one
        warnings.warn(text, FollowWarning, stacklevel=2)
