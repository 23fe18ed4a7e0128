"""A job of several ranks that saves sharded state with torch.distributed.checkpoint; `test_dcp.py` starts it.

Arguments: number of ranks, directory. It writes `checkpoint/`, and the same state in one piece to `whole.pt`.
"""

import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def whole(node: Any) -> Any:
    """The same tree with the shards of all ranks gathered."""
    if isinstance(node, dict):
        return {key: whole(value) for key, value in node.items()}
    if isinstance(node, list):
        return [whole(item) for item in node]
    return node.full_tensor().contiguous() if isinstance(node, DTensor) else node


def save(rank: int, ranks: int, directory: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "columns": distribute_tensor(torch.arange(20.0, dtype=torch.bfloat16).reshape(4, 5), mesh, [Shard(1)]),
        "everywhere": distribute_tensor(torch.arange(3), mesh, [Replicate()]),
        "plain": torch.tensor(2.5),
        "step": 12,
    }
    gathered = whole(state)
    if rank == 0:
        torch.save(gathered, directory / "whole.pt")
    dcp.save(state, checkpoint_id=directory / "checkpoint")
    dist.destroy_process_group()


def main(ranks: int, directory: Path) -> int:
    # A fork shares what was imported; no thread runs yet.
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=save, args=(rank, ranks, directory), daemon=True) for rank in range(ranks)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return max(abs(job.exitcode or 0) for job in jobs)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
