"""`load` and `plan`: check the arguments, and plan a load, or execute it, at once or when the result is called for.

`execute` has the phases of a load, in their order. On several ranks each phase ends with a vote.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import checked_call
from modelstate.background import AtExit, BackgroundTask
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import NO_PICKLE, Source, open as open_checkpoint
from modelstate.distributed.agreement import (
    COMMIT,
    NOTHING_CHANGED,
    PLANNING,
    READING,
    TIMEOUT_SECONDS,
    Agreement,
    agreement_of,
)
from modelstate.errors import BackgroundCancelledError, ModelCodeError, OptionError, PlanError, code_errors
from modelstate.io.files import OpenFiles, kept_open
from modelstate.loading import collective
from modelstate.loading.stage import (
    Place,
    Staging,
    commit_values,
    limit_memory,
    overwrite,
    place_fallible,
    reads_at_commit,
    stage,
    stage_unleased,
)
from modelstate.planning.matching import ModelSchemaView, match
from modelstate.planning.options import LoadArguments, LoadOptions, PlanArguments, check_model, checked_options
from modelstate.planning.plan import LoadPlan, LoadReport
from modelstate.planning.planner import Planner
from modelstate.planning.recorder import IncompatibleKeys, walk
from modelstate.planning.transfer import Execution, Way
from modelstate.problems import glob_patterns, plan_error
from modelstate.process import deferred_signals, gc_paused, progress_bar, stopped_by
from modelstate.text_format import count, listed
from modelstate.torch_compat.modules import needs_protocol
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.sharding import refresh_shards, reshard
from modelstate.transaction.optimizers import check_optimizers, following_state, placed
from modelstate.transaction.references import lost_references
from modelstate.transaction.slots import compare_names, slots_of
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
        DistributedError: The model has DTensors, and there is no process group.

    Examples:
        >>> plan = modelstate.plan(model, "model.safetensors")
        >>> plan.ok
        True
        >>> report = modelstate.load(model, plan)
    """
    checked = checked_options(**options)
    model = check_model(model)
    checkpoint = open_checkpoint(source, cache=checked.cache)
    with exclusive(model), Transaction(model) as transaction, gc_paused():
        planner, staging = prepare(transaction, checkpoint, checked, call_extra_state=False)
        with staging.files:
            if checked.in_place is None:
                stage_unleased(planner.executions, staging.files)
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
    "ms.load",
    foreign=OF_TORCH,
    within=collective.before_call("modelstate.load"),
    options=LoadArguments,
    defaults=LoadOptions(),
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
        if background and (checked.in_place or agreement is not None):
            overwrites = "in_place=True, which overwrites memory that the program still uses"
            raise OptionError(
                "this load cannot go on in the background",
                where="background=True",
                found=overwrites if agreement is None else "a model with DTensors, whose ranks load together",
                remedy="leave background=True out",
            )
    # A transform is the user's code. It may create reference cycles of tensors, which must be collected in time.
    paused_gc = gc_paused if checked.transform is None else nullcontext[None]
    if not background:
        votes = nullcontext() if agreement is None else agreement.collective()
        # The votes first, as in every call: two threads that took these locks in two orders would wait for each other.
        with votes, exclusive(model), paused_gc(), Transaction(model) as transaction:
            return execute(transaction, source, checked, agreement, started=started)
    with exclusive(model), paused_gc(), Transaction(model) as transaction:
        planner, staging = prepare(transaction, source, checked, call_extra_state=False)
        staging.files.close()
        check_plan(planner, checked.optimizers)
        executions = planner.executions
        for item in executions:
            if item.transfers.way is Way.INTO:
                item.stage_instead("the model is in use until then")
        limit_memory(staging, executions)
        staged = StagedLoad(planner.plan(), staging, executions)

    def commit() -> LoadReport:
        options = replace(checked, progress=False)
        with exclusive(model), paused_gc(), Transaction(model) as transaction:
            return execute(transaction, staged.plan, options, None, started=started, staged=staged)

    return LoadHandle(staged, commit)


def _ranks_of(
    tensors: nn.Module | tuple[()], process_group: ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Agreement | None:
    """Returns the ranks that load these tensors together; None for a load on one rank."""
    # Without a process group there is one rank. Where the model then has DTensors, `prepare` raises.
    has_group = process_group is not None or (dist.is_available() and dist.is_initialized())
    if has_group or timeout_seconds != TIMEOUT_SECONDS:
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
) -> LoadReport:
    """Loads into the root of a transaction that the caller has entered, together with other changes of the caller.

    The caller holds the lock of the root (`exclusive`), too, and around it the votes of `agreement`, if it passes one.

    `then` is called before the commit, when every tensor has its final shape, dtype and device, and only copies between
    existing memory remain. Code that reads tensors in `then`, within the transaction's `model_code`, sees the new
    values, if the transaction's `reads_values` says so. `then` registers an undo for each of its changes with the
    transaction. `check` is called when the load is planned, before its problems are raised.
    """
    agreement = agreement or _ranks_of(transaction.root)
    with nullcontext() if agreement is None else agreement.collective(), gc_paused():
        return execute(transaction, checkpoint, options, agreement, then=then, check=check)


