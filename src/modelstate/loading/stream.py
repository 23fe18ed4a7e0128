"""Reads values in blocks that are cast, moved or transformed while the next block is read."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from modelstate.errors import TransformError
from modelstate.io.engine import BUFFER_BYTES, Block, Part, Wait, Wanted
from modelstate.io.memory import MemoryTracker, fresh_tensors
from modelstate.planning.assignment import Assignment, remade, transform_errors
from modelstate.planning.placement import after_remaking
from modelstate.planning.prepare import Preparation
from modelstate.planning.transforms import RowsWriter, asked_writer
from modelstate.spec import StoredTensor, contiguous_stride
from modelstate.torch_compat.dtypes import can_overflow
from modelstate.torch_compat.plain import is_plain


class CudaCopyStreams:
    """A stream of copies for each device and each thread."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # The memory of the targets may still be in use by what the caller has queued before.
        self._before = {device: torch.cuda.current_stream(device) for device in devices}
        self._own = threading.local()

    def copy(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Wait:
        """Begins to copy values out of pinned memory; returns what waits for the end. They are cast on the device."""
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
    """The plain tensors that a tensor is made of, each with the tensor's rows; None where it is not of that kind."""
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
    """A tensor of so many rows, of which some are given at a time, from any thread and in any order."""

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows = name, rows
        self._kind: _Kind | None = None
        self._context: Any = None
        self._shape = torch.Size()
        self._parts: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def put(self, first: int, some: torch.Tensor) -> None:
        """Takes the rows from `first` on. Raises `TransformError` where they are not like those that came before."""
        for name, part in self.begin(some).items():
            self._parts[name][first : first + part.shape[0]].copy_(part)

    def begin(self, some: torch.Tensor) -> dict[str, torch.Tensor]:
        """Makes the memory for rows that are like these, without taking them, and returns their parts.

        Raises `TransformError` where they are not like those that came before.
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
        """Whether any rows have come, which say what parts there are."""
        return self._kind is not None

    def at(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The memory for so many rows from the first on, by part, once it has begun."""
        return {name: part[first : first + count] for name, part in self._parts.items()}

    def _begin(self, kind: _Kind, context: Any, columns: torch.Size) -> None:
        self._context, self._shape = context, torch.Size((self._rows, *columns))
        on_cpu = {part.name: part for part in kind.parts if part.device.type == "cpu"}
        layouts = [(torch.Size((self._rows, *part.columns)), None, part.dtype) for part in on_cpu.values()]
        fresh = dict(zip(on_cpu, fresh_tensors(layouts), strict=True))
        for name, columns, dtype, device in kind.parts:
            there = fresh.get(name)
            made = torch.empty((self._rows, *columns), dtype=dtype, device=device) if there is None else there
            self._parts[name] = made
        self._kind = kind

    @property
    def whole(self) -> torch.Tensor:
        """The tensor, when all rows have come."""
        assert self._kind is not None
        if "" in self._parts:
            return self._parts[""]
        cls: Any = self._kind.cls
        made: torch.Tensor = cls.__tensor_unflatten__(
            self._parts, self._context, self._shape, contiguous_stride(self._shape)
        )
        return made

    @property
    def freezes(self) -> bool:
        """Whether the rows came as a parameter that gets no gradient."""
        return self._kind is not None and self._kind.freezes


def _kind(some: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> _Kind:
    context = "" if is_plain(some) else repr(_context(some))
    like = tuple(_Part(name, part.shape[1:], part.dtype, part.device) for name, part in parts.items())
    return _Kind(type(some.data), context, like, isinstance(some, torch.nn.Parameter) and not some.requires_grad)


def _context(some: torch.Tensor) -> Any:
    return None if is_plain(some) else some.__tensor_flatten__()[1]  # type: ignore[attr-defined]


Progress = Callable[[int], None]


def read_streamed(preparation: Preparation, streamed: Sequence[Assignment], progress: Progress) -> None:
    """Gives assignments that can be streamed their final values; those that are read in place get them where they are.

    Raises `ReadFailedError` and `TransformError`; what is read in place is then partly overwritten.
    """
    if not streamed:
        return
    means = preparation.means
    flow = _Flow(streamed, preparation.held, BUFFER_BYTES if means.uncached else 0)

    def on_block(block: Block, seconds: float) -> None:
        flow.on_block(block, seconds)
        progress(block.wanted_bytes)

    preparation.checkpoint.stream(
        [Wanted(made.stored.extent, made.unit_bytes) for made in streamed if isinstance(made.stored, StoredTensor)],
        flow.consume,
        strategy=means,
        on_block=on_block,
        buffers=2 if flow.on_device else 1,
        pinned=flow.on_device,
    )
    flow.end()
    preparation.held.take(-flow.buffer_bytes)


class _Flow:
    """Where the pieces go."""

    def __init__(self, streamed: Sequence[Assignment], held: MemoryTracker, beside_bytes: int) -> None:
        self._streamed = streamed
        self._joined = {
            index: RowAssembler(made.name, made.param.shape[0])
            for index, made in enumerate(streamed)
            if made.remake is not None
        }
        self._writers = {index: _writer(streamed[index]) for index in self._joined}
        cast = [index for index, made in enumerate(streamed) if made.remake is None]
        self._finals = dict(zip(cast, _memory([streamed[index] for index in cast]), strict=True))
        self._flat = {index: final.detach().view(-1) for index, final in self._finals.items()}
        devices = {final.device for final in self._finals.values() if final.device.type == "cuda"}
        self.on_device = bool(devices)
        self._queues = CudaCopyStreams(devices)
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
        with transform_errors(made.name):
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

    def on_block(self, block: Block, seconds: float) -> None:
        """Records the seconds that a block took."""
        for part in block.parts:
            made = self._streamed[part.which]
            made.seconds += seconds * part.nbytes / block.wanted_bytes


def _memory(cast: Sequence[Assignment]) -> list[torch.Tensor]:
    """For each the memory where its value stays."""
    on_cpu = [made for made in cast if made.on_cpu and not made.placement.direct]
    fresh = dict(zip(map(id, on_cpu), fresh_tensors([made.layout for made in on_cpu]), strict=True))
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


def _shown(buffer: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A piece as numbers, in the buffer."""
    count = part.nbytes // dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(buffer.untyped_storage(), part.at // dtype.itemsize, (count,), contiguous_stride((count,)))
