"""`stage`: reads, casts and transforms values, each into its final memory where possible."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from msgspec.structs import replace
from torch import nn
from torch.autograd.graph import increment_version

from modelstate.errors import MemoryBudgetError, PlacementError, TransformError, code_errors
from modelstate.io.engine import ReadStrategy, Request, memory_at, read_fully, read_ranges
from modelstate.io.linux import trim_heap
from modelstate.io.memory import fresh_tensors
from modelstate.io.page_cache import read_ahead
from modelstate.io.tensors import compute, elements
from modelstate.loading.stream import Progress, Staging, set_transformed, streamed_read
from modelstate.planning.transfer import BY_SUBCLASS, Execution, Sink, Transfers, Way, peak_bytes
from modelstate.planning.transforms import BY_TRANSFORM, Transform, called
from modelstate.process import ONE_VARIABLE, reference_count
from modelstate.remote.location import CONNECTIONS
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import StoredComposite, StoredTensor, contiguous_stride
from modelstate.text_format import size
from modelstate.torch_compat.dtypes import AT_ONCE, nonfinite, short
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import payload_of, storage_id, storage_owners, write_count


def limit_memory(staging: Staging, transfers: Sequence[Transfers]) -> None:
    """Chooses a read strategy, which keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
    budget, strategy = staging.options.max_memory_bytes, ReadStrategy.fastest()
    if any(file.is_remote for file in staging.checkpoint.fingerprints.values()):
        strategy = replace(strategy, threads=CONNECTIONS, remote=budget is not None)
    most_bytes = sys.maxsize if budget is None else budget
    needed = 0
    for staging.strategy in (strategy, *strategy.smaller()):
        staging.peak_memory_bytes = needed = peak_bytes(transfers, staging.strategy)
        if needed <= most_bytes:
            return
    staged = 0 if staging.options.in_place else sum(item.staged_bytes for item in transfers)
    could = staged > 0 and needed - staged <= most_bytes
    raise MemoryBudgetError(
        "the load needs more memory beyond the final tensors than it was given; nothing has been changed",
        expected=f"at most {most_bytes} bytes",
        found=f"{needed} bytes, at the least",
        remedy=f"max_memory_bytes={needed}" + (", or in_place=True, which needs no second copy" if could else ""),
    )


def prefetch_range(staging: Staging, transfers: Sequence[Transfers]) -> list[str]:
    """Makes the kernel read what is not in the page cache, and does not wait. Returns remarks for the report."""
    if any(file.is_remote for file in staging.checkpoint.fingerprints.values()):
        return []
    nbytes = read_ahead([extent for item in transfers for extent in item.extents], staging.files)
    return [f"the file was not in the page cache: {size(nbytes)} of it are read ahead"] if nbytes else []


Pairs = Sequence[tuple[Execution, list[torch.Tensor]]]
"""What is read, with the memory for each row."""
_LEAST_TRIMMED_BYTES = 4 << 20
"""A transform that frees so much leaves holes in the heap. Without trimming, 16 weights of 16 MB that become float8
were measured to take 600 instead of 280 MB."""


def stage(staging: Staging, executions: Iterable[Execution], progress: Progress) -> None:
    """Computes every final value that is not read straight into its slot. The model is not changed.

    Raises `ReadFailedError` and `TransformError`.
    """
    waiting = [item for item in executions if not item.finals and item.transfers.way is not Way.INTO]
    for item in waiting:
        if item.transfers.way is Way.MAP:
            item.finals = item.transfers.mapped()
            progress(item.transfers.nbytes)
    straight, blocks, computed, whole = by_sink(item for item in waiting if not item.finals)
    if straight:
        memory = iter(fresh_tensors([layout for item in straight for layout in item.transfers.layouts()]))
        _read_straight(staging, [(item, [next(memory) for _ in item.transfers.names]) for item in straight], progress)
    if blocks:
        streamed_read(staging, blocks, progress)()
    if computed:
        finals = fresh_tensors([layout for item in computed for layout in item.transfers.layouts()])
        _compute(staging, computed, finals, progress)
    for item in whole:
        stage_one(staging, item)
        progress(item.transfers.nbytes)


