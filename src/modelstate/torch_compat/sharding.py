"""DTensors from the inside: the split of a dimension by a placement, and the local tensors."""

import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Split(NamedTuple):
    """The split of a tensor dimension over a mesh dimension, as one rank sees it."""

    placement: Any
    """A `Shard`, or a private placement of torch that splits a dimension, such as `_StridedShard`."""
    ranks: int
    """The number of ranks along the mesh dimension."""
    position: int
    """The position of the rank along the mesh dimension."""


def is_split(placement: Any) -> bool:
    """Whether a placement splits a dimension of a tensor."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, Shard | _StridedShard)


def split_indices(size: int, splits: Sequence[Split]) -> list[range]:
    """Returns the indices of a dimension that one rank holds: runs, in the order in which they lie in its local tensor.

    Torch itself splits a tensor of indices, so the result is right for every placement that torch can split by. Where
    all splits are views, the tensor has no memory, and the views say where they begin.
    """
    views = all(split.placement.is_shard() for split in splits)
    indices = torch.empty(size, dtype=torch.uint8, device="meta") if views else torch.arange(size)
    for placement, ranks, position in splits:
        # The dimension that is split has the number that the placement says.
        column = indices.reshape(*[1] * placement.dim, -1)
        shards, _ = placement._split_tensor(column, ranks, with_padding=False, contiguous=False)
        indices = shards[position].reshape(-1)
    if not indices.numel():
        return []
    if indices.is_meta:
        start = int(indices.storage_offset())
        return [range(start, start + indices.numel())]
    ends = torch.nonzero(indices.diff() != 1).flatten() + 1
    return [range(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(indices, ends)]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor itself, not a copy or an alias of it."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def default_store() -> Any:
    """Returns the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def gloo_group(store: Any, rank: int, size: int, timeout_seconds: float) -> Any:
    """Returns a gloo group over a store. Unlike `new_group`, only its own ranks take part in making it."""
    from torch._C._distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_seconds))


def all_reduce_maximum(group: Any, tensor: torch.Tensor, timeout_seconds: float) -> None:
    """Replaces each element by the largest of all ranks. Raises `RuntimeError` where a rank is missing for too long."""
    from torch.distributed import AllreduceOptions, ReduceOp

    options: Any = AllreduceOptions()
    options.reduceOp, options.timeout = ReduceOp.MAX, datetime.timedelta(seconds=timeout_seconds)
    group.allreduce([tensor], options).wait()


def all_gather(group: Any, tensors: list[torch.Tensor], tensor: torch.Tensor, timeout_seconds: float) -> None:
    """Copies the tensors of all ranks. Raises `RuntimeError` where a rank is missing for too long."""
    from torch._C._distributed_c10d import AllgatherOptions

    options: Any = AllgatherOptions()
    options.timeout = datetime.timedelta(seconds=timeout_seconds)
    group.allgather([tensors], [tensor], options).wait()