def execute(
    transaction: Transaction,
    source: Source | LoadPlan,
    options: LoadOptions,
    agreement: Agreement | None,
    *,
    started: float | None = None,
    staged: StagedLoad | None = None,
    then: Callable[[], None] | None = None,
    check: Callable[[Planner], None] | None = None,
) -> LoadReport:
    """Loads into the root of a transaction. All references to the planner are gone when the function returns.

    The caller pauses the garbage collector, which would visit every object of the load if it went on before that.

    Args:
        transaction: The transaction of the load.
        source: The checkpoint, or a plan that was made before.
        options: The options of the load.
        agreement: The ranks that load together; None for a load on one rank.
        started: When the load began, by `time.perf_counter`.
        staged: The values that have been read in the background.
        then: See `load_then`.
        check: See `load_then`.
    """
    started = time.perf_counter() if started is None else started
    optimizers = options.optimizers
    before = placed(optimizers) if optimizers else {}
    planner: Planner
    phase: Callable[..., AbstractContextManager[None]]
    phase = (lambda *_, **__: nullcontext()) if agreement is None else agreement.phase
    with ExitStack() as held:
        with phase(PLANNING, lambda: collective.digests_of(planner)):
            planner, staging = prepare(transaction, source, options, agreement, call_extra_state=True, staged=staged)
            held.callback(staging.files.close)
            if check is not None:
                check(planner)
            check_plan(planner, optimizers)
            if staged is None:
                limit_memory(staging, planner.executions)
            else:
                staged.hand_over(planner)
            executions = planner.executions
        rank = None if agreement is None else agreement.rank
        to_stage = [*planner.moves, *(item for item in executions if item.reader in (None, rank))]
        nbytes = sum(item.transfers.nbytes for item in to_stage)
        staging.progress = held.enter_context(progress_bar(options.progress, nbytes, "loading"))
        with phase(READING), nullcontext() if agreement is None else collective.reading(planner, agreement):
            verified = 0 if staged is None else staged.verified_bytes
            if staged is None and options.verify:
                verified = staging.checkpoint.verify()
            stage(staging, to_stage)
        if agreement is not None:
            collective.broadcast(planner, agreement)
        effect = "values that are read in place are overwritten" if staging.options.in_place else NOTHING_CHANGED
        with phase(collective.LAST_CHECKS, decides=True, effect=effect):
            finals = {
                tensor: final
                for item in (executions if optimizers else ())
                for tensor, final in zip(item.transfers.slot_tensors, item.finals, strict=False)
                if is_plain(final)  # parameters of tensor subclasses have their final values already
            }
            for state, key, value in following_state(optimizers, finals, before) if optimizers else ():
                transaction.at_commit(partial(state.__setitem__, key, value))
            place_fallible(transaction, executions)
            if any(item.transfers.facts.sharded is not None for item in planner.singles):
                transaction.register_undo(refresh_shards(planner.slots.modules.values()))
            # Mapped values are not read, so no read notices a change.
            for maps in {maps for item in executions if (maps := item.transfers.maps) is not None}:
                maps.check_unchanged()
            if staging.options.in_place:
                overwrite(staging, executions)
            if then is not None:
                then()
            # Reads in place have compared the files, and their error names what they leave.
            at_commit = [] if staging.options.in_place else reads_at_commit(staging, executions)
            if agreement is not None:  # a rank that is interrupted behind the vote would not commit, and others would
                held.enter_context(deferred_signals())
        with phase(COMMIT, effect="all other ranks have loaded"):
            commit_values(transaction, executions, at_commit)
        ranks, reread_bytes = ((), 0) if agreement is None else collective.rank_reports(planner, agreement)
    target, source_name = planner.names
    return LoadReport(
        target=target,
        source=source_name,
        notes=(
            *planner.notes,
            *staging.notes,
            *transaction.notes,
            *(staging.overflows.notes() if staging.overflows.counts else ()),
        ),
        slots=planner.slot_count,
        seconds=time.perf_counter() - started,
        peak_memory_bytes=staging.peak_memory_bytes,
        verified_bytes=verified,
        # The writes of this library keep every object. Code of the model may replace objects.
        references_lost=lost_references(planner.slots_before, planner.model) if transaction.armed else (),
        ranks=ranks,
        reread_bytes=reread_bytes,
        make_steps=planner.step_maker(),
    )


