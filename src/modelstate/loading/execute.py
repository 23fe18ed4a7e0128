"""Executes a load: plans it, stages its values, and commits them, all or nothing.

What can fail comes first, and can be undone; then the commit. On several ranks each phase ends with a vote.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from msgspec.structs import replace

from modelstate.checkpoint.mapped import views_of
from modelstate.checkpoint.open import Source, open_source
from modelstate.distributed.agreement import NOTHING_CHANGED, Agreement, agreement_of
from modelstate.errors import MemoryBudgetError, ModelStateError, OptionError, PlacementError, ReadFailedError
from modelstate.io import system
from modelstate.io.engine import LocalFile, OpenFiles
from modelstate.io.files import kept_open
from modelstate.io.linux import MAP_NORESERVE
from modelstate.io.page_cache import bring_into_cache, lease_files
from modelstate.loading import collective
from modelstate.loading.stage import Progress, Staging, limit_memory, reads, stage, stage_one
from modelstate.planning.matching import ModelSchemaView, match
from modelstate.planning.options import LoadOptions
from modelstate.planning.plan import LoadPlan, LoadReport
from modelstate.planning.planner import Planner, refusal_of_writes
from modelstate.planning.record import bind, record
from modelstate.planning.transfer import Execution, Sink, Transfers, Way, copy_cannot_fail, stage_unleased
from modelstate.problems import glob_patterns
from modelstate.process import deferred_signals, gc_paused, progress_bar
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import can_overflow
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import copy_each, without_modes
from modelstate.torch_compat.sharding import dtensor_like, refresh_shards, reshard
from modelstate.transaction.optimizers import following_state, placed
from modelstate.transaction.references import lost_references
from modelstate.transaction.slots import slots_of
from modelstate.transaction.swap_tensors import become, give_memory, give_memory_to_all, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write

_LOAD_AGAIN = "load again, and do not change the model's slots until the result"


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
    in_columns: bool = True,
) -> LoadReport:
    """Loads into the root of a transaction. All references to the planner are gone when the function returns.

    Args:
        transaction: The transaction of the load.
        source: The checkpoint, or a plan that was made before.
        options: The options of the load.
        agreement: The ranks that load together; None for a load on one rank.
        started: When the load began, by `time.perf_counter`.
        staged: The values that have been read in the background.
        then: See `load_then`.
        check: See `load_then`.
        in_columns: Whether values without facts of their own may be planned together.
    """
    started = time.perf_counter() if started is None else started
    optimizers = options.optimizers
    before = placed(optimizers) if optimizers else {}
    planner: Planner
    phase: Callable[..., AbstractContextManager[None]]
    phase = (lambda *_, **__: nullcontext()) if agreement is None else agreement.phase
    with ExitStack() as held:
        with phase(collective.PLANNING, lambda: collective.digests_of(planner)):
            planner, staging = prepare(
                transaction, source, options, agreement, call_extra_state=True, staged=staged, in_columns=in_columns
            )
            held.enter_context(staging.files)
            if check is not None:
                check(planner)
            check_plan(planner, optimizers)
            notes = planner.notes
            if staged is None:
                limit_memory(staging, planner.executions)
            else:
                notes += staged.hand_over(staging, planner)
            executions = planner.executions
        here = collective.to_read_here(executions, staging.shared) if staging.shared else executions
        to_stage = [*planner.moves, *here]
        nbytes = sum(item.transfers.nbytes for item in to_stage)
        advance = held.enter_context(progress_bar(options.progress, nbytes, "loading"))
        with phase(collective.READING), ExitStack() as random:
            if agreement is not None:  # first of all, because the other ranks wait here for this one
                for replicas in dict.fromkeys(read.ranks for read in staging.shared):
                    agreement.connect(replicas)
                random.enter_context(collective.shared_generator(planner, agreement))
            if staged is not None:
                verified = staged.verified_bytes
            else:
                verified = staging.checkpoint.verify() if options.verify else 0
            notes += stage(staging, to_stage, advance)
        if agreement is not None and staging.shared:
            with phase(collective.SHARING), agreement.barrier():
                collective.broadcast(staging.shared, agreement)
        effect = "values that are read in place are overwritten" if staging.options.in_place else NOTHING_CHANGED
        with phase(collective.LAST_CHECKS, decides=True, effect=effect):
            finals = {
                tensor: final
                for item in (executions if optimizers else ())
                for tensor, final in zip(item.transfers.slot_tensors, item.finals, strict=False)
                if is_plain(final)  # parameters of tensor subclasses have their final values already
            }
            new_state = following_state(optimizers, finals, before) if optimizers else []
            place_fallible(transaction, executions)
            if any(item.transfers.facts.sharded is not None for item in planner.singles):
                transaction.register_undo(refresh_shards(planner.slots.modules.values()))
            # Mapped values are not read, so no read notices a change.
            for maps in {maps for item in executions if (maps := item.transfers.maps) is not None}:
                maps.check_unchanged()
            if staging.options.in_place:
                overwrite(staging, executions, advance)
            if then is not None:
                then()
            # Reads in place have compared the files, and their error names what they leave.
            at_commit = [] if staging.options.in_place else reads_at_commit(staging, executions, advance)
            if agreement is not None:  # a rank that is interrupted behind the vote would not commit, and others would
                held.enter_context(deferred_signals())
        with phase(collective.COMMIT, effect="all other ranks have loaded"):
            last = [partial(state.__setitem__, key, value) for state, key, value in new_state]
            commit_values(transaction, executions, at_commit, last)
        reports = None if agreement is None else collective.rank_reports(planner, staging.shared, agreement)
    ranks, reread_bytes = reports or ((), 0)
    target, source_name = planner.names
    return LoadReport(
        target=target,
        source=source_name,
        notes=(*notes, *transaction.notes, *(staging.overflows.notes() if staging.overflows.counts else ())),
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
    in_use: str = "",
    in_columns: bool = True,
) -> tuple[Planner, Staging]:
    """Plans a load, or binds a plan that was made before, and returns with it how its values are read.

    `in_use` is why no value can be read at the commit. `in_columns` is whether values without facts of their own may be
    planned together. The caller closes the files of the staging.
    """
    with kept_open() as opened:
        if "torch.distributed.fsdp" in sys.modules:
            reshard(transaction.root)
        view = ModelSchemaView(transaction.root, slots_of(transaction.root))
        if not isinstance(source, LoadPlan):
            # A load with a transform has not paused the garbage collector.
            with nullcontext() if options.transform is None else gc_paused():
                checkpoint = open_source(source)
            matched = match(checkpoint, options, view)
        else:
            matched = source.binding.matched
        files = OpenFiles(matched.part.fingerprints, opened)
        staging = Staging(matched.part, options, transaction.root, files)
        if staged is not None:  # the memory of the model is looked up again
            staging = replace(staged.staging, files=files)
        planner = Planner(
            *(transaction, view, matched, partial(Place, staging)),
            call_extra_state=call_extra_state,
            in_columns=in_columns,
        )
        if not isinstance(source, LoadPlan):
            record(planner)
        else:
            bind(planner, source, "make the plan again" if staged is None else _LOAD_AGAIN)
        if options.read_once:
            staging.shared = collective.shared_reads(planner.singles, agreement or agreement_of(transaction.root))
            planner.notes += collective.notes_on_shared(staging.shared)
        if staged is None and not options.in_place:
            stage_unleased(planner.executions, staging.files, in_use)
        return planner, staging


def check_plan(planner: Planner, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises the problems of a plan.

    A transform of modules must not replace a parameter of an optimizer: the state that fits the new tensor is unknown.
    """
    if planner.problems:
        raise planner.error()
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


