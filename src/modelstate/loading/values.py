"""How values become final: those that are needed whole, with their casts and transforms, and those in blocks.

One thread casts, moves or transforms a block while another one reads the next. A `Staging` says how the values of a
load are read, and with which memory.
"""

from __future__ import annotations

import threading
import time
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
from modelstate.io.engine import (
    Block,
    OpenFiles,
    Part,
    ReadStrategy,
    Request,
    Rows,
    Wait,
    block_buffers,
    common_align_bytes,
    in_blocks,
    read_ranges,
    stream,
)
from modelstate.io.linux import populate, trim_heap
from modelstate.io.memory import aligned, fresh_tensors
from modelstate.io.staging import pinned_memory
from modelstate.io.tensors import read_tensor
from modelstate.loading.collective import SharedRead
from modelstate.planning.options import LoadOptions
from modelstate.planning.transfer import BY_SUBCLASS, Execution, Transfers, Way, choose_way, final_memory
from modelstate.planning.transforms import BY_TRANSFORM, BlockFunction, called, transform_errors
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, values_of
from modelstate.spec import ByteRange, Stored, StoredComposite, StoredTensor, contiguous_stride
from modelstate.torch_compat.dtypes import UNCHECKED, Overflows, can_overflow, nonfinite
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import copy_each, payload_of, storage_of, storage_owners
from modelstate.transaction.slots import Addresses, slots_of

Progress = Callable[[int], None]
_QUEUED_DEVICES = ("cuda",)
"""The types of devices to which copies are queued."""


class Staging(msgspec.Struct, eq=False, dict=True):
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take."""

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
    files: OpenFiles
    """The files, which are opened once, and compared with their fingerprints when all has been read."""
    strategy: ReadStrategy = msgspec.field(default_factory=ReadStrategy)
    """The threads, buffers and files of the reads."""
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    """Counts values that casts make infinite or NaN."""
    peak_memory_bytes: int = 0
    """The most memory that the load takes at once in addition to the final tensors."""
    is_cached: bool = False
    """Whether the page cache has what is read at the commit, and nothing has been read since it was asked."""
    shared: list[SharedRead] = msgspec.field(default_factory=list)
    """The values that one rank reads for several."""
    progress: Progress = lambda _: None
    """Called with numbers of bytes that are done; may raise to end a read."""

    def read_requests(
        self, requests: Sequence[Request | Rows], on_read: Progress | None = None, *, is_new_memory: bool = True
    ) -> None:
        """Executes requests with the threads of the load. See `read_ranges`."""
        read_ranges(
            requests,
            files=self.files,
            on_read=on_read,
            threads=self.strategy.threads,
            batch_bytes=self.strategy.block_bytes if self.strategy.remote else None,
            is_new_memory=is_new_memory,
        )

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values of a stored tensor into memory of their own."""
        return read_tensor(stored, partial(read_ranges, files=self.files))

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)


_LEAST_TRIMMED_BYTES = 4 << 20
"""A transform that frees so much leaves holes in the heap. Without trimming, 16 weights of 16 MB that become float8
were measured to take 600 instead of 280 MB."""


# Values that are needed whole.


def read_whole(staging: Staging, execution: Execution) -> None:
    """Reads a value that is needed whole, into its slot where that is the way. Raises as `streamed_read`."""
    transfer = execution.transfers
    if transfer.way is Way.INTO:  # in a load with `in_place=True`
        with torch.no_grad():
            value = _own_value(staging, execution)
            transfer.param.copy_(value)
            staging.overflows.check(transfer.name, value, transfer.param)
        execution.finals = transfer.params
    else:
        stage_one(staging, execution)
    staging.progress(transfer.nbytes)


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
    if facts.is_transformed:
        _transformed(staging, execution)
        return
    if transfer.way is Way.CODE:
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
        value = facts.value if is_copied else _own_value(staging, execution)
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
        staging.read_requests(transfer.requests([memory]))
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


def _transformed(staging: Staging, execution: Execution) -> None:
    """Sets the final value to the result of a transform, in memory that nothing else refers to.

    Raises `TransformError`.
    """
    transfer, facts = execution.transfers, execution.transfers.facts
    name, shape, value = transfer.name, transfer.param.shape, _own_value(staging, execution)
    before: Callable[[], int]
    if facts.transform is not None:
        before, freezes = partial(_nonfinite_before, staging, transfer), False
        result = called(facts.transform, name, value, shape)
    else:
        assert facts.module_transform is not None
        with torch.inference_mode(False), torch.no_grad():
            stride = facts.own_stride or contiguous_stride(facts.value.size())
            if is_plain(value) and not (transfer.on_cpu and value.dtype == transfer.dtype and value.stride() == stride):
                value = _as_slot(staging, transfer, value)
            before = partial(int, nonfinite(value) if is_plain(value) else 0)
            result = called(facts.module_transform, name, value, shape)
        freezes = isinstance(result, nn.Parameter) and not result.requires_grad
    is_argument = result is value
    if is_argument:
        del value
    what = f"the {type(result).__name__} of the transform cannot be copied; nothing has been changed"
    with code_errors(TransformError, what, where=name), torch.inference_mode(False), torch.no_grad():
        cast = result = result.detach()
        requested = None if facts.transform is None else staging.options.dtype
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
        set_transformed(execution, final, freezes=freezes)


