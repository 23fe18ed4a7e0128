"""`LoadHandle`: a load that reads in a background thread, and places the values when its result is called for."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from msgspec.structs import replace

from modelstate.background import AtExit, BackgroundTask
from modelstate.errors import BackgroundCancelledError, OptionError
from modelstate.loading.stage import stage
from modelstate.loading.values import Staging
from modelstate.planning.plan import LoadPlan, LoadReport
from modelstate.planning.planner import Planner
from modelstate.planning.transfer import Execution
from modelstate.process import progress_bar, stopped_by
from modelstate.torch_compat.plain import is_plain


class LoadHandle:
    """A load that runs in a background thread: the result of `modelstate.load(..., background=True)`.

    The model is unchanged until `result` puts everything in place. A handle that is dropped, or left as a context
    without a result, is cancelled; so is one that is not done when the program ends. All methods may be called from
    any thread.

    Examples:
        >>> with modelstate.load(model, "model.safetensors", background=True) as handle:
        ...     tokenizer = Tokenizer.from_file("tokenizer.json")
        ...     report = handle.result()
    """

    def __init__(self, staged: StagedLoad, commit: Callable[[], LoadReport]) -> None:
        # The task does not refer to the handle, so that a handle can be dropped.
        where = f"{staged.plan.source} into {staged.plan.target}"
        self._task = BackgroundTask(
            staged.read, kind="load", where=where, at_exit=AtExit.CANCEL, discard=staged.release
        )
        self._commit: Callable[[], LoadReport] | None = commit
        self._outcome: LoadReport | BaseException | None = None
        self._lock = threading.RLock()
        """Held by the thread that sets the outcome."""
        self._committing_thread: int | None = None
        self._pid = os.getpid()
        weakref.finalize(self, self._task.cancel, wait=False).atexit = False
        self._task.start()

    def __repr__(self) -> str:
        outcome, state = self._outcome, "ready" if self._task.done else "coming in"
        if outcome is not None:
            is_cancelled = isinstance(outcome, BackgroundCancelledError)
            state = "loaded" if isinstance(outcome, LoadReport) else "cancelled" if is_cancelled else "failed"
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
            PlanError: The model has changed.
            OptionError: The timeout is no time, or the load itself calls this.

        It raises what `load` raises while it reads and puts in place. An interrupt cancels the load. After any error
        the model is what it was.

        Examples:
            >>> handle = modelstate.load(model, "model.safetensors", background=True)
            >>> report = handle.result(timeout_seconds=60)
        """
        self._leave_parent()
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
                    if self._commit is not None:
                        self._put_in_place(self._commit)
            except BaseException as error:
                if not isinstance(error, Exception):
                    self.cancel(wait=False)
                raise
        if isinstance(self._outcome, LoadReport):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def cancel(self, *, wait: bool = True) -> bool:
        """Ends the load and frees the values that were read. Returns whether the load had no outcome yet.

        The thread ends at its next check: after a few megabytes, or a call of a transform. It does not wait for the
        reply of a server.

        Args:
            wait: whether to return when the thread has ended.

        Examples:
            >>> modelstate.load(model, "model.safetensors", background=True).cancel()
            True
        """
        if self._committing_thread == threading.get_ident():
            return False  # the model's own code calls this while the values are put in place
        self._leave_parent()
        was_open = False
        if self._outcome is None:
            with self._lock:
                was_open = self._outcome is None
                if was_open:
                    self._outcome = self._task.cancelled_error("it was cancelled")
                    self._commit = None
        self._task.cancel(wait=wait)
        return was_open

    def __enter__(self) -> LoadHandle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outcome is None:
            self.cancel()

    def _leave_parent(self) -> None:
        """Ends the load in a forked child, where the thread that may hold the lock does not exist."""
        if self._outcome is None and self._pid != os.getpid():
            self._outcome = self._task.cancelled_error("it belongs to the process that this one was forked from")

    def _put_in_place(self, commit: Callable[[], LoadReport]) -> None:
        self._committing_thread = threading.get_ident()
        try:
            self._task.result()
            self._outcome = commit()
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


class StagedLoad:
    """The values of a load that reads in the background.

    The load is planned, its effects are undone, and `result` executes the plan. The staged values depend on the
    checkpoint and on the metadata of the slots, not on the slots' values, so the model may be used and trained in the
    meantime. `result` computes the other values: values that the model's own loading code uses, because that code runs
    again; values that depend on the model's values; and values that need no read.
    """

    def __init__(self, plan: LoadPlan, staging: Staging, executions: Iterable[Execution]) -> None:
        """Takes over what a load reads, before the transaction in which it was planned is undone.

        Args:
            plan: The plan of the load.
            staging: How the values are read. The load that commits takes it over.
            executions: What the plan reads. The caller must not use it afterwards.

        Raises:
            ChecksumError: `verify` is true and the checkpoint has no checksums.
        """
        self.plan, self.staging, self.verified_bytes = plan, staging, 0
        self._verification = staging.checkpoint.verification() if staging.options.verify else None
        self._notes: list[str] = []
        self._executions = [item for item in executions if not item.finals]
        self._grad_enabled = torch.is_grad_enabled()
        if staging.options.transform is not None:
            _ = staging.own_memory  # computed now, in the thread that uses the model

    def read(self, task: BackgroundTask[None]) -> None:
        """Reads, casts and transforms the values, until the task is cancelled.

        Raises:
            ReadFailedError: A file cannot be read, or has changed since it was opened.
            ChecksumError: The file is damaged.
            TransformError: A transform raises, or returns a tensor that cannot be loaded.
        """
        self._executions = [item for item in self._executions if item.transfers.is_from_files]
        staging, nbytes = self.staging, sum(item.transfers.nbytes for item in self._executions)

        def progress(nbytes: int) -> None:
            task.check()
            advance(nbytes)

        with (
            stopped_by(lambda: task.is_cancelled),
            torch.set_grad_enabled(self._grad_enabled),
            progress_bar(staging.options.progress, nbytes, "loading") as advance,
            staging.files as files,
        ):
            if self._verification:
                self.verified_bytes = self._verification.run(lambda _: progress(0))
            staging.progress = progress
            try:
                self._notes += stage(staging, self._executions)
            finally:
                staging.progress = lambda _: None  # which refers to no task
            files.check_unchanged()
        # Other threads use the tensors on other streams: the copies on the streams of this thread must have ended.
        for device in {final.device for item in self._executions for final in item.finals}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def hand_over(self, staging: Staging, planner: Planner) -> list[str]:
        """Hands the values to the load that commits. Returns notes for the report."""
        ready = {item.transfers.name: item for item in self._executions}
        for item in planner.executions:
            transfers, staged = item.transfers, ready.get(item.transfers.name)
            is_in_file = transfers.own is None or transfers.own.stored is not None
            if item.finals or not is_in_file or staged is None or staged.transfers.names != transfers.names:
                continue
            was = staged.transfers
            item.transfers = replace(transfers, way=was.way, why=was.why, maps=was.maps, dtypes=was.dtypes)
            item.finals, item.freezes = staged.finals, staged.freezes
        for final in (final for item in self._executions for final in item.finals):
            if final.is_cuda and is_plain(final):
                # It was allocated on the stream of the thread that read it. torch uses the memory of a freed tensor
                # again in the order of that stream, but it is the caller's stream that copies from it.
                final.record_stream(torch.cuda.current_stream(final.device))
        return self._notes

    def release(self) -> None:
        """Frees all values that have been read, also where other objects still refer to the plans."""
        for item in self._executions:
            item.finals.clear()  # the load that commits has the same list
        self._executions = []
