"""`Deadline`: when a training loop has to save and end, by the time of its job or by a signal."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Literal, Self

from modelstate.arguments import invalid_option, is_number, seconds_of
from modelstate.errors import OptionError
from modelstate.text_format import short_repr

_Handler = Callable[[int, FrameType | None], object] | int | None
_HOUR_SECONDS = 3600
_MIN_MARGIN_SECONDS = 30.0
_MAX_FIRST_MARGIN_SECONDS = 600.0
"""The most that the automatic margin allows for a save before the first one has been measured."""
_MARGIN_SHARE = 0.05
_MAX_CLOCK_SKEW_SECONDS = 60.0
_NOT_CAUGHT = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGCHLD")
"""Signals that cannot be caught, or that do not ask a process to end."""
_ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""Signals by which a parent ends its children. `multiprocessing` sends SIGTERM and waits, so a child must obey it."""


class Deadline:
    """The time at which a loop has to save and end: the end of its job, or a signal.

    As a context manager it handles `signals`: the first one makes `reached` true, and nothing else happens, so that a
    second signal does not end a save; only a second SIGINT has its earlier effect. The earlier handlers are not called;
    they are restored when the block ends. A deadline may be entered several times, as by nested loops.

    A signal asks the whole process to end: every deadline that handles it is reached, whichever has received it, also
    one that is made later, unless its time has begun since. SIGINT reaches only the deadlines that are entered.

    A forked child, such as the worker of a data loader, ignores a signal that comes to the whole process group, except
    SIGTERM, SIGINT and SIGQUIT, by which its parent ends it. Signals can be handled in the main thread only: entering
    the deadline in another thread raises `OptionError`, unless it is entered already or has `signals=()`. It can be
    left in any thread. Left in another thread, its handlers stay, and call those before them.

    Args:
        hours: the time that the job has; None for signals only.
        margin_seconds: how many seconds before the end the loop ends. "auto" is twice the longest save so far plus the
            longest step so far, at least 30 s. Before the first save it is 5% of the time, at most 10 minutes, plus
            the longest step. Where 5% of the time is less than 30 s, that is the least. `saved` and `stepped` give the
            times.
        since: where the time begins: "process", the start of this process with its imports; "now"; or a Unix time, such
            as the start of the job, where a queue gives it. Later changes of the wall clock have no effect. Time in
            which the machine is suspended counts.
        signals: the signals to handle.

    Raises:
        OptionError: An argument cannot be used.

    Examples:
        >>> with ms.Deadline(hours=4) as deadline:
        ...     for step in range(1000):
        ...         train_step()
        ...         if deadline.reached:
        ...             break
    """

    def __init__(
        self,
        hours: float | None = 4,
        margin_seconds: float | Literal["auto"] = "auto",
        *,
        since: float | Literal["process", "now"] = "process",
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    ) -> None:
        if hours is not None and not (is_number(hours) and 0 < hours * _HOUR_SECONDS < math.inf):
            raise invalid_option("hours", "must be a number of hours", hours, expected="hours, above 0, or None")
        self._total_seconds = math.inf if hours is None else hours * _HOUR_SECONDS
        if margin_seconds != "auto" and not (is_number(margin_seconds) and 0 <= margin_seconds < self._total_seconds):
            raise invalid_option(
                "margin_seconds",
                "must be a number of seconds, or 'auto'",
                margin_seconds,
                expected=f"seconds, from 0, less than {self._total_seconds:g}, or 'auto'",
            )
        self._margin_seconds = None if margin_seconds == "auto" else float(margin_seconds)
        self._signals = _checked_signals(signals)
        if hours is None and not self._signals:
            raise OptionError("a Deadline needs hours= or signals=", expected="hours, or signals", found="neither")
        self.start = now_seconds() - _elapsed_seconds(since)
        """Where the time begins, in seconds since the machine started."""
        self._longest_save: float | None = None
        self._longest_step = 0.0
        self._time_reason = ""
        self._received = 0
        """The first of the signals that was received; 0 for none."""
        self._previous: dict[int, _Handler] = {}
        """The handlers before those of this deadline, by signal."""
        self._owner_pid = 0
        self._depth = 0
        """How many times it was entered and not left."""
        self._entered_seconds = math.inf

    @property
    def reached(self) -> bool:
        """Whether the loop should save and end. Once true, it stays true."""
        return bool(self.reason)

    @property
    def reason(self) -> str:
        """Why the deadline is reached, as text; empty before."""
        if self._received_signal():
            return f"{_name(self._received)} was received"
        remaining, margin = self.remaining_seconds, self.margin_seconds
        if not self._time_reason and remaining <= margin:
            # Stored, because a quick save makes the margin smaller, and the loop must not go on then.
            self._time_reason = (
                f"{remaining:,.0f} s of {self._total_seconds:,.0f} s are left, the margin is {margin:,.0f} s"
            )
        return self._time_reason

    @property
    def remaining_seconds(self) -> float:
        """The seconds until the end, with the margin; 0 after it, infinite without `hours`."""
        return max(0.0, self.start + self._total_seconds - now_seconds())

    @property
    def margin_seconds(self) -> float:
        """How many seconds before the end `reached` becomes true, by the saves and steps so far."""
        if self._margin_seconds is not None:
            return self._margin_seconds
        share = _MARGIN_SHARE * self._total_seconds
        if self._longest_save is None:
            return min(_MAX_FIRST_MARGIN_SECONDS, share) + self._longest_step
        return max(min(_MIN_MARGIN_SECONDS, share), 2 * self._longest_save + self._longest_step)

    def saved(self, seconds: float) -> None:
        """Records how long a save took until it was durable.

        Args:
            seconds: the time of the save.

        Raises:
            OptionError: It is not a number from 0.

        Examples:
            >>> deadline.saved(store.save(1000, objects).seconds)
        """
        self._longest_save = max(self._longest_save or 0.0, seconds_of("seconds", seconds))

    def stepped(self, seconds: float) -> None:
        """Records how much time passed between two checks of `reached`.

        Args:
            seconds: the time of a step of the loop.

        Raises:
            OptionError: It is not a number from 0.

        Examples:
            >>> deadline.stepped(2.5)
        """
        self._longest_step = max(self._longest_step, seconds_of("seconds", seconds))

    def __enter__(self) -> Self:
        if self._depth:
            self._depth, self._owner_pid = self._depth + 1, os.getpid()
            return self
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be received in the main thread alone",
                found=threading.current_thread().name,
                remedy="enter the deadline there first, or give it signals=()",
            )
        self._depth, self._owner_pid, self._entered_seconds = 1, os.getpid(), now_seconds()
        _entered.append(self)
        for number in self._signals:
            previous = signal.signal(number, self._receive)
            if previous != self._receive:  # it is where another thread has left the deadline
                self._previous[number] = previous
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            _entered.remove(self)
            for number in reversed(self._previous):
                self._restore_handler(number)

    def _restore_handler(self, number: int) -> None:
        """Restores the handler before, unless another one was set since, or this is not the main thread."""
        if signal.getsignal(number) == self._receive:
            with suppress(ValueError):
                # None is a handler that Python did not set, and cannot set again.
                signal.signal(number, signal.SIG_DFL if self._previous[number] is None else self._previous[number])

    def _call_previous(self, number: int, frame: FrameType | None) -> None:
        """Restores the handler before, and has the same effect as that."""
        previous = self._previous[number]
        self._restore_handler(number)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._depth:
            self._call_previous(number, frame)
            return
        if os.getpid() != self._owner_pid:
            # A forked child, such as the worker of a data loader, has no loop that checks the deadline.
            if number in _ENDS_CHILDREN or callable(self._previous[number]):
                self._call_previous(number, frame)
            return
        _came[number] = now_seconds()
        self._received_signal()
        if number == signal.SIGINT:
            for deadline in reversed(_entered):
                if number in deadline._previous:
                    deadline._restore_handler(number)

    def _received_signal(self) -> int:
        """Returns the first of the signals that has come; 0 where none has."""
        if not self._received:
            begins = {
                number: self._entered_seconds if number == signal.SIGINT else self.start for number in self._signals
            }
            came = {number: _came[number] for number in self._signals if _came.get(number, -math.inf) >= begins[number]}
            self._received = min(came, key=lambda number: came[number], default=0)
        return self._received


