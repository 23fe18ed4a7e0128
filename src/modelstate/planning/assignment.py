"""An assignment of a value to a slot: how its bytes are read, and what transforms make of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
"""What is less is read sooner than handed from one thread to another."""


@dataclass(slots=True, eq=False)
class Assignment:
    """A value on its way into a slot."""

    name: str
    """The name in the model."""
    kind: str
    param: torch.Tensor
    """The tensor that is there now."""
    value: torch.Tensor
    """What goes there, as the checkpoint has it: a view of the file, whose bytes have not been read."""
    given: str
    """The name under which the value was handed to the model; empty where code of the model computed it."""
    stored: Source | None
    """Where the value lies; None where it was computed, or in the hands of the model's code."""
    placement: Placement
    dtype: torch.dtype
    """After the load."""
    device: torch.device
    """After the load."""
    overflows: Overflows
    """Counts what becomes infinite or NaN by a cast on the way, for all assignments of a load."""
    transform: Transform | None = None
    """Called with the value as the checkpoint has it; what it returns is asked for."""
    remake: Bound | None = None
    """Called with the value as it would be loaded: cast, and on its device."""
    remake_bytes: int = 0
    """Bytes of memory that it takes beside that value, or those rows of it, and what it returns."""
    remake_rows: int = 0
    """So many rows at a time can be remade by themselves; 0 where it takes the whole value."""
    freezes: bool = False
    """Whether the slot gets no gradient any more, as the remade value says."""
    final: torch.Tensor | None = None
    """The value as it will be, once it has been read, cast and transformed."""
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes to read: those of the parts, where the value is made of several tensors."""
        if isinstance(self.stored, (StoredTensor, StoredComposite, Derived)):
            return self.stored.nbytes
        return sum(part.numel() * part.itemsize for part in payload_of(self.value)) or (
            self.value.numel() * self.value.itemsize
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory beside its own that the value passes through."""
        if isinstance(self.stored, Derived):
            return self.stored.result_bytes + self.stored.scratch_bytes
        if isinstance(self.stored, StoredTensor) and not self.stored.is_contiguous:
            read = self.stored.read_bytes
            return read if read == self.nbytes else read + self.nbytes  # elements that lie apart are put together
        return self.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the value takes until it is copied into its slot."""
        if self.placement.by_handler and not self.placement.mapped:
            return self._handed_bytes
        waits = self.placement.staged and not isinstance(self.stored, torch.Tensor)
        return self.value.numel() * self.dtype.itemsize if waits else 0

    @property
    def _handed_bytes(self) -> int:
        """The value, which a handler copies as it likes, and what the slot's tensor was, to undo that."""
        own = [part for part in payload_of(self.param) if not part.is_meta and storage_id(part)]
        kept = {storage_id(part): part.untyped_storage().nbytes() for part in own}
        return self.nbytes + sum(kept.values())

    @property
    def is_run_of_bytes(self) -> bool:
        """Whether the bytes of the file are, in their order, those of the value."""
        return isinstance(self.stored, StoredTensor) and self.stored.nbytes > 0 and self.stored.is_contiguous

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def needs_buffer(self) -> bool:
        """Whether the value is read, or put together, in other memory than it ends in."""
        if self.placement.mapped or isinstance(self.stored, torch.Tensor):
            return False
        changes = self.value.dtype != self.dtype or self.remake is not None or self.layout[1] is not None
        return changes or not self.on_cpu or not self.is_run_of_bytes

    @property
    def passing_bytes(self) -> int:
        """Bytes of memory that a transform takes for this value, as far as anybody knows beforehand."""
        if self.transform is not None:
            return self.buffer_bytes  # what it is given
        if self.remake is None:
            return 0
        ordered = all(one.is_contiguous() for one in (self.value, self.param) if is_plain(one))
        straight = self.value.dtype == self.dtype and ordered and not isinstance(self.stored, Derived)
        copied = 0 if straight or not self.on_cpu else self.value.numel() * self.dtype.itemsize
        return self.remake_bytes + copied + (self.nbytes if isinstance(self.stored, torch.Tensor) else 0)

    @property
    def is_read_ahead(self) -> bool:
        """Whether it is read by another thread, while the transform of the tensor before it is called."""
        return self.transform is not None and self.is_run_of_bytes and self.nbytes >= LEAST_AHEAD_BYTES

    @property
    def layout(self) -> tuple[torch.Size, tuple[int, ...] | None, torch.dtype]:
        """Shape, stride and dtype of memory for the slot; the stride only where it is a layout, as channels last is."""
        param = self.param
        keeps = is_plain(param) and not param.is_contiguous() and is_dense(param)
        return param.size(), tuple(param.stride()) if keeps else None, self.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of memory for the slot."""
        shape, stride, _ = self.layout
        return stride or contiguous_stride(shape)

    @property
    def is_streamed(self) -> bool:
        """Whether the value can be cast, moved or remade in pieces, as it is read."""
        if not (self.is_run_of_bytes and self.reads_plainly) or self.reads_unchanged:
            return False
        if self.placement.direct:
            return self.param.is_contiguous()
        return self.layout[1] is None and (self.remake is None or self.remake_rows > 0)

    @property
    def way(self) -> str:
        """How its bytes come in: see `Step.way`."""
        if self.placement.mapped:
            return "mapped"
        if self.stored is None or isinstance(self.stored, torch.Tensor):
            return "in memory"
        if self.is_streamed:
            return "streamed"
        return "direct" if self.is_run_of_bytes and self.reads_plainly and self.reads_unchanged else "whole"

    @property
    def unit_bytes(self) -> int:
        """Bytes of the file that have to come together, where the value is streamed."""
        if self.remake is None:
            return self.value.itemsize
        return self.remake_rows * (self.nbytes // self.value.shape[0])

    @property
    def working_bytes(self) -> int:
        """Bytes of memory that each thread takes for a streamed value, beside what it reads into."""
        if self.remake is None:
            return 0
        result = min(self.unit_bytes, self.nbytes) // self.value.itemsize * self.dtype.itemsize
        return self.remake_bytes + (2 if self.value.dtype != self.dtype else 1) * result

    @property
    def reads_plainly(self) -> bool:
        """Whether nothing but a read, and perhaps a cast, stands between the file and the slot."""
        return self.transform is None and not self.placement.mapped and not self.placement.by_handler

    @property
    def is_read_together(self) -> bool:
        """Whether it is read in runs of bytes, with others, and not as a single tensor when its turn comes."""
        return self.is_run_of_bytes and (self.placement.direct or self.reads_plainly)

    @property
    def reads_unchanged(self) -> bool:
        """Whether what is read is what is wanted, where it is wanted."""
        return self.value.dtype == self.dtype and self.on_cpu and self.remake is None


BY_TRANSFORM = "transform="


def called(transform: Transform, name: str, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What the transform returns, if it is a tensor of that shape. Raises `TransformError`."""
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
    """Makes a `TransformError` of what a transform raises for the tensor of this name."""
    try:
        yield
    except ModelStateError:
        raise
    except Exception as error:
        raise TransformError(
            "the transform raised; nothing has been changed", where=name, found=f"{type(error).__name__}: {error}"
        ) from error


