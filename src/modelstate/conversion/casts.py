"""The casts of plain CPU tensors, which a conversion makes at its commit.

Such a cast can fail only for lack of memory, and before the commit the memory is known to be there. So each old tensor
is freed as soon as its new one exists, where two phases would need the memory of all new tensors at once.

A module may have tens of thousands of small tensors. They are cast in batches, each with a few calls of torch.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from modelstate.conversion.tensors import DATA, Target
from modelstate.planning.plan import Step
from modelstate.torch_compat.dtypes import Overflows, can_overflow, has_finite_sum
from modelstate.torch_compat.plain import has_its_memory, is_plain
from modelstate.torch_compat.private import copy_each, flattened
from modelstate.transaction.slots import Slot
from modelstate.transaction.swap_tensors import point_to

_BATCH_BYTES = 32 << 10
"""The bytes of the new tensors of a batch. They stay in a cache of the processor until they have been checked, and are
too few elements for torch to share them out to several threads, which would take longer than the cast."""
_CPU = torch.device("cpu")


class Casts:
    """The casts of one conversion. Nothing is cast before `run`."""

    def __init__(self, target: Target, overflows: Overflows | None) -> None:
        self._target, self._overflows = target, overflows
        self._batches: list[_Batch] = []
        self.new_bytes = 0
        """The memory of all new tensors."""
        self.peak_bytes = 0
        """The most memory that is in use at any time, less that of the old tensors."""

    def take(self, plain: Iterable[Slot]) -> list[Slot]:
        """Adds the plain tensors that can be cast at the commit.

        Returns the tensors that cannot; those that have the dtype already are in neither.
        """
        others: list[Slot] = []
        kinds: dict[torch.dtype, _Kind | None] = {}
        for slot in plain:
            tensor = slot.tensor
            dtype = tensor.dtype
            kind = kinds[dtype] if dtype in kinds else kinds.setdefault(dtype, self._kind(dtype))
            if kind is None or not tensor.is_cpu or tensor.is_inference() or not has_its_memory(tensor):
                others.append(slot)
                continue
            grad = tensor.grad if tensor.is_leaf else None
            if grad is None:
                if kind.is_cast:
                    kind.slots.append(slot)
            # The cast of the gradient must be as certain to succeed as that of its tensor.
            elif not is_plain(grad) or grad.is_nested or not grad.is_cpu or grad.is_inference() or grad.dtype != dtype:
                others.append(slot)
            elif kind.is_cast:
                self._batches.append(_Batch([slot], 2 * tensor.numel(), kind, grad))
        for kind in kinds.values():
            self._batches += [] if kind is None else kind.batches()
        grown = 0
        for batch in self._batches:
            self.new_bytes += batch.new_bytes
            self.peak_bytes = max(self.peak_bytes, grown + batch.new_bytes + batch.working_bytes)
            grown += batch.new_bytes - batch.old_bytes
        return others

    def _kind(self, dtype: torch.dtype) -> "_Kind | None":
        new = self._target.deferred_cast(dtype)
        if new is None:
            return None
        overflows = self._overflows if can_overflow(dtype, new.dtype) else None
        return _Kind(dtype, new, new.dtype != dtype, overflows)

    @property
    def slots(self) -> list[Slot]:
        """The slots of the tensors that are cast."""
        return [slot for batch in self._batches for slot in batch.slots]

    def finals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns an empty tensor like the new one for each tensor."""
        return {slot.tensor: batch.kind.new for batch in self._batches for slot in batch.slots}

    def run(self) -> None:
        """Casts all tensors. It fails only for lack of memory."""
        with torch.inference_mode(False), torch.no_grad():
            for batch in self._batches:
                batch.run()

    def steps(self) -> Callable[[], list[Step]]:
        """Returns a function that makes the step of each tensor. The function holds no tensor."""
        batches = [
            (
                batch.kind.dtype,
                batch.kind.new.dtype,
                [(names, kind, tensor.shape) for names, kind, tensor in batch.slots],
            )
            for batch in self._batches
        ]

        def make() -> list[Step]:
            return [
                Step(
                    *(names[0], kind, "", DATA, tuple(shape), new, old, _CPU),
                    *(shape.numel() * old.itemsize, names[1:]),
                )
                for old, new, rows in batches
                for names, kind, shape in rows
            ]

        return make


class _Kind(msgspec.Struct):
    """The tensors of a dtype that get the same new one."""

    dtype: torch.dtype
    new: torch.Tensor
    """An empty tensor of the new dtype."""
    is_cast: bool
    """Whether the new dtype is another one."""
    overflows: Overflows | None
    """Counts values that become infinite or NaN; None where the new dtype can hold all values."""
    slots: list[Slot] = msgspec.field(default_factory=list)
    """Those of tensors without a gradient."""

    def batches(self) -> "Iterator[_Batch]":
        """Yields small tensors together, and each large one by itself."""
        most = _BATCH_BYTES // self.new.itemsize
        batch: list[Slot] = []
        total = 0
        for slot in self.slots:
            numel = slot.tensor.numel()
            if total + numel > most and batch:
                yield _Batch(batch, total, self)
                batch, total = [], 0
            batch.append(slot)
            total += numel
        if batch:
            yield _Batch(batch, total, self)


class _Batch(msgspec.Struct):
    """Tensors that are cast together."""

    slots: list[Slot]
    numel: int
    """The elements of the tensors, and of the gradient."""
    kind: _Kind
    grad: torch.Tensor | None = None
    """The gradient of the only tensor."""

    @property
    def old_bytes(self) -> int:
        """The memory that is freed."""
        return self.numel * self.kind.dtype.itemsize

    @property
    def new_bytes(self) -> int:
        """The memory of the new tensors, and of the new gradient."""
        return self.numel * self.kind.new.itemsize

    @property
    def working_bytes(self) -> int:
        """The memory that is needed beside the old and the new tensors."""
        return self.new_bytes if self.kind.overflows is not None and len(self.slots) > 1 else 0

    def run(self) -> None:
        dtype, overflows, grad = self.kind.new.dtype, self.kind.overflows, self.grad
        tensors = [slot.tensor for slot in self.slots]
        values = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        copy_each(values, tensors)
        if overflows is not None and not has_finite_sum(flattened(values) if len(values) > 1 else values[0]):
            for slot, value in zip(self.slots, values, strict=True):
                overflows.check(slot.name, slot.tensor, value)
        if grad is not None:
            point_to(tensors[0], values[0], grad.to(dtype), held_grad=grad, undoable=False)
            return
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value
