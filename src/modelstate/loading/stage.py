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
from modelstate.planning.transfer import Sink, Transfer, Transfers, Way, peak_bytes
from modelstate.planning.transforms import BY_TRANSFORM, Transform, called
from modelstate.process import ONE_VARIABLE, reference_count
from modelstate.remote.location import CONNECTIONS
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import StoredComposite, StoredTensor
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


Pairs = Sequence[tuple[Transfers, list[torch.Tensor]]]
"""What is read, with the memory for each row."""
_LEAST_TRIMMED_BYTES = 4 << 20
"""A transform that frees so much leaves holes in the heap. Without trimming, 16 weights of 16 MB that become float8
were measured to take 600 instead of 280 MB."""


def stage(staging: Staging, transfers: Iterable[Transfers], progress: Progress) -> None:
    """Computes every final value that is not read straight into its slot. The model is not changed.

    Raises `ReadFailedError` and `TransformError`.
    """
    waiting = [item for item in transfers if not item.finals and item.way is not Way.INTO]
    for item in waiting:
        if item.way is Way.MAP:
            item.finals = item.mapped()
            progress(item.nbytes)
    straight, blocks, computed, whole = by_sink(item for item in waiting if not item.finals)
    if straight:
        memory = iter(fresh_tensors([layout for item in straight for layout in item.layouts()]))
        _read_straight(staging, [(item, [next(memory) for _ in item.names]) for item in straight], progress)
    if blocks:
        streamed_read(staging, blocks, progress)()
    if computed:
        _compute(staging, computed, fresh_tensors([layout for item in computed for layout in item.layouts()]), progress)
    for item in whole:
        stage_one(staging, item)
        progress(item.nbytes)


def reads_into_slots(
    staging: Staging, transfers: Iterable[Transfers], progress: Progress
) -> list[Callable[[], object]]:
    """Returns functions that read values straight into the memory of their slots, one after the other.

    The buffers for blocks have been allocated when this returns. Values that are needed whole, as only a load with
    `in_place=True` has, have been read. Each function raises `ReadFailedError` where a read fails, and the last one
    where a file has changed; the memory is then partly overwritten.
    """
    straight, blocks, computed, whole = by_sink(transfers)
    assert staging.options.in_place or not whole  # they are written before the commit
    for item in whole:
        with torch.no_grad():
            value = _own_value(staging, item)
            item.param.copy_(value)
            staging.overflows.check(item.name, value, item.param)
        item.finals = item.params
        progress(item.nbytes)
    reads: list[Callable[[], object]] = [streamed_read(staging, blocks, progress)] if blocks else []
    if computed:
        reads.append(partial(_compute, staging, computed, [item.param for item in computed], progress))
    if straight:
        reads.append(partial(_read_straight, staging, [(item, item.params) for item in straight], progress))
    return [*reads, staging.files.check_unchanged]


def by_sink(
    transfers: Iterable[Transfers],
) -> tuple[list[Transfers], list[Transfers], list[Transfer], list[Transfer]]:
    """Returns transfers by their sinks, in the order of the files: memory, blocks, computed, whole."""
    ordered = sorted(transfers, key=lambda item: item.extents[:1])
    singles = [item for item in ordered if isinstance(item, Transfer)]
    return (
        [item for item in ordered if item.sink is Sink.MEMORY],
        [item for item in ordered if item.sink is Sink.BLOCKS],
        [item for item in singles if item.sink is Sink.COMPUTED],
        [item for item in singles if item.sink is Sink.WHOLE],
    )


def _read_straight(staging: Staging, pairs: Pairs, progress: Progress) -> None:
    """Reads values that are ranges of files into their final memory. Raises `ReadFailedError`."""
    try:
        _read(staging, pairs, progress)
    finally:  # autograd has not seen the writes
        for item, targets in pairs:
            if item.way is Way.INTO:
                increment_version(targets)
    for item, targets in pairs:
        item.finals = targets


