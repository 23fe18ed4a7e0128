"""When a training loop has to save and end: before its time is over, or when a signal says so."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from modelstate.errors import OptionError
from modelstate.store.retention import is_number

_HOUR_SECONDS = 3600
_FLOOR_SECONDS = 30.0
_UNKNOWN_SECONDS = 600.0
_SHARE = 0.05
_SKEW_SECONDS = 60.0
_NOT_CAUGHT = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGCHLD")
"""Signals that cannot be caught, or that do not ask for an end."""
_ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""By the first, `multiprocessing` ends workers, and waits until they have: a child must never pass it over."""


class Deadline:
    """Tells a loop when to save and end.

    `hours` is the time that the job has, or None for signals alone. `since` is where it begins: `"process"`, the start
    of this process, imports included; `"now"`; or a Unix time, as that of the start of the job, where a queue says it.
    What the wall clock does afterwards changes nothing; time in which the machine is suspended counts.

    `margin` is how many seconds before the end the loop ends. `"auto"` is twice the longest save so far plus the
    longest step so far, of which `saved` and `stepped` tell; at least 30 s. Before the first save it is 5% of the time,
    10 minutes at most, plus the longest step. Where 5% of the time is less than 30 s, that is the least.

    As a context manager it takes `signals`: the first one makes `reached` true, and the loop goes on until it asks.
    Nothing else happens, so a second one does not end a save; only a second SIGINT does what it did before. The
    handlers that were there before are not called; they are put back at the end. One deadline may be entered several
    times, as by loops within each other.

    A signal asks all of the process to end: whichever deadline has received it, each that takes this signal is reached,
    one that is made later too, unless its time has begun since. SIGINT is for those alone that are entered.

    Forked children, as the workers of a data loader, do not end by a signal that comes to all of the process group;
    only by SIGTERM, SIGINT and SIGQUIT, for by these their parent ends them. Signals can be taken in the main thread
    alone: entering it in another one raises `OptionError`, unless it is entered already; `signals=()` takes none. It
    can be left in any thread. In another one its handlers stay, and do what those before them do.

    Raises `OptionError` for arguments that mean nothing.
    """

    def __init__(
        self,
        hours: float | None = 4,
        margin: float | Literal["auto"] = "auto",
        *,
        since: float | Literal["process", "now"] = "process",
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    ) -> None:
        if hours is not None and not (is_number(hours) and 0 < hours * _HOUR_SECONDS < math.inf):
            raise OptionError("hours= is the time of the job", expected="hours, above 0, or None", found=repr(hours))
        self._total_seconds = math.inf if hours is None else hours * _HOUR_SECONDS
        if margin != "auto" and not (is_number(margin) and 0 <= margin < self._total_seconds):
            raise OptionError(
                "margin= is the time that is left when the loop ends",
                expected=f"seconds, from 0, less than {self._total_seconds:g}, or 'auto'",
                found=repr(margin),
            )
        self._margin_seconds = None if margin == "auto" else float(margin)
        self._signals = _checked_signals(signals)
        if hours is None and not self._signals:
            raise OptionError("a deadline that never comes", expected="hours, or signals", found="neither")
        self._start = now_seconds() - _elapsed_seconds(since)
        self._longest_save: float | None = None
        self._longest_step = 0.0
        self._late = ""
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._owner = 0
        self._inside: list[None] = []
        """One for each time that it was entered and not left; a list, since threads may do so at once."""
        self._entered = math.inf

    @property
    def reached(self) -> bool:
        """Whether the loop should save and end. Once it is true it stays so."""
        return bool(self.reason)

    @property
    def reason(self) -> str:
        """Why, as text; empty before."""
        if self._signal():
            return f"{_name(self._received)} was received"
        remaining, margin = self.remaining_seconds, self.margin_seconds
        if not self._late and remaining <= margin:
            # Kept, for a margin that a save has made smaller must not let the loop go on.
            self._late = f"{remaining:,.0f} s of {self._total_seconds:,.0f} s are left, the margin is {margin:,.0f} s"
        return self._late

    @property
    def remaining_seconds(self) -> float:
        """Until the end, the margin included; 0 after it, infinite without `hours`."""
        return max(0.0, self._start + self._total_seconds - now_seconds())

    @property
    def margin_seconds(self) -> float:
        """How long before the end `reached` is true, as far as is known now."""
        if self._margin_seconds is not None:
            return self._margin_seconds
        share = _SHARE * self._total_seconds
        if self._longest_save is None:
            return min(_UNKNOWN_SECONDS, share) + self._longest_step
        return max(min(_FLOOR_SECONDS, share), 2 * self._longest_save + self._longest_step)

    @property
    def start(self) -> float:
        """Where its time begins, in seconds since the machine started."""
        return self._start

    @property
    def is_by_signal(self) -> bool:
        """Whether it was reached by a signal."""
        return bool(self._received)

    def saved(self, seconds: float) -> None:
        """Tells how long a save took, until it was durable."""
        self._longest_save = max(self._longest_save or 0.0, _checked_seconds(seconds))

    def stepped(self, seconds: float) -> None:
        """Tells how long the loop took from one look at `reached` to the next."""
        self._longest_step = max(self._longest_step, _checked_seconds(seconds))

    def __enter__(self) -> Self:
        if self._inside and self._owner == os.getpid():
            self._inside.append(None)
            return self
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be received in the main thread alone",
                found=threading.current_thread().name,
                remedy="enter the deadline there first, or give it signals=()",
            )
        before = {number: self._handler_before(number) for number in self._signals}
        self._owner, self._inside, self._entered, self._previous = os.getpid(), [None], now_seconds(), {}
        try:
            for number, previous in before.items():
                signal.signal(number, self._receive)
                self._previous[number] = previous
            _entered.append(self)
        except BaseException as error:
            self._put_back()
            if not isinstance(error, OSError | ValueError):
                raise
            raise OptionError("a signal that cannot be received", found=error, remedy="signals= without it") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._inside:  # in a forked child that has entered it anew, loops of its parent leave it too
            self._inside.pop()
        if not self._inside:
            self._put_back()

    def _handler_before(self, number: int) -> Any:
        """The one that is there, behind those that stayed of deadlines which nobody is in any more."""
        found = signal.getsignal(number)
        while True:
            of = getattr(found, "__self__", None)
            if not isinstance(of, Deadline) or number not in of._previous or (of._inside and of is not self):
                return found
            found = of._previous[number]

    def _put_back(self) -> None:
        self._inside = []
        if self in _entered:
            _entered.remove(self)
        for number in reversed(self._previous):
            self._put_one_back(number)
        for other in _entered:  # one that was entered later and is left later: this one's handler is no more
            for number, previous in other._previous.items():
                if previous == self._receive:
                    other._previous[number] = self._previous[number]

    def _put_one_back(self, number: int) -> None:
        """Unless somebody has put in another handler since, or this is not the main thread."""
        if signal.getsignal(number) == self._receive:
            with suppress(ValueError):
                # None is a handler that Python did not install, and cannot install again.
                signal.signal(number, signal.SIG_DFL if self._previous[number] is None else self._previous[number])

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Does what the handler does that was there before."""
        previous = self._previous[number]
        self._put_one_back(number)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._inside:
            self._pass_on(number, frame)
            return
        if os.getpid() != self._owner:
            # A forked child, as a worker of a data loader: it has no loop that asks.
            if number in _ENDS_CHILDREN or callable(self._previous[number]):
                self._pass_on(number, frame)
            return
        _came[number] = now_seconds()
        self._signal()
        if number == signal.SIGINT:
            for one in reversed(_entered):
                if number in one._previous:
                    one._put_one_back(number)

    def _signal(self) -> int:
        """The first of its signals that has come; 0 where none has."""
        if not self._received:
            begins = {number: self._entered if number == signal.SIGINT else self._start for number in self._signals}
            came = {number: _came[number] for number in self._signals if _came.get(number, -math.inf) >= begins[number]}
            self._received = min(came, key=lambda number: came[number], default=0)
        return self._received


_came: dict[int, float] = {}
"""When each signal came last, in seconds since the machine started: whoever asks it to end asks the process."""
_entered: list[Deadline] = []
"""Those that are entered, in this order."""


def _checked_seconds(given: float) -> float:
    if not (is_number(given) and 0 <= given < math.inf):
        raise OptionError("this is no time that something took", expected="seconds, from 0", found=repr(given))
    return float(given)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _checked_signals(given: Iterable[int]) -> tuple[int, ...]:
    expected = "several of signal.valid_signals() that ask for an end, as (signal.SIGTERM,)"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise OptionError("signals= has several signals", expected=expected, found=repr(given))
    numbers = tuple(dict.fromkeys(given))
    never = {getattr(signal, name) for name in _NOT_CAUGHT if hasattr(signal, name)}
    for number in numbers:
        if not isinstance(number, int) or number not in signal.valid_signals() or number in never:
            raise OptionError("a signal that cannot be waited for", expected=expected, found=repr(number))
    return numbers


def _elapsed_seconds(since: object) -> float:
    """How long ago that was."""
    if since == "now":
        return 0.0
    if since == "process":
        return _process_seconds()
    now = time.time()
    if not is_number(since) or not -math.inf < since <= now + _SKEW_SECONDS:
        raise OptionError(
            "since= is where the time begins",
            expected="'process', 'now', or a Unix time in seconds that is over",
            found=repr(since),
        )
    return now - since


def now_seconds() -> float:
    """Seconds since the machine started: the clock in which the system says when a process did."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process_seconds() -> float:
    """The age of this process; 0 where the system does not tell it."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # The name of the program comes before, in brackets, and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return max(0.0, now_seconds() - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
