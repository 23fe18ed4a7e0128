"""What tensors have common memory, before and after a function has made new ones."""

from collections.abc import Sequence

import torch

from modelstate.plan.overlap import overlap
from modelstate.plan.placement import is_dense, is_plain
from modelstate.plan.slots import Slot
from modelstate.plan.torch_private import payload_of, storage_owners


def sharing(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Groups of slots with plain tensors that show common elements of one storage."""
    starts = [slot.tensor.data_ptr() for slot in slots]
    groups: list[list[Slot]] = []
    run: list[Slot] = []
    end = 0
    for index in sorted(range(len(slots)), key=starts.__getitem__):
        start, slot = starts[index], slots[index]
        nbytes = _span_bytes(slot.tensor) if start else 0
        if not nbytes:  # empty, or on meta
            continue
        if start < end and any(overlap(slot.tensor, one.tensor) for one in run):
            run.append(slot)
        else:
            run = [slot]
            groups.append(run)
        end = max(end, start + nbytes)
    return [group for group in groups if len(group) > 1]


def _span_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.is_contiguous() else span(tensor) * tensor.itemsize


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def of_its_own(value: torch.Tensor) -> torch.Tensor:
    """What a function returned, out of any graph, in memory that it has alone and that can be trained."""
    value = value if value.is_leaf else value.detach()
    if not is_plain(value) or value.is_nested or value.is_meta or (is_dense(value) and storage_owners(value) == 1):
        return value
    return value.clone(memory_format=torch.preserve_format if is_dense(value) else torch.contiguous_format)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values of one."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor.detach()._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.detach().values()]
    return payload_of(tensor)
