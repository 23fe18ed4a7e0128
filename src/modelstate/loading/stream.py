"""Streams tensors: one thread casts, moves or transforms a block while another one reads the next."""

import math
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch

from modelstate.io.blocks import Block, Buffers, Consume, Part, Wait, Wanted, in_blocks, stream
from modelstate.io.engine import common_align_bytes
from modelstate.io.leased import LeasedFiles
from modelstate.io.memory import aligned, fresh_tensors
from modelstate.io.pinned import pinned_memory
from modelstate.loading.staging import Staging
from modelstate.planning.assignment import Assignment, after_module_transform, transform_errors
from modelstate.planning.plain_table import PlainTable
from modelstate.planning.transforms import BlockFunction
from modelstate.spec import StoredTensor
from modelstate.torch_compat.dtypes import UNCHECKED, Overflows, can_overflow, extremes, is_range_within, is_within
from modelstate.torch_compat.private import copy_each

_MOST_DIRECT = 4
"""So many parts of a block are copied to a device one by one."""
_FEW = 16
"""So many tensors of a block are checked one by one, whether a cast has made values infinite."""


class Value(NamedTuple):
    """A value in a run, or a piece of one, and where it goes."""

    name: str
    first: int
    """Elements from the beginning of the run."""
    target: torch.Tensor
    """The memory for it, flat, of the dtype that it is cast to."""


