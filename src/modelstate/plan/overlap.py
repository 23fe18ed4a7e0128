"""Tensors that show the same memory without being the same tensor."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from modelstate.plan.memento import same_place
from modelstate.plan.placement import is_plain
from modelstate.plan.slots import Slot
from modelstate.plan.torch_private import address_range, storage_id


class Addresses:
    """The memory of some tensors, to be asked whether others lie in it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({address_range(tensor) for tensor in tensors} - {(0, 0)})
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of the tensor lies in this memory, or a part of it does."""
        start, end = address_range(tensor)
        if start == end:
            return False
        before = bisect_right(self._starts, start) - 1
        return (before >= 0 and start < self._ends[before]) or (
            before + 1 < len(self._starts) and self._starts[before + 1] < end
        )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors with memory may have elements in common."""
    if not (is_plain(a) and is_plain(b)) or a.is_meta or b.is_meta or storage_id(a) != storage_id(b):
        return False
    (a_start, a_end), (b_start, b_end) = extent(a), extent(b)
    return a_start < b_end and b_start < a_end


def sharing(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Groups of slots with plain tensors that show common elements of one storage. Sorting finds them."""
    starts = [slot.tensor.data_ptr() for slot in slots]
    groups: list[list[Slot]] = []
    run: list[Slot] = []
    end = 0
    for index in sorted(range(len(slots)), key=starts.__getitem__):
        start, slot = starts[index], slots[index]
        nbytes = _extent_bytes(slot.tensor) if start else 0
        if not nbytes:  # empty, or on meta
            continue
        if start < end and any(overlap(slot.tensor, one.tensor) for one in run):
            run.append(slot)
        else:
            run = [slot]
            groups.append(run)
        end = max(end, start + nbytes)
    return [group for group in groups if len(group) > 1]


def clash(a: torch.Tensor, a_value: torch.Tensor, b: torch.Tensor, b_value: torch.Tensor) -> bool:
    """Whether writing `a_value` to `a` and then `b_value` to `b`, which overlap, changes what `a` has got."""
    if same_place(a, b):
        return not same_values(a_value, b_value)
    if a.dtype != b.dtype:
        return True
    size = a.untyped_storage().nbytes() // a.itemsize
    memory = torch.zeros(size, dtype=a.dtype, device=a.device)
    written = torch.zeros(size, dtype=torch.bool, device=a.device)
    memory.as_strided(a.size(), a.stride(), a.storage_offset()).copy_(a_value)
    written.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    there = memory.as_strided(b.size(), b.stride(), b.storage_offset())
    mask = written.as_strided(b.size(), b.stride(), b.storage_offset())
    new = b_value.to(a.device, a.dtype)
    same = (there == new) | ((there != there) & (new != new))
    return not bool((same | ~mask).all())


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, without looking where they are the same view of the same bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (is_plain(a) and is_plain(b)):
        return a is b
    if same_place(a, b):
        return a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = (t.resolve_conj().resolve_neg() for t in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a.view(bits[a.itemsize]), b.view(bits[b.itemsize]))


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    start, end = extent(tensor)
    return (end - start) * tensor.itemsize


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements from the beginning of the storage to the first and behind the last."""
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset())
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return start, start + 1 + sum((size - 1) * step for size, step in steps)
