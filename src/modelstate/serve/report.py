"""Results of a live program: the report of a swap, events of its history, and answers with their version."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from modelstate.text_format import size


class Clock(dict[str, float]):
    """Seconds by phase: `with clock("staged"): ...` adds the time of the block to the phase."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()

    def __missing__(self, name: str) -> float:
        return 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the clock was made."""
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
    """The result of `Live.swap`. Printing it shows the versions, sizes and times.

    Example:
        >>> report = live.swap("step-2000.safetensors")
        >>> report.version, report.previous
        (2, 1)
    """

    version: int
    """The id of the version that serves now."""
    previous: int
    """The id of the version before."""
    target: str
    source: str
    mode: Mode
    tensors: int
    """The number of weights that were filled; a tied weight counts once."""
    bytes: int
    """The size of these weights."""
    copies: int
    """The largest number of copies of the weights at one time, with kept versions and an undo copy."""
    staged_seconds: float
    """Time to read and check the weights. In the mode "frugal" requests wait during this time."""
    canary_seconds: float
    flip_seconds: float
    """Time to carry buffers over and to make the version the current one."""
    drain_seconds: float
    """Time spent waiting for requests of the version before: after the flip, or at the start in the mode "frugal"."""
    drained: bool
    """Whether all requests of the version before have ended; otherwise it is freed when the last one ends."""
    seconds: float
    """Time of the whole swap."""
    carried: tuple[str, ...] = ()
    """Buffers that requests had changed, and that were taken over from the version before."""
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
    """A row of `Live.history()`."""

    action: str
    """ "started", "swapped", "rolled back" or "refused"."""
    version: int
    """The id of the version that served afterwards."""
    source: str
    time: float
    """Seconds since 1970."""
    seconds: float
    error: str = ""
    """The class and text of the error; empty without an error."""


class Answer(NamedTuple):
    """The result of a request, and the id of the version that gave it."""

    value: Any
    version: int
