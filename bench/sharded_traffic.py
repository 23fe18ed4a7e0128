"""Counts the bytes that ranks send to each other in a sharded save, over 2, 4 and 8 ranks, and prints a table.

The bytes are those that each rank gives to the collectives of modelstate. An all-reduce sends twice what it reduces.
The model's weights are split by rows or by columns.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import modelstate as ms
from bench.measure import Stage, Stages, temporary_folder
from bench.pages import InPage, Row
from bench.sharded import LAYERS, WIDTH, on_ranks, start_rank
from bench.sharded_saving import filled
from modelstate.distributed.connections import Connections
from modelstate.text_format import size

RANKS = (2, 4, 8)
ROWS, COLUMNS = "rows", "columns"
HEAD = (
    *("ranks", "shards of a rank", "own memory beyond them", "sent in votes", "sent in all"),
    *("split by columns: sent in all", "own memory beyond the shards"),
)


def counting(sent: dict[str, int]) -> Any:
    """Replaces the collectives by ones that count what this rank sends to others."""

    real = Connections.run

    def run(self: Connections, name: str, *arguments: Any, **options: Any) -> None:
        import torch.distributed as dist

        if name == "alltoall_base":
            *_, own_counts = arguments
            nbytes = sum(own_counts) - own_counts[dist.get_rank()]
        elif name == "allgather":
            (tensors,), (tensor,) = arguments
            nbytes = (len(tensors) - 1) * tensor.nbytes
        else:
            ((tensor,),) = arguments
            nbytes = tensor.nbytes * (2 if name == "allreduce" else 1)
        sent[name] = sent.get(name, 0) + nbytes
        real(self, name, *arguments, **options)

    return mock.patch.object(Connections, "run", run)


def save_on_a_rank(*, rank: int, ranks: int, contender: str, folder: str, width: int, layers: int) -> None:
    """One rank: saves a tiny model first, so that connections do not count. The contender is how weights are split."""
    import torch.distributed as dist

    start_rank(rank, ranks, folder)
    columns, path = contender == COLUMNS, Path(folder)
    ms.save(filled(64, 2, columns), path / "tiny.safetensors")
    model = filled(width, layers, columns)
    params: list[Any] = [*model.parameters()]
    shards = sum(param.to_local().nbytes for param in params)
    sent: dict[str, int] = {}
    stages = Stages()
    dist.barrier()
    with counting(sent):
        ms.save(model, path / "model.safetensors")
    stages.end(
        "saved", votes=sent.get("allreduce", 0) + sent.get("broadcast", 0), all=sum(sent.values()), shards=shards
    )
    dist.barrier()
    dist.destroy_process_group()


def measure(split: str, ranks: int, folder: Path, width: int, layers: int) -> list[Stage]:
    """Saves once, and returns what each rank has counted."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        results = on_ranks(save_on_a_rank, ranks, contender=split, folder=own, width=width, layers=layers)
        return [result["saved"] for result in results]


def rows(width: int = WIDTH, layers: int = LAYERS) -> Iterator[Row]:
    """Measures, and yields the rows of the table: of the rank with the most."""
    with temporary_folder() as folder:
        for ranks in RANKS:
            by_rows, by_columns = (measure(split, ranks, folder, width, layers) for split in (ROWS, COLUMNS))
            facts = [max(stage.facts[name] for stage in by_rows) for name in ("shards", "votes", "all")]
            sent = max(stage.facts["all"] for stage in by_columns)
            memory, with_columns = (max(stage.anonymous_bytes for stage in found) for found in (by_rows, by_columns))
            yield (str(ranks), size(facts[0]), size(memory), *map(size, facts[1:]), size(sent), size(with_columns))


TABLE = InPage(
    "bench/results/sharded.md",
    "sharded_traffic",
    "<!-- End of the table of traffic -->",
    HEAD,
    rows,
)

if __name__ == "__main__":
    TABLE.main(__doc__)
