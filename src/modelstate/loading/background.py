"""Loads whose bytes come in while the program goes on."""

import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch

from modelstate.errors import LoadCancelledError, LoadTimeoutError, OptionError
from modelstate.loading.commit import StagedLoad
from modelstate.loading.report import LoadReport, progress_bar

_EXIT_SECONDS = 2.0
"""How long the end of the program waits for threads that are in the middle of a tensor."""


class LoadHandle:
    """A load that goes on in a thread of its own, made by `modelstate.load(..., background=True)`.

    The model is what it was until `result` puts everything in place. A handle that is dropped, or left as a context
    without a result, is cancelled; so is one that is not done when the program ends. All methods may be called from
    any thread.

    >>> with modelstate.load(model, "model.safetensors", background=True) as handle:
    ...     tokenizer = Tokenizer.from_file("tokenizer.json")
    ...     report = handle.result()
    """

    def __init__(self, staged: StagedLoad, progress: bool | None, commit: Callable[[], LoadReport]) -> None:
        self._work = _Work(staged, progress)
        self._commit: Callable[[], LoadReport] | None = commit
        self._outcome: LoadReport | BaseException | None = None
        self._trace: TracebackType | None = None
        self._lock = threading.RLock()
        """Held by whoever decides the outcome."""
        self._decider: int | None = None
        self._text = f"{staged.plan.source} into {staged.plan.target}"
        weakref.finalize(self, self._work.stop).atexit = False
        self._work.start()

    def __repr__(self) -> str:
        outcome = self._outcome
        if isinstance(outcome, LoadReport):
            state = "loaded"
        elif outcome is not None:
            state = "cancelled" if isinstance(outcome, LoadCancelledError) else "failed"
        else:
            state = "ready" if self._work.finished else "coming in"
        return f"<LoadHandle of {self._text}: {state}>"

    @property
    def done(self) -> bool:
        """Whether `result` would not wait: everything has come in, or the load has failed, ended or been cancelled."""
        return self._outcome is not None or self._work.finished

    def result(self, timeout_seconds: float | None = None) -> LoadReport:
        """Waits until everything has come in, puts it in place, all or nothing, and returns the report.

        The model's own loading code runs here, `set_extra_state` included, after the model was checked to be what it
        was at the call of `load`. Called again, it returns the same report, or raises the same error.

        Args:
            timeout_seconds: how long to wait for what comes in. After that `LoadTimeoutError` is raised, and the load
                goes on.

        Raises what `load` raises while it reads and puts in place; `StalePlanError` where the model has changed;
        `LoadCancelledError`, `LoadTimeoutError`, `OptionError`. An interrupt cancels the load. After all of these the
        model is what it was.
        """
        until = _deadline(timeout_seconds)
        if self._outcome is None:
            self._check_caller()
            try:
                self._wait(until)
                self._decide(until)
            except Exception:
                raise
            except BaseException:
                self.cancel(wait=False)
                raise
        if isinstance(self._outcome, LoadReport):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome.with_traceback(self._trace)

    def cancel(self, *, wait: bool = True) -> bool:
        """Ends the load and frees what has come in. Returns whether there was still something to end.

        The thread ends after what it is at: a few megabytes, or one call of a transform. With `wait` it has ended
        when this returns.
        """
        here = threading.current_thread()
        if self._decider == here.ident:
            return False  # code of the model, called while the result is put in place
        ended = False
        if self._outcome is None:
            with self._lock:
                ended = self._outcome is None
                if ended:
                    self._outcome = _cancelled(self._text, "it was cancelled")
                    self._commit = None
        self._work.stop()
        if wait and here is not self._work.thread:
            self._work.thread.join()
        return ended

    def __enter__(self) -> "LoadHandle":
        return self

    def __exit__(self, *_: object) -> None:
        if self._outcome is None:
            self.cancel()

    def _check_caller(self) -> None:
        here = threading.current_thread()
        if here is self._work.thread or self._decider == here.ident:
            raise OptionError(
                "a load cannot wait for itself", where="result()", remedy="call it where load was called, not within it"
            )

    def _wait(self, until: float | None) -> None:
        work = self._work
        work.thread.join(_left(until))
        if not work.finished:
            if work.thread.is_alive():
                raise LoadTimeoutError(
                    "not everything has come in within the time; the load goes on",
                    where=self._text,
                    remedy="result() again, with more time or without timeout_seconds=; or cancel()",
                )
            raise _cancelled(self._text, "its thread is in the process that this one was forked from")

    def _decide(self, until: float | None) -> None:
        """Sets the outcome, if nobody has."""
        left = _left(until)
        try:
            if not self._lock.acquire(timeout=-1 if left is None else left):
                raise LoadTimeoutError(
                    "another thread has not put everything in place within the time",
                    where=self._text,
                    remedy="wait longer",
                )
            if self._outcome is None:
                self._decider = threading.get_ident()
                self._put_in_place()
        finally:
            try:
                if self._decider == threading.get_ident():
                    self._decider = None
            finally:
                with suppress(RuntimeError):  # an interrupt can come before it was acquired, and right after
                    self._lock.release()

    def _put_in_place(self) -> None:
        try:
            if self._work.error is not None:
                self._fail(self._work.error)
                return
            assert self._commit is not None
            self._outcome = self._commit()
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._outcome = _cancelled(self._text, "it was interrupted while it was put in place, all or nothing")
            raise
        finally:
            self._commit = None
            self._work.stop()
            # The finalizer holds the work, and the error would hold whoever gets it, this object among them.
            self._work.error = None

    def _fail(self, error: BaseException) -> None:
        self._outcome, self._trace = error, error.__traceback__


