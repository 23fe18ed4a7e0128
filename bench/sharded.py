"""Loads a checkpoint into an FSDP2 model on four ranks, in each of the usual ways, and prints a table.

Every run has four fresh processes, which share a gloo group on the CPU. The model is on meta when the clock starts, and
every rank holds its shards when it stops. `--rank` is one rank of a contender.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

import modelstate as ms
from bench.measure import MeasurementError, Stage, Stages, run
from bench.pages import InPage, milliseconds, ratio
from modelstate.text_format import size

Result = TypeVar("Result")

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


def rank_main(rank: int, contender: str, folder: Path, width: int, layers: int) -> None:
    """One rank: loads a tiny checkpoint first, so that imports and connections do not count."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    load = CONTENDERS[contender]
    load(on_meta(64, 2), folder.parent / "tiny" / "model.safetensors")
    model = on_meta(width, layers)
    stages = Stages()
    dist.barrier()
    before = _read_so_far()
    begun = time.perf_counter()
    load(model, folder.parent / "model" / "model.safetensors")
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


def _read_so_far() -> int:
    """Returns the bytes that the process has read with system calls, from files and sockets."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar:"))


def measure(contender: str, folder: Path, width: int, layers: int) -> Loaded:
    """Runs a contender once, with a fresh process for each rank."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = ["-m", "bench.sharded", "--contender", contender, "--folder", own]
        command += ["--width", str(width), "--layers", str(layers), "--rank"]
        start = partial(run, environment={"OMP_NUM_THREADS": "1"}, timeout_seconds=120)
        with ThreadPoolExecutor(RANKS) as pool:
            results = list(pool.map(start, [[*command, str(rank)] for rank in range(RANKS)]))
    ready: list[Stage] = [result["ready"] for result in results]
    return Loaded(
        max(stage.facts["seconds"] for stage in ready),
        sum(stage.facts["read_bytes"] for stage in ready),
        sum(stage.anonymous_bytes for stage in ready),
        sum(stage.total_bytes for stage in ready),
        tuple(result["check"].facts["digest"] for result in results),
    )


def alternated(names: Sequence[str], measure: Callable[[str], Result], runs: int) -> dict[str, list[Result]]:
    """Runs the contenders in alternation. One that fails is left out, and its error is printed."""
    results: dict[str, list[Result]] = {}
    failed: set[str] = set()
    for turn in range(runs):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            if name in failed:
                continue
            try:
                results.setdefault(name, []).append(measure(name))
            except MeasurementError as error:
                print(f"{name}: {str(error)[-400:]}", file=sys.stderr)
                failed.add(name)
    return {name: results[name] for name in names if name in results and name not in failed}


def measured(runs: int, width: int, layers: int, folder: Path) -> dict[str, list[Loaded]]:
    write(folder / "tiny", 64, 2)
    write(folder / "model", width, layers)
    results = alternated(list(CONTENDERS), lambda name: measure(name, folder, width, layers), runs)
    if len({loaded.digests for found in results.values() for loaded in found}) != 1:
        raise MeasurementError("the contenders end with different weights")
    return results


def table_rows(results: Mapping[str, Sequence[Loaded]]) -> Iterator[tuple[str, ...]]:
    """Medians of each contender."""
    first = median(loaded.seconds for loaded in results[OURS])
    for name, found in results.items():
        seconds = median(loaded.seconds for loaded in found)
        sizes = (
            median(getattr(loaded, field) for loaded in found)
            for field in ("read_bytes", "own_bytes", "resident_bytes")
        )
        yield name, milliseconds(seconds), ratio(seconds, first), *map(size, sizes)


def rows(runs: int = RUNS, width: int = WIDTH, layers: int = LAYERS) -> list[tuple[str, ...]]:
    """Measures, and returns the rows of the table."""
    with temporary_folder() as folder:
        return list(table_rows(measured(runs, width, layers, folder)))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a folder on the disk of `TMPDIR`, or of the checkout."""
    parent = os.environ.get("TMPDIR") or Path(__file__).resolve().parent.parent / ".venv"
    with tempfile.TemporaryDirectory(prefix="modelstate-bench-", dir=parent) as folder:
        yield Path(folder)


TABLE = InPage(
    Path(__file__).resolve().parent.parent / "docs" / "sharded.md",
    "<!-- The table: python -m bench.sharded --write -->",
    "<!-- End of the table -->",
    HEAD,
    rows,
)


def main(
    table: InPage,
    doc: str | None,
    contenders: Iterable[str],
    rank_main: Callable[[int, str, Path, int, int], None],
) -> None:
    """Prints or writes the table of a benchmark, or is one rank of a contender."""
    if "--rank" not in sys.argv:
        table.main(doc)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--contender", choices=[*contenders])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    rank_main(options.rank, options.contender, options.folder, options.width, options.layers)


if __name__ == "__main__":
    main(TABLE, __doc__, CONTENDERS, rank_main)
