"""The end of a load: values get into their slots. What can fail comes first, and can be undone; then the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from msgspec.structs import replace

from modelstate.checkpoint.mapped import Maps
from modelstate.errors import MemoryBudgetError, ModelStateError, PlacementError, ReadFailedError
from modelstate.io.page_cache import bring_into_cache, lease_files
from modelstate.loading.stage import Progress, Staging, limit_memory, reads, stage, stage_one
from modelstate.planning.planner import refusal_of_writes
from modelstate.planning.transfer import Execution, Sink, Transfers, Way, copy_cannot_fail
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import can_overflow
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import copy_each, without_modes
from modelstate.torch_compat.sharding import dtensor_like
from modelstate.transaction.swap_tensors import become, give_memory, give_memory_to_all, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write


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
        else:
            with torch.no_grad():
                self._replace(param, final, transaction)
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

    def _replace(self, param: torch.Tensor, final: torch.Tensor, transaction: Transaction) -> None:
        transfer = self.execution.transfers
        if transfer.way is Way.CODE or not is_plain(final):
            if transfer.way is Way.CODE:
                transaction.save_tensor(param)
                # As torch does when swapping is switched on.
                new = param.module_load(final, assign=param.is_meta)  # type: ignore[no-untyped-call]
                if new is final or new is param:
                    raise RuntimeError("module_load returned self or other; it must return a new tensor")
                if is_plain(new) and not is_plain(param):
                    what = "no handler converts a plain tensor to this class"
                    raise RuntimeError(f"its class would no longer be {type(param).__name__}: {what}")
                _take_over(transfer.name, param, new, transaction)
            else:
                transaction.save_metadata(param)
                _take_over(transfer.name, param, final, transaction)
            self.execution.transfers = replace(transfer, dtypes=[param.dtype], device=param.device)
        elif _keeps_memory(transfer):
            transaction.save_tensor(param)
            param.copy_(final)
        else:
            transaction.register_undo(point_to(param, final, _converted_grad(param, final)))


def _keeps_memory(transfer: Transfers) -> bool:
    """Whether the slot keeps its memory."""
    return transfer.param.dtype == transfer.dtype and transfer.param.device == transfer.device


def _converted_grad(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor with the dtype and device of its new value; None where the value cannot have one."""
    grad = tensor.grad if tensor.is_leaf and (value.is_floating_point() or value.is_complex()) else None
    return None if grad is None else grad.to(value.device, value.dtype)


def _take_over(name: str, param: torch.Tensor, value: torch.Tensor, transaction: Transaction) -> None:
    """Gives `param` the class, metadata and memory of `value`. A gradient stays if it still fits."""
    for error in refusals({name: param}):
        raise error
    grad = param.grad if param.is_leaf else None
    fits = grad is not None and (grad.shape, grad.dtype, grad.device) == (value.shape, value.dtype, value.device)
    # An inference tensor can only be changed in inference mode. Other tensors must not become inference tensors, which
    # cannot be trained.
    in_inference_mode = param.is_inference() or value.is_inference()
    with nullcontext() if in_inference_mode else torch.inference_mode(False):
        transaction.register_undo(become(param, value, grad if fits else None))


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
            casts = [item for item in waiting if _casts_from_map(item.transfers)]
            rest = [item for item in waiting if item not in casts]
            copies = [_copy_from_maps(staging, casts)] if casts else []
            return [*copies, *reads(staging, rest, lambda _: None), staging.files.check_unchanged]
        for item in waiting:
            item.stage_instead(refusal)
        limit_memory(staging, executions)
        stage(staging, executions, advance)
    staging.files.check_unchanged()
    return []


def _casts_from_map(transfers: Transfers) -> bool:
    """Whether torch may cast the values out of a map: nothing has to look at them, and it is faster than in blocks."""
    columns = transfers.columns
    if transfers.sink is not Sink.BLOCKS or columns is None or transfers.own is not None or not transfers.on_cpu:
        return False
    stored = transfers.stored_dtype
    are_aligned = all(start % stored.itemsize == 0 for start in columns.starts)
    return are_aligned and not any(can_overflow(stored, dtype) for dtype in {*transfers.dtypes})


def _copy_from_maps(staging: Staging, executions: Sequence[Execution]) -> Callable[[], object]:
    """Returns a function that copies values out of maps of their files, which are leased and in the page cache."""
    maps = Maps(staging.checkpoint.fingerprints, staging.checkpoint.format)
    values = [value for item in executions if item.transfers.columns for value in maps.tensors(item.transfers.columns)]
    return partial(copy_each, [param for item in executions for param in item.transfers.params], values)


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