def reads_into_slots(
    staging: Staging, executions: Iterable[Execution], progress: Progress
) -> list[Callable[[], object]]:
    """Returns functions that read values straight into the memory of their slots, one after the other.

    The buffers for blocks have been allocated when this returns. Values that are needed whole, as only a load with
    `in_place=True` has, have been read. Each function raises `ReadFailedError` where a read fails, and the last one
    where a file has changed; the memory is then partly overwritten.
    """
    straight, blocks, computed, whole = by_sink(executions)
    assert staging.options.in_place or not whole  # they are written before the commit
    for item in whole:
        transfer = item.transfers
        with torch.no_grad():
            value = _own_value(staging, item)
            transfer.param.copy_(value)
            staging.overflows.check(transfer.name, value, transfer.param)
        item.finals = transfer.params
        progress(transfer.nbytes)
    reads: list[Callable[[], object]] = [streamed_read(staging, blocks, progress)] if blocks else []
    if computed:
        targets = [item.transfers.param for item in computed]
        reads.append(partial(_compute, staging, computed, targets, progress))
    if straight:
        pairs = [(item, item.transfers.params) for item in straight]
        reads.append(partial(_read_straight, staging, pairs, progress))
    return [*reads, staging.files.check_unchanged]


def by_sink(executions: Iterable[Execution]) -> list[list[Execution]]:
    """Returns what is read by its sink, in the order of the files: memory, blocks, computed, whole."""
    ordered = sorted(executions, key=lambda item: item.transfers.extents[:1])
    return [[item for item in ordered if item.transfers.sink is sink] for sink in Sink]


def _read_straight(staging: Staging, pairs: Pairs, progress: Progress) -> None:
    """Reads values that are ranges of files into their final memory. Raises `ReadFailedError`."""
    try:
        _read(staging, pairs, progress)
    finally:  # autograd has not seen the writes
        for item, targets in pairs:
            if item.transfers.way is Way.INTO:
                increment_version(targets)
    for item, targets in pairs:
        item.finals = targets


def _read(staging: Staging, pairs: Pairs, progress: Progress) -> None:
    """Reads values that are ranges of files into tensors. Raises `ReadFailedError`."""
    started, strategy = time.perf_counter(), staging.strategy
    read_ranges(
        [request for item, targets in pairs for request in item.transfers.requests(targets)],
        files=staging.files,
        on_read=progress,
        threads=strategy.threads if strategy.remote else None,
        batch_bytes=strategy.block_bytes if strategy.remote else None,
    )
    seconds, total = time.perf_counter() - started, sum(item.transfers.nbytes for item, _ in pairs)
    for item, _ in pairs:
        item.seconds += seconds * item.transfers.nbytes / max(total, 1)


def _read_here(staging: Staging, requests: Iterable[Request]) -> None:
    """Reads ranges of files in the caller's thread. Raises `ReadFailedError`."""
    for (path, start, nbytes), address in requests:
        read_fully(staging.files[path], [memory_at(address, nbytes)], start, nbytes)


def _compute(
    staging: Staging,
    computed: Sequence[Execution],
    finals: Sequence[torch.Tensor],
    progress: Progress,
) -> None:
    """Computes combined tensors into their final memory. Raises `ReadFailedError`."""
    combined = [item.transfers.facts.combined for item in computed]
    targets = [(stored, final) for stored, final in zip(combined, finals, strict=True) if stored is not None]
    started = time.perf_counter()
    compute(targets, partial(_read_here, staging), read_whole=staging.read, on_done=lambda _: progress(0))
    seconds, total = time.perf_counter() - started, sum(item.transfers.nbytes for item in computed)
    for item, final in zip(computed, finals, strict=True):
        item.finals = [final]
        item.seconds += seconds * item.transfers.nbytes / total
        progress(item.transfers.nbytes)


# Values that are needed whole.


def stage_one(staging: Staging, execution: Execution) -> None:
    """Computes the final value of one transfer.

    Raises `PlacementError` where a tensor subclass cannot be copied.
    """
    started, transfer = time.perf_counter(), execution.transfers
    with code_errors(
        PlacementError,
        f"a {type(transfer.facts.value).__name__} cannot be copied out of the checkpoint; nothing has been changed",
        where=transfer.name,
        remedy="convert the value with transform=",
    ):
        _stage_one(staging, execution)
    if transfer.facts.transform_bytes >= _LEAST_TRIMMED_BYTES:
        trim_heap()
    execution.seconds += time.perf_counter() - started


