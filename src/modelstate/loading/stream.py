"""Streams tensors: one thread casts, moves or transforms a block while another one reads the next.

A `Staging` says how the values of a load are read, and with which memory.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
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
from modelstate.io.engine import (
    Block,
    OpenFiles,
    Part,
    ReadStrategy,
    Wait,
    Wanted,
    block_buffers,
    common_align_bytes,
    in_blocks,
    read_ranges,
    stream,
)
from modelstate.io.files import Opened
from modelstate.io.memory import aligned, fresh_tensors
from modelstate.io.staging import pinned_memory
from modelstate.io.tensors import read_tensor
from modelstate.loading.collective import SharedRead
from modelstate.planning.options import LoadOptions
from modelstate.planning.transfer import BY_SUBCLASS, Execution, Transfers, Way, choose_way
from modelstate.planning.transforms import BlockFunction, transform_errors
from modelstate.process import cached_attribute
from modelstate.spec import ByteRange, Stored
from modelstate.torch_compat.dtypes import UNCHECKED, Overflows, can_overflow, extremes, is_range_within
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import copy_each
from modelstate.transaction.slots import Addresses, slots_of

Progress = Callable[[int], None]
_QUEUED_DEVICES = ("cuda",)
"""The types of devices to which copies are queued."""
_MOST_DIRECT = 4
"""So many parts of a block are copied to a device one by one."""


class Staging(msgspec.Struct, eq=False, dict=True):
    """How the values of a load are read: from where, with which threads and buffers, and the memory that they take."""

    checkpoint: Checkpoint
    options: LoadOptions
    model: nn.Module
    opened: dict[str, Opened] = msgspec.field(default_factory=dict)
    """Files that are open since the checkpoint was opened."""
    strategy: ReadStrategy = msgspec.field(default_factory=ReadStrategy.fastest)
    """The threads, buffers and files of the reads."""
    overflows: Overflows = msgspec.field(default_factory=Overflows)
    """Counts values that casts make infinite or NaN."""
    peak_memory_bytes: int = 0
    """The most memory that the load takes at once in addition to the final tensors."""
    shared: list[SharedRead] = msgspec.field(default_factory=list)
    """The values that one rank reads for several."""

    @cached_attribute
    def files(self) -> OpenFiles:
        """The files, which are opened once, and compared with their fingerprints when all has been read."""
        return OpenFiles(self.checkpoint.fingerprints, self.opened)

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values of a stored tensor into memory of their own."""
        return read_tensor(stored, partial(read_ranges, files=self.files))

    @cached_attribute
    def own_memory(self) -> Addresses:
        """The memory of the model's tensors."""
        return Addresses(slot.tensor for slot in slots_of(self.model).tensors)


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
    sources, targets = _values(pieces, buffer), [piece.target for piece in pieces]
    copy_each(targets, sources)
    _count_overflows(pieces, sources, targets, overflows)


def _count_overflows(
    pieces: Sequence[Piece],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor | torch.dtype],
    overflows: Overflows,
) -> None:
    """Counts the values that a cast has made infinite. They are in place: a load does not fail for a count."""
    for piece, source, target in zip(pieces, sources, targets, strict=True):
        try:
            overflows.check(piece.name, source, target)
        except (MemoryError, RuntimeError):
            overflows.add({(UNCHECKED, piece.name): source.numel()})


