"""Background tasks: the thread behind `load(background=True)`, `Store.save(background=True)` and `follow`.

A task has a thread of its own. A pool of `concurrent.futures` lacks what this file is for: cancelling a task that runs,
a process that is forked meanwhile, and the end of the program.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from modelstate.arguments import seconds_of
from modelstate.errors import BackgroundCancelledError, BackgroundTimeoutError
from modelstate.process import Stopped, try_start

_Result = TypeVar("_Result")

_EXIT_SECONDS = 2.0
"""How long the end of the program waits for tasks that it has cancelled."""


class AtExit(Enum):
    """What the end of the program does with a task that has not ended."""

    FINISH = "finish"
    """Waits for the task, and prints its error unless that was raised."""
    CANCEL = "cancel"
    """Cancels the task when the main thread has ended."""
    CANCEL_LAST = "cancel last"
    """Cancels the task when all threads have ended that are not daemons."""


class BackgroundTask(Generic[_Result]):
    """A function that runs in a thread. Every method may be called from any thread.

    The task runs on where nothing refers to it. In a process that is forked while it runs, the task has ended there,
    and has no result.

    Args:
        work: the function; its argument is the task, for `check` and `sleep`.
        kind: the noun for the task, such as "load".
        where: what the task works on, for errors.
        at_exit: what the end of the program does with the task.
        failure: what the end of the program prints before the error, with `AtExit.FINISH`.
        discard: frees the result of a task that was cancelled or has failed. It may be called twice.
    """

    error: BaseException | None = None
    """The error of the function."""
    is_cancelled = False
    """Whether `cancel` was called."""

    def __init__(
        self,
        work: Callable[[BackgroundTask[_Result]], _Result],
        *,
        kind: str,
        where: str,
        at_exit: AtExit,
        failure: str = "",
        discard: Callable[[], object] = lambda: None,
    ) -> None:
        self._kind, self.where, self._at_exit = kind, where, at_exit
        self._failure, self._discard = failure, discard
        self._work: Callable[[BackgroundTask[_Result]], _Result] | None = work
        self._ended = threading.Event()
        self._ended.set()  # until `start`
        self._result: tuple[_Result] | tuple[()] = ()
        """Empty without a result."""
        self._traceback: TracebackType | None = None
        """That of the error, before `result` has raised it."""
        self._is_reported = False
        self._pid = os.getpid()
        self._running_thread: int | None = None
        self._wake = threading.Lock()
        """Released by `cancel`, to end a `sleep`: the garbage collector may call `cancel` within itself, which an
        `Event` does not allow."""
        self._wake.acquire()
        self._thread: threading.Thread | None = threading.Thread(
            target=partial(contextvars.copy_context().run, self._run),
            name=f"modelstate-{kind}",
            daemon=at_exit is not AtExit.FINISH,  # Python itself waits for other threads
        )

    def start(self) -> None:
        """Starts the thread. Where none can be started, the task has run in this thread when this returns.

        Raises:
            BackgroundCancelledError: No thread can be started, and the task would run until it is cancelled.
        """
        thread = self._thread
        assert thread is not None
        is_endless = self._at_exit is AtExit.CANCEL_LAST
        self._ended.clear()
        try:
            _tasks.add(self)
            if is_endless or threading.main_thread().is_alive():  # else the end of the program waits for no new task
                _watch_exit()
                if try_start(thread):
                    return
        except BaseException:
            if thread.ident is None:  # it has not been started: nothing waits for it
                self._ended.set()
                _tasks.discard(self)
            raise
        if is_endless:
            self._ended.set()
            _tasks.discard(self)
            raise BackgroundCancelledError(
                f"no thread can be started for the {self._kind}",
                where=self.where,
                found="the system starts no more threads for this process",
                remedy="raise the limit (`ulimit -u`, or pids.max of the container), or take background=False",
            )
        thread = self._thread = None  # it refers to the task
        self._run()
        if self.error is not None and not isinstance(self.error, Exception):
            self._is_reported = True
            raise self.error  # Ctrl-C, which has arrived in this thread

    @property
    def done(self) -> bool:
        """Whether the task has ended: with a result, with an error, or cancelled."""
        return self._pid != os.getpid() or self._ended.is_set()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs within the task."""
        return self._running_thread == threading.get_ident()

    @property
    def has_unreported_error(self) -> bool:
        """Whether the task has failed, was not cancelled, and its error was neither raised by `result` nor printed."""
        return self.error is not None and not self._is_reported and not self.is_cancelled

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until the task has ended, for at most so many seconds. Returns whether it has.

        Raises `OptionError` for a time that cannot be waited.
        """
        if timeout_seconds is not None:
            most = threading.TIMEOUT_MAX
            timeout_seconds = seconds_of("timeout_seconds", timeout_seconds, most=most, accepts_none=True)
        if self._pid == os.getpid():
            self._ended.wait(timeout_seconds)
        return self.done

    def result(self, timeout_seconds: float | None = None) -> _Result:
        """Waits until the task has ended, and returns its result.

        Args:
            timeout_seconds: the most seconds to wait; None waits until the end.

        Raises:
            BackgroundTimeoutError: The task has not ended in time. It goes on.
            BackgroundCancelledError: The task was cancelled, or belongs to the process that this one was forked from.

        The error of the task is raised too.

        Examples:
            >>> pending = store.save(1000, {"model": model}, background=True)
            >>> pending.result(timeout_seconds=60).path
            'checkpoints/step-000001000'
        """
        if not self.wait(timeout_seconds):
            raise self.timeout_error(timeout_seconds)
        if self.error is not None:
            self._is_reported = True
            _tasks.discard(self)
            raise self.error.with_traceback(self._traceback)
        is_own = self._pid == os.getpid()
        if not (is_own and self._result):
            raise self.cancelled_error(
                "it was cancelled" if is_own else "its thread is in the process that this one was forked from"
            )
        return self._result[0]

    def cancelled_error(self, why: str) -> BackgroundCancelledError:
        """Returns the error for a task without a result."""
        return BackgroundCancelledError(
            f"the {self._kind} has no result", where=self.where, found=why, remedy=f"{self._kind} again"
        )

    def timeout_error(self, timeout_seconds: float | None) -> BackgroundTimeoutError:
        """Returns the error for a task that has not ended within the time."""
        return BackgroundTimeoutError(
            f"the {self._kind} has not ended within the time; the {self._kind} goes on",
            where=self.where,
            expected=f"within {timeout_seconds} s",
            remedy="result() again, with more time or without timeout_seconds=; or cancel()",
        )

    def cancel(self, *, wait: bool = True) -> bool:
        """Ends the task at its next check.

        Args:
            wait: whether to return when the task has ended; a call within the task never waits.

        Returns:
            Whether the task had not ended; with `wait`, whether it has ended without a result.

        Examples:
            >>> pending = store.save(1000, {"model": model}, background=True)
            >>> pending.cancel()
            True
        """
        self.is_cancelled = True
        was_running = not self.done
        with suppress(RuntimeError):  # it was released before
            self._wake.release()
        if not was_running:
            self._discard()
        elif wait and not self.is_current:
            self.wait()
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
            return not self._result
        return was_running

    def check(self) -> None:
        """Raises `Stopped` where the task was cancelled. The function calls it between pieces of its work."""
        if self.is_cancelled:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Waits for so many seconds, or until the task is cancelled."""
        if not self.is_cancelled:
            self._wake.acquire(timeout=seconds)

    def _run(self) -> None:
        assert self._work is not None
        self._running_thread = threading.get_ident()
        try:
            self._result = (self._work(self),)
        except Stopped:
            pass
        except BaseException as error:
            # The variables would keep alive what the function has worked with: its memory, and the lock of a store.
            traceback.clear_frames(error.__traceback__)
            self.error, self._traceback = error, error.__traceback__
        self._work = None  # releases what the function refers to
        if self.error is not None or self.is_cancelled:
            self._discard()
        if self.error is None or self._at_exit is not AtExit.FINISH:
            _tasks.discard(self)
        elif _is_ending:
            self._report()
        self._ended.set()
        if self.is_cancelled:
            self._discard()  # `cancel` may have come after the first test
        self._running_thread = None
        del self  # the traceback of the error refers to this frame

    def _report(self) -> None:
        """Prints that the task has failed, or has not ended, unless its error was raised."""
        if not (self._is_reported or self._result or self.is_cancelled):
            self._is_reported = True
            reason = self.error or "the program ended before that"
            print(f"modelstate: {self._failure}: {reason}", file=sys.stderr, flush=True)
        _tasks.discard(self)


