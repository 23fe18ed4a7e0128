"""How values become final that are not read straight into their memory: in blocks, computed, or needed whole.

One thread casts, moves or transforms a block while another one reads the next. A `Staging` says how the values of a
load are read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import PlacementError, TransformError, code_errors
from modelstate.io import engine
from modelstate.io.engine import (
    Block,
    Part,
    ReadStrategy,
    Wait,
    block_buffers,
    common_align_bytes,
    read_ranges,
    stream,
)
from modelstate.io.files import OpenFiles
from modelstate.io.memory import aligned, fresh_tensors
from modelstate.io.staging import pinned_memory
from modelstate.io.system import populate, trim_heap
from modelstate.io.tensors import ReadAll, compute, read_tensor
from modelstate.planning.options import LoadOptions
from modelstate.planning.transfer import BY_SUBCLASS, Execution, Memory, Transfers, Way, choose_way, final_memory
from modelstate.planning.transforms import BY_TRANSFORM, BlockFunction, called, transform_errors
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import ByteRange, Stored, contiguous_stride
from modelstate.torch_compat.dtypes import UNCHECKED, Overflows, can_overflow, nonfinite
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import copy_each, payload_of, storage_of, storage_owners
from modelstate.transaction.slots import Addresses, slots_of

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
    """

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
    files: OpenFiles
    strategy: ReadStrategy = msgspec.field(default_factory=ReadStrategy)
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    peak_memory_bytes: int = 0
    progress: Callable[[int], None] = lambda _: None

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


def read_computed(staging: Staging, items: Sequence[Execution], memory: Memory) -> None:
    """Reads combined tensors, which are computed in blocks."""
    pairs = [(item.transfers.facts.combined, final) for item, (final,) in zip(items, memory, strict=True)]
    targets = [(stored, final) for stored, final in pairs if stored is not None]
    read_here = partial(staging.read_ranges, threads=1)
    compute(targets, read_here, read_whole=staging.read, on_block=lambda: staging.progress(0))
    staging.progress(sum(item.transfers.nbytes for item in items))


# Values that are needed whole.

_LEAST_TRIMMED_BYTES = 4 << 20
"""A transform that frees so much leaves holes in the heap. Without trimming, 16 weights of 16 MB that become float8
were measured to take 600 instead of 280 MB."""


def read_whole(staging: Staging, execution: Execution, finals: list[torch.Tensor]) -> None:
    """Reads a value that is needed whole, and adds the final value to a list.

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
    finals.append(final)
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
    ((final,),) = final_memory([execution])
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


def _count_overflows(parts: Sequence[_Value], sources: Sequence[torch.Tensor], overflows: Overflows) -> None:
    """Counts the values that a cast has made infinite. They are in place: a load does not fail for a count."""
    for part, source in zip(parts, sources, strict=True):
        if can_overflow(part.dtype, part.target.dtype):
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
            narrow = [part for part in parts if can_overflow(part.dtype, part.target.dtype)]
            with torch.cuda.stream(self._own):
                _count_overflows(narrow, _sources(narrow, buffer), overflows)

        return wait


@torch.inference_mode(False)  # tensors of that mode could not be written to outside of it
def _buffers(blocks: Sequence[Block], threads: int, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """The buffers of a read: in pinned memory, as far as there is some, where blocks are copied to CUDA devices."""
    if devices and blocks:
        with suppress(RuntimeError):  # a limit on pinned memory; copies from other memory only take longer
            nbytes, count = max(block.source.nbytes for block in blocks), min(threads, len(blocks))
            memory, step = pinned_memory(count * aligned(nbytes), devices[0]), aligned(nbytes)
            return [memory[at : at + nbytes] for at in range(0, count * step, step)]
    return block_buffers(blocks, threads)


def in_blocks(staging: Staging, items: Sequence[Execution], memory: Memory) -> Callable[[], None]:
    """Returns the read of values that pass through blocks. All buffers have been allocated when this returns."""
    strategy = staging.strategy
    wanted, values = list[tuple[ByteRange, int]](), list[_Value | _Rows]()
    for item, targets in zip(items, memory, strict=True):
        transfer, dtype, unit_bytes = item.transfers, item.transfers.stored_dtype, item.transfers.unit_bytes
        wanted += [(source, unit_bytes) for source in transfer.columns.ranges()]
        if transfer.own is not None and transfer.own.block_function is not None:
            values.append(_Rows(item, transfer.own.block_function, targets))
        else:
            values += [_Value(transfer, *row, dtype) for row in zip(transfer.names, targets, strict=True)]
    targeted = {item.transfers.device for item in items}
    devices = sorted((device for device in targeted if device.type in _QUEUED_DEVICES), key=str)
    if devices:
        strategy = strategy.for_devices(sum(aligned(source.nbytes) for source, _ in wanted))
    align_bytes = common_align_bytes({source.path for source, _ in wanted}, staging.checkpoint.fingerprints)
    blocks = engine.in_blocks(wanted, strategy.block_bytes, align_bytes)
    block_bytes = max((block.source.nbytes for block in blocks), default=0)
    queues = {device: CudaQueue(device, block_bytes) for device in devices}
    buffers = _buffers(blocks, strategy.threads, devices)

    def consume(block: Block, buffer: torch.Tensor) -> Wait | None:
        by_device = defaultdict[torch.device, list[_Value]](list)
        for part in block.parts:
            value = values[part.which]
            if isinstance(value, _Rows):
                value.write(part, buffer, staging.overflows)
                continue
            value = value.part(part)
            by_device[value.transfers.device].append(value)
            if value.transfers.way is not Way.INTO and value.transfers.on_cpu:
                populate(value.target.data_ptr(), value.target.nbytes)
        waits = list[Wait]()
        for device, parts in by_device.items():
            if device in queues:
                waits.append(queues[device].run(buffer, block.source.nbytes, parts, staging.overflows))
            else:
                sources = _sources(parts, buffer)
                copy_each([part.target for part in parts], sources)
                _count_overflows(parts, sources, staging.overflows)
        return (lambda: [wait() for wait in waits]) if waits else None

    def read() -> None:
        try:
            stream(
                *(blocks, buffers, consume),
                files=staging.files,
                on_block=lambda block: staging.progress(block.wanted_bytes),
            )
        finally:
            # A block that has failed may have left copies behind: they use memory that is freed after an error.
            for queue in queues.values():
                queue.wait()
        buffers.clear()
        queues.clear()
        for value in values:
            if isinstance(value, _Rows):
                value.end()

    return read


class _Rows:
    """A value that a function transforms block by block, with the parts of its result."""

    def __init__(self, execution: Execution, function: BlockFunction, finals: list[torch.Tensor]) -> None:
        """`finals` gets the result."""
        self._execution, self._function, self._finals = execution, function, finals
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
        """Adds the result to the final values."""
        result = self._function.whole(self._parts, self._shape)
        self._finals.append(_as_final(self._execution, result.detach(), freezes=not result.requires_grad))
