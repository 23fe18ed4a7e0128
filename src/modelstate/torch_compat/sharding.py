"""DTensors from the inside: the split of a dimension by a placement, and the local tensors."""

from __future__ import annotations

import copy
import ctypes
import datetime
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, cast

import torch

from modelstate.errors import DistributedError
from modelstate.process import check_stopped
from modelstate.spec import contiguous_stride

if TYPE_CHECKING:
    from torch.distributed import Store, Work
    from torch.distributed.tensor import DTensor, Placement, Shard


Gloo: TypeAlias = Any
"""A `ProcessGroupGloo`, whose collectives have no types."""


class DimensionSplit(NamedTuple):
    """The split of a tensor dimension over a mesh dimension, as one rank sees it."""

    placement: Shard
    """A `Shard`, or a private placement of torch that splits a dimension, such as `_StridedShard`."""
    ranks: int
    """The number of ranks along the mesh dimension."""
    position: int
    """The position of the rank along the mesh dimension."""


def is_split(placement: object) -> TypeGuard[Shard]:
    """Whether a placement splits a dimension of a tensor."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, Shard | _StridedShard)


def split_indices(size: int, splits: Sequence[DimensionSplit]) -> list[range]:
    """Returns the indices of a dimension that one rank holds: runs, in the order in which they lie in its local tensor.

    Torch itself splits a tensor of indices, so the result is right for every placement that torch can split by.

    Raises `DistributedError` for an uneven split of FSDP2 over tensor parallelism in torch 2.8, whose placements say
    other indices than those that the ranks hold. Its `_StridedShard` is a `Shard`.
    """
    from torch.distributed.tensor import Shard

    if all(type(split.placement) is Shard for split in splits):
        indices_in_a_row = range(size)
        for placement, ranks, position in splits:
            own = _ranges(len(indices_in_a_row), placement, ranks)[position]
            indices_in_a_row = indices_in_a_row[own.start : own.stop]
        return [indices_in_a_row] if indices_in_a_row else []
    indices = torch.arange(size, device="cpu")
    for placement, ranks, position in splits:
        parts = ranks * getattr(placement, "split_factor", 1)
        if parts > ranks and isinstance(placement, Shard) and len(indices) % parts:
            raise DistributedError(
                "this version of torch states a wrong layout for an uneven split by FSDP2 and tensor parallelism",
                expected=f"a size that {parts} ranks divide evenly",
                found=f"{len(indices)}, placed {placement!r}, torch {torch.__version__}",
                remedy="use torch 2.11 or later, or a mesh that divides the size",
            )
        indices = _shards(indices, placement, ranks)[position].reshape(-1)
    if not indices.numel():
        return []
    ends = torch.nonzero(indices.diff() != 1).flatten() + 1
    return [range(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(indices, ends)]


@lru_cache(maxsize=64)
def _ranges(size: int, placement: Shard, ranks: int) -> tuple[range, ...]:
    """Returns the indices of all positions at once, since torch splits for all of them. The shards are views."""
    shards = _shards(torch.empty(size, dtype=torch.uint8, device="meta"), placement, ranks)
    starts = (int(shard.storage_offset()) if shard.numel() else 0 for shard in shards)
    return tuple(range(start, start + shard.numel()) for start, shard in zip(starts, shards, strict=True))


def _shards(indices: torch.Tensor, placement: Shard, ranks: int) -> Sequence[torch.Tensor]:
    # The dimension that is split has the number that the placement says.
    column = indices.reshape(*[1] * placement.dim, -1)
    shards: Sequence[torch.Tensor]
    shards, _ = placement._split_tensor(column, ranks, with_padding=False, contiguous=False)
    return shards


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor itself, not a copy or an alias of it."""
    return _dtensor(tensor)._local_tensor


def _dtensor(tensor: torch.Tensor) -> DTensor:
    return cast("DTensor", tensor)


def replicas_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the ranks that hold the same part of a DTensor as this rank, in ascending order."""
    held = _dtensor(tensor)
    coordinate = held.device_mesh.get_coordinate() or ()
    placed = zip(held.placements, coordinate, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else position for placement, position in placed)
    return tuple(sorted(int(rank) for rank in held.device_mesh.mesh[index].flatten()))


def mesh_device_type(tensor: torch.Tensor) -> str:
    """Returns the type of the devices of a DTensor's mesh."""
    return _dtensor(tensor).device_mesh.device_type