_came: dict[int, float] = {}
"""When each signal came last, in seconds since the machine started, for all deadlines of the process."""
_entered: list[Deadline] = []
"""The deadlines that are entered, in the order of entering."""


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _checked_signals(given: Iterable[int]) -> tuple[int, ...]:
    expected = "several of signal.valid_signals() that ask for an end, as (signal.SIGTERM,)"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise invalid_option("signals", "must be a sequence of signals", given, expected=expected)
    numbers = tuple(dict.fromkeys(given))
    never = {getattr(signal, name) for name in _NOT_CAUGHT if hasattr(signal, name)}
    for number in numbers:
        if not isinstance(number, int) or number not in signal.valid_signals() or number in never:
            raise OptionError("a signal that cannot be waited for", expected=expected, found=short_repr(number))
    return numbers


def _elapsed_seconds(since: object) -> float:
    """Returns how long ago the time began."""
    if since == "now":
        return 0.0
    if since == "process":
        return _process_seconds()
    now = time.time()
    if not is_number(since) or not -math.inf < since <= now + _MAX_CLOCK_SKEW_SECONDS:
        raise invalid_option(
            "since", "has an invalid value", since, expected="'process', 'now', or a Unix time in seconds that is over"
        )
    return now - since


def now_seconds() -> float:
    """Returns seconds since the machine started, the clock in which the system gives the start of a process."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process_seconds() -> float:
    """Returns the age of this process; 0 where the system does not give it."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # The second field is the name of the program in brackets, which may contain spaces and brackets.
            fields = file.read().rpartition(b")")[2].split()
        return max(0.0, now_seconds() - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