def _stage_one(staging: Staging, execution: Execution) -> None:
    transfer, overflows = execution.transfers, staging.overflows
    facts = transfer.facts
    if facts.transform is not None:
        final = _transformed(staging, facts.transform, execution)
    elif transfer.maps is not None:
        final = facts.value
    elif transfer.way is Way.CODE:
        value = _own_value(staging, execution)
        final = value.to(transfer.dtype) if is_plain(value) else value
        if is_plain(value):
            overflows.check(transfer.name, value, final)
    elif transfer.way is Way.STAGED and facts.is_live:
        # A live tensor needs no copy, unless the load overwrites it.
        final = facts.value.clone() if staging.own_memory.hold(facts.value) else facts.value
        overflows.check(transfer.name, facts.value, transfer.dtype)
    else:
        is_copied = facts.is_live and (transfer.on_cpu or transfer.device != facts.value.device)
        is_copied = is_copied and facts.module_transform is None
        value = facts.value if is_copied else _own_value(staging, execution)
        if facts.module_transform is not None:
            _apply_module_transform(staging, execution, facts.module_transform, value)
            return
        is_final = isinstance(facts.stored, Derived) and _is_final(transfer, value)
        final = value if is_final else _as_slot(staging, transfer, value)
    execution.finals = [final]


def _is_final(transfer: Transfers, value: torch.Tensor) -> bool:
    """Whether a value needs no copy: nothing else refers to its memory, and it fits the slot."""
    ((shape, stride, dtype),) = transfer.layouts()
    in_order = value.is_contiguous() if stride is None else tuple(value.stride()) == stride
    fits = value.dtype == dtype and value.device == transfer.device and value.shape == shape
    own = is_plain(value) and storage_owners(value) == 1 and value.untyped_storage().nbytes() == value.nbytes
    return own and fits and in_order and not value.is_inference() and not value.is_conj()


def _own_value(staging: Staging, execution: Execution) -> torch.Tensor:
    """Returns the value in memory that nothing else refers to. Reads it if it is in a file."""
    transfer, facts = execution.transfers, execution.transfers.facts
    stored, value = facts.stored, facts.value
    if transfer.is_read_into_place:
        (memory,) = fresh_tensors([(value.size(), None, value.dtype)])
        _read(staging, [(execution, [memory])], lambda _: None)
        return memory
    if isinstance(stored, StoredComposite):
        return staging.read(stored)
    if isinstance(stored, Derived):
        value = values_of(stored, staging.read, partial(staging.overflows.check, transfer.name))
        return value.clone() if storage_owners(value) > 1 else value.detach()
    if isinstance(stored, StoredTensor):
        value = staging.read(stored)
        return value if is_dense(value) else value.clone()
    if is_plain(value):
        return value.detach().clone()
    return value.detach().to(copy=True)  # the one copy that even the smallest subclasses have


@torch.inference_mode(False)
@torch.no_grad()
def _as_slot(staging: Staging, transfer: Transfers, value: torch.Tensor) -> torch.Tensor:
    """Copies a value to new memory with the dtype, device and layout of the slot."""
    ((shape, own_stride, dtype),) = transfer.layouts()
    if transfer.on_cpu:
        (final,) = fresh_tensors(transfer.layouts())
        final.copy_(value)
    elif own_stride is not None and tuple(value.stride()) != own_stride:
        final = torch.empty_strided(shape, own_stride, dtype=dtype, device=transfer.device)
        final.copy_(value)
    else:
        final = value.to(dtype)
    staging.overflows.check(transfer.name, value, final)
    return final.to(transfer.device)


# Transforms.


