"""What swaps have done."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from modelstate.text_format import size


class Clock(dict[str, float]):
    """Seconds by what they were spent on: `with clock("staged"): ...` adds to them."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()

    def __missing__(self, name: str) -> float:
        return 0.0

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self[name] += time.perf_counter() - began


Mode = Literal["available", "frugal"]


@dataclass(frozen=True, slots=True, repr=False)
class SwapReport:
    """What a swap has done. Made by `Live.swap`."""

    version: int
    """The id of the version that serves now."""
    previous: int
    """The id of the one before."""
    target: str
    source: str
    mode: Mode
    tensors: int
    """Weights that were filled; a tied one counts once."""
    bytes: int
    """Bytes of them."""
    copies: int
    """How many copies of the weights there were at most at once, kept versions and an undo copy included."""
    staged_seconds: float
    """For reading and checking them. In the mode "frugal" requests wait for this, too."""
    canary_seconds: float
    flip_seconds: float
    """For carrying buffers over and making the version the current one."""
    drain_seconds: float
    """Waiting for requests of the version before: after the flip, or before anything in the mode "frugal"."""
    drained: bool
    """Whether no request has the version before any more; otherwise it goes when the last one ends."""
    seconds: float
    """All of it."""
    carried: tuple[str, ...] = ()
    """Buffers that were taken over from the version before, as requests had changed them."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        served = f"{self.source} into {self.target}: version {self.version} serves, after {self.previous}"
        return f"<{type(self).__name__}: {served}, {self.tensors} tensors, {size(self.bytes)}>"

    def __str__(self) -> str:
        lines = [
            f"{self.source} into {self.target}: version {self.version} serves, after {self.previous}",
            f"  {self.tensors} tensors, {size(self.bytes)}, at most {self.copies} copies of them at once ({self.mode})",
            f"  staged in {self.staged_seconds:.3f} s, canary {self.canary_seconds:.3f} s, "
            f"flip {self.flip_seconds * 1e3:.3f} ms, drain {self.drain_seconds:.3f} s",
        ]
        if not self.drained:
            lines.append(f"  requests of version {self.previous} are still under way")
        if self.carried:
            lines.append(f"  carried over: {', '.join(self.carried[:8])}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


class Event(NamedTuple):
    """What has happened to a live program: a row of `Live.history()`."""

    action: str
    """ "started", "swapped", "rolled back" or "refused"."""
    version: int
    """The version that served afterwards."""
    source: str
    time: float
    """Seconds since 1970."""
    seconds: float
    error: str = ""
    """The class and text of the error; empty where there was none."""


class Answer(NamedTuple):
    """A result, and the version that gave it."""

    value: Any
    version: int
