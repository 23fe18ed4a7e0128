"""`load` and `plan`: check the arguments, and plan a load, or execute it, at once or when the result is called for."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import checked_call
from modelstate.background import AtExit, BackgroundTask
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import NO_PICKLE, Source, open as open_checkpoint
from modelstate.distributed.agreement import TIMEOUT_SECONDS, Agreement, agreement_of
from modelstate.errors import BackgroundCancelledError, OptionError
from modelstate.loading.collective import PLANNING, before_call
from modelstate.loading.execute import StagedLoad, check_plan, execute, prepare
from modelstate.loading.stage import limit_memory
from modelstate.planning.options import LoadArguments, LoadOptions, PlanArguments, check_model, checked_options
from modelstate.planning.plan import LoadPlan, LoadReport
from modelstate.planning.planner import Planner
from modelstate.process import gc_paused, progress_bar, stopped_by
from modelstate.transaction.optimizers import check_optimizers
from modelstate.transaction.transaction import Transaction, exclusive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OF_TORCH = {
    "assign": "leave it out: tensors on meta get memory, and all parameters stay the same objects",
    "weights_only": NO_PICKLE,
    "mmap": "map=: whether tensors on meta may be maps of the file",
}
"""Arguments of `torch.load` and `load_state_dict`, each with the argument that replaces it."""


@checked_call("ms.plan", foreign=OF_TORCH, options=PlanArguments, defaults=LoadOptions())
def plan(model: nn.Module, source: Source, **options: Unpack[PlanArguments]) -> LoadPlan:
    """Plans a load: returns what `load` with the same arguments would do, and every problem.

    The model is not changed. The model's own loading code runs (hooks and `_load_from_state_dict` overrides, but not
    `set_extra_state`), and its effects are undone. No tensor bytes are read, with these exceptions: the model's code or
    the function of an `Apply` uses values, or two values have to be compared (of tied tensors, of a `Same`, or of
    non-persistent buffers that the checkpoint also has).

    Args:
        model: The module to load into.
        source: The checkpoint, as for `load`.
        **options: Options of `modelstate.loading.LoadOptions`: those up to `cache`, which decide about the plan.

    Returns:
        The plan. Problems do not raise: see `LoadPlan.ok` and `LoadPlan.problems`.

    Raises:
        OpenError: The checkpoint cannot be opened.
        AmbiguousCheckpointError: Several parts of the checkpoint fit the model.
        KeyNotFoundError: The checkpoint has no part `key`.
        OptionError: An argument is invalid.
        ModelCodeError: The model's own code raises.

    Examples:
        >>> plan = modelstate.plan(model, "model.safetensors")
        >>> plan.ok
        True
        >>> report = modelstate.load(model, plan)
    """
    checked = checked_options(**options)
    model = check_model(model)
    checkpoint = open_checkpoint(source, cache=checked.cache)
    with exclusive(model), Transaction(model) as transaction, gc_paused(), torch.random.fork_rng(devices=[]):
        planner, staging = prepare(transaction, checkpoint, checked, call_extra_state=False)
        staging.files.close()
        return planner.plan()


@overload
def load(
    model: nn.Module, source: Source | LoadPlan, *, background: Literal[False] = False, **options: Unpack[LoadArguments]
) -> LoadReport: ...
@overload
def load(
    model: nn.Module, source: Source | LoadPlan, *, background: Literal[True], **options: Unpack[LoadArguments]
) -> LoadHandle: ...
@overload
def load(
    model: nn.Module, source: Source | LoadPlan, *, background: bool, **options: Unpack[LoadArguments]
) -> LoadReport | LoadHandle: ...
@checked_call(
    "ms.load", foreign=OF_TORCH, within=before_call("modelstate.load"), options=LoadArguments, defaults=LoadOptions()
)
def load(
    model: nn.Module, source: Source | LoadPlan, *, background: bool = False, **options: Unpack[LoadArguments]
) -> LoadReport | LoadHandle:
    """Loads a checkpoint into a model, all or nothing, and keeps every reference.

    After the load every parameter and buffer is the same object as before, so optimizers, ties and hooks that refer to
    it stay valid. Every name of the checkpoint and every slot of the model must have a counterpart. After an error the
    model is unchanged, bit for bit.

    A load into a model with DTensors (FSDP2, HSDP, tensor parallelism) is a call of all ranks of its mesh. Each rank
    reads the bytes of its local tensors, and all ranks load or none does.

    Args:
        model: A module on the meta device (see `modelstate.skeleton`), materialised, or mixed.
        source: A path, a directory, a mapping from names to tensors, a `Checkpoint`, or a `LoadPlan`. A plan is
            executed as it is: the arguments that `modelstate.plan` takes must be left out.
        background: Plans and checks now, and returns a `LoadHandle` while a thread reads, casts and transforms. The
            model is unchanged until `LoadHandle.result`. The report's `seconds` last until that call returns.
        **options: Options of `modelstate.loading.LoadOptions`.

    Returns:
        The report of the load; with `background=True`, the handle.

    Raises:
        PlanError: The checkpoint does not fit the model, with every problem; or `source` is a plan, and the model has
            changed since the plan was created.
        OpenError: The checkpoint cannot be opened.
        OptionError: An argument is invalid.
        ModelCodeError: The model's own code raises.
        TransformError: A transform raises, or returns a tensor that cannot be loaded.
        PlacementError: A tensor subclass refuses a value.
        ReadFailedError: A file cannot be read, or has changed since it was opened.
        ChecksumError: `verify` finds damage, or the file has no checksums.
        MemoryBudgetError: The load needs more memory than `max_memory_bytes`.
        DistributedError: The model has DTensors, and there is no process group of all ranks of their mesh.
        DistributedError: The ranks load different models, sources or rules.
        RankLostError: A rank has not taken part within `timeout_seconds`.

    Examples:
        >>> with modelstate.skeleton():
        ...     model = Model(config)
        >>> report = modelstate.load(model, "model.safetensors", dtype="bfloat16")
        >>> report.coverage
        1.0
    """
    started = time.perf_counter()
    process_group, timeout_seconds = options.get("process_group"), options.get("timeout_seconds", TIMEOUT_SECONDS)
    # A module that is passed as the source is an error, of all its ranks.
    given = next((value for value in (model, source) if isinstance(value, nn.Module)), ())
    agreement = _ranks_of(given, process_group, timeout_seconds)
    with nullcontext() if agreement is None else agreement.before(PLANNING):
        model = check_model(model)
        checked = checked_options(**options)
        if checked.optimizers != ():
            checked = replace(checked, optimizers=check_optimizers(checked.optimizers, model))
        if isinstance(source, LoadPlan):
            own = [*checked.of_plan(), *(["cache"] if checked.cache is not None else [])]
            if own:
                found = ", ".join(f"{name}=" for name in own)
                raise OptionError("a plan has its own arguments", found=found, remedy="pass them to modelstate.plan")
            checked = replace(checked, **source.options.of_plan())
        elif checked.cache is not None:
            source = open_checkpoint(source, cache=checked.cache)
        if background and checked.in_place:
            raise OptionError(
                "in_place=True overwrites memory that the program still uses",
                where="background=True",
                remedy="leave one of them out; without in_place=True the values are read into new memory",
            )
        if background and agreement is not None:
            raise OptionError(
                "a load on several ranks cannot go on in the background",
                where="background=True",
                found="a model with DTensors",
                remedy="leave it out; the ranks load together",
            )
    # A transform is the user's code. It may create reference cycles of tensors, which must be collected in time.
    paused_gc = gc_paused if checked.transform is None else nullcontext[None]
    if not background:
        votes = nullcontext() if agreement is None else agreement.collective()
        # The votes first, as in every call: two threads that took these locks in two orders would wait for each other.
        with votes, exclusive(model), paused_gc(), Transaction(model) as transaction:
            return execute(transaction, source, checked, agreement, started=started)
    with exclusive(model), paused_gc(), Transaction(model) as transaction:
        with torch.random.fork_rng(devices=[]):
            in_use = "the model is in use until then"
            planner, staging = prepare(transaction, source, checked, call_extra_state=False, in_use=in_use)
        staging.files.close()
        check_plan(planner, checked.optimizers)
        executions = planner.executions
        limit_memory(staging, executions)
        staged = StagedLoad(planner.plan(), staging, executions, checked.verify)

    def commit() -> LoadReport:
        options = replace(checked, progress=False)
        with exclusive(model), paused_gc(), Transaction(model) as transaction:
            return execute(transaction, staged.plan, options, None, started=started, staged=staged)

    return LoadHandle(staged, checked.progress, commit)


def _ranks_of(
    tensors: nn.Module | tuple[()], process_group: ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Agreement | None:
    """Returns the ranks that load these tensors together; None for a load on one rank."""
    # A program without DTensors has not imported their module, and its loads are of one rank.
    if "torch.distributed.tensor" in sys.modules or process_group is not None or timeout_seconds != TIMEOUT_SECONDS:
        agreement = agreement_of(tensors, process_group, timeout_seconds)
        return agreement if agreement.is_collective else None
    return None


def load_then(
    transaction: Transaction,
    checkpoint: Checkpoint,
    options: LoadOptions,
    then: Callable[[], None] | None = None,
    *,
    agreement: Agreement | None = None,
    check: Callable[[Planner], None] | None = None,
    runs_code: bool = False,
) -> LoadReport:
    """Loads into the root of a transaction that the caller has entered, together with other changes of the caller.

    The caller holds the lock of the root (`exclusive`), too, and around it the votes of `agreement`, if it passes one.

    `then` is called before the commit, when every tensor has its final shape, dtype and device, and only copies between
    existing memory remain. Code that reads tensors in `then`, within the transaction's `model_code`, sees the new
    values, if `runs_code` says that `then` runs such code. `then` registers an undo for each of its changes with the
    transaction. `check` is called when the load is planned, before its problems are raised.
    """
    if agreement is None:
        agreement = _ranks_of(transaction.root)
    elif not agreement.is_collective:
        agreement = None
    with nullcontext() if agreement is None else agreement.collective(), gc_paused():
        return execute(transaction, checkpoint, options, agreement, then=then, check=check, in_columns=not runs_code)


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

    def __init__(self, staged: StagedLoad, progress: bool | None, commit: Callable[[], LoadReport]) -> None:
        grad_enabled = torch.is_grad_enabled()

        def read(task: BackgroundTask[None]) -> None:
            def on_progress(nbytes: int) -> None:
                task.check()
                advance(nbytes)

            with (
                stopped_by(lambda: task.is_cancelled),
                torch.set_grad_enabled(grad_enabled),
                progress_bar(progress, staged.nbytes, "loading") as advance,
            ):
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

        The thread ends at its next check: after a few megabytes, or a call of a transform. It does not wait for the
        reply of a server.

        Args:
            wait: whether to return when the thread has ended.

        Examples:
            >>> modelstate.load(model, "model.safetensors", background=True).cancel()
            True
        """
        self._leave_parent()
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

    def __enter__(self) -> LoadHandle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outcome is None:
            self.cancel()

    def _leave_parent(self) -> None:
        """In a forked child, gives up what other threads of the parent were doing: they do not exist here."""
        if self._outcome is None and self._pid != os.getpid():
            self._outcome = self._task.cancelled_error("it belongs to the process that this one was forked from")

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
