"""One small network, sharded in every way that torch has, on a group of four ranks."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import modelstate as ms

ROWS = 20
"""Of the embedding."""


class Block(nn.Module):
    """Projections under the names of a transformer's attention and MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.down(torch.relu(self.up(self.q(x) * self.k(x) + self.v(x))))


class Net(nn.Module):
    """An embedding, two blocks and a head, which is tied to the embedding if asked."""

    steps: torch.Tensor
    table: torch.Tensor

    def __init__(self, width: int = 8, hidden: int = 16, rows: int = ROWS, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, rows, bias=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("table", torch.arange(width) / width, persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.table.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SIZES: dict[str, dict[str, Any]] = {
    "uneven": {"width": 6, "hidden": 10, "rows": 18},  # 6 rows on 4 ranks: 2, 2, 2, 0
    "empty": {"width": 3, "hidden": 2, "rows": 5},  # most ranks hold nothing of most tensors
    "tied": {"tied": True},
    "tied+tp": {"tied": True},
    "wide": {"width": 10, "rows": 300_001},  # its blocks end within rows
}


def plain(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    """The network of a kind, not sharded, with values that depend on the seed."""
    torch.manual_seed(seed)
    net = Net(**SIZES.get(kind, {})).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter))
        net.steps.fill_(seed)
    return net


@cache
def mesh(*shape: int) -> DeviceMesh:
    """A mesh over the four ranks, made once in each process: every mesh makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def fsdp(net: Net, on: DeviceMesh, placement: Callable[[nn.Parameter], Shard | None] | None = None) -> None:
    for block in net.blocks:
        fully_shard(block, mesh=on, shard_placement_fn=placement)
    fully_shard(net, mesh=on, shard_placement_fn=placement)


def _tensor_parallel(net: Net, on: DeviceMesh) -> None:
    plan: dict[str, Any] = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
    for block in net.blocks:
        parallelize_module(block, on, plan)
    parallelize_module(net, on, {"embed": RowwiseParallel(), "head": ColwiseParallel()})


def _fsdp_and_tensor_parallel(net: Net) -> None:
    _tensor_parallel(net, mesh(2, 2)["inner"])
    fsdp(net, mesh(2, 2)["outer"])


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0 else None


def _replicated(net: Net) -> None:
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            replica = distribute_tensor(parameter, mesh(4), [Replicate()])
            module.register_parameter(name, nn.Parameter(replica))


SHARD: dict[str, Callable[[Net], object]] = {
    "fsdp": lambda net: fsdp(net, mesh(4)),
    "hsdp": lambda net: fsdp(net, mesh(2, 2)),
    "tp": lambda net: _tensor_parallel(net, mesh(4)),
    "fsdp+tp": _fsdp_and_tensor_parallel,
    "shard1": lambda net: fsdp(net, mesh(4), _columns),
    "uneven": lambda net: fsdp(net, mesh(4)),
    "empty": lambda net: fsdp(net, mesh(4)),
    "replicated": _replicated,
    "tied": lambda net: fsdp(net, mesh(4)),
}
"""Each kind of model, by what shards it. A function is called on all ranks."""


def sharded(kind: str, dtype: torch.dtype = torch.float32, *, meta: bool = False, seed: int = 1) -> Net:
    """The network of a kind, sharded, on meta or with values that depend on the seed. Called on all ranks."""
    if meta:
        with ms.skeleton():
            net = Net(**SIZES.get(kind, {})).to(dtype)
    else:
        net = plain(kind, dtype, seed)
    SHARD[kind](net)
    return net


def filled(value: float, kind: str = "fsdp", *, frozen: bool = False) -> dict[str, Any]:
    """A network and AdamW. All elements that change have the same value; a block may be frozen. Called on all ranks."""
    net = sharded(kind)
    net.blocks[0].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.0, fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    objects = {"model": net, "optimizer": optimizer}
    for tensor in changing(objects):
        tensor.fill_(value)
    return objects


def changing(objects: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the local tensors that have one value."""
    net, optimizer = objects["model"], objects["optimizer"]
    moments = [values[key] for values in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    own = [parameter for parameter in net.parameters() if parameter.requires_grad]
    yield from (local(tensor.detach()) for tensor in (*own, *moments, net.steps))


def gathered(net: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, whole, by its name: also of a tie, and of non-persistent buffers. For all ranks."""
    named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return {name: whole(tensor).detach().clone() for name, tensor in named}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
