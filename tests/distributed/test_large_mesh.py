"""One rank of a mesh of 512 ranks plans a model of 70B parameters, without peers."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import modelstate as ms
from modelstate.distributed import shards
from modelstate.torch_compat.private import torch_version
from tests.distributed import models


class Decoder(nn.Module):
    """The names and shapes of a Llama of 70B parameters."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = 8192, 28672
        sizes = {"q": (width, width), "k": (width, 1024), "v": (width, 1024), "o": (width, width)}
        sizes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}

        def layer() -> nn.Module:
            linear = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
            return nn.ModuleDict({**linear, "first": nn.RMSNorm(width), "second": nn.RMSNorm(width)})

        self.embed = nn.Embedding(128256, width)
        self.layers = nn.ModuleList(layer() for _ in range(80))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 128256, bias=False)


def write_hole(net: nn.Module, path: Path) -> None:
    """Writes a checkpoint of a model in bfloat16 without its values."""
    header, end = {}, 0
    for name, tensor in net.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


STYLES = {
    **{f"layers.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("o", "down")},
    "head": "colwise",
    "embed": "rowwise",
}


@pytest.mark.skipif(torch_version() < (2, 11), reason="this torch states a wrong layout for 128256 rows on 512 ranks")
@pytest.mark.slow
def test_a_rank_of_a_large_mesh_plans_with_few_computations(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = Decoder().to(torch.bfloat16)
    path = tmp_path / "model.safetensors"
    write_hole(net, path)
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
    assert plan.bytes == sum(models.local(parameter).nbytes for parameter in net.parameters())
