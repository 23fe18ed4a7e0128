"""Writes a small directory of torch.distributed.checkpoint with the installed torch, as files for the tests.

Two ranks save plain tensors, sharded tensors and values. The state is a function of nothing but this file, so that the
tests know what must be read:

    python tests/formats/dcp_written/write.py tests/formats/dcp_written/torch-2.15
"""

import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

RANKS = 2


def state() -> dict[str, Any]:
    """The state dict, each tensor whole. The names in `SHARDED` are saved in shards."""
    rows = torch.arange(10.0).reshape(5, 2)
    return {
        "model": {
            "rows": rows,
            "columns": rows.to(torch.bfloat16).t().contiguous(),
            "plain": torch.arange(3),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
        },
        "list": [torch.ones(2), 7],
        "step": 12,
    }


SHARDED = {"rows": 0, "columns": 1}


def save(rank: int, directory: Path, meeting: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    saved = state()
    for name, dimension in SHARDED.items():
        saved["model"][name] = distribute_tensor(saved["model"][name], mesh, [Shard(dimension)])
    dcp.save(saved, checkpoint_id=directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        context = multiprocessing.get_context("spawn")
        arguments = (Path(sys.argv[1]), f"{scratch}/meeting")
        ranks = [context.Process(target=save, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(abs(process.exitcode or 0) for process in ranks))