def prepare(
    transaction: Transaction,
    source: Source | LoadPlan,
    options: LoadOptions,
    agreement: Agreement | None = None,
    *,
    call_extra_state: bool,
    staged: StagedLoad | None = None,
) -> tuple[Planner, Staging]:
    """Plans a load, or binds a plan that was made before, and returns with it how its values are read.

    A plan that sets no extra state leaves the random generator as it is. The caller closes the files of the staging.
    """
    with kept_open() as opened, nullcontext() if call_extra_state else torch.random.fork_rng(devices=[]):
        slots = slots_of(transaction.root)
        if "torch.distributed.fsdp" in sys.modules and reshard(slots.modules.values()):
            slots = slots_of(transaction.root)
        may_be_sharded = agreement is None and "torch.distributed.tensor" in sys.modules
        if may_be_sharded and any(is_sharded(slot.tensor) for slot in slots.tensors):
            agreement_of(transaction.root)  # raises where there is no process group
        view = ModelSchemaView(transaction.root, slots)
        if isinstance(source, LoadPlan):
            matched = source.binding.matched
        else:
            matched = match(open_checkpoint(source), options, view)
        files = OpenFiles(matched.part.fingerprints, opened)
        staging = Staging(matched.part, options, transaction.root, files)
        if staged is not None:  # the memory of the model is looked up again
            staging = replace(staged.staging, files=files)
        make_write = partial(Place, staging)
        planner = Planner(transaction, view, matched, make_write, call_extra_state=call_extra_state)
        if isinstance(source, LoadPlan):
            remedy = "load again, and do not change the model's slots until the result"
            _bind(planner, source, "make the plan again" if staged is None else remedy)
        else:
            _record(planner)
        if options.read_once:
            planner.notes += collective.share_reads(planner.singles, agreement or agreement_of(transaction.root))
        return planner, staging


def _record(planner: Planner) -> None:
    """Plans a load: every value gets a transfer, or there is a problem. Raises `ModelCodeError`."""
    matched, slots, transaction = planner.matched, planner.slots, planner.transaction
    planner.notes += matched.notes
    planner.problems += matched.applied.problems
    names, target = matched.applied.entries.keys(), type(planner.model).__name__
    if needs_protocol(slots.modules, names, matched.versions):
        nested = planner.incoming.nested_values(slots.modules)
        state_dict = {name: planner.incoming.value(name) for name in names}
        for name, (value, names_within) in nested.items():
            state_dict[name] = value
            for within in names_within:
                del state_dict[within]
        with code_errors(ModelCodeError, "the model's own loading code raised; nothing has been changed", where=target):
            outcome = walk(planner.model, slots, state_dict, matched.versions, planner, calls_own=True)
        left = [nested[name][1] if name in nested else [name] for name in outcome.unexpected]
        outcome.unexpected = [name for names in left for name in names]
    else:
        common, missing, unexpected = compare_names(slots, names, planner.add_plain())
        outcome = IncompatibleKeys(missing, unexpected)
        what = "code of a tensor subclass or a transform raised; nothing has been changed"
        with code_errors(ModelCodeError, what, where=target) if common else nullcontext():
            for name in common:
                planner.tensor(name, slots.by_name[name].tensor, planner.incoming.value(name), None, outcome.errors)
        # Another name of the tensor may have filled it.
        outcome.missing = [name for name in missing if id(slots.by_name[name].tensor) not in planner.filled]
    planner.notes += [f"{type(module).__name__}: its own load_state_dict was called" for module in outcome.called]
    options, is_filled = planner.options, len(planner.filled) == len(slots.tensors)
    has_code = transaction.armed or planner.changes_dtypes or options.transform or matched.rules
    has_names = outcome.missing or outcome.unexpected or options.allow_missing or options.allow_unexpected
    is_complete = is_filled and not (has_code or has_names)
    if planner.singles or planner.problems or not is_complete or any(slot.tensor.is_meta for slot in slots.tensors):
        from modelstate.planning.coverage import check_coverage  # a usual load does without

        check_coverage(planner, outcome, is_complete)
    planner.settle()


