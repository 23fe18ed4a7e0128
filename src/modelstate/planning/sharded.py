"""Slots that are DTensors: a rank loads its region of the source into its local tensor.

For the rest of a load such a slot is the local tensor, and its source is the region of the source that belongs there:
all routes of plain tensors apply. The DTensor itself gets other memory only where the local tensor cannot keep its own.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec
import torch

from modelstate.distributed.shards import LocalShard, shard_of
from modelstate.errors import DistributedError, TransformError
from modelstate.planning.transforms import Transform
from modelstate.problems import Problem, ProblemKind, one_line
from modelstate.rules.expression import Derived, Operation, Source, lacks_values
from modelstate.spec import StoredTensor, slices_of
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.sharding import local_tensor, mesh_device_type, same_layout


class ShardedSlot(msgspec.Struct, frozen=True, eq=False):
    """A DTensor of the model, and the value of the whole tensor."""

    tensor: torch.Tensor
    """The DTensor."""
    shard: LocalShard
    """The part of it that this rank holds."""
    value: torch.Tensor
    """The value of the whole tensor, as it is in the checkpoint."""

    def local(self, stored: Source | None, transform: Transform | None = None) -> LocalSlot:
        """Returns what is loaded into the local tensor, for the source and the transform of the whole tensor.

        A value that is not a view of the whole one is without memory until it is computed. A transform may look at
        other elements than its own, so it gets the whole value.
        """
        param = local_tensor(self.tensor)
        if transform is not None:
            return LocalSlot(param, self.value, stored, partial(self._cropped, transform))
        if is_sharded(self.value) and not self._is_whole_here(self.value):
            local = local_tensor(self.value)
            return LocalSlot(param, local, local if stored is not None else None)
        value = local_tensor(self.value) if is_sharded(self.value) else self.value
        if isinstance(stored, Derived) and not stored.parts and not isinstance(stored.change, Operation):
            # Initial values are computed once, and whole: they are random numbers, equal on all ranks.
            change, shape = stored.change, self.shard.shape
            source: Source = Derived(stored.dtype, shape, (), lambda: self._part_of(change()), is_certain=False)
            return LocalSlot(param, torch.empty(shape, dtype=value.dtype, device="cpu"), source)
        source = self.shard.of(value if stored is None or is_sharded(self.value) else stored)
        if isinstance(source, torch.Tensor):
            return LocalSlot(param, source, None if stored is None else source)
        is_view = isinstance(stored, StoredTensor) and isinstance(source, StoredTensor)
        if is_view and is_plain(value) and len(boxes := self.shard.boxes()) == 1:
            return LocalSlot(param, value[slices_of(boxes[0][0])], source)
        lacking = source.lacks_values if isinstance(source, Derived) else lacks_values(source)
        device = "meta" if value.is_meta or lacking else "cpu"
        return LocalSlot(param, torch.empty(self.shard.shape, dtype=value.dtype, device=device), source)

    def device_after(self, requested: torch.device | None) -> torch.device:
        """Returns the device of the local tensor after the load."""
        if requested is not None or not self.tensor.is_meta:
            return requested or self.tensor.device
        return torch.empty(0, device=mesh_device_type(self.tensor)).device

    @staticmethod
    def _is_whole_here(value: torch.Tensor) -> bool:
        shard = shard_of(value)
        return shard is not None and shard.is_whole

    def _cropped(self, transform: Transform, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns the part of a transform's result that this rank holds."""
        result = transform(name, whole)
        if not isinstance(result, torch.Tensor) or result.shape != self.tensor.shape or not is_plain(result):
            raise TransformError(
                "the transform returned something that cannot be split over the ranks; nothing has been changed",
                where=name,
                expected=f"a plain tensor of shape {tuple(self.tensor.shape)}",
                found=f"{type(result).__name__} of shape {tuple(getattr(result, 'shape', ()))}",
            )
        return self._part_of(result)

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        local = whole.new_empty(self.shard.shape)
        for box, place in self.shard.boxes():
            local[slices_of(place)] = whole[slices_of(box)]
        return local


class LocalSlot(NamedTuple):
    """The local tensor of a DTensor, and what is loaded into it."""

    param: torch.Tensor
    value: torch.Tensor
    stored: Source | None
    transform: Transform | None = None


def sharded_slot(
    name: str, tensor: torch.Tensor, value: torch.Tensor, device: torch.device | None
) -> ShardedSlot | Problem:
    """Returns the slot of a DTensor, or the problem that keeps its ranks from loading their regions of `value`.

    `device` is the device that the load asks for.
    """
    mesh_device = mesh_device_type(tensor)
    if device is not None and device.type not in (mesh_device, tensor.device.type):
        return Problem(
            ProblemKind.UNLOADABLE_LAYOUT, name, why=f"its mesh is on {mesh_device}, and device= asks for {device.type}"
        )
    try:
        shard = shard_of(tensor)
        if shard is None:
            return Problem(ProblemKind.UNLOADABLE_LAYOUT, name, why="this rank is not in the mesh of the DTensor")
        if not is_plain(local_tensor(tensor)):
            return Problem(
                ProblemKind.UNLOADABLE_LAYOUT, name, why=f"its local tensor is a {type(local_tensor(tensor)).__name__}"
            )
        if is_sharded(value):
            given = shard_of(value)
            if given is None or not (given.is_whole or same_layout(tensor, value)):
                return Problem(ProblemKind.OTHER_SHARDING, name)
        elif not is_plain(value):
            return Problem(
                ProblemKind.UNLOADABLE_LAYOUT, name, why=f"the value is a {type(value).__name__}, which has no regions"
            )
    except DistributedError as error:
        return Problem(ProblemKind.UNLOADABLE_LAYOUT, name, why=one_line(error))
    return ShardedSlot(tensor, shard, value)
