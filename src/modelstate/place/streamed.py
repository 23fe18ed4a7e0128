"""Values that are cast, moved or remade piece by piece, while they are read."""

from collections.abc import Callable, Sequence

import torch

from modelstate.place.memory import HeapTrim, PageWatch, fresh_tensors
from modelstate.place.queues import Queues
from modelstate.place.remake import remade, told_of
from modelstate.place.rows import Joined
from modelstate.plan.assignment import Assignment
from modelstate.plan.held import Held
from modelstate.plan.placement import after_remaking
from modelstate.plan.prepare import Preparation
from modelstate.plan.transforms import RowsWriter, asked_writer
from modelstate.read.overflow import can_overflow
from modelstate.read.stream import Block, Part, Wait, Wanted
from modelstate.read.uncached import BUFFER_BYTES
from modelstate.spec import StoredTensor, contiguous_stride

Progress = Callable[[int], None]
_TRIM_BYTES = 64 << 20
"""What is remade before the heaps are asked for what is free in them."""


def read_streamed(preparation: Preparation, streamed: Sequence[Assignment], progress: Progress) -> None:
    """Gives assignments that can be streamed their final values; those that are read in place get them where they are.

    Raises `ReadFailedError` and `TransformError`; what is read in place is then partly overwritten.
    """
    if not streamed:
        return
    means = preparation.means
    flow = _Flow(streamed, means.threads, preparation.held, BUFFER_BYTES if means.uncached else 0)

    def on_block(block: Block, seconds: float) -> None:
        flow.on_block(block, seconds)
        progress(block.wanted_bytes)

    preparation.checkpoint.stream(
        [Wanted(made.stored.extent, made.unit_bytes) for made in streamed if isinstance(made.stored, StoredTensor)],
        flow.consume,
        threads=means.threads,
        block_bytes=means.block_bytes,
        on_block=on_block,
        buffers=2 if flow.on_device else 1,
        pinned=flow.on_device,
        uncached=means.uncached,
    )
    flow.end()
    preparation.held.take(-flow.buffer_bytes)