class Run(NamedTuple):
    """Values of one dtype that lie behind each other in a buffer."""

    at: int
    """Bytes from the beginning of the buffer."""
    numel: int
    dtype: torch.dtype
    values: Sequence[Value]

    @property
    def narrow(self) -> set[torch.dtype]:
        """The dtypes that values are cast to and in which they may become infinite."""
        return {dtype for dtype in {value.target.dtype for value in self.values} if can_overflow(self.dtype, dtype)}

    def shown(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements in a buffer."""
        return buffer[self.at : self.at + self.numel * self.dtype.itemsize].view(self.dtype)

    def sources(self, shown: torch.Tensor) -> list[torch.Tensor]:
        """The values, as views."""
        if len(self.values) == 1 and self.values[0].target.numel() == self.numel:
            return [shown]
        return [shown[value.first : value.first + value.target.numel()] for value in self.values]


def copy_runs(runs: Sequence[Run], buffer: torch.Tensor, overflows: Overflows) -> None:
    """Copies and casts what is in a buffer to where it belongs."""
    shown = [run.shown(buffer) for run in runs]
    sources = [run.sources(elements) for run, elements in zip(runs, shown, strict=True)]
    copy_each([value.target for run in runs for value in run.values], [one for some in sources for one in some])
    found = Overflows()
    for run, elements, values in zip(runs, shown, sources, strict=True):
        # The sum of a result takes less time than the limits of what was read, but a call for each tensor.
        if narrow := run.narrow:
            if len(values) > _FEW and all(is_within(elements, dtype) for dtype in narrow):
                continue
            for value, source in zip(run.values, values, strict=True):
                try:
                    found.check(value.name, source, value.target)
                except (MemoryError, RuntimeError):  # the values are in place: a load does not fail for a count
                    found.add({(UNCHECKED, value.name): source.numel()})
    overflows.add(found.counts)


class CudaQueue:
    """Copies blocks to a CUDA device, where the values are cast and put where they belong, on a stream of its own.

    A block gets to the device in one copy where it has parts of many tensors: there, a small copy takes far less time
    than one from the host. Threads queue their blocks one after the other. If they did so at the same time, they would
    wait for Python's lock between all calls of CUDA, for longer than the copies take. For the same reason, what can be
    done before is done before: a thread that queues a block keeps all others waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._callers, self._lock = torch.cuda.current_stream(device), threading.Lock()
        self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._there = torch.empty(0, device="cpu")

    def reserve(self, nbytes: int) -> int:
        """Allocates memory for blocks of this size on the device. A read that is under way allocates none.

        Returns by how many bytes the memory has grown.
        """
        with self._lock, self.callers_stream():
            before = self._there.nbytes
            if before < nbytes:
                self._there = torch.empty(nbytes, dtype=torch.uint8, device=self._own.device)
            # The caller's work that is queued may use this memory, and that of the targets.
            self._own.wait_stream(self._callers)
            return self._there.nbytes - before

    def wait(self) -> None:
        """Waits until the device has done all that was queued, also by a call of `run` that was interrupted."""
        self._own.synchronize()

    def release(self) -> None:
        """Frees the memory on the device."""
        self._there = torch.empty(0, device="cpu")

    def callers_stream(self) -> AbstractContextManager[Any]:
        """Has a thread queue its work behind that of the thread that loads."""
        return torch.cuda.stream(self._callers)

    def run(self, buffer: torch.Tensor, nbytes: int, runs: Sequence[Run], overflows: Overflows) -> Wait:
        """Queues the copies of what is in a buffer to where it belongs.

        Returns a function that waits until the device has done that, and then counts the values that a cast has made
        infinite: until then, nothing must overwrite the buffer.
        """
        is_direct = goes_straight(runs)
        here, there = (buffer, buffer) if is_direct else (buffer[:nbytes], self._there[:nbytes])
        shown = [run.shown(there) for run in runs]
        sources = [one for run, elements in zip(runs, shown, strict=True) for one in run.sources(elements)]
        targets = [value.target for run in runs for value in run.values]
        narrow = [(run, elements) for run, elements in zip(runs, shown, strict=True) if run.narrow]
        with self._lock, torch.cuda.stream(self._own):
            if not is_direct:
                there.copy_(here, non_blocking=True)
            copy_each(targets, sources, non_blocking=True)
            limits = _queued_limits(narrow)
            event = self._own.record_event()

        def wait() -> None:
            event.synchronize()
            if not narrow:
                return
            found = Overflows()
            with torch.cuda.stream(self._own):
                known = limits.tolist()
            for (run, _), (least, greatest) in zip(narrow, known, strict=True):
                if not all(is_range_within(least, greatest, dtype) for dtype in run.narrow):
                    for value, source in zip(run.values, run.sources(run.shown(buffer)), strict=True):
                        try:
                            found.check(value.name, source, value.target.dtype)
                        except (MemoryError, RuntimeError):  # the block is done: nothing would look at it again
                            found.add({(UNCHECKED, value.name): source.numel()})
            overflows.add(found.counts)

        return wait


def _queued_limits(runs: Sequence[tuple[Run, torch.Tensor]]) -> torch.Tensor:
    """The least and the greatest value of each run; NaN where they cannot be known without looking at each value."""
    found = [extremes(elements) for _, elements in runs]
    if runs and None not in found:
        with suppress(torch.OutOfMemoryError):
            return torch.stack([limit for pair in found if pair for limit in pair]).view(-1, 2)
    return torch.full((len(runs), 2), math.nan, device="cpu")


def goes_straight(runs: Sequence[Run]) -> bool:
    """Whether the values of a block are copied from the buffer to where they belong, and not by the block."""
    count = sum(len(run.values) for run in runs)
    return count <= _MOST_DIRECT and all(value.target.dtype is run.dtype for run in runs for value in run.values)


class StreamBuffers(Buffers):
    """The buffers of streamed reads: of pinned memory where blocks are copied to CUDA devices."""

    def __init__(self, staging: Staging, devices: Iterable[torch.device]) -> None:
        super().__init__()
        self.queues = {device: CudaQueue(device) for device in sorted(set(devices), key=str) if device.type == "cuda"}
        self._tracker, self._taken = staging.held, 0

    @torch.inference_mode(False)  # tensors of that mode could not be written to outside of it
    def _make(self, count: int, nbytes: int) -> list[torch.Tensor]:
        on_devices = sum(queue.reserve(nbytes) for queue in self.queues.values())
        taken = count * nbytes + on_devices
        self._tracker.take(taken)
        self._taken += taken
        for device in self.queues:
            with suppress(RuntimeError):  # a limit on pinned memory; copies from other memory only take longer
                step = aligned(nbytes)
                memory = pinned_memory(count * step, device)
                return [memory[at : at + nbytes] for at in range(0, count * step, step)]
        return super()._make(count, nbytes)

    def release(self) -> None:
        """Frees the buffers and the memory on the devices, when all reads have ended."""
        super().release()
        for queue in self.queues.values():
            queue.release()
        self._tracker.take(-self._taken)
        self._taken = 0


Progress = Callable[[int], None]


class Leased(NamedTuple):
    """Files that are leased, and the buffers of the reads from them, which are made when all of these are planned."""

    files: LeasedFiles
    buffers: StreamBuffers


def streamed_read(
    staging: Staging, streamed: Sequence[Assignment], progress: Progress, leased: Leased | None = None
) -> Callable[[], None]:
    """Returns a function that reads the final values of assignments that can be streamed.

    It reads in place where the placement says so, and from the files of `leased`, where that is passed.

    It raises `ReadFailedError` and `TransformError`; memory that is read in place is then partly overwritten.
    """
    buffers = StreamBuffers(staging, (one.device for one in streamed)) if leased is None else leased.buffers
    consumer = _BlockConsumer(staging, streamed, buffers.queues)
    ranges = [one.stored.extent for one in streamed if isinstance(one.stored, StoredTensor)]
    wanted = [Wanted(extent, one.unit_bytes) for extent, one in zip(ranges, streamed, strict=True)]

    def on_block(block: Block, seconds: float) -> None:
        consumer.on_block(block, seconds)
        progress(block.wanted_bytes)

    return _stream(
        *(staging, wanted, consumer.consume, buffers, on_block, consumer.end, leased),
        to_device=any(one.device in buffers.queues for one in streamed),
    )


def table_read(
    staging: Staging,
    table: PlainTable,
    targets: Sequence[torch.Tensor],
    progress: Progress,
    leased: Leased | None = None,
) -> Callable[[], None]:
    """Returns a function that reads the values of a streamed table into tensors, and casts them.

    Values that adjoin in a file are read as one range, and the bytes of a value that has several names once.

    With `leased` it reads from these files.

    It raises `ReadFailedError`; memory that is read in place is then partly overwritten.
    """
    dtype, sources, extents = table.stored_dtype, table.sources, table.extents
    in_order = sorted(range(len(sources)), key=sources.__getitem__)
    begins = [(path, start) for path, start, _ in map(sources.__getitem__, in_order)]
    ends = [(path, start + nbytes) for path, start, nbytes in map(sources.__getitem__, in_order)]
    buffers = StreamBuffers(staging, [table.device]) if leased is None else leased.buffers
    queue = buffers.queues.get(table.device)

    def consume(block: Block, buffer: torch.Tensor) -> Wait | None:
        runs = [run_of(part) for part in block.parts]
        if queue is not None:
            return queue.run(buffer, block.nbytes, runs, staging.overflows)
        copy_runs(runs, buffer, staging.overflows)
        return None

    def run_of(part: Part) -> Run:
        path, first = extents[part.which].path, extents[part.which].start + part.first
        values = []
        for row in in_order[bisect_right(ends, (path, first)) : bisect_left(begins, (path, first + part.nbytes))]:
            _, start, nbytes = sources[row]
            begin, end = max(start, first), min(start + nbytes, first + part.nbytes)
            target = targets[row]
            if end - begin < nbytes:
                at = target.storage_offset() + (begin - start) // dtype.itemsize
                target = target.as_strided(((end - begin) // dtype.itemsize,), (1,), at)
            elif target.dim() != 1:
                target = target.view(-1)
            values.append(Value(table.slots[row].name, (begin - first) // dtype.itemsize, target))
        return Run(part.at, part.nbytes // dtype.itemsize, dtype, values)

    def on_block(block: Block, seconds: float) -> None:
        table.seconds += seconds
        progress(block.wanted_bytes)

    def end() -> None:
        progress(table.nbytes - sum(extent.nbytes for extent in extents))

    wanted = [Wanted(extent, dtype.itemsize) for extent in extents]
    return _stream(
        *(staging, wanted, consume, buffers, on_block, end, leased),
        to_device=queue is not None,
    )


def _stream(
    staging: Staging,
    wanted: Sequence[Wanted],
    consume: Consume,
    buffers: StreamBuffers,
    on_block: Callable[[Block, float], None],
    end: Callable[[], None],
    leased: Leased | None,
    *,
    to_device: bool,
) -> Callable[[], None]:
    """Returns the function that reads the ranges, and gives blocks to `consume`."""
    strategy, fingerprints = staging.strategy, staging.checkpoint.fingerprints
    if to_device:
        strategy = strategy.for_devices(sum(aligned(entry.source.nbytes) for entry in wanted))
    align_bytes = common_align_bytes({entry.source.path for entry in wanted}, fingerprints)
    blocks = in_blocks(wanted, strategy.block_bytes, align_bytes)
    buffers.need(blocks, strategy.threads)

    def run() -> None:
        try:
            stream(
                *(wanted, consume),
                strategy=strategy,
                fingerprints=fingerprints,
                on_block=on_block,
                blocks=blocks,
                buffers=buffers,
                leased=None if leased is None else leased.files,
            )
        finally:
            # A block that has failed may have left copies behind: they use memory that is freed after an error.
            for queue in buffers.queues.values():
                queue.wait()
        if leased is None:
            buffers.release()
        end()

    return run


class _BlockConsumer:
    """Casts, moves or transforms the parts of blocks, and writes them to the final tensors."""

    def __init__(
        self, staging: Staging, streamed: Sequence[Assignment], queues: Mapping[torch.device, CudaQueue]
    ) -> None:
        self._streamed, self._queues, self._overflows = streamed, queues, staging.overflows
        self._parts = {
            index: assignment.block_function.parts(assignment.param.shape[0])
            for index, assignment in enumerate(streamed)
            if assignment.block_function is not None
        }
        cast = [index for index, assignment in enumerate(streamed) if assignment.block_function is None]
        self._finals = dict(zip(cast, _memory([streamed[index] for index in cast]), strict=True))
        self._flat = {index: final.detach().view(-1) for index, final in self._finals.items()}
        self._tracker = staging.held
        self._tracker.take(sum(assignment.staged_bytes for assignment in streamed))

    def consume(self, block: Block, buffer: torch.Tensor) -> Wait | None:
        """Processes a block. Returns a function that waits until the buffer can be used again."""
        queues = self._queues
        runs = defaultdict[torch.device, list[Run]](list)
        for part in block.parts:
            assignment = self._streamed[part.which]
            itemsize = assignment.value.dtype.itemsize
            run = Run(part.at, part.nbytes // itemsize, assignment.value.dtype, ())
            if assignment.block_function is None:
                first = part.first // itemsize
                target = self._flat[part.which][first : first + run.numel]
                runs[target.device].append(run._replace(values=[Value(assignment.name, 0, target)]))
            else:
                self._transform(assignment, assignment.block_function, part, run.shown(buffer))
        waits = list[Wait]()
        for device, its in runs.items():
            if device in queues:
                waits.append(queues[device].run(buffer, block.nbytes, its, self._overflows))
            else:
                copy_runs(its, buffer, self._overflows)
        return (lambda: [wait() for wait in waits]) if waits else None

    def _transform(self, assignment: Assignment, function: BlockFunction, part: Part, value: torch.Tensor) -> None:
        """Transforms the rows of a part, and writes them where they belong."""
        rows = value.view(-1, *assignment.value.shape[1:])
        first = part.first // assignment.unit_bytes
        cast_bytes = 0 if value.dtype == assignment.dtype else rows.numel() * assignment.dtype.itemsize
        with self._tracker.during(function.extra_bytes + cast_bytes):
            cast = rows.to(assignment.dtype)
            assignment.overflows.check(assignment.name, rows, cast)
            parts = {name: tensor[first : first + len(rows)] for name, tensor in self._parts[part.which].items()}
            with transform_errors(assignment.name):
                function.write(cast, parts)

    @torch.inference_mode(False)
    def end(self) -> None:
        """Sets the final values of the assignments."""
        for index, assignment in enumerate(self._streamed):
            if assignment.block_function is None:
                assignment.final = self._finals[index]
                continue
            result = assignment.block_function.whole(self._parts[index], assignment.param.shape)
            assignment.final, assignment.freezes = result.detach(), not result.requires_grad
            assignment.dtype = assignment.final.dtype
            assignment.placement = after_module_transform(assignment.placement, assignment.param, assignment.final)

    def on_block(self, block: Block, seconds: float) -> None:
        """Records the seconds that a block took."""
        wanted_bytes = block.wanted_bytes
        for part in block.parts:
            assignment = self._streamed[part.which]
            assignment.seconds += seconds * part.nbytes / wanted_bytes


def _memory(cast: Sequence[Assignment]) -> list[torch.Tensor]:
    """The final memory of each assignment."""
    on_cpu = [assignment for assignment in cast if assignment.on_cpu and not assignment.placement.direct]
    fresh = iter(fresh_tensors([assignment.layout for assignment in on_cpu]))
    memory = []
    with torch.inference_mode(False):
        for assignment in cast:
            if assignment.placement.direct:
                memory.append(assignment.param)
            elif assignment.on_cpu:
                memory.append(next(fresh))
            else:
                memory.append(torch.empty(assignment.param.shape, dtype=assignment.dtype, device=assignment.device))
    return memory