def _cancelled(where: str, why: str) -> LoadCancelledError:
    return LoadCancelledError("the load has no result", where=where, found=why, remedy="load again")


def _deadline(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise OptionError(
            "timeout_seconds= is a time to wait", expected="seconds, from 0, or None", found=repr(timeout)
        )
    return time.monotonic() + timeout


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class _Stopped(BaseException):
    """Raised within the thread; nothing that catches errors of transforms or files may take it for one."""


class _Work:
    """The thread that brings everything in. It knows nothing of the handle, so that a handle can be dropped."""

    def __init__(self, staged: StagedLoad, progress: bool | None) -> None:
        self.finished = False
        self.error: BaseException | None = None
        self._staged, self._progress = staged, progress
        self._stopped = False
        run = partial(contextvars.copy_context().run, self._run, torch.is_grad_enabled())
        self.thread = threading.Thread(target=run, name="modelstate-load", daemon=True)

    def start(self) -> None:
        _stop_at_exit()
        _running.add(self)
        try:
            self.thread.start()
        except BaseException:
            _running.discard(self)
            raise

    def stop(self) -> None:
        """Ends the thread at the next piece, and frees what has come in, at once or when it has ended.

        Whichever of this and the end of the thread is the second sees both marks, and no lock is needed: one that is
        held when the process forks would never be released in the child.
        """
        self._stopped = True
        if self.finished:
            self._staged.release()

    def _run(self, grad_enabled: bool) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled), progress_bar(self._progress, self._staged.nbytes) as advance:
                self._staged.bring_in(partial(self._advance, advance))
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.finished = True
            if self._stopped or self.error is not None:
                self._staged.release()
            _running.discard(self)

    def _advance(self, advance: Callable[[int], None], nbytes: int) -> None:
        if self._stopped:
            raise _Stopped
        advance(nbytes)


_running: set[_Work] = set()
_waits_for_exit = False


def _stop_at_exit() -> None:
    """Has the end of the program stop what is still running, once.

    Functions of `atexit` come too late: before them Python waits for the threads that read, which would read all that
    has been asked for. And a thread that is still within torch when the interpreter goes may crash it.
    """
    global _waits_for_exit
    if not _waits_for_exit:
        _waits_for_exit = True
        before_threads_are_joined: Any = threading._register_atexit  # type: ignore[attr-defined]
        before_threads_are_joined(_stop_all)


def _stop_all() -> None:
    works, until = list(_running), time.monotonic() + _EXIT_SECONDS
    for work in works:
        work.stop()
    for work in works:
        work.thread.join(_left(until))
