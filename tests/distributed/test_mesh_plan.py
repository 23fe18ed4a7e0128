"""The plan for a mesh, made in one process, says what the ranks of a real mesh hold."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import modelstate as ms
from modelstate.loading import mesh_plan, plan_for_mesh
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


def test_a_large_model_on_many_ranks_takes_few_computations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names and shapes of a Llama of 70B, on a mesh of 64 x 8. What costs the same is computed once."""
    width, hidden, layers, words = 8192, 28672, 80, 128256
    with torch.device("meta"):
        model = nn.Module()
        model.embed, model.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        model.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(width, size, bias=False)
                    for name, size in zip("qkvo", (width, 1024, 1024, width), strict=True)
                }
                | {"gate": nn.Linear(width, hidden, bias=False), "up": nn.Linear(width, hidden, bias=False)}
                | {"down": nn.Linear(hidden, width, bias=False), "norm": nn.RMSNorm(width), "after": nn.RMSNorm(width)}
            )
            for _ in range(layers)
        )
        model.to(torch.bfloat16)
    write_sparse(dict(model.state_dict()), tmp_path / "model.safetensors")
    styles = {f"layers.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")}
    styles |= {"layers.*.o": "rowwise", "layers.*.down": "rowwise", "embed": "rowwise", "head": "colwise"}
    counted = mock.Mock(side_effect=mesh_plan._cost)
    monkeypatch.setattr(mesh_plan, "_cost", counted)
    plan = ms.plan(model, tmp_path / "model.safetensors")
    ranks = plan_for_mesh(plan, model, (64, 8), styles)
    assert len(ranks.ranks) == 512
    assert ranks.held_bytes >= plan.bytes
    assert ranks.imbalance < 1.01
    assert counted.call_count < 30  # for 722 tensors and 512 ranks


def write_sparse(state: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file with a header, and no bytes of tensors."""
    header, end = {}, 0
    for name, tensor in state.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


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
