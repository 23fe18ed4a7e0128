"""`LoadHandle`: a load whose values are read by a background task, and put in place by the caller of `result`."""

import threading
import weakref
from collections.abc import Callable

import torch

from modelstate.background import AtExit, BackgroundTask
from modelstate.errors import BackgroundCancelledError, OptionError
from modelstate.loading.commit import StagedLoad
from modelstate.loading.report import LoadReport, progress_bar


class LoadHandle:
    """A load that runs in a background thread: the result of `modelstate.load(..., background=True)`.

    The model is unchanged until `result` puts everything in place. A handle that is dropped, or left as a context
    without a result, is cancelled; so is one that is not done when the program ends. All methods may be called from
    any thread.

    Example:
        >>> with modelstate.load(model, "model.safetensors", background=True) as handle:
        ...     tokenizer = Tokenizer.from_file("tokenizer.json")
        ...     report = handle.result()
    """

    def __init__(self, staged: StagedLoad, progress: bool | None, commit: Callable[[], LoadReport]) -> None:
        grad_enabled = torch.is_grad_enabled()

        def read(task: BackgroundTask[None]) -> None:
            def on_progress(nbytes: int) -> None:
                task.check()
                advance(nbytes)

            with torch.set_grad_enabled(grad_enabled), progress_bar(progress, staged.nbytes) as advance:
                staged.read(on_progress)

        # The task does not refer to the handle, so that a handle can be dropped.
        self._task = BackgroundTask(
            read,
            kind="load",
            where=f"{staged.plan.source} into {staged.plan.target}",
            at_exit=AtExit.CANCEL,
            discard=staged.release,
        )
        self._commit: Callable[[], LoadReport] | None = commit
        self._outcome: LoadReport | BaseException | None = None
        self._lock = threading.RLock()
        """Held by the thread that sets the outcome."""
        self._committing_thread: int | None = None
        weakref.finalize(self, self._task.cancel, wait=False).atexit = False
        self._task.start()

    def __repr__(self) -> str:
        outcome = self._outcome
        if isinstance(outcome, LoadReport):
            state = "loaded"
        elif outcome is not None:
            state = "cancelled" if isinstance(outcome, BackgroundCancelledError) else "failed"
        else:
            state = "ready" if self._task.done else "coming in"
        return f"<LoadHandle of {self._task.where}: {state}>"

    @property
    def done(self) -> bool:
        """Whether `result` need not wait for values that are read: all have been, or there is a result or an error."""
        return self._outcome is not None or self._task.done

    def result(self, timeout_seconds: float | None = None) -> LoadReport:
        """Waits until all values have been read, puts them in place, all or nothing, and returns the report.

        The model's own loading code runs here, `set_extra_state` included, after a check that the model is what it
        was at the call of `load`. Called again, it returns the same report, or raises the same error.

        Args:
            timeout_seconds: how long to wait until all values have been read; None waits without limit.

        Raises:
            BackgroundTimeoutError: Not all values have been read in time. The load goes on.
            BackgroundCancelledError: The load was cancelled.
            StalePlanError: The model has changed.
            OptionError: The timeout is no time, or the load itself calls this.

        It raises what `load` raises while it reads and puts in place. An interrupt cancels the load. After any error
        the model is what it was.

        Example:
            >>> handle = modelstate.load(model, "model.safetensors", background=True)
            >>> report = handle.result(timeout_seconds=60)
        """
        if self._outcome is None:
            if self._task.is_current or self._committing_thread == threading.get_ident():
                raise OptionError(
                    "a load cannot wait for itself",
                    where="result()",
                    remedy="call it where load was called, not within it",
                )
            try:
                if not self._task.wait(timeout_seconds):
                    raise self._task.timeout_error(timeout_seconds)
                with self._lock:
                    if self._outcome is None:
                        self._put_in_place()
            except Exception:
                raise
            except BaseException:
                self.cancel(wait=False)
                raise
        if isinstance(self._outcome, LoadReport):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def cancel(self, *, wait: bool = True) -> bool:
        """Ends the load and frees the values that were read. Returns whether the load had no outcome yet.

        The thread ends at its next check: after a few megabytes, or a call of a transform.

        Args:
            wait: whether to return when the thread has ended.

        Example:
            >>> modelstate.load(model, "model.safetensors", background=True).cancel()
            True
        """
        if self._committing_thread == threading.get_ident():
            return False  # the model's own code calls this while the values are put in place
        was_open = False
        if self._outcome is None:
            with self._lock:
                was_open = self._outcome is None
                if was_open:
                    self._outcome = self._task.cancelled_error("it was cancelled")
                    self._commit = None
        self._task.cancel(wait=wait)
        return was_open

    def __enter__(self) -> "LoadHandle":
        return self

    def __exit__(self, *_: object) -> None:
        if self._outcome is None:
            self.cancel()

    def _put_in_place(self) -> None:
        self._committing_thread = threading.get_ident()
        try:
            self._task.result()
            assert self._commit is not None
            self._outcome = self._commit()
        except Exception as error:
            self._outcome = error
        except BaseException:
            self._outcome = self._task.cancelled_error("it was interrupted while it was put in place, all or nothing")
            raise
        finally:
            self._commit = self._committing_thread = None
            self._task.cancel(wait=False)
            # The finalizer refers to the task, and the traceback of the error refers to this handle.
            self._task.error = None
