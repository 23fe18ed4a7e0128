"""An assignment of a value to a slot: how its bytes are read, and how transforms change it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from modelstate.errors import ModelStateError, TransformError
from modelstate.io.memory import fresh_tensors
from modelstate.planning.placement import Placement, after_remaking
from modelstate.planning.transforms import Bound, Transform
from modelstate.rules.expression import Derived, Source
from modelstate.spec import StoredComposite, StoredTensor, contiguous_stride
from modelstate.torch_compat.dtypes import Overflows, nonfinite
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import payload_of, storage_id, storage_owners

LEAST_AHEAD_BYTES = 64 << 10
"""Reading fewer bytes takes less time than handing them to another thread."""


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
    dtype: torch.dtype
    """After the load."""
    device: torch.device
    """After the load."""
    overflows: Overflows
    """Counts values that a cast makes infinite or NaN, for all assignments of a load."""
    transform: Transform | None = None
    """Called with the value as it is in the checkpoint. Its result may have any dtype."""
    remake: Bound | None = None
    """The transform of the module, called with the value as it would be loaded: cast, and on its device."""
    remake_bytes: int = 0
    """Bytes of memory that a call of `remake` needs in addition to its argument and its result."""
    remake_rows: int = 0
    """The number of rows for one call of `remake`; 0 where a call needs the whole value."""
    freezes: bool = False
    """Whether the result of `remake` clears `requires_grad` of the slot."""
    final: torch.Tensor | None = None
    """The final value; None until the value has been read, cast and transformed."""
    seconds: float = 0.0
    nbytes: int = field(init=False)
    """Bytes to read: the sum of the parts for a value that is computed from several tensors."""
    is_run_of_bytes: bool = field(init=False)
    """Whether the value is one contiguous range of a file."""
    on_cpu: bool = field(init=False)

    def __post_init__(self) -> None:
        stored = self.stored
        if isinstance(stored, (StoredTensor, StoredComposite, Derived)):
            self.nbytes = stored.nbytes
        else:
            parts = sum(part.numel() * part.itemsize for part in payload_of(self.value))
            self.nbytes = parts or self.value.numel() * self.value.itemsize
        self.is_run_of_bytes = isinstance(stored, StoredTensor) and self.nbytes > 0 and stored.is_contiguous
        self.on_cpu = self.device.type == "cpu"

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the temporary memory that the value is read into."""
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
        changes = self.value.dtype != self.dtype or self.remake is not None or self.layout[1] is not None
        return changes or not self.on_cpu or not self.is_run_of_bytes

    @property
    def passing_bytes(self) -> int:
        """Bytes of memory that a transform needs for this value, as far as they are known before the call."""
        if self.transform is not None:
            return self.buffer_bytes  # the argument of the transform
        if self.remake is None:
            return 0
        ordered = all(tensor.is_contiguous() for tensor in (self.value, self.param) if is_plain(tensor))
        straight = self.value.dtype == self.dtype and ordered and not isinstance(self.stored, Derived)
        copied = 0 if straight or not self.on_cpu else self.value.numel() * self.dtype.itemsize
        return self.remake_bytes + copied + (self.nbytes if isinstance(self.stored, torch.Tensor) else 0)

    @property
    def is_read_ahead(self) -> bool:
        """Whether another thread reads the value while the transform of the previous tensor runs."""
        return self.transform is not None and self.is_run_of_bytes and self.nbytes >= LEAST_AHEAD_BYTES

    @property
    def layout(self) -> tuple[torch.Size, tuple[int, ...] | None, torch.dtype]:
        """Shape, stride and dtype of new memory for the slot. The stride is None unless it is a dense memory format."""
        param = self.param
        keeps_stride = is_plain(param) and not param.is_contiguous() and is_dense(param)
        return param.size(), tuple(param.stride()) if keeps_stride else None, self.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of new memory for the slot."""
        shape, stride, _ = self.layout
        return stride or contiguous_stride(shape)

    @property
    def is_streamed(self) -> bool:
        """Whether the value is cast, moved or transformed in blocks while it is read."""
        if not (self.is_run_of_bytes and self.reads_plainly) or self.reads_unchanged:
            return False
        if self.placement.direct:
            return self.param.is_contiguous()
        return self.layout[1] is None and (self.remake is None or self.remake_rows > 0)

    @property
    def way(self) -> str:
        """How the bytes are read: see `Step.way`."""
        if self.placement.mapped:
            return "mapped"
        if self.stored is None or isinstance(self.stored, torch.Tensor):
            return "in memory"
        if self.is_streamed:
            return "streamed"
        return "direct" if self.is_run_of_bytes and self.reads_plainly and self.reads_unchanged else "whole"

    @property
    def unit_bytes(self) -> int:
        """The smallest number of bytes that a streamed value can be split into."""
        if self.remake is None:
            return self.value.itemsize
        return self.remake_rows * (self.nbytes // self.value.shape[0])

    @property
    def working_bytes(self) -> int:
        """Bytes of memory that each thread needs for a streamed value in addition to its read buffer."""
        if self.remake is None:
            return 0
        result = min(self.unit_bytes, self.nbytes) // self.value.itemsize * self.dtype.itemsize
        return self.remake_bytes + (2 if self.value.dtype != self.dtype else 1) * result

    @property
    def reads_plainly(self) -> bool:
        """Whether the value is read, and perhaps cast, without a map, a function or a handler."""
        return self.transform is None and not self.placement.mapped and not self.placement.by_handler

    @property
    def is_read_together(self) -> bool:
        """Whether the value is read in one batch with others, not separately."""
        return self.is_run_of_bytes and (self.placement.direct or self.reads_plainly)

    @property
    def reads_unchanged(self) -> bool:
        """Whether the bytes are read without a cast, a move or a transform."""
        return self.value.dtype == self.dtype and self.on_cpu and self.remake is None


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
            found=f"shape {tuple(result.shape)} on {result.device}" if is_tensor else repr(result)[:80],
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
            "the transform raised; nothing has been changed", where=name, found=f"{type(error).__name__}: {error}"
        ) from error


def remade(assignment: Assignment, last: Transform, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Calls a module's transform with a value or some of its rows, and counts new infinite and NaN values."""
    before = nonfinite(value) if is_plain(value) else 0
    result = called(last, assignment.name, value, shape)
    if is_plain(result):
        assignment.overflows.check_function(assignment.name, BY_TRANSFORM, result, lambda: before)
    return result


def apply_module_transform(assignment: Assignment, last: Transform, value: torch.Tensor) -> None:
    """Sets the final value to the result of a module's transform. The memory of `value` may be reused afterwards."""
    if is_plain(value) and not (
        assignment.on_cpu and value.dtype == assignment.dtype and value.stride() == assignment.stride
    ):
        value = as_target(assignment, value)
    result = remade(assignment, last, value, assignment.param.shape)
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
    assignment.placement = after_remaking(assignment.placement, assignment.param, result)


def as_target(assignment: Assignment, value: torch.Tensor) -> torch.Tensor:
    """Copies a value to new memory with the dtype, device and layout of the slot."""
    if assignment.on_cpu:
        (final,) = fresh_tensors([assignment.layout])
        final.copy_(value)
    else:
        final = value.to(assignment.dtype)
    assignment.overflows.check(assignment.name, value, final)
    return final.to(assignment.device)