def same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two DTensors are placed in the same way on the same ranks."""
    one, other = _dtensor(first), _dtensor(second)
    return one.device_mesh == other.device_mesh and one.placements == other.placements


def dtensor_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor with the shape and placements of `tensor`, and a local tensor of any dtype and device.

    `DTensor.from_local` does the same, and takes four times as long.
    """
    from torch.distributed.tensor import DTensor

    spec = _dtensor(tensor)._spec
    if local.dtype != tensor.dtype and spec.tensor_meta is not None:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_on(
    mesh_shape: Sequence[int],
    ranks: Sequence[int],
    placements: Sequence[Placement],
    shape: Sequence[int],
    local: torch.Tensor,
) -> torch.Tensor:
    """Returns a DTensor on a mesh, which this rank need not be part of. No rank communicates.

    Args:
        mesh_shape: The shape of the mesh.
        ranks: Its ranks, in the order of their coordinates.
        placements: The placements on it.
        shape: The global shape.
        local: The local tensor, whose dtype the DTensor has.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = DeviceMesh(local.device.type, torch.tensor(ranks, device="cpu").view(*mesh_shape), _init_backend=False)
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def ranks_of_meshes(tensors: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    """Returns the ranks of each mesh of some DTensors. Torch computes the ranks of a mesh anew at each access."""
    meshes = {id(mesh): mesh for mesh in (_dtensor(tensor).device_mesh for tensor in tensors)}
    return {tuple(map(int, mesh.mesh.flatten())) for mesh in meshes.values()}


def default_store() -> Store:
    """Returns the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def gloo_group(store: Store, rank: int, size: int, timeout_seconds: float) -> Gloo:
    """Returns a gloo group over a store. Unlike `new_group`, only its own ranks take part in making it."""
    from torch._C._distributed_c10d import ProcessGroupGloo

    for left in [left for left in _left if left[1].is_completed()]:
        _left.remove(left)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(left[0]))
    return ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_seconds))


_left: list[tuple[Gloo, Work]] = []
"""Groups, and the collectives of theirs that this process no longer waits for."""
IsAbandoned = Callable[[], bool]
"""Whether another rank has abandoned the connections of a group. Asked while this rank waits."""
FIRST_CHECK_SECONDS, CHECK_SECONDS = 0.25, 5.0
"""The time before the first such question, and the longest one between two: each is twice the one before."""


def _wait(group: Gloo, work: Work, timeout_seconds: float, is_abandoned: IsAbandoned) -> None:
    """Waits for a collective of a group.

    Raises `TimeoutError` where a rank is missing for too long, and `RuntimeError` where connections are lost.

    gloo can miss that the connection to another rank has been closed, and would wait until the timeout. In a thread
    whose work is to end, it raises `Stopped`.
    """
    pause = min(FIRST_CHECK_SECONDS, CHECK_SECONDS)
    end, next_check = time.monotonic() + timeout_seconds, time.monotonic() + pause
    try:
        while True:
            left = end - time.monotonic()
            wait_seconds = min(left, next_check - time.monotonic(), FIRST_CHECK_SECONDS)
            is_over = work.is_completed()  # then the error is its own, and not that of a wait that was too short
            try:
                work.wait(datetime.timedelta(seconds=max(wait_seconds, 0.001)))
                return
            except RuntimeError as error:
                now = time.monotonic()
                if now >= end or (is_over and now >= end - FIRST_CHECK_SECONDS):
                    raise TimeoutError(str(error)) from None
                if is_over:
                    raise
            if work.is_completed():
                continue
            check_stopped()
            if time.monotonic() >= next_check:
                if is_abandoned():
                    raise RuntimeError("another rank has abandoned the connections")
                pause = min(2 * pause, CHECK_SECONDS)
                next_check = time.monotonic() + pause
    except BaseException:  # also an interrupt
        if time.monotonic() < end and not work.is_completed():
            # A thread of the group waits on, and the destructor of the group would wait for the thread: here, or where
            # the interpreter ends. The next group that is made frees those whose threads wait no longer.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _left.append((group, work))
        raise


_OPTIONS = {
    "allreduce": "AllreduceOptions",
    "allgather": "AllgatherOptions",
    "broadcast": "BroadcastOptions",
    "alltoall_base": "AllToAllOptions",
}


