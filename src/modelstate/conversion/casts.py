"""The casts of plain CPU tensors, which a conversion makes at its commit.

Such a cast can fail only for lack of memory, and before the commit the memory is known to be there. So each old tensor
is freed as soon as its new one exists, where two phases would need the memory of all new tensors at once.

A module may have tens of thousands of small tensors. They are cast in batches, each with a few calls of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import torch

from modelstate.conversion.tensors import DATA, Target
from modelstate.planning.plan import Step
from modelstate.planning.transfer import Way
from modelstate.torch_compat.dtypes import Overflows, can_overflow, has_finite_sum
from modelstate.torch_compat.plain import has_its_memory, is_plain
from modelstate.torch_compat.private import copy_each, flattened
from modelstate.transaction.slots import Slot
from modelstate.transaction.swap_tensors import point_to

_BATCH_BYTES = 32 << 10
"""The bytes of the new tensors of a batch. They stay in a cache of the processor until they have been checked, and are
too few elements for torch to share them out to several threads, which would take longer than the cast."""


class _Batch(msgspec.Struct):
    """Tensors of one dtype that are cast together; a large one is alone, and so is one with a gradient."""

    dtype: torch.dtype
    new: torch.Tensor
    """An empty tensor like the new ones."""
    slots: list[Slot]
    numel: int = 0
    """The elements of the tensors, and of the gradient."""
    grad: torch.Tensor | None = None
    """The gradient of the only tensor."""


class Casts:
    """The casts of one conversion. Nothing is cast before `run`."""

    def __init__(self, target: Target, overflows: Overflows | None) -> None:
        self._target, self._overflows = target, overflows
        self._batches: list[_Batch] = []
        self.new_bytes = 0
        """The memory of all new tensors."""
        self.peak_bytes = 0
        """The most memory that is in use at any time, less that of the old tensors."""

    def add(self, plain: Iterable[Slot]) -> list[Slot]:
        """Adds the plain tensors that can be cast at the commit.

        Returns the tensors that cannot; those that have the dtype already are in neither.
        """
        others: list[Slot] = []
        new_of: dict[torch.dtype, torch.Tensor | None] = {}
        open_batches: dict[torch.dtype, _Batch] = {}
        for slot in plain:
            tensor = slot.tensor
            dtype, grad = tensor.dtype, tensor.grad if tensor.is_leaf else None
            if dtype not in new_of:
                new_of[dtype] = self._target.deferred_cast(dtype)
            new = new_of[dtype]
            # The cast of the gradient must be as certain to succeed as that of its tensor.
            if new is None or not _is_certain(tensor, dtype) or (grad is not None and not _is_certain(grad, dtype)):
                others.append(slot)
            elif new.dtype != dtype:
                numel = tensor.numel()
                batch = open_batches.get(dtype)
                if grad is not None:
                    self._batches.append(_Batch(dtype, new, [slot], 2 * numel, grad))
                    continue
                if batch is None or (batch.numel + numel) * new.itemsize > _BATCH_BYTES:
                    batch = open_batches[dtype] = _Batch(dtype, new, [])
                    self._batches.append(batch)
                batch.slots.append(slot)
                batch.numel += numel
        grown = 0
        for batch in self._batches:
            new_bytes = batch.numel * batch.new.itemsize
            is_checked = self._overflows is not None and can_overflow(batch.dtype, batch.new.dtype)
            flat_bytes = new_bytes if is_checked and len(batch.slots) > 1 else 0
            self.new_bytes += new_bytes
            self.peak_bytes = max(self.peak_bytes, grown + new_bytes + flat_bytes)
            grown += new_bytes - batch.numel * batch.dtype.itemsize
        return others

    @property
    def slots(self) -> list[Slot]:
        """The slots of the tensors that are cast."""
        return [slot for batch in self._batches for slot in batch.slots]

    def finals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns an empty tensor like the new one for each tensor."""
        return {slot.tensor: batch.new for batch in self._batches for slot in batch.slots}

    def run(self) -> None:
        """Casts all tensors. It fails only for lack of memory."""
        with torch.inference_mode(False), torch.no_grad():
            for batch in self._batches:
                tensors = [slot.tensor for slot in batch.slots]
                values = [torch.empty_like(tensor, dtype=batch.new.dtype) for tensor in tensors]
                copy_each(values, tensors)
                overflows = self._overflows if can_overflow(batch.dtype, batch.new.dtype) else None
                if overflows is not None and not has_finite_sum(flattened(values) if len(values) > 1 else values[0]):
                    for slot, value in zip(batch.slots, values, strict=True):
                        overflows.check(slot.name, slot.tensor, value)
                if batch.grad is not None:
                    grad = batch.grad.to(batch.new.dtype)
                    point_to(tensors[0], values[0], grad, held_grad=batch.grad, undoable=False)
                    continue
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.data = value

    def steps(self) -> Callable[[], list[Step]]:
        """Returns a function that makes the step of each tensor. The function holds no tensor."""
        facts = [
            (names, kind, tensor.shape, batch.dtype, batch.new.dtype)
            for batch in self._batches
            for names, kind, tensor in batch.slots
        ]
        return lambda: [
            Step(
                names[0],
                kind,
                source="",
                way=Way.NEW,
                why=DATA,
                shape=tuple(shape),
                dtype=new,
                stored_dtype=old,
                device=torch.device("cpu"),
                nbytes=shape.numel() * old.itemsize,
                ties=names[1:],
            )
            for names, kind, shape, old, new in facts
        ]


def _is_certain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast of the tensor can fail only for lack of memory."""
    is_own = tensor.dtype == dtype and tensor.is_cpu and not tensor.is_inference()
    return is_own and is_plain(tensor) and not tensor.is_nested and has_its_memory(tensor)