def _nonfinite_before(staging: Staging, transfer: Transfers) -> int:
    """The infinite and NaN values of what a transform was given, which may have changed: it is read once more."""
    stored = transfer.facts.stored
    return nonfinite(transfer.facts.value if stored is None else values_of(stored, staging.read))


# Values that pass through blocks.


class Piece(NamedTuple):
    """A value, or a part of one, in a buffer, and where it goes."""

    name: str
    at: int
    """Bytes from the beginning of the buffer."""
    dtype: torch.dtype
    target: torch.Tensor
    """The memory for it, flat, of the dtype that it is cast to."""


def _values(pieces: Sequence[Piece], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The values of pieces, as views of the buffer."""
    typed = {
        dtype: buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
        for dtype in {piece.dtype for piece in pieces}
    }
    return [typed[dtype].narrow(0, at // dtype.itemsize, target.numel()) for _, at, dtype, target in pieces]


def copy_pieces(pieces: Sequence[Piece], buffer: torch.Tensor, overflows: Overflows) -> None:
    """Copies and casts what is in a buffer to where it belongs."""
    sources = _values(pieces, buffer)
    copy_each([piece.target for piece in pieces], sources)
    pairs = zip(pieces, sources, strict=True)
    _count_overflows([pair for pair in pairs if can_overflow(pair[0].dtype, pair[0].target.dtype)], overflows)


def _count_overflows(values: Sequence[tuple[Piece, torch.Tensor]], overflows: Overflows) -> None:
    """Counts the values that a cast has made infinite. They are in place: a load does not fail for a count."""
    for piece, source in values:
        try:
            overflows.check(piece.name, source, piece.target)
        except (MemoryError, RuntimeError):
            overflows.add({(UNCHECKED, piece.name): source.numel()})


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

    def run(self, buffer: torch.Tensor, nbytes: int, pieces: Sequence[Piece], overflows: Overflows) -> Wait:
        """Queues the copies of what is in a buffer to where it belongs.

        Returns a function that waits until the device has done that, and then counts the values that a cast has made
        infinite: until then, nothing must overwrite the buffer.
        """
        here, there = buffer[:nbytes], self._there[:nbytes]
        targets, sources = [piece.target for piece in pieces], _values(pieces, there)
        with self._lock, torch.cuda.stream(self._own):
            there.copy_(here, non_blocking=True)
            copy_each(targets, sources, non_blocking=True)
            event = self._own.record_event()

        def wait() -> None:
            event.synchronize()
            narrow = [piece for piece in pieces if can_overflow(piece.dtype, piece.target.dtype)]
            with torch.cuda.stream(self._own):
                _count_overflows([*zip(narrow, _values(narrow, buffer), strict=True)], overflows)

        return wait


@torch.inference_mode(False)  # tensors of that mode could not be written to outside of it
def _pinned_buffers(blocks: Sequence[Block], threads: int, device: torch.device) -> list[torch.Tensor]:
    """The buffers of a read whose blocks are copied to a CUDA device: in pinned memory, as far as there is some."""
    with suppress(RuntimeError):  # a limit on pinned memory; copies from other memory only take longer
        nbytes, count = max(block.source.nbytes for block in blocks), min(threads, len(blocks))
        memory, step = pinned_memory(count * aligned(nbytes), device), aligned(nbytes)
        return [memory[at : at + nbytes] for at in range(0, count * step, step)]
    return block_buffers(blocks, threads)


def streamed_read(staging: Staging, executions: Sequence[Execution]) -> Callable[[], None]:
    """Returns a function that reads the final values of transfers that pass through blocks.

    It reads into the slots where that is the way. All buffers have been allocated when this returns.

    The returned function raises `ReadFailedError` and `TransformError`; memory that is read into is then partly
    overwritten.
    """
    strategy, transfers = staging.strategy, [item.transfers for item in executions]
    wanted, values = list[tuple[ByteRange, int]](), list[_Value | _Transformed]()
    plain = list[Execution]()
    for item in executions:
        if item.transfers.own is None or item.transfers.own.block_function is None:
            plain.append(item)
        else:
            wanted += [(extent, item.transfers.unit_bytes) for extent in item.transfers.extents]
            values.append(_Transformed(staging, item, item.transfers.own.block_function))
    memory = final_memory(plain)
    for item, targets in zip(plain, memory, strict=True):
        dtype, names = item.transfers.stored_dtype, item.transfers.names
        wanted += [(source, dtype.itemsize) for source in item.transfers.rows.ranges()]
        values += [_Value(item, name, dtype, target) for name, target in zip(names, targets, strict=True)]
    devices = sorted({item.device for item in transfers if item.device.type in _QUEUED_DEVICES}, key=str)
    if devices:
        strategy = strategy.for_devices(sum(aligned(source.nbytes) for source, _ in wanted))
    align_bytes = common_align_bytes({source.path for source, _ in wanted}, staging.checkpoint.fingerprints)
    blocks = in_blocks(wanted, strategy.block_bytes, align_bytes)
    block_bytes = max((block.source.nbytes for block in blocks), default=0)
    queues = {device: CudaQueue(device, block_bytes) for device in devices}
    if devices and blocks:
        buffers = _pinned_buffers(blocks, strategy.threads, devices[0])
    else:
        buffers = block_buffers(blocks, strategy.threads)

    def consume(block: Block, buffer: torch.Tensor) -> Wait | None:
        pieces = defaultdict[torch.device, list[Piece]](list)
        for part in block.parts:
            value = values[part.which]
            if isinstance(value, _Transformed):
                value.write(part, buffer)
                continue
            transfer, piece = value.execution.transfers, value.piece(part)
            pieces[transfer.device].append(piece)
            if transfer.way is not Way.INTO and transfer.on_cpu:
                populate(piece.target.data_ptr(), piece.target.nbytes)
        waits = list[Wait]()
        for device, of_device in pieces.items():
            if device in queues:
                waits.append(queues[device].run(buffer, block.source.nbytes, of_device, staging.overflows))
            else:
                copy_pieces(of_device, buffer, staging.overflows)
        return (lambda: [wait() for wait in waits]) if waits else None

    def on_block(block: Block, seconds: float) -> None:
        wanted_bytes = block.wanted_bytes
        for part in block.parts:
            values[part.which].execution.seconds += seconds * part.nbytes / wanted_bytes
        staging.progress(wanted_bytes)

    def run() -> None:
        try:
            stream(blocks, buffers, consume, files=staging.files, on_block=on_block)
        finally:
            # A block that has failed may have left copies behind: they use memory that is freed after an error.
            for queue in queues.values():
                queue.wait()
        buffers.clear()
        queues.clear()
        for item, targets in zip(plain, memory, strict=True):
            item.finals = targets
        for value in values:
            if isinstance(value, _Transformed):
                value.end()

    return run


class _Value(NamedTuple):
    """A value that is read in blocks, with its final memory."""

    execution: Execution
    name: str
    dtype: torch.dtype
    """The dtype in the file."""
    target: torch.Tensor

    def piece(self, part: Part) -> Piece:
        """Returns a part of the value, and where it goes."""
        _, first, nbytes, at = part
        _, name, dtype, target = self
        count = nbytes // dtype.itemsize
        if count < target.numel():
            target = target.as_strided((count,), (1,), target.storage_offset() + first // dtype.itemsize)
        elif target.dim() != 1:
            target = target.view(-1)
        return Piece(name, at, dtype, target)


class _Transformed:
    """A value that a function transforms block by block, with the parts of its result."""

    def __init__(self, staging: Staging, execution: Execution, function: BlockFunction) -> None:
        self.execution, self._function, self._staging = execution, function, staging
        self._shape = execution.transfers.facts.value.shape
        self._parts = function.parts(self._shape[0])

    def write(self, part: Part, buffer: torch.Tensor) -> None:
        """Transforms the rows of a part, and writes them where they belong."""
        transfer, function = self.execution.transfers, self._function
        value = buffer[part.at : part.at + part.nbytes].view(transfer.stored_dtype)
        rows, first = value.view(-1, *self._shape[1:]), part.first // transfer.unit_bytes
        cast = rows.to(transfer.dtype)
        self._staging.overflows.check(transfer.name, rows, cast)
        parts = {name: tensor[first : first + len(rows)] for name, tensor in self._parts.items()}
        with transform_errors(transfer.name):
            function.write(cast, parts)

    @torch.inference_mode(False)
    def end(self) -> None:
        """Sets the final value."""
        result = self._function.whole(self._parts, self._shape)
        set_transformed(self.execution, result.detach(), freezes=not result.requires_grad)


def set_transformed(execution: Execution, final: torch.Tensor, *, freezes: bool) -> None:
    """Sets the result of a transform, whose class and dtype the slot gets, as the final value."""
    transfer, by_module = execution.transfers, execution.transfers.facts.module_transform
    way, why = Way.NEW, f"{type(final).__name__} made by {BY_TRANSFORM if by_module is None else by_module.transform}"
    if is_plain(final, transfer.param):
        way, why = choose_way(
            *(transfer.param, final.dtype, final.device), can_map=False, in_place=False, can_read_into=False
        )
    elif is_plain(final):
        way, why = Way.CODE, BY_SUBCLASS
    execution.transfers = replace(transfer, dtypes=[final.dtype], way=way, why=why)
    execution.finals, execution.freezes = [final], freezes
