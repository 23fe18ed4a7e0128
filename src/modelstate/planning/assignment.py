"""Assignments of values to slots: where the bytes go, how they are read, and how transforms change them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

import torch
from torch import nn

from modelstate.errors import ModelStateError, TransformError
from modelstate.io.engine import Request, Rows
from modelstate.io.memory import Layout, fresh_tensors
from modelstate.planning.sharded import ShardedSlot
from modelstate.planning.transforms import BlockFunction, Bound, Transform
from modelstate.rules.expression import Derived, PlacedTensor, Source, placed_tensors
from modelstate.spec import ByteRange, Combined, StoredComposite, StoredTensor, contiguous_stride, is_run
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import Overflows, nonfinite
from modelstate.torch_compat.plain import has_its_memory, is_dense, is_plain, is_plain_memory
from modelstate.torch_compat.private import payload_of, storage_id, storage_owners

COPYABLE = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ]
)
"""Dtypes between which a copy of torch cannot fail."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a value gets into its slot, and why."""

    name: str
    """"copy", "data", "swap" or "call"."""
    why: str
    mapped: bool = False
    """The memory of the slot is a map of the file."""
    direct: bool = False
    """The bytes are read directly into the memory of the slot. An I/O error does not restore the old values."""
    leased: bool = False
    """Of `direct`: the bytes are read at the commit, from a file that a read lease holds; else the value is staged."""
    by_handler: bool = False
    """The `module_load` handler of a tensor subclass decides."""
    staged: bool = field(init=False)
    """The value is read into temporary memory, and copied when all values are read."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "staged", self.name == "copy" and not self.direct)


CALL = Placement("call", "passed to set_extra_state")
"""The placement of extra state."""
MAPPED = Placement("swap", "was on meta: becomes a map of the file", mapped=True)
NEW_MEMORY = Placement("swap", "was on meta: gets memory")
DIRECT = Placement("copy", "into the existing memory, directly", direct=True)
DEVICES_READ_INTO = ("cpu", "cuda")
"""The types of devices with memory that can be read into at the commit: no step of the way there allocates memory."""
LEASED = Placement(
    "copy", "into the existing memory, directly, while a read lease holds the file", direct=True, leased=True
)
STAGED = Placement("copy", "into the existing memory, after all reads")


@cache
def staged_because(reason: str) -> Placement:
    """The placement of values that were planned to be read at the commit, and are not."""
    return Placement("copy", f"{STAGED.why}: {reason}")


def choose(
    param: torch.Tensor,
    value: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    *,
    map: bool,
    in_place: bool | None,
    transformed: bool,
) -> Placement:
    """Returns the placement of a value in a slot.

    Args:
        param: The tensor of the slot.
        value: The value as it is in the checkpoint.
        dtype: The dtype of the slot after the load.
        device: The device of the slot after the load.
        map: Whether the slot may be a map of the file.
        in_place: Whether the bytes may be read directly into the memory of the slot; None for a read that cannot fail.
        transformed: Whether a transform may still change the value.
    """
    if not is_plain(param, value):
        is_mapped = map and param.is_meta and is_plain(value) and dtype == value.dtype
        return Placement(
            "swap", "a tensor subclass or layout decides in module_load", mapped=is_mapped, by_handler=True
        )
    if param.is_meta:
        is_mapped = map and dtype == value.dtype and device.type == "cpu" and value.stride() == param.stride()
        return MAPPED if is_mapped else NEW_MEMORY
    if dtype != param.dtype:
        return Placement("data", f"changes its dtype to {str(dtype).removeprefix('torch.')}")
    if device != param.device:
        return Placement("data", f"moves to {device}")
    if in_place is not False and not transformed and _copy_cannot_fail(param, value):
        if in_place is None:  # the value is a map of a file, and shares no memory with the slot
            return LEASED
        if storage_id(param) != storage_id(value):
            return DIRECT
    return STAGED


def after_transform(planned: Placement, param: torch.Tensor, result: torch.Tensor, value: torch.Tensor) -> Placement:
    """Returns the placement of the result of a transform, whose class and dtype the slot gets."""
    if not is_plain(result):
        return Placement("swap", "takes the class of the result of the transform")
    if not is_plain(param):
        return Placement("swap", "a tensor subclass decides in module_load", by_handler=True)
    if param.is_meta:
        is_mapped = planned.mapped and storage_id(result) == storage_id(value)
        return planned if is_mapped else Placement("swap", "was on meta: gets the result of the transform")
    if result.dtype != param.dtype:
        return Placement("data", f"changes its dtype to {str(result.dtype).removeprefix('torch.')}")
    return planned


def after_module_transform(planned: Placement, param: torch.Tensor, result: torch.Tensor) -> Placement:
    """Returns the placement of the result of a module's transform, whose class and dtype the slot gets."""
    if not is_plain(result):
        return Placement("swap", f"{type(result).__name__} {planned.why}")
    return choose(param, result, result.dtype, result.device, map=False, in_place=False, transformed=True)


def copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `target.copy_(value)` cannot fail, for equal shapes."""
    return is_plain(target, value) and _copy_cannot_fail(target, value) and storage_id(target) != storage_id(value)


def _copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """`copy_cannot_fail` for plain tensors that share no memory."""
    dtype, value_dtype = target.dtype, value.dtype
    if dtype not in COPYABLE or value.is_meta or target.is_inference():
        return False
    if value_dtype != dtype and (
        value_dtype not in COPYABLE
        or dtype.is_complex < value_dtype.is_complex  # torch warns, and a warning may be made an error
    ):
        return False
    return target.is_meta or ((target.is_contiguous() or is_dense(target)) and has_its_memory(target))


LEAST_AHEAD_BYTES = 64 << 10
"""Reading fewer bytes takes less time than handing them to another thread."""


class ReadRoute(StrEnum):
    """How the bytes of a value get from their source to its final memory."""

    MAPPED = "mapped"
    """Not at all: the memory of the slot is a map of the file."""
    IN_MEMORY = "in memory"
    """The source is a tensor in memory."""
    DIRECT = "direct"
    """Read into the final memory."""
    STREAMED = "streamed"
    """Cast, moved or transformed in blocks while they are read."""
    COMPUTED = "computed"
    """Computed in blocks from several tensors, into the final memory."""
    WHOLE = "whole"
    """Read into a buffer first."""


@dataclass(slots=True, eq=False)
class Assignment:
    """A value that is loaded into a slot."""

    name: str
    """The name in the model."""
    kind: str
    param: torch.Tensor
    """The tensor that is in the slot before the load."""
    value: torch.Tensor
    """The value as it is in the checkpoint: a map of the file, whose bytes have not been read."""
    given: str
    """The name of the value in the state dict for the model; empty where code of the model computed the value."""
    stored: Source | None
    """The source of the value; None where the model's code computed the value, or may have changed it."""
    placement: Placement
    plain: bool
    """Whether the tensor and the value are plain tensors."""
    dtype: torch.dtype
    """After the load."""
    device: torch.device
    """After the load."""
    overflows: Overflows
    """Counts values that a cast makes infinite or NaN, for all assignments of a load."""
    transform: Transform | None = None
    """Called with the value as it is in the checkpoint. Its result may have any dtype."""
    module_transform: Bound | None = None
    """Called with the value as it would be loaded: cast, and on its device."""
    transform_bytes: int = 0
    """Bytes of memory that a call of `module_transform` needs in addition to its argument and its result."""
    block_function: BlockFunction | None = None
    """Computes the result of `module_transform` in blocks of rows; None where a call needs the whole value."""
    freezes: bool = False
    """Whether the result of `module_transform` clears `requires_grad` of the slot."""
    final: torch.Tensor | None = None
    """The final value; None until the value has been read, cast and transformed."""
    seconds: float = 0.0
    sharded: ShardedSlot | None = None
    """The DTensor whose local tensor is `param`; None for a slot that is on one rank."""
    nbytes: int = field(init=False)
    """Bytes to read: the sum of the parts for a value that is computed from several tensors."""
    is_run_of_bytes: bool = field(init=False)
    """Whether the value is one contiguous range of a file."""
    placed: tuple[PlacedTensor, ...] = field(init=False, default=())
    """The parts of files that the value consists of, where it is several ranges; empty for other values."""
    on_cpu: bool = field(init=False)
    own_stride: tuple[int, ...] | None = field(init=False)
    """The stride of a slot whose elements are dense in memory and in another order than a new tensor's; else None."""
    route: ReadRoute = field(init=False)

    def __post_init__(self) -> None:
        stored, param = self.stored, self.param
        self.is_run_of_bytes = is_run(stored)
        if isinstance(stored, StoredTensor):
            self.nbytes = stored.nbytes
            if not stored.is_contiguous:
                self.placed = placed_tensors(stored)
        elif isinstance(stored, (StoredComposite, Derived)):
            self.nbytes = stored.nbytes
            self.placed = placed_tensors(stored)
        else:
            parts = sum(part.numel() * part.itemsize for part in payload_of(self.value))
            self.nbytes = parts or self.value.numel() * self.value.itemsize
        self.on_cpu = self.device.type == "cpu"
        self.own_stride = None
        if (self.plain or is_plain(param)) and not param.is_contiguous() and is_dense(param):
            self.own_stride = tuple(param.stride())
        self.choose_route()

    @property
    def is_transformed(self) -> bool:
        """Whether a transform computes the final value."""
        return self.transform is not None or self.module_transform is not None

    @property
    def slot_tensor(self) -> torch.Tensor:
        """The tensor of the model: `param`, or the DTensor whose local tensor it is."""
        return self.param if self.sharded is None else self.sharded.tensor

    def choose_route(self) -> None:
        """Sets `route`. Called again where `placement` or the transforms change before the value is read."""
        if self.placement.mapped:
            self.route = ReadRoute.MAPPED
        elif self.stored is None or isinstance(self.stored, torch.Tensor):
            self.route = ReadRoute.IN_MEMORY
        elif self.combined is not None and self._is_computed_into_place:
            self.route = ReadRoute.COMPUTED
        elif not self.is_read_into_place or self.transform is not None or self.placement.by_handler:
            self.route = ReadRoute.WHOLE
        elif self.value.dtype == self.dtype and self.on_cpu and self.module_transform is None:
            self.route = ReadRoute.DIRECT
        elif not self.is_run_of_bytes:
            self.route = ReadRoute.WHOLE
        elif self.placement.direct:
            self.route = ReadRoute.STREAMED if self.param.is_contiguous() else ReadRoute.WHOLE
        else:
            in_rows = self.own_stride is None and (self.module_transform is None or self.block_function is not None)
            self.route = ReadRoute.STREAMED if in_rows else ReadRoute.WHOLE

    def stage_instead(self, reason: str) -> None:
        """Has the value read before the commit that was planned to be read at the commit."""
        self.placement = staged_because(reason)
        self.choose_route()

    @property
    def slot_names(self) -> list[str]:
        """The name, in a list."""
        return [self.name]

    @property
    def is_read_into_place(self) -> bool:
        """Whether the value is ranges of files that can be read to where its elements belong."""
        return self.is_run_of_bytes or bool(self.placed)

    def requests(self, address: int) -> list[Request | Rows]:
        """Returns the reads of a value that is read into place, to contiguous memory at an address."""
        if isinstance(self.stored, StoredTensor) and self.is_run_of_bytes:
            return [Request(self.stored.extent, address)]
        return [request for part in self.placed for request in part.requests(address)]

    @property
    def combined(self) -> Combined | None:
        """The tensor that can be computed in blocks from several tensors of files; None for other values."""
        return self.stored.read_in_blocks if isinstance(self.stored, Derived) else None

    @property
    def _is_computed_into_place(self) -> bool:
        """Whether nothing has to be done with the result of a computation."""
        is_final = self.value.dtype == self.dtype and self.on_cpu and not self.is_transformed
        in_order = self.own_stride is None and (not self.placement.direct or self.param.is_contiguous())
        return is_final and in_order and not self.placement.by_handler

    @property
    def extents(self) -> list[ByteRange]:
        """The ranges of files that a value is read from which can be read at the commit."""
        if isinstance(self.stored, StoredTensor):
            return [self.stored.extent]
        if self.placed:
            return [part.stored.extent for part in self.placed]
        parts = () if self.combined is None else self.combined.parts
        return [part.extent for part in parts if isinstance(part, StoredTensor)]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the temporary memory that the value is read into."""
        if self.is_read_into_place:
            return self.nbytes
        if isinstance(self.stored, Derived):
            return self.stored.result_bytes + self.stored.scratch_bytes
        if isinstance(self.stored, StoredTensor) and not self.stored.is_contiguous:
            read = self.stored.read_bytes
            return read if read == self.nbytes else read + self.nbytes  # gathers strided elements
        return self.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the value needs until it is copied into its slot."""
        if self.placement.by_handler and not self.placement.mapped:
            return self._handed_bytes
        waits = self.placement.staged and not isinstance(self.stored, torch.Tensor)
        return self.value.numel() * self.dtype.itemsize if waits else 0

    @property
    def _handed_bytes(self) -> int:
        """Bytes of the value, which a `module_load` handler copies, and of the slot's old tensor, for an undo."""
        parts = [part for part in payload_of(self.param) if not part.is_meta and storage_id(part)]
        storage_sizes = {storage_id(part): part.untyped_storage().nbytes() for part in parts}
        return self.nbytes + sum(storage_sizes.values())

    @property
    def needs_buffer(self) -> bool:
        """Whether the value is read into, or computed in, temporary memory."""
        if self.placement.mapped or isinstance(self.stored, torch.Tensor):
            return False
        changes = self.value.dtype != self.dtype or self.module_transform is not None or self.own_stride is not None
        # A read for `in_place=True` goes straight to plain memory only.
        changes = changes or (self.placement == DIRECT and not is_plain_memory(self.param))
        return changes or not self.on_cpu or not self.is_read_into_place

    @property
    def passing_bytes(self) -> int:
        """Bytes of memory that a transform needs for this value, as far as they are known before the call."""
        if self.transform is not None:
            return self.buffer_bytes  # the argument of the transform
        if self.module_transform is None:
            return 0
        ordered = all(tensor.is_contiguous() for tensor in (self.value, self.param) if is_plain(tensor))
        straight = self.value.dtype == self.dtype and ordered and not isinstance(self.stored, Derived)
        copied = 0 if straight or not self.on_cpu else self.value.numel() * self.dtype.itemsize
        return self.transform_bytes + copied + (self.nbytes if isinstance(self.stored, torch.Tensor) else 0)

    @property
    def is_read_ahead(self) -> bool:
        """Whether another thread reads the value while the transform of the previous tensor runs."""
        return self.transform is not None and self.is_run_of_bytes and self.nbytes >= LEAST_AHEAD_BYTES

    @property
    def layout(self) -> Layout:
        """Shape, stride and dtype of new memory for the slot. The stride is None unless it is a dense memory format."""
        return self.param.size(), self.own_stride, self.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of new memory for the slot."""
        return self.own_stride or contiguous_stride(self.param.size())

    @property
    def unit_bytes(self) -> int:
        """The smallest number of bytes that a streamed value can be split into: an element, or a row."""
        return self.value.itemsize if self.block_function is None else self.nbytes // self.value.shape[0]

    def working_bytes(self, block_bytes: int) -> int:
        """Bytes of memory that each thread needs for a streamed value in addition to its read buffer."""
        if self.block_function is None:
            return 0
        cast = min(max(block_bytes, self.unit_bytes), self.nbytes) // self.value.itemsize * self.dtype.itemsize
        return self.block_function.extra_bytes + (cast if self.value.dtype != self.dtype else 0)

    @property
    def is_read_together(self) -> bool:
        """Whether the value is read in one batch with others, not separately."""
        alone = self.transform is not None or self.placement.by_handler or self.placement.mapped
        return self.is_read_into_place and not alone


BY_TRANSFORM = "transform="


def called(transform: Transform, name: str, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Calls a transform, and returns its result, a tensor of this shape. Raises `TransformError`."""
    with transform_errors(name):
        result = transform(name, value)
    if not isinstance(result, torch.Tensor) or result.shape != torch.Size(shape) or result.is_meta:
        is_tensor = isinstance(result, torch.Tensor)
        raise TransformError(
            "the transform returned something that cannot be loaded; nothing has been changed",
            where=name,
            expected=f"a tensor of shape {tuple(shape)}",
            found=f"shape {tuple(result.shape)} on {result.device}" if is_tensor else short_repr(result),
            remedy="have it return a tensor of this shape with values; to change shapes, use rules=",
        )
    return result


