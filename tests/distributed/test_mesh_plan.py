"""The plan for a mesh, made in one process, says what the ranks of a real mesh hold."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import modelstate as ms
from modelstate.distributed import shards
from modelstate.loading import plan_for_mesh
from modelstate.torch_compat.private import torch_version
from tests.distributed import models
from tests.distributed.ranks import Ranks
from tests.loading.test_mesh_plan import STYLES, Decoder, write_hole

TENSOR_PARALLEL = {
    "blocks.*.[qkv]": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.norm": "replicate",
    "embed": "rowwise",
    "head": "colwise",
}
"""What `models.SHARD` gives to `parallelize_module`."""
MESHES: dict[str, tuple[tuple[int, ...], dict[str, str] | None]] = {
    "fsdp": ((4,), None),
    "hsdp": ((2, 2), None),
    "tp": ((4,), TENSOR_PARALLEL),
    "fsdp+tp": ((2, 2), TENSOR_PARALLEL),
    "uneven": ((4,), None),
    "empty": ((4,), None),
    "tied": ((4,), None),
    "tied+tp": ((4,), TENSOR_PARALLEL),  # which unties
}


def _held_bytes(kind: str) -> int:
    net = models.plain(kind)
    models.SHARD[kind.removeprefix("tied+")](net)
    tensors: list[torch.Tensor] = [
        *net.parameters(),
        *(buffer for name, buffer in net.named_buffers() if name != "table"),
    ]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.itemsize for tensor in local)


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("kind", MESHES)
def test_each_rank_holds_what_the_plan_says(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    net = models.plain(kind)
    ms.save(net, tmp_path / "model.safetensors")
    plan = plan_for_mesh(ms.plan(net, tmp_path / "model.safetensors"), net, *MESHES[kind])
    assert [rank.held_bytes for rank in plan.ranks] == ranks.values(_held_bytes, kind)
    assert [rank.rank for rank in plan.ranks] == [0, 1, 2, 3]


@pytest.mark.skipif(torch_version() < (2, 11), reason="this torch states a wrong layout for 128256 rows on 512 ranks")
@pytest.mark.slow
def test_a_rank_of_a_large_mesh_plans_with_few_computations(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = Decoder().to(torch.bfloat16)
    path = tmp_path / "model.safetensors"
    write_hole(net, path)
    expected = plan_for_mesh(ms.plan(net, path), net, (64, 8), STYLES).ranks[77]
    dist.init_process_group("fake", store=FakeStore(), rank=77, world_size=512)  # DTensors as in a run, without peers
    try:
        mesh = init_device_mesh("cpu", (64, 8), mesh_dim_names=("data", "tensor"))
        makers: dict[str, Callable[[], ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        parallelize_module(net, mesh["tensor"], {name: makers[style]() for name, style in STYLES.items()})
        for layer in net.layers:
            fully_shard([*layer.children()], mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        shards._local_shard.cache_clear()
        tracemalloc.start()
        plan = ms.plan(net, path)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
        dist.destroy_process_group()
    assert plan.ok
    assert len(plan.steps) == 723
    assert shards._local_shard.cache_info().misses < 20
    assert plan.bytes == expected.held_bytes


def test_too_many_ranks(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    ms.save(net, tmp_path / "model.safetensors")
    with pytest.raises(ms.errors.OptionError, match="too many ranks"):
        plan_for_mesh(ms.plan(net, tmp_path / "model.safetensors"), net, (100_000,))


def test_other_ranks_than_those_of_a_group_need_no_group(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 640, bias=False))
    ms.save(net, tmp_path / "model.safetensors")
    plan = plan_for_mesh(ms.plan(net, tmp_path / "model.safetensors"), net, (64, 8), {"0": "colwise"})
    assert {rank.coordinate for rank in plan.ranks} == {(row, column) for row in range(64) for column in range(8)}
    # 640 rows: 80 for each rank of tensor parallelism, and of these 2 for each of 40 ranks of FSDP.
    assert [rank.held_bytes for rank in plan.ranks] == [2 * 64 * 4] * (40 * 8) + [0] * (24 * 8)
    assert plan.read_bytes == plan.held_bytes == plan.plan.bytes