def _read(staging: Staging, pairs: Pairs, progress: Progress) -> None:
    """Reads values that are ranges of files into tensors. Raises `ReadFailedError`."""
    started, strategy = time.perf_counter(), staging.strategy
    read_ranges(
        [request for item, targets in pairs for request in item.requests(targets)],
        files=staging.files,
        on_read=progress,
        threads=strategy.threads if strategy.remote else None,
        batch_bytes=strategy.block_bytes if strategy.remote else None,
    )
    seconds, total = time.perf_counter() - started, sum(item.nbytes for item, _ in pairs)
    for item, _ in pairs:
        item.seconds += seconds * item.nbytes / max(total, 1)


def _read_here(staging: Staging, requests: Iterable[Request]) -> None:
    """Reads ranges of files in the caller's thread. Raises `ReadFailedError`."""
    for (path, start, nbytes), address in requests:
        read_fully(staging.files[path], [memory_at(address, nbytes)], start, nbytes)


def _compute(
    staging: Staging,
    computed: Sequence[Transfer],
    finals: Sequence[torch.Tensor],
    progress: Progress,
) -> None:
    """Computes combined tensors into their final memory. Raises `ReadFailedError`."""
    pairs = zip(computed, finals, strict=True)
    targets = [(item.combined, final) for item, final in pairs if item.combined is not None]
    started = time.perf_counter()
    compute(targets, partial(_read_here, staging), read_whole=staging.read, on_done=lambda _: progress(0))
    seconds, total = time.perf_counter() - started, sum(item.nbytes for item in computed)
    for item, final in zip(computed, finals, strict=True):
        item.finals = [final]
        item.seconds += seconds * item.nbytes / total
        progress(item.nbytes)


# Values that are needed whole.


def stage_one(staging: Staging, transfer: Transfer) -> None:
    """Computes the final value of one transfer.

    Raises `PlacementError` where a tensor subclass cannot be copied.
    """
    started = time.perf_counter()
    with code_errors(
        PlacementError,
        f"a {type(transfer.value).__name__} cannot be copied out of the checkpoint; nothing has been changed",
        where=transfer.name,
        remedy="convert the value with transform=",
    ):
        _stage_one(staging, transfer)
    if transfer.transform_bytes >= _LEAST_TRIMMED_BYTES:
        trim_heap()
    transfer.seconds += time.perf_counter() - started


def _stage_one(staging: Staging, transfer: Transfer) -> None:
    overflows, stored = staging.overflows, transfer.stored
    is_live = isinstance(stored, torch.Tensor)
    if transfer.transform is not None:
        final = _transformed(staging, transfer.transform, transfer)
    elif transfer.maps is not None:
        final = transfer.value
    elif transfer.way is Way.CODE:
        value = _own_value(staging, transfer)
        final = value.to(transfer.dtype) if is_plain(value) else value
        if is_plain(value):
            overflows.check(transfer.name, value, final)
    elif transfer.way is Way.STAGED and is_live:
        # A live tensor needs no copy, unless the load overwrites it.
        final = transfer.value.clone() if staging.own_memory.hold(transfer.value) else transfer.value
        overflows.check(transfer.name, transfer.value, transfer.dtype)
    else:
        is_copied = is_live and (transfer.on_cpu or transfer.device != transfer.value.device)
        is_copied = is_copied and transfer.module_transform is None
        value = transfer.value if is_copied else _own_value(staging, transfer)
        if transfer.module_transform is not None:
            _apply_module_transform(staging, transfer, transfer.module_transform, value)
            return
        is_final = isinstance(stored, Derived) and _is_final(transfer, value)
        final = value if is_final else _as_slot(staging, transfer, value)
    transfer.finals = [final]


def _is_final(transfer: Transfer, value: torch.Tensor) -> bool:
    """Whether a value needs no copy: nothing else refers to its memory, and it fits the slot."""
    ((_, stride, dtype),) = transfer.layouts()
    in_order = value.is_contiguous() if stride is None else tuple(value.stride()) == stride
    fits = value.dtype == dtype and value.device == transfer.device and value.shape == transfer.param.shape
    own = is_plain(value) and storage_owners(value) == 1 and value.untyped_storage().nbytes() == value.nbytes
    return own and fits and in_order and not value.is_inference() and not value.is_conj()