def run_collective(
    group: Gloo, is_abandoned: IsAbandoned, name: str, *arguments: object, timeout_seconds: float, **settings: object
) -> None:
    """Runs a collective of a group, and waits for it. Raises `RuntimeError` where a rank is missing for too long.

    Args:
        group: The group.
        is_abandoned: Whether another rank has abandoned the connections.
        name: The name of the group's method.
        arguments: The arguments of the method, without its options.
        timeout_seconds: How long to wait for the other ranks.
        settings: The options of the collective beside the timeout.
    """
    from torch._C import _distributed_c10d

    options = getattr(_distributed_c10d, _OPTIONS[name])()
    for setting, value in {"timeout": datetime.timedelta(seconds=timeout_seconds), **settings}.items():
        setattr(options, setting, value)
    _wait(group, getattr(group, name)(*arguments, options), timeout_seconds, is_abandoned)


# Modules of FSDP2.


def is_hook_of_fsdp(hook: object) -> bool:
    """Whether a hook of a state dict is one of FSDP2. `reshard` and `refresh_shards` do what these hooks do."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def _fsdp_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Yields the groups of parameters that FSDP2 gathers together."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    seen = set()
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.12
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            for group in groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def without_fsdp(module: torch.nn.Module, memo: dict[int, object]) -> torch.nn.Module:
    """Returns a deep copy of a module, in which modules of FSDP2 have their original class, and no hooks.

    Args:
        module: The module, whose modules of FSDP2 refuse a deep copy.
        memo: The objects that stand for others in the copy, by the ids of the others, as for `copy.deepcopy`.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapped = [part for part in module.modules() if fsdp is not None and isinstance(part, fsdp.FSDPModule)]
    plain_classes: list[Any] = [type(part).__mro__[2] for part in wrapped]
    copies = [plain_class.__new__(plain_class) for plain_class in plain_classes]
    memo.update(zip(map(id, wrapped), copies, strict=True))
    for part, result in zip(wrapped, copies, strict=True):
        for name, value in vars(part).items():
            if "hooks" in name:
                vars(result)[name] = type(value)()
            elif not name.startswith("__composable"):  # the state of FSDP2
                vars(result)[name] = copy.deepcopy(value, memo)
    return copy.deepcopy(module, memo)


_OF_FSDP_PARAM = ("sharded_param", "_sharded_param_data", "_sharding_spec")
"""The attributes that FSDP2 sets when its parameters get other memory."""


def reshard(modules: Iterable[torch.nn.Module]) -> bool:
    """Has modules of FSDP2 show their sharded parameters, and not those that a forward pass has gathered.

    Returns whether there are such modules.
    """
    groups = [*_fsdp_groups(modules)]
    for group in groups:
        group._to_sharded()
    return bool(groups)


def sharded_params(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Returns the parameters of FSDP2, which it gathers before a forward pass."""
    infos = [param._module_info for group in _fsdp_groups(modules) for param in group.fsdp_params]
    return [getattr(info.module, info.param_name) for info in infos]


def gathered_shards(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Returns the shards of the parameters that modules of FSDP2 show whole, as they may after a forward pass."""
    groups = [group for group in _fsdp_groups(modules) if not group.is_sharded]
    return [param.sharded_param for group in groups for param in group.fsdp_params]


def refresh_shards(modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Has FSDP2 use the sharded parameters that its modules have now, and their memory. Returns the undo."""
    undos: list[tuple[object, str, object]] = []
    for group in _fsdp_groups(modules):
        for param in group.fsdp_params:
            info, data = param._module_info, param._sharded_param_data
            now = getattr(info.module, info.param_name)
            local = now._local_tensor
            has_memory = type(data) is torch.Tensor and data.untyped_storage()._cdata == local.untyped_storage()._cdata
            if has_memory and now is param.sharded_param:
                continue
            undos += [(param, name, getattr(param, name)) for name in _OF_FSDP_PARAM]
            undos.append((now, "_local_tensor", local))
            # Outside inference mode, where its tensors could not be trained.
            with torch.inference_mode(local.is_inference()), torch.no_grad():
                param.reset_sharded_param()

    def undo() -> None:
        for holder, name, value in reversed(undos):
            setattr(holder, name, value)

    return undo