class Place(Write):
    """The write that executes a transfer. The final value decides how."""

    __slots__ = ("execution", "staging")

    def __init__(self, staging: Staging, execution: Execution) -> None:
        super().__init__(execution.transfers.param, execution.transfers.facts.value)
        self.staging, self.execution = staging, execution

    @property
    def cannot_fail(self) -> bool:
        """Whether only a copy between existing memory remains."""
        transfer, param, final = self.execution.transfers, self.target, self.execution.final
        if final is None or transfer.way is Way.CODE or param.is_meta or not _keeps_memory(transfer):
            return False
        return final is param or copy_cannot_fail(param, final)

    def run(self, transaction: Transaction | None) -> None:
        execution, param = self.execution, self.target
        if execution.final is None:
            if transaction is not None:
                used = "code of the model uses it"
                way = execution.transfers.way
                if way is Way.INTO and self.staging.options.in_place is None:
                    execution.stage_instead(used)
                elif way is Way.MAP:
                    execution.transfers = replace(execution.transfers, way=Way.NEW, why=f"was on meta: {used}")
                execution.transfers = replace(execution.transfers, maps=None)  # the value is read
            stage_one(self.staging, execution)
        transfer, final = execution.transfers, execution.final
        sharded = transfer.facts.sharded
        assert final is not None
        if final is param:
            return  # the value was read in place
        with torch.no_grad():
            if transaction is None:
                param.copy_(final)
            elif sharded is not None and (param.is_meta or not _keeps_memory(transfer) or not is_plain(final)):
                # The DTensor stays the same object. In inference mode it would become one that cannot be trained.
                held = sharded.tensor
                with torch.inference_mode(final.is_inference()), torch.no_grad():
                    transaction.save_metadata(held)
                    transaction.register_undo(become(held, dtensor_like(held, final), _converted_grad(held, final)))
            elif param.is_meta and transfer.way is not Way.CODE and is_plain(final):
                transaction.register_undo(give_memory(param, final))
            elif transfer.way is Way.CODE:
                transaction.save_tensor(param)
                # As torch does when swapping is switched on.
                new = param.module_load(final, assign=param.is_meta)  # type: ignore[no-untyped-call]
                if new is final or new is param:
                    raise RuntimeError("module_load returned self or other; it must return a new tensor")
                if is_plain(new) and not is_plain(param):
                    what = "no handler converts a plain tensor to this class"
                    raise RuntimeError(f"its class would no longer be {type(param).__name__}: {what}")
                _take_over(execution, param, new, transaction)
            elif not is_plain(final):
                transaction.save_metadata(param)
                _take_over(execution, param, final, transaction)
            elif _keeps_memory(transfer):
                transaction.save_tensor(param)
                param.copy_(final)
            else:
                transaction.register_undo(point_to(param, final, _converted_grad(param, final)))
        (slot_tensor,) = transfer.slot_tensors
        if execution.freezes and slot_tensor.requires_grad:
            grad = slot_tensor.grad

            def undo() -> None:
                slot_tensor.requires_grad_()
                slot_tensor.grad = grad

            if transaction is not None:
                transaction.register_undo(undo)
            slot_tensor.grad = None
            slot_tensor.requires_grad_(False)