class CudaQueue:
    """Copies blocks to a CUDA device, where the values are cast and put where they belong, on a stream of its own.

    A block gets to the device in one copy where it has parts of many tensors: there, a small copy takes far less time
    than one from the host. Threads queue their blocks one after the other. If they did so at the same time, they would
    wait for Python's lock between all calls of CUDA, for longer than the copies take. For the same reason, what can be
    done before is done before: a thread that queues a block keeps all others waiting.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocates memory for blocks of this size on the device, so that no read allocates any."""
        callers, self._lock = torch.cuda.current_stream(device), threading.Lock()
        self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(callers):
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
        is_direct = goes_straight(pieces)
        here, there = (buffer, buffer) if is_direct else (buffer[:nbytes], self._there[:nbytes])
        sources, targets = _values(pieces, there), [piece.target for piece in pieces]
        narrow = [
            (piece, source)
            for piece, source in zip(pieces, sources, strict=True)
            if can_overflow(piece.dtype, piece.target.dtype)
        ]
        with self._lock, torch.cuda.stream(self._own):
            if not is_direct:
                there.copy_(here, non_blocking=True)
            copy_each(targets, sources, non_blocking=True)
            limits = _queued_limits([source for _, source in narrow])
            event = self._own.record_event()

        def wait() -> None:
            event.synchronize()
            if not narrow:
                return
            with torch.cuda.stream(self._own):
                known = limits.tolist()
            suspects = [
                piece
                for (piece, _), (least, greatest) in zip(narrow, known, strict=True)
                if not is_range_within(least, greatest, piece.target.dtype)
            ]
            dtypes = [piece.target.dtype for piece in suspects]
            _count_overflows(suspects, _values(suspects, buffer), dtypes, overflows)

        return wait


