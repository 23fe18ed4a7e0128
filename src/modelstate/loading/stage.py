"""Reads the values of a load, and puts them in place: what can fail first, and can be undone, then the commit.

Each value is read into its final memory where possible. What is read straight into the slots is read at the commit.
Other values are cast, moved or transformed in blocks, while another thread reads the next one; computed in blocks; or
read whole. A `Staging` says how the values of a load are read.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.autograd.graph import increment_version

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.mapped import views_of
from modelstate.errors import (
    MemoryBudgetError,
    ModelStateError,
    PlacementError,
    ReadFailedError,
    TransformError,
    code_errors,
)
from modelstate.io import engine, system
from modelstate.io.engine import Block, Part, ReadStrategy, Wait, block_buffers, common_align_bytes, read_ranges, stream
from modelstate.io.files import LocalFile, OpenFiles
from modelstate.io.memory import HUGE_PAGE_BYTES, aligned, fresh_tensors
from modelstate.io.page_cache import (
    LEAST_BYTES_AHEAD,
    Looks,
    bring_into_cache,
    lease_files,
    look,
    read_ahead,
    skip_page_cache,
)
from modelstate.io.staging import pinned_memory
from modelstate.io.system import MAP_NORESERVE, populate, trim_heap
from modelstate.io.tensors import ReadAll, compute, read_tensor
from modelstate.planning.options import LoadOptions
from modelstate.planning.planner import refusal_of_writes
from modelstate.planning.transfer import (
    BY_SUBCLASS,
    Execution,
    Sink,
    Transfers,
    Way,
    allocate,
    choose_way,
    copy_cannot_fail,
    peak_bytes,
)
from modelstate.planning.transforms import BY_TRANSFORM, BlockFunction, called, transform_errors
from modelstate.process import cached_attribute, start_threads
from modelstate.remote.location import CONNECTIONS
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import ByteRange, Stored, contiguous_stride
from modelstate.text_format import listed, size
from modelstate.torch_compat.dtypes import UNCHECKED, Overflows, can_overflow, nonfinite
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import copy_each, payload_of, storage_of, storage_owners, without_modes
from modelstate.torch_compat.sharding import dtensor_like
from modelstate.transaction.slots import Addresses, slots_of
from modelstate.transaction.swap_tensors import become, give_memory, give_memory_to_all, point_to, refusals
from modelstate.transaction.transaction import Transaction, Write

_QUEUED_DEVICES = ("cuda",)
"""The types of devices to which copies are queued."""


class Staging(msgspec.Struct, eq=False, dict=True):
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take.

    Args:
        checkpoint: The part of the checkpoint that is loaded.
        options: The options of the load.
        model: The root of the transaction.
        files: The files, which are opened once, and compared with their fingerprints when all has been read.
        strategy: The threads and buffers of the reads.
        overflows: Counts values that casts make infinite or NaN.
        peak_memory_bytes: The most memory that the load takes at once in addition to the final tensors.
        progress: Called with numbers of bytes that are done; may raise to end a read.
        notes: Remarks for the report.
    """

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
    files: OpenFiles
    strategy: ReadStrategy = msgspec.field(default_factory=ReadStrategy)
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    peak_memory_bytes: int = 0
    progress: Callable[[int], None] = lambda _: None
    notes: list[str] = []

    @property
    def read_ranges(self) -> ReadAll:
        """Executes requests with the threads of the load. See `modelstate.io.engine.read_ranges`."""
        strategy = self.strategy
        batch_bytes = strategy.block_bytes if strategy.remote else None
        return partial(read_ranges, files=self.files, threads=strategy.threads, batch_bytes=batch_bytes)

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values of a stored tensor into memory of their own."""
        return read_tensor(stored, self.read_ranges)

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)


def limit_memory(staging: Staging, executions: Iterable[Execution]) -> None:
    """Chooses a read strategy, which keeps to the memory budget. Raises `MemoryBudgetError` if there is none."""
    transfers = [item.transfers for item in executions]
    budget, strategy = staging.options.max_memory_bytes, staging.strategy
    most = math.inf if budget is None else budget
    if any(file.is_remote for file in staging.checkpoint.fingerprints.values()):
        strategy = replace(strategy, threads=CONNECTIONS, remote=budget is not None)
    for staging.strategy in [strategy] if budget is None else chain([strategy], strategy.smaller()):
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


def stage(staging: Staging, executions: Iterable[Execution]) -> None:
    """Computes every final value that is not read straight into its slot. The model is not changed.

    Raises `ReadFailedError` and `TransformError`.
    """
    unread = [item for item in executions if not item.finals]
    waiting = [item for item in unread if item.transfers.way is not Way.INTO]
    soon = unread if staging.options.in_place else waiting
    if sum(item.transfers.nbytes for item in soon) >= LEAST_BYTES_AHEAD:
        start_reads(staging, soon)
    for item in waiting:
        transfers = item.transfers
        if transfers.maps is not None:
            item.finals = transfers.maps.tensors(transfers.columns) if transfers.own is None else [transfers.own.value]
            staging.progress(transfers.nbytes)
    for read in reads(staging, (item for item in waiting if not item.finals)):
        read()


def start_reads(staging: Staging, items: Sequence[Execution]) -> Looks:
    """Makes the kernel start to read what the page cache lacks of the values. Returns what the page cache has.

    Reads of a load with `in_place=True` go past the page cache instead, which is faster, where no other rank reads the
    file too.
    """
    options = staging.options
    looks = look([extent for item in items for extent in item.transfers.extents], staging.files)
    is_alone = not (dist.is_available() and dist.is_initialized())
    nbytes, how = 0, "past it"
    if options.in_place and options.max_memory_bytes is None and is_alone:
        nbytes = skip_page_cache(looks, staging.files)
        staging.peak_memory_bytes += staging.strategy.threads * HUGE_PAGE_BYTES if nbytes else 0
    if not nbytes:
        nbytes, how = read_ahead(looks, staging.files), "ahead"
    if nbytes:
        staging.notes.append(f"the file was not in the page cache: {size(nbytes)} of it are read {how}")
    return looks


def reads(staging: Staging, executions: Iterable[Execution]) -> Iterator[Callable[[], None]]:
    """Yields functions that read values into their final memory, one after the other, in the order of the files.

    When a function is yielded, the memory of slots that it reads into and the buffers for blocks have been allocated.

    Each function raises `ReadFailedError` where a read fails; memory of slots is then partly overwritten. It raises
    `TransformError`, and `PlacementError` where a tensor subclass cannot be copied.
    """
    groups = defaultdict[tuple[Sink, str], list[Execution]](list)
    for item in executions:
        sink = item.transfers.sink
        groups[sink, str(item.transfers.device) if sink is Sink.BLOCKS else ""].append(item)
    for (sink, _), items in sorted(groups.items()):
        if sink in (Sink.COMPUTED, Sink.WHOLE):  # what is read in blocks or as ranges is sorted there
            items.sort(key=lambda item: item.transfers.extents[:1])
        if sink is Sink.WHOLE:
            yield from (partial(read_whole, staging, item) for item in items)
            continue
        allocate(items)
        if sink is Sink.BLOCKS:
            yield in_blocks(staging, items)
        else:
            yield partial(read_computed if sink is Sink.COMPUTED else _read_ranges, staging, items)


def _read_ranges(staging: Staging, items: Sequence[Execution]) -> None:
    """Reads values that are ranges of files."""
    in_slots = [item for item in items if item.transfers.way is Way.INTO]
    for item in in_slots:
        increment_version(item.transfers.params)  # autograd does not see the writes
    requests = [request for item in items for request in item.transfers.requests(item.finals)]
    staging.read_ranges(requests, on_read=staging.progress, is_new_memory=len(in_slots) < len(items))


def read_computed(staging: Staging, items: Sequence[Execution]) -> None:
    """Reads combined tensors, which are computed in blocks."""
    pairs = [(item.transfers.facts.combined, item.finals[0]) for item in items]
    targets = [(stored, final) for stored, final in pairs if stored is not None]
    read_here = partial(staging.read_ranges, threads=1)
    compute(targets, read_here, read_whole=staging.read, on_block=lambda: staging.progress(0))
    staging.progress(sum(item.transfers.nbytes for item in items))


# Values that are needed whole.

_LEAST_TRIMMED_BYTES = 4 << 20
"""A transform that frees so much leaves holes in the heap. Without trimming, 16 weights of 16 MB that become float8
were measured to take 600 instead of 280 MB."""


def read_whole(staging: Staging, execution: Execution) -> None:
    """Reads a value that is needed whole.

    Raises `PlacementError` where a tensor subclass cannot be copied, and `TransformError`.
    """
    transfer, facts = execution.transfers, execution.transfers.facts
    what = f"a {type(facts.value).__name__} cannot be copied out of the checkpoint; nothing has been changed"
    with code_errors(PlacementError, what, where=transfer.name, remedy="convert the value with transform="):
        if facts.is_transformed:
            final = _transformed(staging, execution)
        elif transfer.way is Way.STAGED and facts.is_live:
            # A live tensor needs no copy, unless the load overwrites it.
            final = facts.value.clone() if staging.own_memory.hold(facts.value) else facts.value
            staging.overflows.check(transfer.name, facts.value, transfer.dtype)
        elif transfer.way is Way.CODE:
            value = _own_value(staging, execution)
            final = value.to(transfer.dtype) if is_plain(value) else value
            staging.overflows.check(transfer.name, value, final)
        else:
            final = _as_slot(staging, execution, facts.value if facts.is_live else _own_value(staging, execution))
    if facts.transform_bytes >= _LEAST_TRIMMED_BYTES:
        trim_heap()
    execution.finals = [final]
    staging.progress(transfer.nbytes)


def _own_value(staging: Staging, execution: Execution) -> torch.Tensor:
    """Returns the value in memory that nothing else refers to. Reads it if it is in a file."""
    transfer, facts = execution.transfers, execution.transfers.facts
    value = facts.value
    if transfer.is_read_into_place:
        (memory,) = fresh_tensors([(value.size(), None, value.dtype)])
        staging.read_ranges(transfer.requests([memory]), is_new_memory=True)
        return memory
    if facts.stored is not None and not facts.is_live:
        value = values_of(facts.stored, staging.read, partial(staging.overflows.check, transfer.name))
        if storage_owners(value) > 1 or (is_plain(value) and not is_dense(value)):
            return value.clone()
        return value.detach() if isinstance(facts.stored, Derived) else value
    if is_plain(value):
        return value.detach().clone()
    return value.detach().to(copy=True)  # the one copy that even the smallest subclasses have


@torch.no_grad()
def _as_slot(staging: Staging, execution: Execution, value: torch.Tensor) -> torch.Tensor:
    """Returns a value in the memory of its slot, or with the dtype, device and layout of the slot.

    A value of `_own_value` that has these is not copied.
    """
    transfer = execution.transfers
    ((shape, stride, dtype),) = transfer.layouts()
    if value is not transfer.facts.value and transfer.way is not Way.INTO and is_plain(value):
        fits = (value.shape, value.dtype, value.device) == (shape, dtype, transfer.device)
        in_order = tuple(value.stride()) == (stride or contiguous_stride(shape)) and not value.is_conj()
        if fits and in_order and not value.is_inference() and value.untyped_storage().nbytes() == value.nbytes:
            return value
    allocate([execution])
    (final,) = execution.finals
    final.copy_(value)
    staging.overflows.check(transfer.name, value, final)
    return final


def _transformed(staging: Staging, execution: Execution) -> torch.Tensor:
    """Returns the result of a transform, in memory that nothing else refers to. Raises `TransformError`."""
    transfer, facts = execution.transfers, execution.transfers.facts
    name, shape, value = transfer.name, transfer.param.shape, _own_value(staging, execution)
    given, requested, freezes = 0, None, False
    if facts.transform is not None:
        requested = staging.options.dtype
        result = called(facts.transform, name, value, shape)
    else:
        assert facts.module_transform is not None
        with torch.inference_mode(False), torch.no_grad():
            if is_plain(value):
                value = _as_slot(staging, execution, value)
                given = nonfinite(value)
            result = called(facts.module_transform, name, value, shape)
        freezes = isinstance(result, nn.Parameter) and not result.requires_grad
    is_argument = result is value
    if is_argument:
        del value

    def before() -> int:
        if facts.transform is None:
            return given
        # The function of a user may have changed what it was given: it is read once more.
        return nonfinite(facts.value if facts.stored is None else values_of(facts.stored, staging.read))

    what = f"the {type(result).__name__} of the transform cannot be copied; nothing has been changed"
    with code_errors(TransformError, what, where=name), torch.inference_mode(False), torch.no_grad():
        cast = result = result.detach()
        if requested is not None and result.is_floating_point() and type(result) is torch.Tensor:
            cast = result.to(requested)
        if not staging.overflows.check(name, result, cast) and is_plain(result):
            staging.overflows.check_function(name, BY_TRANSFORM, result, before)
        final = cast.to(transfer.device)
        # Others may write to memory that they refer to, as a function does that returns the same buffer each time.
        is_own = not final.is_inference() and all(storage_owners(part) <= 1 for part in payload_of(final))
        if is_plain(final):
            final = final.resolve_conj().resolve_neg()
            storage = storage_of(final)
            is_alone = storage.nbytes() == final.nbytes and (is_argument or storage.resizable())  # not that of an array
            if not (is_own and is_alone and is_dense(final)) or staging.own_memory.hold(final):
                final = final.clone(memory_format=torch.contiguous_format)
        elif not is_own:
            final = final.clone()
        return _as_final(execution, final, freezes=freezes)


def _as_final(execution: Execution, result: torch.Tensor, *, freezes: bool) -> torch.Tensor:
    """Returns the result of a transform, whose class and dtype the slot gets."""
    transfer, by_module = execution.transfers, execution.transfers.facts.module_transform
    way, why = Way.NEW, f"{type(result).__name__} made by {BY_TRANSFORM if by_module is None else by_module.transform}"
    if is_plain(result, transfer.param):
        slot = transfer.param, result.dtype, result.device
        way, why = choose_way(*slot, can_map=False, in_place=False, can_read_into=False)
    elif is_plain(result):
        way, why = Way.CODE, BY_SUBCLASS
    execution.transfers, execution.freezes = replace(transfer, dtypes=[result.dtype], way=way, why=why), freezes
    return result


# Values that pass through blocks.


class _Value(NamedTuple):
    """A value, or the part of one that is in a buffer, with its final memory."""

    transfers: Transfers
    name: str
    target: torch.Tensor
    """Of a part flat."""
    dtype: torch.dtype
    """The dtype in the file."""
    at: int = 0
    """Bytes from the beginning of the buffer."""

    def part(self, part: Part) -> _Value:
        """Returns a part of the value."""
        transfers, name, target, dtype, _ = self
        count = part.nbytes // dtype.itemsize
        if count < target.numel():
            target = target.as_strided((count,), (1,), target.storage_offset() + part.first // dtype.itemsize)
        elif target.dim() != 1:
            target = target.view(-1)
        return _Value(transfers, name, target, dtype, part.at)


def _sources(parts: Sequence[_Value], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The values of parts, as views of the buffer."""
    typed = {
        dtype: buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
        for dtype in {part.dtype for part in parts}
    }
    return [typed[dtype].narrow(0, at // dtype.itemsize, target.numel()) for _, _, target, dtype, at in parts]


def _count_overflows(parts: Sequence[_Value], buffer: torch.Tensor, overflows: Overflows) -> None:
    """Counts the values that a cast has made infinite. They are in place: a load does not fail for a count."""
    narrow = [part for part in parts if can_overflow(part.dtype, part.target.dtype)]
    for part, source in zip(narrow, _sources(narrow, buffer), strict=True):
        try:
            overflows.check(part.name, source, part.target)
        except (MemoryError, RuntimeError):
            overflows.add({(UNCHECKED, part.name): source.numel()})


class CudaQueue:
    """Copies blocks to a CUDA device, where the values are cast and put where they belong, on a stream of its own.

    A block gets to the device in one copy: there, a small copy takes far less time than one from the host. Threads
    queue their blocks one after the other. If they did so at the same time, they would wait for Python's lock between
    all calls of CUDA, for longer than the copies take. For the same reason, what can be done before is done before: a
    thread that queues a block keeps all others waiting.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocates memory for blocks of this size on the device, so that no read allocates any."""
        callers, self._lock = torch.cuda.current_stream(device), threading.Lock()
        self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(callers), torch.inference_mode(False):
            self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # The caller's work that is queued may use this memory, and that of the targets.
        self._own.wait_stream(callers)

    def wait(self) -> None:
        """Waits until the device has done all that was queued, also by a call of `run` that was interrupted."""
        self._own.synchronize()

    def run(self, buffer: torch.Tensor, nbytes: int, parts: Sequence[_Value], overflows: Overflows) -> Wait:
        """Queues the copies of what is in a buffer to where it belongs.

        Returns a function that waits until the device has done that, and then counts the values that a cast has made
        infinite: until then, nothing must overwrite the buffer.
        """
        here, there = buffer[:nbytes], self._there[:nbytes]
        targets, sources = [part.target for part in parts], _sources(parts, there)
        with self._lock, torch.cuda.stream(self._own):
            there.copy_(here, non_blocking=True)
            copy_each(targets, sources, non_blocking=True)
            event = self._own.record_event()

        def wait() -> None:
            event.synchronize()
            with torch.cuda.stream(self._own):
                _count_overflows(parts, buffer, overflows)

        return wait


@torch.inference_mode(False)  # tensors of that mode could not be written to outside of it
def _buffers(blocks: Sequence[Block], threads: int, device: torch.device) -> list[torch.Tensor]:
    """The buffers of a read: in pinned memory, as far as there is some, where blocks are copied to a CUDA device."""
    if blocks and device.type in _QUEUED_DEVICES:
        with suppress(RuntimeError):  # a limit on pinned memory; copies from other memory only take longer
            nbytes, count = max(block.source.nbytes for block in blocks), min(threads, len(blocks))
            memory, step = pinned_memory(count * aligned(nbytes), device), aligned(nbytes)
            return [memory[at : at + nbytes] for at in range(0, count * step, step)]
    return block_buffers(blocks, threads)


def in_blocks(staging: Staging, items: Sequence[Execution]) -> Callable[[], None]:
    """Returns the read of values that pass through blocks to one device. All its buffers have been allocated then."""
    wanted, values, device = list[tuple[ByteRange, int]](), list[_Value | _Rows](), items[0].transfers.device
    for item in items:
        transfer, dtype, unit_bytes = item.transfers, item.transfers.stored_dtype, item.transfers.unit_bytes
        wanted += [(source, unit_bytes) for source in transfer.columns.ranges()]
        if transfer.own is not None and transfer.own.block_function is not None:
            values.append(_Rows(item, transfer.own.block_function))
        else:
            values += [_Value(transfer, *row, dtype) for row in zip(transfer.names, item.finals, strict=True)]
    strategy, is_queued = staging.strategy, device.type in _QUEUED_DEVICES
    if is_queued:
        strategy = strategy.for_devices(sum(aligned(source.nbytes) for source, _ in wanted))
    align_bytes = common_align_bytes({source.path for source, _ in wanted}, staging.checkpoint.fingerprints)
    blocks = engine.in_blocks(wanted, strategy.block_bytes, align_bytes)
    block_bytes = max((block.source.nbytes for block in blocks), default=0)
    queue = CudaQueue(device, block_bytes) if is_queued else None
    buffers = _buffers(blocks, strategy.threads, device)

    def consume(block: Block, buffer: torch.Tensor) -> Wait | None:
        parts = list[_Value]()
        for piece in block.parts:
            value = values[piece.which]
            if isinstance(value, _Rows):
                value.write(piece, buffer, staging.overflows)
            else:
                parts.append(value.part(piece))
        if queue is not None:
            return queue.run(buffer, block.source.nbytes, parts, staging.overflows)
        for part in parts:
            if part.transfers.on_cpu and part.transfers.way is not Way.INTO:
                populate(part.target.data_ptr(), part.target.nbytes)
        if parts:
            copy_each([part.target for part in parts], _sources(parts, buffer))
            _count_overflows(parts, buffer, staging.overflows)
        return None

    def on_block(block: Block) -> None:
        staging.progress(block.wanted_bytes)

    def read() -> None:
        try:
            stream(blocks, buffers, consume, files=staging.files, on_block=on_block)
        finally:
            # A block that has failed may have left copies behind: they use memory that is freed after an error.
            if queue is not None:
                queue.wait()
        buffers.clear()
        for value in values:
            if isinstance(value, _Rows):
                value.end()

    return read


class _Rows:
    """A value that a function transforms block by block, with the parts of its result."""

    def __init__(self, execution: Execution, function: BlockFunction) -> None:
        self._execution, self._function = execution, function
        self._shape = execution.transfers.facts.value.shape
        self._parts = function.parts(self._shape[0])

    def write(self, part: Part, buffer: torch.Tensor, overflows: Overflows) -> None:
        """Transforms the rows of a part, and writes them where they belong."""
        transfer, function = self._execution.transfers, self._function
        value = buffer[part.at : part.at + part.nbytes].view(transfer.stored_dtype)
        rows, first = value.view(-1, *self._shape[1:]), part.first // transfer.unit_bytes
        cast = rows.to(transfer.dtype)
        overflows.check(transfer.name, rows, cast)
        parts = {name: tensor[first : first + len(rows)] for name, tensor in self._parts.items()}
        with transform_errors(transfer.name):
            function.write(cast, parts)

    @torch.inference_mode(False)
    def end(self) -> None:
        """Sets the final value to the result."""
        result = self._function.whole(self._parts, self._shape)
        self._execution.finals = [_as_final(self._execution, result.detach(), freezes=not result.requires_grad)]


# Writes.


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
            try:
                for read in reads(self.staging, [execution]):
                    read()
            except BaseException:  # which code of the model may catch
                execution.finals = []
                raise
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
    waiting = [item for item in executions if item.transfers.way is Way.INTO and not item.finals]
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


def stage_unleased(executions: Iterable[Execution], files: OpenFiles) -> list[Execution]:
    """Has values staged that are planned to be read at the commit, where their files cannot be leased now.

    Returns what is read at the commit.
    """
    waiting = [item for item in executions if item.transfers.way is Way.INTO and not item.finals]
    extents = [extent for item in waiting for extent in item.transfers.extents]
    refusal = lease_files(extents, files) if waiting else ""
    for item in waiting if refusal else ():
        item.stage_instead(refusal)
    return [] if refusal else waiting


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
    waiting = stage_unleased(executions, staging.files)
    # Progress may be shown in a way that fails, so it comes before the commit.
    if waiting and bring_into_cache(start_reads(staging, waiting), staging.files, lambda _: staging.progress(0)):
        staging.progress(sum(item.transfers.nbytes for item in waiting))
        staging.progress = lambda _: None
        staging.files.check_unchanged()
        copies = _copies_from_maps(staging, [item for item in waiting if _is_cast_from_map(item.transfers)])
        others = reads(staging, (item for item in waiting if not item.finals))
        return [*copies, *others, staging.files.check_unchanged]
    for item in waiting:
        item.stage_instead("the page cache has not all of it")
    if waiting:
        staging.files.release()
    if not all(item.finals for item in executions):
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
    maps = dict[str, mmap.mmap]()
    try:
        for path in {path for item in items for path in item.transfers.columns.paths}:
            file = staging.files[path]
            assert isinstance(file, LocalFile)  # others are not leased
            maps[path] = system.mmap(file.descriptor, 0, mmap.MAP_PRIVATE | MAP_NORESERVE)
    except (OSError, ValueError):
        return []
    allocate(items)
    params = [final for item in items for final in item.finals]
    values = [view for item in items for view in views_of(maps, item.transfers.columns)]

    def unmap() -> None:
        values.clear()
        for mapped in maps.values():
            mapped.close()  # without the interpreter lock

    def copy() -> None:
        copy_each(params, values)
        start_threads(unmap)  # which takes a quarter of the time of the copy

    return [copy] if params else []


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