class _Flow:
    """Where the pieces go."""

    def __init__(self, streamed: Sequence[Assignment], threads: int, held: Held, beside_bytes: int) -> None:
        self.watch = PageWatch(threads)
        self._streamed = streamed
        self._trim = HeapTrim(_TRIM_BYTES)
        self._joined = {
            index: Joined(made.name, made.param.shape[0], self.watch)
            for index, made in enumerate(streamed)
            if made.remake is not None
        }
        self._writers = {index: _writer(streamed[index]) for index in self._joined}
        cast = [index for index, made in enumerate(streamed) if made.remake is None]
        self._finals = dict(zip(cast, _memory([streamed[index] for index in cast], self.watch), strict=True))
        self._flat = {index: final.detach().view(-1) for index, final in self._finals.items()}
        devices = {final.device for final in self._finals.values() if final.device.type == "cuda"}
        self.on_device = bool(devices)
        self._queues = Queues(devices)
        self._held, self._buffers = held, dict[int, int]()
        self._beside_bytes = beside_bytes
        held.take(sum(made.staged_bytes for made in streamed))

    @property
    def buffer_bytes(self) -> int:
        """Of the buffers that something has been read into, and of what each is read through."""
        return sum(self._buffers.values())

    @torch.inference_mode(False)
    def consume(self, block: Block, buffer: torch.Tensor) -> Wait | None:
        """Takes a block out of the buffer that it is in."""
        if buffer.data_ptr() not in self._buffers:
            self._buffers[buffer.data_ptr()] = buffer.nbytes + self._beside_bytes
            self._held.take(buffer.nbytes + self._beside_bytes)
        values: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        checked: list[tuple[Assignment, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for part in block.parts:
                made = self._streamed[part.which]
                value = _shown(buffer, part, made.value.dtype)
                if made.remake is not None:
                    self._remake(made, part, value)
                    continue
                first = part.first // made.value.itemsize
                values.append(value)
                targets.append(self._flat[part.which][first : first + value.numel()])
                if can_overflow(made.value.dtype, made.dtype):
                    checked.append((made, value, targets[-1]))
            if self.on_device:
                for made, value, target in checked:  # before the buffer is read into again
                    made.overflows.check(made.name, value, target)
                return self._queues.copy(targets, values)
            if values:
                torch._foreach_copy_(targets, values)
            for made, value, target in checked:
                made.overflows.check(made.name, value, target)
        return None

    def _remake(self, made: Assignment, part: Part, value: torch.Tensor) -> None:
        assert made.remake is not None
        rest = made.value.shape[1:]
        rows = value.view(-1, *rest)
        first = part.first // (made.nbytes // made.value.shape[0])
        casts = value.dtype != made.dtype
        for at in range(0, len(rows), made.remake_rows):
            given = rows[at : at + made.remake_rows]
            # As many bytes are given to it as it returns.
            with self._held.during(made.remake_bytes + given.numel() * made.dtype.itemsize * (2 if casts else 1)):
                some = given.to(made.dtype)
                made.overflows.check(made.name, given, some)
                some = some.to(made.device)
                self._join(part.which, first + at, some)
                del some

    def _join(self, which: int, first: int, some: torch.Tensor) -> None:
        """Has some rows remade, to where they belong."""
        made, joined, writer = self._streamed[which], self._joined[which], self._writers[which]
        assert made.remake is not None
        if writer is None:
            joined.put(first, remade(made, made.remake, some, some.shape))
            return
        if not joined.has_begun:
            joined.begin(writer.like)
        with told_of(made.name):
            writer.write(some, joined.at(first, len(some)))

    @torch.inference_mode(False)
    def end(self) -> None:
        """Hands the values over, when all of them are there."""
        for index, made in enumerate(self._streamed):
            if made.remake is None:
                made.final = self._finals[index]
                continue
            joined = self._joined[index]
            made.final, made.freezes = joined.whole.detach(), joined.freezes
            made.dtype = made.final.dtype
            made.placement = after_remaking(made.placement, made.param, made.final)
        if self._joined:
            self._trim.trim()

    def on_block(self, block: Block, seconds: float) -> None:
        """Takes down what a block took, and looks after the memory that comes of it."""
        for part in block.parts:
            made = self._streamed[part.which]
            made.seconds += seconds * part.nbytes / block.wanted_bytes
            if made.remake_bytes:
                self._trim.on_freed(part.nbytes)
        self.watch.on_read(sum(_written_bytes(self._streamed[part.which], part) for part in block.parts))


def _memory(cast: Sequence[Assignment], watch: PageWatch) -> list[torch.Tensor]:
    """For each the memory where its value stays."""
    on_cpu = [made for made in cast if made.on_cpu and not made.placement.direct]
    fresh = dict(zip(map(id, on_cpu), fresh_tensors([made.layout for made in on_cpu], watch), strict=True))
    found = []
    with torch.inference_mode(False):
        for made in cast:
            if made.placement.direct:
                found.append(made.param)
            elif made.on_cpu:
                found.append(fresh[id(made)])
            else:
                found.append(torch.empty(made.param.shape, dtype=made.dtype, device=made.device))
    return found


def _writer(made: Assignment) -> RowsWriter | None:
    """What writes remade rows to where they stay."""
    if made.remake is None or not made.on_cpu:
        return None
    return asked_writer(made.remake, made.name, tuple(made.param.shape), made.dtype)


def _written_bytes(made: Assignment, part: Part) -> int:
    """About as many as come of a piece."""
    return part.nbytes // 4 if made.remake is not None else part.nbytes // made.value.itemsize * made.dtype.itemsize


def _shown(buffer: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A piece as numbers, in the buffer."""
    count = part.nbytes // dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(buffer.untyped_storage(), part.at // dtype.itemsize, (count,), contiguous_stride((count,)))