def _queued_limits(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The least and the greatest of each value; NaN where they cannot be known without looking at each element."""
    found = [extremes(value) for value in values]
    if values and None not in found:
        with suppress(torch.OutOfMemoryError):
            return torch.stack([limit for pair in found if pair for limit in pair]).view(-1, 2)
    return torch.full((len(values), 2), math.nan, device="cpu")


def goes_straight(pieces: Sequence[Piece]) -> bool:
    """Whether the values of a block are copied from the buffer to where they belong, and not by the block."""
    return len(pieces) <= _MOST_DIRECT and all(piece.target.dtype is piece.dtype for piece in pieces)


@torch.inference_mode(False)  # tensors of that mode could not be written to outside of it
def _pinned_buffers(blocks: Sequence[Block], threads: int, device: torch.device) -> list[torch.Tensor]:
    """The buffers of a read whose blocks are copied to a CUDA device: in pinned memory, as far as there is some."""
    with suppress(RuntimeError):  # a limit on pinned memory; copies from other memory only take longer
        nbytes, count = max(block.nbytes for block in blocks), min(threads, len(blocks))
        memory, step = pinned_memory(count * aligned(nbytes), device), aligned(nbytes)
        return [memory[at : at + nbytes] for at in range(0, count * step, step)]
    return block_buffers(blocks, threads)


def streamed_read(staging: Staging, executions: Sequence[Execution], progress: Progress) -> Callable[[], None]:
    """Returns a function that reads the final values of transfers that pass through blocks.

    It reads into the slots where that is the way. Values that adjoin in a file are read as one range, and the bytes of
    a value that has several names once. All buffers have been allocated when this returns.

    It raises `ReadFailedError` and `TransformError`; memory that is read into is then partly overwritten.
    """
    strategy = staging.strategy
    wanted, owners = list[Wanted](), list[tuple[_Rows | _Transformed, ByteRange]]()
    transfers = [execution.transfers for execution in executions]
    for execution, item in zip(executions, transfers, strict=True):
        owner: _Rows | _Transformed
        if item.own is not None and item.own.block_function is not None:
            owner = _Transformed(staging, execution, item.own.block_function)
        else:
            owner = _Rows(execution, _memory_for(item))
        wanted += [Wanted(extent, item.unit_bytes) for extent in item.extents]
        owners += [(owner, extent) for extent in item.extents]
    devices = sorted({item.device for item in transfers if item.device.type in _QUEUED_DEVICES}, key=str)
    if devices:
        strategy = strategy.for_devices(sum(aligned(entry.source.nbytes) for entry in wanted))
    align_bytes = common_align_bytes({entry.source.path for entry in wanted}, staging.checkpoint.fingerprints)
    blocks = in_blocks(wanted, strategy.block_bytes, align_bytes)
    block_bytes = max((block.nbytes for block in blocks), default=0)
    queues = {device: CudaQueue(device, block_bytes) for device in devices}
    if devices and blocks:
        buffers = _pinned_buffers(blocks, strategy.threads, devices[0])
    else:
        buffers = block_buffers(blocks, strategy.threads)

    def consume(block: Block, buffer: torch.Tensor) -> Wait | None:
        pieces = defaultdict[torch.device, list[Piece]](list)
        for part in block.parts:
            owner, extent = owners[part.which]
            if isinstance(owner, _Transformed):
                owner.write(part, buffer)
            else:
                pieces[owner.transfers.device] += owner.pieces(part, extent, part.at)
        waits = list[Wait]()
        for device, of_device in pieces.items():
            if device in queues:
                waits.append(queues[device].run(buffer, block.nbytes, of_device, staging.overflows))
            else:
                copy_pieces(of_device, buffer, staging.overflows)
        return (lambda: [wait() for wait in waits]) if waits else None

    def on_block(block: Block, seconds: float) -> None:
        for part in block.parts:
            owners[part.which][0].execution.seconds += seconds * part.nbytes / block.wanted_bytes
        progress(block.wanted_bytes)

    def run() -> None:
        try:
            stream(wanted, blocks, buffers, consume, files=staging.files, on_block=on_block)
        finally:
            # A block that has failed may have left copies behind: they use memory that is freed after an error.
            for queue in queues.values():
                queue.wait()
        buffers.clear()
        queues.clear()
        for owner in dict.fromkeys(owner for owner, _ in owners):
            owner.end()
        progress(sum(item.nbytes for item in transfers) - sum(entry.source.nbytes for entry in wanted))

    return run


class _Rows:
    """The rows of transfers, in the order of the files, with their final memory."""

    def __init__(self, execution: Execution, targets: list[torch.Tensor]) -> None:
        self.execution, self.transfers, self._targets = execution, execution.transfers, targets
        self._sources = self.transfers.sources
        self._order = sorted(range(len(self._sources)), key=self._sources.__getitem__)
        ordered = [self._sources[row] for row in self._order]
        self._begins = [(path, start) for path, start, _ in ordered]
        self._ends = [(path, start + nbytes) for path, start, nbytes in ordered]

    def pieces(self, part: Part, extent: ByteRange, at: int) -> list[Piece]:
        """Returns the values of a part of a range, which begins at a byte of a buffer."""
        dtype, first, found = self.transfers.stored_dtype, extent.start + part.first, list[Piece]()
        end, itemsize = first + part.nbytes, dtype.itemsize
        from_row = bisect_right(self._ends, (extent.path, first))
        for row in self._order[from_row : bisect_left(self._begins, (extent.path, end))]:
            _, start, nbytes = self._sources[row]
            begin, until = max(start, first), min(start + nbytes, end)
            target = self._targets[row]
            if until - begin < nbytes:
                offset = target.storage_offset() + (begin - start) // itemsize
                target = target.as_strided(((until - begin) // itemsize,), (1,), offset)
            elif target.dim() != 1:
                target = target.view(-1)
            found.append(Piece(self.transfers.names[row], at + begin - first, dtype, target))
        return found

    def end(self) -> None:
        """Sets the final values."""
        self.execution.finals = self._targets


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
        rows = value.view(-1, *self._shape[1:])
        first = part.first // transfer.unit_bytes
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
    """Sets the result of a module's transform, whose class and dtype the slot gets, as the final value."""
    transfer = execution.transfers
    way, why = transfer.way, f"{type(final).__name__} {transfer.why}"
    if is_plain(final, transfer.param):
        way, why = choose_way(
            *(transfer.param, final.dtype, final.device), can_map=False, in_place=False, can_read_into=False
        )
    elif is_plain(final):
        way, why = Way.CODE, BY_SUBCLASS
    execution.transfers = replace(transfer, dtypes=[final.dtype], way=way, why=why)
    execution.finals, execution.freezes = [final], freezes


def _memory_for(transfers: Transfers) -> list[torch.Tensor]:
    """The final memory of values: the slots, or new memory."""
    if transfers.way is Way.INTO:
        return transfers.params
    if transfers.device.type == "cpu":
        return fresh_tensors(transfers.layouts())
    with torch.inference_mode(False):
        layouts = transfers.layouts()
        return [torch.empty(shape, dtype=dtype, device=transfers.device) for shape, _, dtype in layouts]