@contextmanager
def transform_errors(name: str) -> Iterator[None]:
    """Turns exceptions of a transform into `TransformError` with the name of the tensor."""
    try:
        yield
    except ModelStateError:
        raise
    except Exception as error:
        raise TransformError(
            "the transform raised; nothing has been changed",
            where=name,
            found=f"{type(error).__name__}: {error}",
            remedy="see the traceback of the cause; a transform is called with the name and the tensor",
        ) from error


def apply_module_transform(assignment: Assignment, last: Transform, value: torch.Tensor) -> None:
    """Sets the final value to the result of a module's transform. The memory of `value` may be reused afterwards."""
    if is_plain(value) and not (
        assignment.on_cpu and value.dtype == assignment.dtype and value.stride() == assignment.stride
    ):
        value = as_target(assignment, value)
    before = nonfinite(value) if is_plain(value) else 0
    result = called(last, assignment.name, value, assignment.param.shape)
    if is_plain(result):
        assignment.overflows.check_function(assignment.name, BY_TRANSFORM, result, lambda: before)
    assignment.freezes = isinstance(result, nn.Parameter) and not result.requires_grad
    try:
        result = result.detach().to(assignment.device)
        storages = {storage_id(part) for part in payload_of(value)}
        kept = any(storage_id(part) in storages or storage_owners(part) > 1 for part in payload_of(result))
        kept = kept or (is_plain(result) and not is_dense(result))
        assignment.final = result.clone() if kept else result
    except Exception as error:
        raise TransformError(
            "the result of the transform cannot be copied; nothing has been changed",
            where=assignment.name,
            found=f"{type(result).__name__}: {type(error).__name__}: {error}",
        ) from error
    assignment.dtype = result.dtype
    assignment.placement = after_module_transform(assignment.placement, assignment.param, result)


def as_target(assignment: Assignment, value: torch.Tensor) -> torch.Tensor:
    """Copies a value to new memory with the dtype, device and layout of the slot."""
    if assignment.on_cpu:
        (final,) = fresh_tensors([assignment.layout])
        final.copy_(value)
    elif assignment.own_stride is not None and tuple(value.stride()) != assignment.own_stride:
        shape, device = assignment.param.shape, assignment.device
        final = torch.empty_strided(shape, assignment.own_stride, dtype=assignment.dtype, device=device)
        final.copy_(value)
    else:
        final = value.to(assignment.dtype)
    assignment.overflows.check(assignment.name, value, final)
    return final.to(assignment.device)