_tasks: set[BackgroundTask[Any]] = set()
"""The tasks that are running, and those whose error is to be printed."""
_is_watching_exit = False
_is_ending = False
"""Whether the main thread has ended."""


def _watch_exit() -> None:
    """Registers what the end of the program does with tasks; twice does no harm.

    A function of `atexit` is called after Python has joined the threads of pools, which would then read all that they
    were asked for, and accept nothing more. Processes of `multiprocessing` call no function of `atexit`.
    """
    global _is_watching_exit
    if not _is_watching_exit:
        atexit.register(_cancel, AtExit.CANCEL_LAST)
        with suppress(RuntimeError):  # the main thread has ended
            threading._register_atexit(_end_of_main_thread)  # type: ignore[attr-defined]
        _is_watching_exit = True  # at the end: an interrupt before it has the next task register again


def _end_of_main_thread() -> None:
    global _is_ending
    _is_ending = True
    own = [task for task in list(_tasks) if task._pid == os.getpid()]
    try:
        _cancel(AtExit.CANCEL)
        for task in own:
            if task._at_exit is AtExit.FINISH:
                task.wait()
    finally:
        for task in own:
            if task._at_exit is AtExit.FINISH:
                task._report()


def _cancel(at_exit: AtExit) -> None:
    """Cancels tasks and waits a moment: a thread that computes while the interpreter ends may crash the process."""
    tasks = [task for task in list(_tasks) if task._pid == os.getpid() and task._at_exit is at_exit]
    until = time.monotonic() + _EXIT_SECONDS
    for task in tasks:
        task.cancel(wait=False)
    for task in tasks:
        task.wait(max(0.0, until - time.monotonic()))