def _bind(planner: Planner, plan: LoadPlan, stale_remedy: str) -> None:
    """Records with the matched checkpoint of a plan, for a model with the same slots.

    The steps are those of the plan where no code of the model runs. Where it runs, they are compared. Raises
    `PlanError`, with this remedy, where the model is no longer the one of the plan.
    """
    was, now = plan.binding.slots, planner.signatures
    if was != now:
        _check_same(planner, was.as_text(), now.as_text(), stale_remedy)
    if not plan.binding.mapped:
        planner.options = replace(planner.options, map=False)
    _record(planner)
    planner.notes[:] = dict.fromkeys([*plan.notes, *planner.notes])  # those on maps may be of the plan alone
    if planner.problems:
        return
    # Whether a file may be mapped depends on other processes too: it does not make a plan stale.
    if (number := plan.binding.mapped - planner.mapped) > 0:
        are_read = f"{count(number, 'tensor')} {'is' if number == 1 else 'are'} read into memory"
        planner.notes.append(f"{are_read}; when the plan was made, the file could be mapped")
    if plan.binding.runs_code or planner.transaction.armed:
        planned, steps = ({step.name: step.decision for step in of} for of in (plan.steps, planner.step_maker()()))
        _check_same(planner, planned, steps, stale_remedy)


def _check_same(planner: Planner, was: Mapping[str, object], now: Mapping[str, object], remedy: str) -> None:
    """Raises `PlanError` where a slot or a step is no longer what it was for the plan."""
    if was == now:
        return
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    raise PlanError(
        "the model is no longer what was planned for; nothing has been changed",
        where=f"{planner.names[0]}: {changed[0]}{more}",
        expected=was.get(changed[0]) or "no such slot",
        found=now.get(changed[0]) or "no such slot",
        remedy=remedy,
        page="model-code",
    )


def check_plan(planner: Planner, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises the problems of a plan.

    A transform of modules must not replace a parameter of an optimizer: the state that fits the new tensor is unknown.
    """
    if planner.problems:
        raise plan_error(*planner.names, planner.problems, given=planner.matched.given) from planner.cause
    optimized = {param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    replaced = [
        item.transfers
        for item in (planner.singles if optimized else ())
        if item.transfers.facts.module_transform is not None and not optimized.isdisjoint(item.transfers.slot_tensors)
    ]
    if replaced:
        alone = ", ".join(f"{pattern!r}: None" for pattern in glob_patterns(item.name for item in replaced))
        raise OptionError(
            "the state of an optimizer cannot follow a parameter that the transform replaces",
            where=listed([item.name for item in replaced], 3),
            found=replaced[0].why,
            remedy=f"build the optimizer after the load, or leave these alone: transform={{{alone}, '*': transform}}; "
            "where transform= is a mapping, its patterns follow these names",
        )


# Loads in the background.


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
        self._outcome: Future[LoadReport] = Future()
        self._lock = threading.RLock()
        """Held by the thread that sets the outcome."""
        self._committing_thread: int | None = None
        self._pid = os.getpid()
        weakref.finalize(self, self._task.cancel, wait=False).atexit = False
        self._task.start()

    def __repr__(self) -> str:
        state = "ready" if self._task.done else "coming in"
        if self._outcome.done():
            error = self._outcome.exception()
            is_cancelled = isinstance(error, BackgroundCancelledError)
            state = "loaded" if error is None else "cancelled" if is_cancelled else "failed"
        return f"<LoadHandle of {self._task.where}: {state}>"

    @property
    def done(self) -> bool:
        """Whether `result` need not wait for values that are read: all have been, or there is a result or an error."""
        return self._outcome.done() or self._task.done

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
        if not self._outcome.done():
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
        return self._outcome.result()

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
        if not self._outcome.done():
            with self._lock:
                was_open = not self._outcome.done()
                if was_open:
                    self._outcome.set_exception(self._task.cancelled_error("it was cancelled"))
                    self._commit = None
        self._task.cancel(wait=wait)
        return was_open

    def __enter__(self) -> LoadHandle:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._outcome.done():
            self.cancel()

    def _leave_parent(self) -> None:
        """Ends the load in a forked child, where the thread that may hold the lock does not exist."""
        if not self._outcome.done() and self._pid != os.getpid():
            why = "it belongs to the process that this one was forked from"
            self._outcome.set_exception(self._task.cancelled_error(why))

    def _put_in_place(self, commit: Callable[[], LoadReport]) -> None:
        self._committing_thread = threading.get_ident()
        try:
            self._task.result()
            self._outcome.set_result(commit())
        except Exception as error:
            self._outcome.set_exception(error)
        except BaseException:
            self._outcome.set_exception(self._task.cancelled_error("it was interrupted while it was put in place"))
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
                stage(staging, self._executions)
            finally:
                staging.progress = lambda _: None  # which refers to no task
            files.check_unchanged()
        # Other threads use the tensors on other streams: the copies on the streams of this thread must have ended.
        for device in {final.device for item in self._executions for final in item.finals}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def hand_over(self, planner: Planner) -> None:
        """Hands the values to the load that commits."""
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

    def release(self) -> None:
        """Frees all values that have been read, also where other objects still refer to the plans."""
        for item in self._executions:
            item.finals.clear()  # the load that commits has the same list
        self._executions = []
