"""Reads the values of a load, and puts them in place: what can fail first, and can be undone, then the commit.

Each value is read into its final memory where possible. What is read straight into the slots is read at the commit.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.autograd.graph import increment_version

from modelstate.checkpoint.mapped import views_of
from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError, ReadFailedError, code_errors
from modelstate.io import system
from modelstate.io.files import LocalFile, OpenFiles
from modelstate.io.memory import HUGE_PAGE_BYTES
from modelstate.io.page_cache import LEAST_BYTES_AHEAD, bring_into_cache, lease_files, look, read_ahead, skip_page_cache
from modelstate.io.system import MAP_NORESERVE
from modelstate.loading.values import Staging, in_blocks, read_computed, read_whole
from modelstate.planning.planner import refusal_of_writes
from modelstate.planning.transfer import (
    Execution,
    Memory,
    Sink,
    Transfers,
    Way,
    copy_cannot_fail,
    final_memory,
    peak_bytes,
)
from modelstate.process import start_threads
from modelstate.remote.location import CONNECTIONS
from modelstate.text_format import listed, size
from modelstate.torch_compat.dtypes import can_overflow
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import copy_each, without_modes
from modelstate.torch_compat.sharding import dtensor_like
from modelstate.transaction.swap_tensors import become, give_memory, give_memory_to_all, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write


def limit_memory(staging: Staging, executions: Iterable[Execution]) -> None:
    """Chooses a read strategy, which keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
    transfers = [item.transfers for item in executions]
    budget, strategy = staging.options.max_memory_bytes, staging.strategy
    if any(file.is_remote for file in staging.checkpoint.fingerprints.values()):
        strategy = replace(strategy, threads=CONNECTIONS, remote=budget is not None)
    most = math.inf if budget is None else budget
    for staging.strategy in chain([strategy], strategy.smaller()):
        staging.peak_memory_bytes = needed = peak_bytes(transfers, staging.strategy)
        if needed <= most:
            return
    staged = 0 if staging.options.in_place else sum(item.staged_bytes for item in transfers)
    could = staged > 0 and needed - staged <= most
    raise MemoryBudgetError(
        "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
        expected=f"at most {budget} bytes",
        found=f"{needed} bytes, at the least",
        remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
    )


def stage(staging: Staging, executions: Iterable[Execution]) -> list[str]:
    """Computes every final value that is not read straight into its slot. The model is not changed.

    First the kernel starts to read what the page cache lacks, also of the other values. A load with `in_place=True`
    goes past the page cache instead, which is faster, where no other rank reads the file too. Returns remarks for the
    report. Raises `ReadFailedError` and `TransformError`.
    """
    unread, options = [item for item in executions if not item.finals], staging.options
    waiting = [item for item in unread if item.transfers.way is not Way.INTO]
    nbytes, how = 0, "past it"
    if sum(item.transfers.nbytes for item in unread) >= LEAST_BYTES_AHEAD:
        looks = look([extent for item in unread for extent in item.transfers.extents], staging.files)
        is_alone = not (dist.is_available() and dist.is_initialized())
        if options.in_place and options.max_memory_bytes is None and is_alone:
            nbytes = skip_page_cache(looks, staging.files)
            staging.peak_memory_bytes += staging.strategy.threads * HUGE_PAGE_BYTES if nbytes else 0
        if not nbytes:
            nbytes, how = read_ahead(looks, staging.files), "ahead"
    for item in waiting:
        if item.transfers.way is Way.MAP:
            item.finals = item.transfers.mapped()
            staging.progress(item.transfers.nbytes)
    for read in reads(staging, (item for item in waiting if not item.finals)):
        read()
    return [f"the file was not in the page cache: {size(nbytes)} of it are read {how}"] if nbytes else []


def reads(staging: Staging, executions: Iterable[Execution]) -> Iterator[Callable[[], None]]:
    """Yields functions that read values into their final memory, one after the other, in the order of the files.

    When a function is yielded, the memory of slots that it reads into and the buffers for blocks have been allocated.

    Each function raises `ReadFailedError` where a read fails; memory of slots is then partly overwritten. It raises
    `TransformError`, and `PlacementError` where a tensor subclass cannot be copied.
    """
    by_sink = defaultdict[Sink, list[Execution]](list)
    for item in executions:
        by_sink[item.transfers.sink].append(item)
    for sink in (Sink.COMPUTED, Sink.WHOLE):  # what is read in blocks or as ranges is sorted there
        by_sink[sink].sort(key=lambda item: item.transfers.extents[:1])
    if items := by_sink[Sink.BLOCKS]:
        memory = final_memory(items)
        yield partial(_execute, items, memory, in_blocks(staging, items, memory))
    for sink, read in ((Sink.COMPUTED, read_computed), (Sink.MEMORY, _read_ranges)):
        if items := by_sink[sink]:
            memory = final_memory(items)
            yield partial(_execute, items, memory, partial(read, staging, items, memory))
    for item in by_sink[Sink.WHOLE]:
        memory = [[]]
        yield partial(_execute, [item], memory, partial(read_whole, staging, item, memory[0]))