@torch.inference_mode(False)
@torch.no_grad()
def _apply_module_transform(staging: Staging, execution: Execution, last: Transform, value: torch.Tensor) -> None:
    """Sets the final value to the result of a module's transform. The memory of `value` may be reused afterwards."""
    transfer = execution.transfers
    stride = transfer.facts.own_stride or contiguous_stride(transfer.facts.value.size())
    if is_plain(value) and not (transfer.on_cpu and value.dtype == transfer.dtype and value.stride() == stride):
        value = _as_slot(staging, transfer, value)
    before = nonfinite(value) if is_plain(value) else 0
    result = called(last, transfer.name, value, transfer.param.shape)
    if is_plain(result):
        staging.overflows.check_function(transfer.name, BY_TRANSFORM, result, lambda: before)
    freezes = isinstance(result, nn.Parameter) and not result.requires_grad
    what = f"the {type(result).__name__} of the transform cannot be copied; nothing has been changed"
    with code_errors(TransformError, what, where=transfer.name):
        result = result.detach().to(transfer.device)
        storages = {storage_id(part) for part in payload_of(value)}
        kept = any(storage_id(part) in storages or storage_owners(part) > 1 for part in payload_of(result))
        kept = kept or (is_plain(result) and not is_dense(result))
        result = result.clone() if kept else result
    set_transformed(execution, result, freezes=freezes)


def _transformed(staging: Staging, transform: Transform, execution: Execution) -> torch.Tensor:
    transfer, value = execution.transfers, _own_value(staging, execution)
    references, owners = reference_count(value), storage_owners(value)
    version = write_count(value) if is_plain(value) and not value.is_inference() else None
    result = called(transform, transfer.name, value, transfer.param.shape)
    # A tensor that others hold, or memory that they do, cannot be the slot's own: they may write to it before the slot
    # has it, as a function does that returns the same buffer again and again, or afterwards.
    references, owners = (references + 1, owners) if result is value else (ONE_VARIABLE, 1)
    own = reference_count(result) <= references and storage_owners(result) <= owners
    result = result.detach()
    # A function that works in place leaves nothing to compare its result with.
    untouched = version is not None and write_count(value) == version and storage_id(value) != storage_id(result)
    before = partial(nonfinite, value) if untouched else partial(_nonfinite_before, staging, transfer)
    return _as_requested(staging, execution, result, own, before)


def _nonfinite_before(staging: Staging, transfer: Transfers) -> int:
    """The infinite and NaN values of what a transform was given, which is read once more."""
    stored, read_all = transfer.facts.stored, partial(read_ranges, files=staging.files)
    if isinstance(stored, StoredTensor) and transfer.columns is not None:
        starts = range(0, stored.numel, AT_ONCE)
        return sum(nonfinite(elements(stored, at, min(AT_ONCE, stored.numel - at), read_all)) for at in starts)
    return nonfinite(transfer.facts.value if stored is None else values_of(stored, staging.read))


@torch.inference_mode(False)
@torch.no_grad()
def _as_requested(
    staging: Staging, execution: Execution, result: torch.Tensor, own: bool, before: Callable[[], int]
) -> torch.Tensor:
    """Returns the result of a transform with the requested dtype and device, in memory that nothing else refers to."""
    transfer, requested, cast = execution.transfers, staging.options.dtype, result
    param, way, why = transfer.param, transfer.way, transfer.why
    if requested is not None and result.is_floating_point() and type(result) is torch.Tensor:
        cast = result.to(requested)
    if not staging.overflows.check(transfer.name, result, cast) and is_plain(result):
        staging.overflows.check_function(transfer.name, BY_TRANSFORM, result, before)
    result = cast.to(transfer.device)
    if not is_plain(result):
        way, why = Way.NEW, "takes the class of the result of the transform"
    elif not is_plain(param):
        way, why = Way.CODE, BY_SUBCLASS
    elif param.is_meta:
        way, why = Way.NEW, "was on meta: gets the result of the transform"
    elif result.dtype != param.dtype:
        way, why = Way.NEW, f"changes its dtype to {short(result.dtype)}"
    execution.transfers = replace(transfer, dtypes=[result.dtype], way=way, why=why)
    if not is_plain(result):
        return result
    if way is Way.STAGED:
        return result if own and not staging.own_memory.hold(result) else result.clone()
    fits = own and is_dense(result) and not result.is_inference()
    return result if fits else result.clone(memory_format=torch.contiguous_format)
