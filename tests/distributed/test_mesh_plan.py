"""The plan for a mesh, made in one process, says what the ranks of a real mesh hold."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import modelstate as ms
from modelstate.loading import plan_for_mesh
from tests.distributed import models
from tests.distributed.ranks import Ranks

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
}


def _held_bytes(kind: str) -> int:
    net = models.sharded(kind)
    tensors: list[torch.Tensor] = [
        *net.parameters(),
        *(buffer for name, buffer in net.named_buffers() if name != "table"),
    ]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.itemsize for tensor in local)


@pytest.mark.parametrize("kind", MESHES)
def test_each_rank_holds_what_the_plan_says(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    net = models.plain(kind)
    ms.save(net, tmp_path / "model.safetensors")
    plan = plan_for_mesh(ms.plan(net, tmp_path / "model.safetensors"), net, *MESHES[kind])
    assert [rank.held_bytes for rank in plan.ranks] == ranks.values(_held_bytes, kind)
    assert [rank.rank for rank in plan.ranks] == [0, 1, 2, 3]


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