def _execute(items: Sequence[Execution], memory: Memory, read: Callable[[], None]) -> None:
    read()
    for item, finals in zip(items, memory, strict=True):
        item.finals = finals


def _read_ranges(staging: Staging, items: Sequence[Execution], memory: Memory) -> None:
    """Reads values that are ranges of files."""
    in_slots = [item for item in items if item.transfers.way is Way.INTO]
    for item in in_slots:
        increment_version(item.transfers.params)  # autograd does not see the writes
    pairs = zip(items, memory, strict=True)
    requests = [request for item, targets in pairs for request in item.transfers.requests(targets)]
    staging.read_ranges(requests, on_read=staging.progress, is_new_memory=len(in_slots) < len(items))


class Place(Write):
    """The write that executes a transfer. The final value decides how."""

    __slots__ = ("execution", "staging")

    def __init__(self, staging: Staging, execution: Execution) -> None:
        super().__init__(execution.transfers.param, execution.transfers.facts.value)
        self.staging, self.execution = staging, execution

    @property
    def cannot_fail(self) -> bool:
        """Whether only a copy between existing memory remains."""
        transfer, param, final = self.execution.transfers, self.target, next(iter(self.execution.finals), None)
        if final is None or transfer.way is Way.CODE or param.is_meta or not _keeps_memory(transfer):
            return False
        return final is param or copy_cannot_fail(param, final)

    @property
    def casts_slot(self) -> bool:
        """Whether a tensor with memory, whose class or layout decides, gets the dtype that is requested."""
        transfer, requested = self.execution.transfers, self.staging.options.dtype
        is_own = transfer.way is Way.CODE and not self.target.is_meta
        return is_own and self.target.dtype != transfer.dtype == requested

    def run(self, transaction: Transaction | None) -> None:
        execution, param = self.execution, self.target
        if not execution.finals:
            used, transfer = "code of the model uses it", execution.transfers
            if transfer.way is Way.INTO:
                execution.stage_instead(used)
            elif transfer.way is Way.MAP:
                execution.transfers = replace(transfer, way=Way.NEW, why=f"was on meta: {used}", maps=None)
            for read in reads(self.staging, [execution]):
                read()
        transfer, (final,) = execution.transfers, execution.finals
        (held,) = transfer.slot_tensors
        if final is param:
            return  # the value was read in place
        with torch.no_grad():
            if transaction is None:
                param.copy_(final)
            elif transfer.way is Way.CODE:
                transaction.save_tensor(param)
                self._become(transaction, param, self._by_module_load(final))
            elif held is not param and (param.is_meta or not _keeps_memory(transfer) or not is_plain(final)):
                # The DTensor stays the same object. In inference mode it would become one that cannot be trained.
                with torch.inference_mode(final.is_inference()), torch.no_grad():
                    self._become(transaction, held, dtensor_like(held, final))
            elif not is_plain(final):
                self._become(transaction, param, final)
            elif param.is_meta:
                transaction.change(partial(give_memory, param, final))
            elif _keeps_memory(transfer):
                transaction.save_tensor(param)
                param.copy_(final)
            else:
                transaction.change(partial(point_to, param, final, _converted_grad(param, final)))
        if execution.freezes and held.requires_grad:
            if transaction is not None:
                transaction.save_metadata(held)
            held.grad = None
            held.requires_grad_(False)

    def _by_module_load(self, final: torch.Tensor) -> torch.Tensor:
        """Returns what the handler of the tensor makes of a value, as torch does when swapping is switched on."""
        param, dtype = self.target, self.execution.transfers.dtype
        with torch.inference_mode(param.is_inference()), torch.no_grad():
            target = param.to(dtype) if self.casts_slot else param
        new: torch.Tensor = target.module_load(final, assign=param.is_meta)  # type: ignore[no-untyped-call]
        if self.casts_slot and new.dtype != dtype:
            raise RuntimeError(f"its class would keep the dtype {new.dtype}")
        if new is final or new is param:
            raise RuntimeError("module_load returned self or other; it must return a new tensor")
        if is_plain(new) and not is_plain(param):
            what = "no handler converts a plain tensor to this class"
            raise RuntimeError(f"its class would no longer be {type(param).__name__}: {what}")
        return new

    def _become(self, transaction: Transaction, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Gives a tensor the class and memory of a value. A gradient stays, cast within a class, if it fits."""
        for error in refusals({self.execution.transfers.name: tensor}):
            raise error
        own_grad = tensor.grad if tensor.is_leaf else None
        grad = _converted_grad(tensor, value) if type(tensor) is type(value) else own_grad
        fits = grad is not None and (grad.shape, grad.dtype, grad.device) == (value.shape, value.dtype, value.device)
        # An inference tensor can only be changed in inference mode. Other tensors must not become inference tensors,
        # which cannot be trained.
        in_inference_mode = tensor.is_inference() or value.is_inference()
        with nullcontext() if in_inference_mode else torch.inference_mode(False):
            transaction.change(partial(become, tensor, value, grad if fits else None))
        self.execution.transfers = replace(self.execution.transfers, dtypes=[tensor.dtype], device=tensor.device)


def _keeps_memory(transfer: Transfers) -> bool:
    """Whether the slot keeps its memory."""
    return transfer.param.dtype == transfer.dtype and transfer.param.device == transfer.device


def _converted_grad(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor with the dtype and device of its new value; None where the value cannot have one."""
    grad = tensor.grad if tensor.is_leaf and (value.is_floating_point() or value.is_complex()) else None
    return None if grad is None else grad.to(value.device, value.dtype)


def _waiting(executions: Iterable[Execution]) -> list[Execution]:
    """Returns what is read straight into its slots, and has not been read."""
    return [item for item in executions if item.transfers.way is Way.INTO and not item.finals]


def _damage(error: Exception, what: str, where: str, remedy: str) -> ModelStateError:
    """Returns the error for a read into slots that has failed: of a file, or of torch that could not cast or copy."""
    is_own = isinstance(error, ReadFailedError | MemoryBudgetError)
    kind = type(error) if isinstance(error, ReadFailedError | MemoryBudgetError) else PlacementError
    return kind(what, where=where, found=error if is_own else f"{type(error).__name__}: {error}", remedy=remedy)


def overwrite(staging: Staging, executions: Iterable[Execution]) -> None:
    """Reads values straight into the memory of their slots, as a load with `in_place=True` does.

    Raises:
        ReadFailedError, MemoryBudgetError, PlacementError: Values may be partly overwritten, and the error says so.
    """
    waiting = _waiting(executions)
    for path in {extent.path for item in waiting for extent in item.transfers.extents}:
        _ = staging.files[path]
    staging.files.check_unchanged()  # nothing has been overwritten yet
    try:
        for read in [*reads(staging, waiting)]:  # the buffers of all reads come first
            read()
        staging.files.check_unchanged()
    except Exception as error:
        raise _damage(
            error,
            "the model was read in place, and that has failed: its values may be partly overwritten",
            getattr(error, "where", ""),
            "load again; without in_place=True, the old values are kept until all is read and cast",
        ) from error


def place_fallible(transaction: Transaction, executions: Iterable[Execution]) -> None:
    """Gives memory to slots on meta, and places values that may run code of a tensor subclass: all can be undone."""
    for item in executions:
        transfers = item.transfers
        if transfers.own is None and transfers.way in (Way.MAP, Way.NEW):
            with without_modes():
                give_memory_to_all(transfers.params, item.finals, transaction.register_undo)
    for write in transaction.writes:
        if isinstance(write, Place) and write.execution.transfers.way is not Way.INTO and not write.cannot_fail:
            target = write.target
            with code_errors(
                PlacementError,
                f"a {type(write.value).__name__} of {write.value.dtype} cannot be put in its place; nothing has been "
                "changed",
                where=write.execution.transfers.name,
                expected=f"{type(target).__name__}, {target.dtype}",
                remedy=refusal_of_writes(target)[1]
                or ("load without dtype=; if that fails too, " if write.casts_slot else "")
                + "give the tensor subclass a module_load handler, or convert the value with transform=",
            ):
                transaction.run(write)


def stage_unleased(executions: Iterable[Execution], files: OpenFiles) -> None:
    """Has values staged that are planned to be read at the commit, where their files cannot be leased now."""
    waiting = _waiting(executions)
    refusal = lease_files([extent for item in waiting for extent in item.transfers.extents], files)
    for item in waiting if refusal else ():
        item.stage_instead(refusal)


def reads_at_commit(staging: Staging, executions: Sequence[Execution]) -> list[Callable[[], None]]:
    """Leases the files that are read at the commit, and returns functions that read from them.

    Where files cannot be leased, their values are staged now.

    Args:
        staging: How the values are read.
        executions: Everything that the load reads.

    Raises:
        ReadFailedError: A file cannot be read, or has changed.
        MemoryBudgetError: The values have to be staged, and need too much memory.
    """
    if not _waiting(executions):
        staging.files.check_unchanged()
        return []
    stage_unleased(executions, staging.files)
    waiting = _waiting(executions)
    extents = [extent for item in waiting for extent in item.transfers.extents]
    # Progress may be shown in a way that fails, so it comes before the commit.
    if waiting and bring_into_cache(extents, staging.files, lambda _: staging.progress(0)):
        staging.progress(sum(item.transfers.nbytes for item in waiting))
        staging.progress = lambda _: None
        staging.files.check_unchanged()
        copies = _copies_from_maps(staging, [item for item in waiting if _is_cast_from_map(item.transfers)])
        others = [item for item in waiting if not (copies and _is_cast_from_map(item.transfers))]
        at_commit = [*copies, *reads(staging, others), staging.files.check_unchanged]
        for item in waiting:
            item.finals = item.transfers.params  # from here on, nothing else reads them
        return at_commit
    staging.files.release()
    for item in waiting:
        item.stage_instead("the page cache has not all of it")
    limit_memory(staging, executions)
    stage(staging, executions)
    staging.files.check_unchanged()
    return []


def _is_cast_from_map(transfers: Transfers) -> bool:
    """Whether torch may cast the values out of a map: nothing has to look at them, and it is faster than in blocks."""
    columns, stored = transfers.columns, transfers.stored_dtype
    if transfers.sink is not Sink.BLOCKS or not (transfers.on_cpu and transfers.nbytes):
        return False
    are_aligned = all(start % stored.itemsize == 0 for start in columns.starts)
    return are_aligned and not any(can_overflow(stored, dtype) for dtype in {*transfers.dtypes})


def _copies_from_maps(staging: Staging, items: Sequence[Execution]) -> list[Callable[[], None]]:
    """Returns a function that copies values out of maps of their files, which are leased and in the page cache.

    Returns none where there are no values, and where the system has no room for a map.
    """
    columns, maps = [item.transfers.columns for item in items], dict[str, mmap.mmap]()
    try:
        for path in {path for each in columns for path in each.paths}:
            file = staging.files[path]
            assert isinstance(file, LocalFile)  # others are not leased
            maps[path] = system.mmap(file.descriptor, 0, mmap.MAP_PRIVATE | MAP_NORESERVE)
    except (OSError, ValueError):
        return []
    memory = final_memory(items)
    params, values = ([*chain.from_iterable(each)] for each in (memory, [views_of(maps, each) for each in columns]))

    def unmap() -> None:
        values.clear()
        for mapped in maps.values():
            mapped.close()  # without the interpreter lock

    def copy() -> None:
        copy_each(params, values)
        start_threads(unmap)  # which takes a quarter of the time of the copy

    return [partial(_execute, items, memory, copy)] if params else []


def commit_values(
    transaction: Transaction, executions: Sequence[Execution], reads: Sequence[Callable[[], None]]
) -> None:
    """Commits, and reads what is read at the commit.

    Args:
        transaction: The transaction of the load.
        executions: Everything that the load reads.
        reads: The result of `reads_at_commit`. All are called, and the first error is raised after the commit.

    Raises:
        ReadFailedError: After the commit, where a read failed that should not have: with the names of the tensors.
        PlacementError: The same for what was read, and could not be cast or copied.
    """
    error: Exception | None = None
    # Values with facts of their own have writes.
    staged = [item for item in executions if item.transfers.own is None and item.transfers.way is Way.STAGED]

    def put_in_place() -> None:
        nonlocal error
        for read in reads:
            try:
                read()
            except Exception as raised:
                error = error or raised
        for item in staged:
            copy_each(item.transfers.params, item.finals)

    transaction.at_commit(put_in_place)
    transaction.commit()
    if error is not None:
        into = [item.transfers for item in executions if item.transfers.way is Way.INTO]
        raise _damage(
            error,
            "values could not be read into the model at the commit: these tensors may be old or damaged, and all "
            "others are loaded",
            listed([name for item in into for name in item.names], 8),
            "load again with in_place=False, which keeps the old values until all is read",
        ) from error