def _keeps_memory(transfer: Transfers) -> bool:
    """Whether the slot keeps its memory."""
    return transfer.param.dtype == transfer.dtype and transfer.param.device == transfer.device


def _converted_grad(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor with the dtype and device of its new value; None where the value cannot have one."""
    grad = tensor.grad if tensor.is_leaf and (value.is_floating_point() or value.is_complex()) else None
    return None if grad is None else grad.to(value.device, value.dtype)


def _take_over(execution: Execution, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    """Gives `param` the class, metadata and memory of `value`. A gradient stays if it still fits."""
    for error in refusals({execution.transfers.name: param}):
        raise error
    grad = param.grad if param.is_leaf else None
    fits = grad is not None and (grad.shape, grad.dtype, grad.device) == (value.shape, value.dtype, value.device)
    # An inference tensor can only be changed in inference mode. Other tensors must not become inference tensors, which
    # cannot be trained.
    in_inference_mode = param.is_inference() or value.is_inference()
    with nullcontext() if in_inference_mode else torch.inference_mode(False):
        transaction.register_undo(become(param, value, grad if fits else None))
    execution.transfers = replace(execution.transfers, dtypes=[param.dtype], device=param.device)


def _waiting(executions: Iterable[Execution]) -> list[Execution]:
    """Returns what is read straight into its slots, and has not been read."""
    return [item for item in executions if item.transfers.way is Way.INTO and not item.finals]


def overwrite(staging: Staging, executions: Iterable[Execution], advance: Progress) -> None:
    """Reads values straight into the memory of their slots, as a load with `in_place=True` does.

    Raises:
        ReadFailedError, MemoryBudgetError, PlacementError: Values may be partly overwritten, and the error says so.
    """
    waiting = _waiting(executions)
    for path in {extent.path for item in waiting for extent in item.transfers.extents}:
        _ = staging.files[path]
    staging.files.check_unchanged()  # nothing has been overwritten yet
    try:
        for read in [*reads(staging, waiting, advance)]:  # the buffers of all reads come first
            read()
        staging.files.check_unchanged()
    except Exception as error:
        kind: type[ModelStateError] = PlacementError  # of torch: what was read could not be cast or copied
        if isinstance(error, ReadFailedError | MemoryBudgetError):
            kind = type(error)
        raise kind(
            "the model was read in place, and that has failed: its values may be partly overwritten",
            where=getattr(error, "where", ""),
            found=error if kind is type(error) else f"{type(error).__name__}: {error}",
            remedy="load again; without in_place=True, the old values are kept until all is read and cast",
        ) from error


def place_fallible(transaction: Transaction, executions: Iterable[Execution]) -> None:
    """Gives memory to slots on meta, and places values that may run code of a tensor subclass: all can be undone."""
    for item in executions:
        transfers = item.transfers
        if transfers.own is None and transfers.way in (Way.MAP, Way.NEW):
            try:
                with without_modes():
                    give_memory_to_all(transfers.params, item.finals, transaction.register_undo)
            except Exception as error:
                row = next(row for row, value in enumerate(item.finals) if not value.is_meta)
                raise _placement_error(transfers.names[row], transfers.params[row], item.finals[row], error) from error
    for write in transaction.writes:
        if not isinstance(write, Place) or write.done or write.execution.transfers.way is Way.INTO:
            continue
        if write.target.is_meta or not write.cannot_fail:
            try:
                transaction.run(write)
            except ModelStateError:
                raise
            except Exception as error:
                raise _placement_error(write.execution.transfers.name, write.target, write.value, error) from error


def _placement_error(name: str, target: torch.Tensor, value: torch.Tensor, error: Exception) -> PlacementError:
    return PlacementError(
        "a value cannot be put in its place; nothing has been changed",
        where=name,
        expected=f"{type(target).__name__}, {target.dtype}",
        found=f"{type(value).__name__}, {value.dtype}: {error}",
        remedy=refusal_of_writes(target)[1]
        or "give the tensor subclass a module_load handler, or convert the value with transform=",
    )


def reads_at_commit(staging: Staging, executions: Sequence[Execution], advance: Progress) -> list[Callable[[], object]]:
    """Leases the files that are read at the commit, and returns functions that read from them.

    Where files cannot be leased, their values are staged now.

    Args:
        staging: How the values are read.
        executions: Everything that the load reads.
        advance: Called with numbers of bytes that are done.

    Raises:
        ReadFailedError: A file cannot be read, or has changed.
        MemoryBudgetError: The values have to be staged, and need too much memory.
    """
    waiting = _waiting(executions)
    if waiting:
        # Progress may be shown in a way that fails, so it comes before the commit.
        extents = [extent for item in waiting for extent in item.transfers.extents]
        refusal = "the page cache has not all of it"
        if bring_into_cache(extents, staging.files, lambda _: advance(0)):
            refusal = lease_files(extents, staging.files)
        if not refusal:
            advance(sum(item.transfers.nbytes for item in waiting))
            staging.files.check_unchanged()
            copied, copies = (
                [item for item in waiting if _is_copied_from_map(item.transfers)],
                list[Callable[[], object]](),
            )
            try:
                copies += [_copy_from_maps(staging, copied)] if copied else []
            except (OSError, ValueError):  # no room for a map
                copied = []
            rest = [item for item in waiting if item not in copied]
            return [*copies, *reads(staging, rest, lambda _: None), staging.files.check_unchanged]
        for item in waiting:
            item.stage_instead(refusal)
        limit_memory(staging, executions)
        stage(staging, executions, advance)
    staging.files.check_unchanged()
    return []


def _is_copied_from_map(transfers: Transfers) -> bool:
    """Whether torch may copy the values out of a map: each is a range of a file, and nothing has to look at a cast."""
    columns = transfers.columns
    if columns is None or not transfers.on_cpu or not transfers.nbytes:
        return False
    sizes = {name: getattr(torch, name).itemsize for name in {*columns.dtype_names}}
    if any(start % sizes[name] for name, start in zip(columns.dtype_names, columns.starts, strict=True)):
        return False
    casts_to = {*transfers.dtypes} if transfers.sink is Sink.BLOCKS else set[torch.dtype]()
    return not any(can_overflow(transfers.stored_dtype, dtype) for dtype in casts_to)


def _copy_from_maps(staging: Staging, executions: Sequence[Execution]) -> Callable[[], object]:
    """Returns a function that copies values out of maps of their files, which are leased and in the page cache.

    Raises `OSError` or `ValueError` where a file cannot be mapped.
    """
    columns, maps = [item.transfers.rows for item in executions], dict[str, mmap.mmap]()
    for path in {path for each in columns for path in each.paths}:
        file = staging.files[path]
        assert isinstance(file, LocalFile)  # others are not leased
        maps[path] = system.mmap(file.descriptor, 0, mmap.MAP_PRIVATE | MAP_NORESERVE)
    values = [value for each in columns for value in views_of(maps, each)]
    params = [param for item in executions for param in item.transfers.params]

    def copy() -> None:
        started = time.perf_counter()
        copy_each(params, values)
        seconds, total = time.perf_counter() - started, sum(item.transfers.nbytes for item in executions)
        for item in executions:
            item.seconds += seconds * item.transfers.nbytes / total

    return copy


def commit_values(
    transaction: Transaction,
    executions: Sequence[Execution],
    reads: Sequence[Callable[[], object]],
    last: Sequence[Callable[[], None]],
) -> None:
    """Commits, and reads what is read at the commit.

    Args:
        transaction: The transaction of the load.
        executions: Everything that the load reads.
        reads: The result of `reads_at_commit`. All are called, and the first error is raised after the commit.
        last: Called at the end of the commit; they must not raise.

    Raises:
        ReadFailedError: After the commit, where a read failed that should not have: with the names of the tensors.
        PlacementError: The same for what was read, and could not be cast or copied.
    """
    error: Exception | None = None
    waiting = _waiting(executions) if reads else []
    # Values with facts of their own have writes.
    staged = [item for item in executions if item.transfers.own is None and item.transfers.way is Way.STAGED]

    @torch.no_grad()
    def first() -> None:
        nonlocal error
        for read in reads:
            try:
                read()
            except Exception as raised:
                error = error or raised
        for item in waiting:
            item.finals = item.transfers.params  # also after an error: nothing reads them again
        for item in staged:
            for param, value in zip(item.transfers.params, item.finals, strict=True):
                param.copy_(value)

    transaction.commit(*last, first=first if reads or staged else None)
    if error is not None:
        kind = ReadFailedError if isinstance(error, ReadFailedError) else PlacementError
        raise kind(
            "values could not be read into the model at the commit: these tensors may be old or damaged, and all "
            "others are loaded",
            where=listed([name for item in waiting for name in item.transfers.names], 8),
            found=error if isinstance(error, ModelStateError) else f"{type(error).__name__}: {error}",
            remedy="load again with in_place=False, which keeps the old values until all is read",
        ) from error


# Values that are read in the background.


class StagedLoad:
    """The values of a load that reads in the background.

    The load is planned, its effects are undone, and `result` executes the plan. The staged values depend on the
    checkpoint and on the metadata of the slots, not on the slots' values, so the model may be used and trained in the
    meantime. `result` computes the other values: values that the model's own loading code uses, because that code runs
    again; values that depend on the model's values; and values that need no read.
    """

    def __init__(self, plan: LoadPlan, staging: Staging, executions: Iterable[Execution], verify: bool) -> None:
        """Takes over what a load reads, before the transaction in which it was planned is undone.

        Args:
            plan: The plan of the load.
            staging: How the values are read. The caller must not use it afterwards.
            executions: What the plan reads. The caller must not use it afterwards.
            verify: Whether `read` compares the file with its checksums.

        Raises:
            ChecksumError: `verify` is true and the checkpoint has no checksums.
        """
        self.plan = plan
        self.verified_bytes = 0
        self._verification = staging.checkpoint.verification() if verify else None
        self._notes: list[str] = []
        self._handed_over: list[Execution] = []
        self._executions = [item for item in executions if item.transfers.is_from_files and not item.finals]
        if staging.options.transform is not None:
            _ = staging.own_memory  # computed now, in the thread that uses the model
        self.staging = staging
        """How the values are read, which the load that commits takes over."""
        self.nbytes = sum(item.transfers.nbytes for item in self._executions)

    def read(self, progress: Progress) -> None:
        """Reads, casts and transforms the values.

        Args:
            progress: Called with numbers of bytes that are done; may raise to end the read.

        Raises:
            ReadFailedError: A file cannot be read, or has changed since it was opened.
            ChecksumError: The file is damaged.
            TransformError: A transform raises, or returns a tensor that cannot be loaded.
        """
        staging, executions = self.staging, self._executions
        if self._verification:
            self.verified_bytes = self._verification.run(lambda _: progress(0))
        with staging.files as files:
            self._notes += stage(staging, executions, progress)
            files.check_unchanged()
        # Other threads use the tensors on other streams: the copies on the streams of this thread must have ended.
        for device in {final.device for item in executions for final in item.finals}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def hand_over(self, staging: Staging, planner: Planner) -> list[str]:
        """Hands the values to the load that commits. Returns notes for the report."""
        ready = {
            name: (item, final)
            for item in self._executions
            for name, final in zip(item.transfers.names, item.finals, strict=False)
        }
        for item in planner.executions:
            transfers = item.transfers
            found = [ready[name] for name in transfers.names if name in ready]
            is_in_file = transfers.own is None or transfers.own.stored is not None
            if item.finals or not is_in_file or len(found) < len(transfers.names):
                continue
            staged, finals = found[0][0], [final for _, final in found]
            was = staged.transfers
            item.transfers = replace(transfers, way=was.way, why=was.why, maps=was.maps)
            if was.own is not None:
                # The model may have come to hold the memory that a transform returned.
                if was.way is Way.STAGED and was.own.transform is not None:
                    finals = [final.clone() if staging.own_memory.hold(final) else final for final in finals]
                item.transfers, item.freezes = replace(item.transfers, dtypes=was.dtypes), staged.freezes
            item.finals, item.seconds = finals, staged.seconds * transfers.nbytes / max(was.nbytes, 1)
            self._handed_over.append(item)
        for final in (final for item in self._handed_over for final in item.finals):
            if final.is_cuda and is_plain(final):
                # It was allocated on the stream of the thread that read it. torch uses the memory of a freed tensor
                # again in the order of that stream, but it is the caller's stream that copies from it.
                final.record_stream(torch.cuda.current_stream(final.device))
        return self._notes

    def release(self) -> None:
        """Frees all values that have been read, also where other objects still refer to the plans."""
        for item in (*self._executions, *self._handed_over):
            item.finals = []
        self._executions, self._handed_over = [], []
