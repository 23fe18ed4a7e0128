"""The memory of what a function has made."""

import torch

from modelstate.plan.placement import is_dense, is_plain
from modelstate.plan.torch_private import payload_of, storage_owners


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