def remade(made: Assignment, last: Transform, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What a module's transform returns for a value, or for some rows of it, with its new infinite values counted."""
    before = nonfinite(value) if is_plain(value) else 0
    result = called(last, made.name, value, shape)
    if is_plain(result):
        made.overflows.check_function(made.name, BY_TRANSFORM, result, lambda: before)
    return result


def apply_module_transform(made: Assignment, last: Transform, value: torch.Tensor) -> None:
    """Lets a module's transform have the last word on a value that is about to be reused."""
    if is_plain(value) and not (made.on_cpu and value.dtype == made.dtype and value.stride() == made.stride):
        value = as_target(made, value)
    result = remade(made, last, value, made.param.shape)
    made.freezes = isinstance(result, nn.Parameter) and not result.requires_grad
    try:
        result = result.detach().to(made.device)
        held = {storage_id(part) for part in payload_of(value)}
        kept = any(storage_id(part) in held or storage_owners(part) > 1 for part in payload_of(result))
        kept = kept or (is_plain(result) and not is_dense(result))
        made.final = result.clone() if kept else result
    except Exception as error:
        raise TransformError(
            "what the transform returned cannot be given memory of its own; nothing has been changed",
            where=made.name,
            found=f"{type(result).__name__}: {type(error).__name__}: {error}",
        ) from error
    made.dtype = result.dtype
    made.placement = after_remaking(made.placement, made.param, result)


def as_target(made: Assignment, value: torch.Tensor) -> torch.Tensor:
    """The value in memory of its own, as the slot wants it."""
    if made.on_cpu:
        (final,) = fresh_tensors([made.layout])
        final.copy_(value)
    else:
        final = value.to(made.dtype)
    made.overflows.check(made.name, value, final)
    return final.to(made.device)
