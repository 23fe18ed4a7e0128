"""Loads a checkpoint into an FSDP2 model on four ranks, in each of the usual ways, and prints a table.

Every run has four fresh processes, which share a gloo group on the CPU. The model is on meta when the clock starts, and
every rank holds its shards when it stops.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

import modelstate as ms
from bench.measure import ROOT, MeasurementError, Stage, Stages, alternate, call, run_together, temporary_folder
from bench.pages import InPage, Row, milliseconds, ratio
from modelstate.text_format import size

RANKS = 4
RUNS = 5
WIDTH, LAYERS = 1280, 18
"""Of a model of 649 MB."""


class Block(nn.Module):
    """The linear layers of a decoder's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Model(nn.Module):
    """Blocks without a forward."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))


def on_meta(width: int, layers: int, columns: bool = False) -> Model:
    """Builds the model on meta, and shards it over all ranks, by rows or, where it has matrices, by columns."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    with ms.skeleton():
        model = Model(width, layers).to(torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, shard_placement_fn=lambda param: Shard(1) if columns and param.ndim == 2 else None)
    return model


def ours(model: Model, path: Path) -> None:
    ms.load(model, path)


def dcp(model: Model, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model.to_empty(device="cpu")
    dcp.load(get_model_state_dict(model), storage_reader=dcp.HuggingFaceStorageReader(str(path.parent)))


def every_rank(model: Model, path: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device="cpu")
    state: dict[str, Any] = dict(load_file(path))
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def broadcast(model: Model, path: Path) -> None:
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device="cpu")
    state: dict[str, Any] = dict(load_file(path)) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def accelerate(model: Model, path: Path) -> None:
    import torch.distributed as dist
    from accelerate.utils import fsdp2_load_full_state_dict
    from safetensors.torch import load_file

    is_main = dist.get_rank() == 0
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=is_main), model, load_file(path) if is_main else {})


OURS = "modelstate.load"
CONTENDERS: Mapping[str, Callable[[Model, Path], None]] = {
    OURS: ours,
    "dcp.load, HuggingFaceStorageReader": dcp,
    "load_file and set_model_state_dict on every rank": every_rank,
    "load_file on rank 0, set_model_state_dict(broadcast_from_rank0)": broadcast,
    "accelerate fsdp2_load_full_state_dict": accelerate,
}
HEAD = ("", "ms", "×", "read with system calls", "own memory of all ranks", "with file pages")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a contender took in one run, over all ranks."""

    seconds: float
    """Of the slowest rank."""
    read_bytes: int
    own_bytes: int
    resident_bytes: int
    digests: tuple[str, ...]
    """Of the shards of each rank."""


def write(folder: Path, width: int, layers: int) -> int:
    """Writes a checkpoint with random values, and returns its bytes."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = {
        name: torch.randint(-(2**15), 2**15, tensor.shape, dtype=torch.int16).view(torch.bfloat16).nan_to_num_()
        for name, tensor in _shapes(width, layers).items()
    }
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in state.values())


def _shapes(width: int, layers: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(Model(width, layers).state_dict())


def load_on_a_rank(*, rank: int, ranks: int, contender: str, folder: str, width: int, layers: int) -> None:
    """One rank: loads a tiny checkpoint first, so that imports and connections do not count."""
    import torch.distributed as dist

    start_rank(rank, ranks, folder)
    load, checkpoints = CONTENDERS[contender], Path(folder).parent
    load(on_meta(64, 2), checkpoints / "tiny" / "model.safetensors")
    model = on_meta(width, layers)
    stages = Stages()
    dist.barrier()
    before = _read_so_far()
    begun = time.perf_counter()
    load(model, checkpoints / "model" / "model.safetensors")
    seconds = time.perf_counter() - begun
    read_bytes = _read_so_far() - before
    stages.end("ready", seconds=seconds, read_bytes=read_bytes)
    digest = hashlib.sha256()
    for param in model.parameters():
        local: Any = param
        digest.update(local.to_local().detach().contiguous().view(torch.uint8).numpy())
    stages.end("check", digest=digest.hexdigest())
    dist.barrier()
    dist.destroy_process_group()


def start_rank(rank: int, ranks: int, folder: str) -> None:
    """Connects a process to the other ranks, which have the same folder."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)


class RankWork(Protocol):
    """What a rank does in a process of its own."""

    __module__: str
    __qualname__: str

    def __call__(self, *, rank: int, ranks: int, contender: str, folder: str, width: int, layers: int) -> None: ...


def on_ranks(
    work: RankWork, ranks: int, *, contender: str, folder: str, width: int, layers: int
) -> list[dict[str, Stage]]:
    """Runs every rank in a fresh process, and returns the stages of each."""
    each = [
        call(work, rank=rank, ranks=ranks, contender=contender, folder=folder, width=width, layers=layers)
        for rank in range(ranks)
    ]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    return run_together(each, environment=environment, timeout_seconds=120)


def _read_so_far() -> int:
    """Returns the bytes that the process has read with system calls, from files and sockets."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar:"))


def measure(contender: str, folder: Path, width: int, layers: int) -> Loaded:
    """Runs a contender once."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        results = on_ranks(load_on_a_rank, RANKS, contender=contender, folder=own, width=width, layers=layers)
    ready: list[Stage] = [result["ready"] for result in results]
    return Loaded(
        max(stage.facts["seconds"] for stage in ready),
        sum(stage.facts["read_bytes"] for stage in ready),
        sum(stage.anonymous_bytes for stage in ready),
        sum(stage.total_bytes for stage in ready),
        tuple(result["check"].facts["digest"] for result in results),
    )


class Measurement(Protocol):
    """What a contender took in one run."""

    @property
    def seconds(self) -> float: ...


Measurements = TypeVar("Measurements", bound=Measurement)


def in_turn(
    names: Sequence[str], measure: Callable[[str], Measurements], runs: int
) -> tuple[dict[str, list[Measurements]], dict[str, str]]:
    """The results of contenders that are measured in alternation, and why others failed."""
    contenders = {name: partial(measure, name) for name in names}
    return alternate(contenders, runs, lambda result: f"{milliseconds(result.seconds)} ms")


def table_rows(
    results: Mapping[str, Sequence[Measurement]], fields: Sequence[str], failed: Mapping[str, str]
) -> Iterator[Row]:
    """The medians of each contender, with fields in bytes; the times are compared with those of the first one."""
    first = median(run.seconds for run in next(iter(results.values())))
    for name, runs in results.items():
        seconds = median(run.seconds for run in runs)
        sizes = (median(getattr(run, field) for run in runs) for field in fields)
        yield name, milliseconds(seconds), ratio(seconds, first), *map(size, sizes)
    for name, reason in failed.items():
        yield name, f"did not run: {reason}", *[""] * (len(fields) + 1)


def rows(runs: int = RUNS, width: int = WIDTH, layers: int = LAYERS) -> list[Row]:
    """Measures, and returns the rows of the table. Raises `MeasurementError` where weights differ."""
    with temporary_folder() as folder:
        write(folder / "tiny", 64, 2)
        write(folder / "model", width, layers)
        results, failed = in_turn(list(CONTENDERS), lambda name: measure(name, folder, width, layers), runs)
    if len({loaded.digests for found in results.values() for loaded in found}) != 1:
        raise MeasurementError("the contenders end with different weights")
    return list(table_rows(results, ("read_bytes", "own_bytes", "resident_bytes"), failed))


TABLE = InPage(
    "bench/results/sharded.md",
    "sharded",
    "<!-- End of the table -->",
    HEAD,
    rows,
)


if __name__ == "__main__":
    TABLE.main(__doc__)
