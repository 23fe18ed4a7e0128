"""What `ms.dcp.Writer` saves: the state of a planner of `torch.distributed.checkpoint`, of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import Placement, Replicate

from modelstate.distributed.agreement import PLANNING, Agreement
from modelstate.distributed.connections import number_of
from modelstate.errors import DistributedError, OptionError
from modelstate.formats.block_writer import write_blocks
from modelstate.formats.torch_zip import pickled
from modelstate.torch_compat.plain import is_sharded
from modelstate.torch_compat.private import storage_id
from modelstate.torch_compat.sharding import dtensor_on, local_tensor

_Path = tuple[str | int, ...]


def state_of(planner: SavePlanner) -> dict[_Path, object]:
    """Returns the values of a planner's state dict by their paths."""
    changed = [
        name
        for name in ("resolve_data", "lookup_object", "transform_object")
        if getattr(type(planner), name, None) is not getattr(DefaultSavePlanner, name)
    ]
    if changed or not isinstance(planner, DefaultSavePlanner):
        raise OptionError(
            "the planner of dcp.save changes what is saved",
            expected="a DefaultSavePlanner, or one that only plans otherwise",
            found=f"{type(planner).__name__}, with its own {', '.join(changed)}",
            remedy="change the state dict before dcp.save",
        )
    return {planner.mappings.get(name, (name,)): value for name, value in planner.state_dict.items()}


class _Layout(msgspec.Struct, frozen=True):
    """A tensor of one rank, for ranks that lack it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    """Empty where the tensor is no DTensor; so is the mesh."""
    mesh: tuple[tuple[int, ...], tuple[int, ...]]
    """The shape of the mesh, and its ranks."""
    digest: str
    """Of the values of a tensor that is no DTensor."""
    tied_to: _Path
    """The first tensor of the rank that shows the same memory."""

    @classmethod
    def of_all(cls, state: Mapping[_Path, object]) -> dict[_Path, _Layout]:
        """Returns the layouts of the tensors of a state."""
        layouts: dict[_Path, _Layout] = {}
        first: dict[object, _Path] = {}
        for path, value in state.items():
            if isinstance(value, torch.Tensor):
                tensor: Any = value
                local = local_tensor(value) if is_sharded(value) else value
                placements: tuple[Placement, ...] = ()
                mesh: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
                digest = ""
                if is_sharded(value):
                    placements = tuple(tensor.placements)
                    mesh = tuple(tensor.device_mesh.shape), tuple(map(int, tensor.device_mesh.mesh.flatten()))
                else:
                    (digest,) = write_blocks(None, 0, [value])
                view = storage_id(local), local.storage_offset(), local.stride(), tuple(value.shape), value.dtype
                tied_to = first.setdefault(view, path)
                layouts[path] = cls(value.dtype, tuple(value.shape), placements, mesh, digest, tied_to)
        return layouts


def with_values_of_all(
    state: dict[_Path, object], agreement: Agreement, group: dist.ProcessGroup
) -> dict[_Path, object]:
    """Returns the state with the values and the DTensors that only other ranks have: a call of all ranks."""
    if len({*agreement.texts("comparing the names", str(number_of(state)))}) == 1:
        return state
    with agreement.phase("describing the state"):
        values = {path: value for path, value in state.items() if not isinstance(value, torch.Tensor)}
        own = values, _Layout.of_all(state)
        pickled(own)  # what cannot be sent is an error here, and not in the gather, where the others would wait
    with agreement.phase(PLANNING):
        of_ranks = [own] * len(agreement.ranks)
        dist.all_gather_object(of_ranks, own, group)  # raises on a rank that cannot unpickle what another one has sent
        ranks = dist.get_process_group_ranks(group)
        return _united(state, ranks, *zip(*of_ranks, strict=True))


def _united(
    state: dict[_Path, object],
    ranks: Sequence[int],
    values: Sequence[dict[_Path, object]],
    layouts: Sequence[dict[_Path, _Layout]],
) -> dict[_Path, object]:
    """Returns the state with the values and the DTensors of all ranks.

    A tensor of some ranks that is no DTensor becomes one that is replicated on these ranks. The order is the same on
    all ranks.
    """
    of_all: dict[_Path, object] = {}
    locals_of: dict[tuple[int, _Path], torch.Tensor] = {}
    for others in values:
        of_all = {**others, **of_all}
    for path in {path: None for others in layouts for path in others}:
        holders = [position for position, others in enumerate(layouts) if path in others]
        layout = layouts[holders[0]][path]
        mesh, placements = layout.mesh, layout.placements
        if len(holders) == len(ranks) or (path in state and placements):
            continue
        if not placements:
            mesh, placements = ((len(holders),), tuple(ranks[position] for position in holders)), (Replicate(),)
            if len({layouts[position][path] for position in holders}) > 1:
                raise DistributedError(
                    "a tensor that is no DTensor differs between the ranks that have it; nothing has been changed",
                    where=".".join(map(str, path)),
                    expected=f"the same values on the ranks {mesh[1]}",
                    remedy="make it a DTensor, or give it another name on each rank",
                )
        value = state.get(path)
        if not isinstance(value, torch.Tensor):
            # Ties are the same on all ranks.
            value = locals_of.setdefault((holders[0], layout.tied_to), torch.empty(0, dtype=layout.dtype, device="cpu"))
        of_all[path] = dtensor_on(*mesh, placements, layout.shape, value)
    # A value that is no tensor stays that of this rank, so that the save finds the ranks that differ.
    own = {path: value for path, value in state.items() if path not in of_all or not isinstance(value, torch.Tensor)}
    of_all = {**of_all, **own}
    return {path: of_all[path] for path in sorted(of_all, key=lambda path: [str(step) for step in path])}