def _own_value(staging: Staging, transfer: Transfer) -> torch.Tensor:
    """Returns the value in memory that nothing else refers to. Reads it if it is in a file."""
    stored = transfer.stored
    if transfer.is_read_into_place:
        (memory,) = fresh_tensors([(transfer.value.size(), None, transfer.value.dtype)])
        _read(staging, [(transfer, [memory])], lambda _: None)
        return memory
    if isinstance(stored, StoredComposite):
        return staging.read(stored)
    if isinstance(stored, Derived):
        value = values_of(stored, staging.read, partial(staging.overflows.check, transfer.name))
        return value.clone() if storage_owners(value) > 1 else value.detach()
    if isinstance(stored, StoredTensor):
        value = staging.read(stored)
        return value if is_dense(value) else value.clone()
    if is_plain(transfer.value):
        return transfer.value.detach().clone()
    return transfer.value.detach().to(copy=True)  # the one copy that even the smallest subclasses have


@torch.inference_mode(False)
@torch.no_grad()
def _as_slot(staging: Staging, transfer: Transfer, value: torch.Tensor) -> torch.Tensor:
    """Copies a value to new memory with the dtype, device and layout of the slot."""
    if transfer.on_cpu:
        (final,) = fresh_tensors(transfer.layouts())
        final.copy_(value)
    elif transfer.own_stride is not None and tuple(value.stride()) != transfer.own_stride:
        shape, device = transfer.param.shape, transfer.device
        final = torch.empty_strided(shape, transfer.own_stride, dtype=transfer.dtype, device=device)
        final.copy_(value)
    else:
        final = value.to(transfer.dtype)
    staging.overflows.check(transfer.name, value, final)
    return final.to(transfer.device)


# Transforms.


@torch.inference_mode(False)
@torch.no_grad()
def _apply_module_transform(staging: Staging, transfer: Transfer, last: Transform, value: torch.Tensor) -> None:
    """Sets the final value to the result of a module's transform. The memory of `value` may be reused afterwards."""
    if is_plain(value) and not (
        transfer.on_cpu and value.dtype == transfer.dtype and value.stride() == transfer.stride
    ):
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
    set_transformed(transfer, result, freezes=freezes)


def _transformed(staging: Staging, transform: Transform, transfer: Transfer) -> torch.Tensor:
    value = _own_value(staging, transfer)
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
    return _as_requested(staging, transfer, result, own, before)


def _nonfinite_before(staging: Staging, transfer: Transfer) -> int:
    """The infinite and NaN values of what a transform was given, which is read once more."""
    stored, read_all = transfer.stored, partial(read_ranges, files=staging.files)
    if isinstance(stored, StoredTensor) and transfer.columns is not None:
        starts = range(0, stored.numel, AT_ONCE)
        return sum(nonfinite(elements(stored, at, min(AT_ONCE, stored.numel - at), read_all)) for at in starts)
    return nonfinite(transfer.value if stored is None else values_of(stored, staging.read))


@torch.inference_mode(False)
@torch.no_grad()
def _as_requested(
    staging: Staging, transfer: Transfer, result: torch.Tensor, own: bool, before: Callable[[], int]
) -> torch.Tensor:
    """Returns the result of a transform with the requested dtype and device, in memory that nothing else refers to."""
    requested, cast, param = staging.options.dtype, result, transfer.param
    if requested is not None and result.is_floating_point() and type(result) is torch.Tensor:
        cast = result.to(requested)
    if not staging.overflows.check(transfer.name, result, cast) and is_plain(result):
        staging.overflows.check_function(transfer.name, BY_TRANSFORM, result, before)
    result = cast.to(transfer.device)
    transfer.dtypes = [result.dtype]
    if not is_plain(result):
        transfer.way, transfer.why = Way.NEW, "takes the class of the result of the transform"
        return result
    if not is_plain(param):
        transfer.way, transfer.why = Way.CODE, "a tensor subclass decides in module_load"
    elif param.is_meta:
        transfer.way, transfer.why = Way.NEW, "was on meta: gets the result of the transform"
    elif result.dtype != param.dtype:
        transfer.way, transfer.why = Way.NEW, f"changes its dtype to {short(result.dtype)}"
    if transfer.way is Way.STAGED:
        return result if own and not staging.own_memory.hold(result) else result.clone()
    fits = own and is_dense(result) and not result.is_inference()
    return result if fits else result.clone(memory_format=torch.contiguous_format)
