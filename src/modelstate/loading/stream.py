"""Streams tensors: one thread casts, moves or transforms a block while another one reads the next."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from modelstate.errors import TransformError
from modelstate.io.blocks import Block, Part, Wait, Wanted, stream
from modelstate.io.engine import BUFFER_BYTES
from modelstate.io.held import HeldFiles
from modelstate.io.memory import fresh_tensors
from modelstate.loading.staging import Staging
from modelstate.planning.assignment import Assignment, after_remaking, remade, transform_errors
from modelstate.planning.plain_table import PlainTable
from modelstate.planning.transforms import RowsWriter, asked_writer
from modelstate.spec import StoredTensor, contiguous_stride
from modelstate.torch_compat.dtypes import can_overflow, is_within
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import copy_each

_FEW = 16
"""So many tensors of a block are checked one by one, whether a cast has made values infinite."""


class CudaCopyStreams:
    """A stream of copies for each device and each thread."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # The memory of the targets may still be in use by what the caller has queued before.
        self._before = {device: torch.cuda.current_stream(device) for device in devices}
        self._own = threading.local()

    def copy(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Wait:
        """Starts to copy values from pinned memory and to cast them on the device; returns a function that waits."""
        used: dict[torch.device, Any] = {}
        for target, value in zip(targets, values, strict=True):
            if target.device not in self._before:
                target.copy_(value)
                continue
            stream = used.setdefault(target.device, self._of_this_thread(target.device))
            with torch.cuda.stream(stream):
                there = value.to(target.device, non_blocking=True) if value.dtype != target.dtype else value
                target.copy_(there, non_blocking=True)
        events = [stream.record_event() for stream in used.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _of_this_thread(self, device: torch.device) -> Any:
        if not hasattr(self._own, "streams"):
            self._own.streams = {}
        streams: dict[torch.device, Any] = self._own.streams
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_stream(self._before[device])
        return streams[device]


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The plain tensors that a tensor consists of, each with the tensor's rows; None for any other tensor."""
    if is_plain(tensor):
        parts = {"": tensor}
    else:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            return None
        parts = {name: getattr(tensor, name) for name in flatten()[0]}
    rows = tensor.shape[0]
    fit = all(is_plain(part) and part.dim() and len(part) == rows and part.is_contiguous() for part in parts.values())
    return parts if fit else None


class _Part(NamedTuple):
    name: str
    columns: torch.Size
    """The shape of a row."""
    dtype: torch.dtype
    device: torch.device


class _Kind(NamedTuple):
    """What all pieces of a tensor have in common."""

    cls: type
    context: str
    parts: tuple[_Part, ...]
    freezes: bool


class RowAssembler:
    """Joins the rows of a tensor, which any thread adds in any order."""

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows = name, rows
        self._kind: _Kind | None = None
        self._context: Any = None
        self._shape = torch.Size()
        self._parts: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def put(self, first: int, some: torch.Tensor) -> None:
        """Adds rows from `first` on. Raises `TransformError` where they are not like the rows before."""
        for name, part in self.begin(some).items():
            self._parts[name][first : first + part.shape[0]].copy_(part)

    def begin(self, some: torch.Tensor) -> dict[str, torch.Tensor]:
        """Allocates the memory for rows like these, without adding them, and returns their parts.

        Raises `TransformError` where they are not like the rows before.
        """
        parts = parts_of(some)
        kind = None if parts is None else _kind(some, parts)
        with self._lock:
            if self._kind is None and kind is not None:
                self._begin(kind, _context(some), some.shape[1:])
        if parts is None or kind != self._kind:
            raise TransformError(
                "what the transform returned for some rows cannot be joined; nothing has been changed",
                where=self._name,
                expected="plain tensors, or tensors of one class, whose parts have as many rows"
                if self._kind is None
                else f"the same for all rows: {self._kind}",
                found=type(some).__name__ if kind is None else kind,
                remedy="let rows_at_once return None, so that it gets the whole tensor",
            )
        return parts

    @property
    def has_begun(self) -> bool:
        """Whether the memory is allocated."""
        return self._kind is not None

    def at(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The memory of `count` rows from `first` on, by part."""
        return {name: part[first : first + count] for name, part in self._parts.items()}

    def _begin(self, kind: _Kind, context: Any, columns: torch.Size) -> None:
        self._context, self._shape = context, torch.Size((self._rows, *columns))
        on_cpu = {part.name: part for part in kind.parts if part.device.type == "cpu"}
        layouts = [(torch.Size((self._rows, *part.columns)), None, part.dtype) for part in on_cpu.values()]
        fresh = dict(zip(on_cpu, fresh_tensors(layouts), strict=True))
        for name, columns, dtype, device in kind.parts:
            there = fresh.get(name)
            if there is None:
                there = torch.empty((self._rows, *columns), dtype=dtype, device=device)
            self._parts[name] = there
        self._kind = kind

    @property
    def whole(self) -> torch.Tensor:
        """The tensor, once all rows are there."""
        assert self._kind is not None
        if "" in self._parts:
            return self._parts[""]
        cls: Any = self._kind.cls
        stride = contiguous_stride(self._shape)
        tensor: torch.Tensor = cls.__tensor_unflatten__(self._parts, self._context, self._shape, stride)
        return tensor

    @property
    def freezes(self) -> bool:
        """Whether the rows are a parameter without gradient."""
        return self._kind is not None and self._kind.freezes


def _kind(some: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> _Kind:
    context = "" if is_plain(some) else repr(_context(some))
    like = tuple(_Part(name, part.shape[1:], part.dtype, part.device) for name, part in parts.items())
    return _Kind(type(some.data), context, like, isinstance(some, torch.nn.Parameter) and not some.requires_grad)


def _context(some: torch.Tensor) -> Any:
    return None if is_plain(some) else some.__tensor_flatten__()[1]  # type: ignore[attr-defined]


Progress = Callable[[int], None]


def read_streamed(
    staging: Staging, streamed: Sequence[Assignment], progress: Progress, held: HeldFiles | None = None
) -> None:
    """Reads the final values of assignments that can be streamed, in place where the placement says so.

    With `held` it reads from these files, and everything that can be read is in place also where it raises.

    Raises `ReadFailedError` and `TransformError`; memory that is read in place is then partly overwritten.
    """
    if not streamed:
        return
    strategy = staging.strategy
    consumer = _BlockConsumer(staging, streamed, BUFFER_BYTES if strategy.uncached else 0)

    def on_block(block: Block, seconds: float) -> None:
        consumer.on_block(block, seconds)
        progress(block.wanted_bytes)

    stream(
        [Wanted(one.stored.extent, one.unit_bytes) for one in streamed if isinstance(one.stored, StoredTensor)],
        consumer.consume,
        strategy=strategy,
        fingerprints=staging.checkpoint.fingerprints,
        on_block=on_block,
        buffers=2 if consumer.on_device else 1,
        pinned=consumer.on_device,
        held=held,
    )
    consumer.end()
    staging.held.take(-consumer.buffer_bytes)


def read_cast(
    staging: Staging,
    table: PlainTable,
    targets: Sequence[torch.Tensor],
    progress: Progress,
    held: HeldFiles | None = None,
) -> None:
    """Reads and casts the values of a table into tensors. Values that adjoin in a file are read as one range.

    The bytes of a value that has several names are read once.

    With `held` it reads from these files, and everything that can be read is in place also where it raises.

    Raises `ReadFailedError`; memory that is read in place is then partly overwritten.
    """
    dtype, sources, runs = table.stored_dtype, table.sources, table.extents
    in_order = sorted(range(len(sources)), key=sources.__getitem__)
    begins = [(path, start) for path, start, _ in map(sources.__getitem__, in_order)]
    ends = [(path, start + nbytes) for path, start, nbytes in map(sources.__getitem__, in_order)]
    narrow = {target for target in table.dtypes if can_overflow(dtype, target)}
    buffers_bytes: dict[int, int] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def consume(block: Block, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() not in buffers_bytes:
            buffers_bytes[buffer.data_ptr()] = buffer.nbytes + (BUFFER_BYTES if staging.strategy.uncached else 0)
            staging.held.take(buffers_bytes[buffer.data_ptr()])
        for part in block.parts:
            rows, values, cast = list[int](), list[torch.Tensor](), list[torch.Tensor]()
            read = _shown(buffer, part, dtype)
            path, first = runs[part.which].path, runs[part.which].start + part.first
            end = first + part.nbytes
            for row in in_order[bisect_right(ends, (path, first)) : bisect_left(begins, (path, end))]:
                _, start, nbytes = sources[row]
                value = read[max(start - first, 0) // dtype.itemsize : (start + nbytes - first) // dtype.itemsize]
                target = targets[row].view(-1)
                if len(value) < len(target):
                    skipped = max(first - start, 0) // dtype.itemsize
                    target = target[skipped : skipped + len(value)]
                rows.append(row)
                values.append(value)
                cast.append(target)
            copy_each(cast, values)
            # The sum of a result takes less time than the limits of what was read, but a call for each tensor.
            if narrow and (len(rows) <= _FEW or not all(is_within(read, target) for target in narrow)):
                for row, value, target in zip(rows, values, cast, strict=True):
                    staging.overflows.check(table.slots[row].name, value, target)

    def on_block(block: Block, seconds: float) -> None:
        table.seconds += seconds
        progress(block.wanted_bytes)

    stream(
        [Wanted(run, dtype.itemsize) for run in runs],
        consume,
        strategy=staging.strategy,
        fingerprints=staging.checkpoint.fingerprints,
        on_block=on_block,
        held=held,
    )
    staging.held.take(-sum(buffers_bytes.values()))
    progress(table.nbytes - sum(run.nbytes for run in runs))


class _BlockConsumer:
    """Casts, moves or transforms the parts of blocks, and writes them to the final tensors."""

    def __init__(self, staging: Staging, streamed: Sequence[Assignment], beside_bytes: int) -> None:
        self._streamed = streamed
        self._joined = {
            index: RowAssembler(assignment.name, assignment.param.shape[0])
            for index, assignment in enumerate(streamed)
            if assignment.remake is not None
        }
        self._writers = {index: _writer(streamed[index]) for index in self._joined}
        cast = [index for index, assignment in enumerate(streamed) if assignment.remake is None]
        self._finals = dict(zip(cast, _memory(staging, [streamed[index] for index in cast]), strict=True))
        self._flat = {index: final.detach().view(-1) for index, final in self._finals.items()}
        devices = {final.device for final in self._finals.values() if final.device.type == "cuda"}
        self.on_device = bool(devices)
        self._queues = CudaCopyStreams(devices)
        self._held, self._bytes_of_buffers = staging.held, dict[int, int]()
        self._beside_bytes = beside_bytes
        self._held.take(sum(assignment.staged_bytes for assignment in streamed))

    @property
    def buffer_bytes(self) -> int:
        """The size of the buffers in use, with the O_DIRECT buffer of each."""
        return sum(self._bytes_of_buffers.values())

    @torch.inference_mode(False)
    def consume(self, block: Block, buffer: torch.Tensor) -> Wait | None:
        """Processes a block. Returns a function that waits until the buffer can be used again."""
        if buffer.data_ptr() not in self._bytes_of_buffers:
            self._bytes_of_buffers[buffer.data_ptr()] = buffer.nbytes + self._beside_bytes
            self._held.take(buffer.nbytes + self._beside_bytes)
        values: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        checked: list[tuple[Assignment, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for part in block.parts:
                assignment = self._streamed[part.which]
                value = _shown(buffer, part, assignment.value.dtype)
                if assignment.remake is not None:
                    self._remake(assignment, part, value)
                    continue
                first = part.first // assignment.value.itemsize
                values.append(value)
                targets.append(self._flat[part.which][first : first + value.numel()])
                if can_overflow(assignment.value.dtype, assignment.dtype):
                    checked.append((assignment, value, targets[-1]))
            if self.on_device:
                for assignment, value, target in checked:  # before the buffer is read into again
                    assignment.overflows.check(assignment.name, value, target)
                return self._queues.copy(targets, values)
            if values:
                copy_each(targets, values)
            for assignment, value, target in checked:
                assignment.overflows.check(assignment.name, value, target)
        return None

    def _remake(self, assignment: Assignment, part: Part, value: torch.Tensor) -> None:
        assert assignment.remake is not None
        rest = assignment.value.shape[1:]
        rows = value.view(-1, *rest)
        first = part.first // (assignment.nbytes // assignment.value.shape[0])
        casts = value.dtype != assignment.dtype
        for at in range(0, len(rows), assignment.remake_rows):
            given = rows[at : at + assignment.remake_rows]
            # The transform gets as many bytes as it returns.
            given_bytes = given.numel() * assignment.dtype.itemsize * (2 if casts else 1)
            with self._held.during(assignment.remake_bytes + given_bytes):
                some = given.to(assignment.dtype)
                assignment.overflows.check(assignment.name, given, some)
                some = some.to(assignment.device)
                self._join(part.which, first + at, some)
                del some

    def _join(self, which: int, first: int, some: torch.Tensor) -> None:
        """Transforms some rows, and puts them where they belong."""
        assignment, joined, writer = self._streamed[which], self._joined[which], self._writers[which]
        assert assignment.remake is not None
        if writer is None:
            joined.put(first, remade(assignment, assignment.remake, some, some.shape))
            return
        if not joined.has_begun:
            joined.begin(writer.like)
        with transform_errors(assignment.name):
            writer.write(some, joined.at(first, len(some)))

    @torch.inference_mode(False)
    def end(self) -> None:
        """Sets the final values of the assignments."""
        for index, assignment in enumerate(self._streamed):
            if assignment.remake is None:
                assignment.final = self._finals[index]
                continue
            joined = self._joined[index]
            assignment.final, assignment.freezes = joined.whole.detach(), joined.freezes
            assignment.dtype = assignment.final.dtype
            assignment.placement = after_remaking(assignment.placement, assignment.param, assignment.final)

    def on_block(self, block: Block, seconds: float) -> None:
        """Records the seconds that a block took."""
        for part in block.parts:
            assignment = self._streamed[part.which]
            assignment.seconds += seconds * part.nbytes / block.wanted_bytes


def _memory(staging: Staging, cast: Sequence[Assignment]) -> list[torch.Tensor]:
    """The final memory of each assignment."""
    on_cpu = [assignment for assignment in cast if assignment.on_cpu and not assignment.placement.direct]
    copied = [assignment for assignment in on_cpu if assignment.placement.staged]
    kept = [assignment for assignment in on_cpu if not assignment.placement.staged]
    memory_of = {
        id(assignment): tensor
        for some, allocate in ((copied, staging.temporary), (kept, fresh_tensors))
        for assignment, tensor in zip(some, allocate([assignment.layout for assignment in some]), strict=True)
    }
    memory = []
    with torch.inference_mode(False):
        for assignment in cast:
            if assignment.placement.direct:
                memory.append(assignment.param)
            elif assignment.on_cpu:
                memory.append(memory_of[id(assignment)])
            else:
                memory.append(torch.empty(assignment.param.shape, dtype=assignment.dtype, device=assignment.device))
    return memory


def _writer(assignment: Assignment) -> RowsWriter | None:
    """The function that writes transformed rows to their final memory, where the transform has one."""
    if assignment.remake is None or not assignment.on_cpu:
        return None
    return asked_writer(assignment.remake, assignment.name, tuple(assignment.param.shape), assignment.dtype)


def _shown(buffer: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A view of a part of the buffer with the stored dtype."""
    count = part.nbytes // dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(buffer.untyped_storage(), part.at // dtype.itemsize, (count,), contiguous_stride((count,)))
