"""The shard that a rank holds, against the local tensors that torch itself makes on every rank of a mesh."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from modelstate import errors
from modelstate.distributed.shards import LocalShard, local_shard, shard_of
from modelstate.rules.expression import read_bytes, values_of
from modelstate.spec import ByteRange, StoredTensor, slices_of

STATES_WRONG_LAYOUTS = issubclass(_StridedShard, Shard)
"""Whether this is torch 2.8, whose placements of uneven splits are refused."""


@contextmanager
def rank_of(mesh_shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """A mesh as one of its ranks sees it. Nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))  # type: ignore[no-untyped-call]
    try:
        names = ("dp", "tp", "pp")[: len(mesh_shape)]
        yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def held(shard: LocalShard, whole: torch.Tensor) -> torch.Tensor:
    """What the boxes say that a rank holds."""
    local = torch.full(shard.shape, -1.0)
    for box, place in shard.boxes():
        local[slices_of(place)] = whole[slices_of(box)]
    return local


def agrees(tensor: DTensor, whole: torch.Tensor, mesh: DeviceMesh) -> None:
    """Compares a shard with the local tensor of torch: through the boxes, and as a source.

    The mesh is given, since torch caches meshes for the life of a process, which is several ranks here.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    try:
        shard = local_shard(tuple(tensor.shape), tuple(tensor.placements), tuple(mesh.shape), tuple(coordinate))
    except errors.DistributedError:
        if not STATES_WRONG_LAYOUTS:
            raise
        return
    local = tensor.to_local()
    assert shard.shape == tuple(local.shape)
    assert torch.equal(held(shard, whole), local)
    assert torch.equal(values_of(shard.of(whole), lambda stored: stored), local)  # type: ignore[arg-type,return-value]


CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((8, 3), (4,), [Shard(0)]),
    ((3, 8), (4,), [Shard(1)]),
    ((6, 2), (4,), [Shard(0)]),  # 2, 2, 2 and no rows
    ((1,), (4,), [Shard(0)]),
    ((0, 3), (2,), [Shard(0)]),
    ((5, 5), (4,), [Replicate()]),
    ((), (2,), [Replicate()]),
    ((7, 3), (2, 2), [Replicate(), Shard(0)]),
    ((7, 5), (2, 2), [Shard(0), Shard(1)]),
    ((7, 5), (2, 2), [Shard(1), Shard(-2)]),
    ((7, 3), (2, 2), [Shard(0), Shard(0)]),
    ((8, 3), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((7, 3), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 9), (4,), [_StridedShard(1, split_factor=2)]),
    ((9, 9), (2, 2), [_StridedShard(1, split_factor=3), _StridedShard(0, split_factor=2)]),
    ((4, 6, 5), (2, 2, 2), [Shard(2), Replicate(), Shard(1)]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES)
def test_a_distributed_tensor(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    whole = numbers(*shape)
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            agrees(distribute_tensor(whole, mesh, placements, src_data_rank=None), whole, mesh)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 3))
    placement = st.one_of(st.builds(Shard, dims), st.just(Replicate()), strided)
    return shape, mesh_shape, [draw(placement) for _ in mesh_shape]


@pytest.mark.slow
@settings(deadline=None)
@given(layouts())
def test_all_ranks_together_hold_every_element_as_often_as_it_is_replicated(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[Any]],
) -> None:
    shape, mesh_shape, placements = layout
    times = torch.zeros(shape, dtype=torch.int64)
    for rank in range(math.prod(mesh_shape)):
        coordinate = [int(index) for index in torch.unravel_index(torch.tensor(rank), mesh_shape)]
        try:
            shard = local_shard(tuple(shape), tuple(placements), tuple(mesh_shape), tuple(coordinate))
        except errors.DistributedError:
            if not STATES_WRONG_LAYOUTS:
                raise
            return
        for box, _ in shard.boxes():
            times[slices_of(box)] += 1
    replicas = math.prod(
        size for size, placement in zip(mesh_shape, placements, strict=True) if placement.is_replicate()
    )
    assert bool((times == replicas).all())


def test_a_shard_reads_its_bytes_only() -> None:
    stored = StoredTensor.view(torch.float32, (64, 16), (16, 1), ByteRange("file", 0, 64 * 16 * 4))
    rows = local_shard((64, 16), (Shard(0),), (8,), (3,)).of(stored)
    assert isinstance(rows, StoredTensor)
    assert rows.extent == ByteRange("file", 24 * 16 * 4, 8 * 16 * 4)
    strided = local_shard((64, 16), (_StridedShard(0, split_factor=2), Shard(0)), (2, 2), (1, 0)).of(stored)
    assert read_bytes(strided) == 16 * 16 * 4


def test_layouts_that_cannot_be_loaded() -> None:
    with pytest.raises(errors.DistributedError, match="partial sums"):
        local_shard((4,), (Partial(),), (2,), (0,))
    with pytest.raises(errors.DistributedError, match="a dimension that it does not have"):
        local_shard((4,), (Shard(1),), (2,), (0,))
    with rank_of((2,), 0) as mesh:
        uneven = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
        with pytest.raises(errors.DistributedError, match="does not have the shape"):
            shard_of(uneven)
        assert shard_of(distribute_tensor(numbers(4), mesh, [Shard(0)], src_data_rank=None)) is not None


def test_a_mesh_that_does_not_list_its_ranks_in_order() -> None:
    """FSDP2 gives such ranks other parts than the placements say."""
    with rank_of((4,), 1):
        for ranks in ([1, 0, 2, 3], [[0, 1], [3, 2]], [[2, 3], [0, 1]]):
            mesh = DeviceMesh("cpu", ranks, _init_backend=False)
            placements = [Shard(0)] * mesh.ndim
            tensor = distribute_tensor(numbers(4), mesh, placements, src_data_rank=None)
            with pytest.raises(errors.DistributedError, match="another order"):
                shard_of(tensor)
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], _init_backend=False)
        assert shard_of(distribute_tensor(numbers(4), mesh, [Shard(0)] * 2, src_data_rank=None)) is not None


def test_a_large_dimension_takes_no_memory() -> None:
    shard = local_shard((1 << 40, 2), (Shard(0), Shard(0)), (2, 4), (1, 3))
    assert shard.runs == ((range(7 << 37, 8 << 37),), (range(2),))
