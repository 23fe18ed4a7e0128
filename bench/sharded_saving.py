"""Saves an FSDP2 model of four ranks in each of the usual ways, and prints a table.

Every run has four fresh processes, which share a gloo group on the CPU. A save counts when its bytes are on the disk:
what does not flush its files itself is followed by a flush of them. The table names what did not run;
`pip install torch_checkpointing` brings what is not among the requirements.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import modelstate as ms
from bench.measure import MeasurementError, Stage, Stages, temporary_folder
from bench.pages import InPage, Row
from bench.sharded import LAYERS, RANKS, RUNS, WIDTH, Model, in_turn, on_meta, on_ranks, start_rank, table_rows


def _flush(folder: Path) -> None:
    """Flushes the files of a folder, and their names."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def ours(model: Model, folder: Path) -> None:
    ms.save(model, folder / "model.safetensors")


def store(model: Model, folder: Path) -> None:
    with ms.Store(folder) as checkpoints:
        checkpoints.save(1, {"model": model})


def dcp(model: Model, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    dcp.save(get_model_state_dict(model), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))


def dcp_consolidated(model: Model, folder: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(model)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        _flush(folder)
    dist.barrier()


def gathered(model: Model, folder: Path) -> None:
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = dict(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    )
    if dist.get_rank() == 0:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        _flush(folder)
    dist.barrier()


def torch_checkpointing(model: Model, folder: Path, consolidates: bool = False) -> None:
    """Its files are safetensors, since its own consolidation takes no others.

    Version 0.1.1 gathers what the ranks hold on CUDA devices only; here gloo does it. Its writes with O_DIRECT, the
    default, are not aligned, so that ext4 refuses them.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(_: object, data: object, group: Any = None) -> dict[int, object]:
        of_ranks: list[object] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, data, group)
        return dict(enumerate(of_ranks))

    config, storage = CheckpointManager.Config.with_sync_save(), LocalFileSystemStorageConfig(use_direct_io=False)
    layout = LayoutInfo(SHARD_OF_RANK.replace("*", "{rank}"), SafetensorsSerialization())
    config.items = {"model": ItemSpec(layout=layout, resharder=DefaultResharder())}
    config.storage_config = storage
    manager = config.build()
    with mock.patch.object(DefaultMetadataManager, "_all_gather_pickled_data", gather):
        manager.save(str(folder / SHARDS), {"model": get_model_state_dict(model)})
    manager.close()
    if consolidates:
        dist.barrier()
        consolidate_hf_safetensors_checkpoint(str(folder / SHARDS), output_dir=str(folder), storage_config=storage)
    dist.barrier()
    if dist.get_rank() == 0:
        _flush(folder)
    dist.barrier()


SHARDS, SHARD_OF_RANK = "shards", "model_*.safetensors"
"""The folder of torch_checkpointing, and the names of its files."""
OURS, STORE = "modelstate.save", "modelstate.Store.save"
CONTENDERS: Mapping[str, Callable[[Model, Path], None]] = {
    OURS: ours,
    STORE: store,
    "dcp.save, which leaves files of its own": dcp,
    "dcp.save, HuggingFaceStorageWriter with consolidation": dcp_consolidated,
    "torch_checkpointing, which leaves a file for each rank": torch_checkpointing,
    "torch_checkpointing with consolidation": partial(torch_checkpointing, consolidates=True),
    "get_model_state_dict(full_state_dict=True), save_file on rank 0": gathered,
}
HEAD = ("", "ms", "×", "own memory of all ranks", "of the rank with the most", "bytes on the disk")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a contender took in one run."""

    seconds: float
    """Of the slowest rank."""
    own_bytes: int
    most_bytes: int
    """Of the rank whose memory grew most."""
    disk_bytes: int
    digest: str
    """Of the tensors that were read back."""


def save_on_a_rank(*, rank: int, ranks: int, contender: str, folder: str, width: int, layers: int) -> None:
    """One rank: saves a tiny model first, so that imports and connections do not count."""
    import torch.distributed as dist

    start_rank(rank, ranks, folder)
    save, tiny, saved = CONTENDERS[contender], Path(folder) / "tiny", Path(folder) / "saved"
    for each in (tiny, saved):
        each.mkdir(exist_ok=True)
    save(filled(64, 2), tiny)
    model = filled(width, layers)
    stages = Stages()
    dist.barrier()
    begun = time.perf_counter()
    save(model, saved)
    stages.end("saved", seconds=time.perf_counter() - begun)
    dist.barrier()
    dist.destroy_process_group()


def filled(width: int, layers: int, columns: bool = False) -> Model:
    """The model with values that depend on nothing but the rank. Its weights are split by rows, or by columns."""
    import torch.distributed as dist

    model = on_meta(width, layers, columns).to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for param in model.parameters():
        shard: Any = param.detach()
        local = shard.to_local()
        local.copy_(torch.randint(-(2**15), 2**15, local.shape, dtype=torch.int16).view(torch.bfloat16).nan_to_num_())
    return model


def _digest(folder: Path, contender: str) -> str:
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors*"), key=lambda path: path.suffix)  # an index is first
    with ExitStack() as opened:
        if contender == STORE:
            parts = [ms.Store(folder).open("model")]
        elif files or not (folder / SHARDS).exists():
            parts = [ms.open(files[0] if files else folder)]
        else:
            parts = [ms.open(path) for path in sorted((folder / SHARDS).glob(SHARD_OF_RANK))]
        for part in parts:
            opened.enter_context(part)
        for name in sorted(parts[0]):
            tensor = torch.cat([part.tensor(name) for part in parts])
            data: Any = tensor.view(torch.uint8).numpy()
            digest.update(data)
    return digest.hexdigest()


def measure(contender: str, folder: Path, width: int, layers: int) -> Saved:
    """Runs a contender once."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        results = on_ranks(save_on_a_rank, RANKS, contender=contender, folder=own, width=width, layers=layers)
        saved = Path(own) / "saved"
        disk_bytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        digest = _digest(saved, contender)
    stages: list[Stage] = [result["saved"] for result in results]
    memory = [stage.anonymous_bytes for stage in stages]
    return Saved(max(stage.facts["seconds"] for stage in stages), sum(memory), max(memory), disk_bytes, digest)


def rows(runs: int = RUNS, width: int = WIDTH, layers: int = LAYERS) -> list[Row]:
    """Measures, and returns the rows of the table. Raises `MeasurementError` where weights differ."""
    with temporary_folder() as folder:
        results, failed = in_turn(list(CONTENDERS), lambda name: measure(name, folder, width, layers), runs)
    if len({saved.digest for found in results.values() for saved in found}) != 1:
        raise MeasurementError("the contenders have saved different weights")
    return list(table_rows(results, ("own_bytes", "most_bytes", "disk_bytes"), failed))


TABLE = InPage(
    "bench/results/sharded.md",
    "sharded_saving",
    "<!-- End of the table of saves -->",
    HEAD,
    rows,
)


if __name__ == "__main__":
    TABLE.main(__doc__)
