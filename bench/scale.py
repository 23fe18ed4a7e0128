"""What a save costs on 8 to 16,384 ranks, on paper: files, writes, messages, and the time of the commit.

The product's own planner plans the save of every rank, without processes; formulas add what the votes and exchanges
send. Prints a table; `--write` puts it into docs/scale.md.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Shard

from bench.pages import InPage
from modelstate.distributed.agreement import Agreement
from modelstate.distributed.writing import CollectiveWriter, ShardedTensor, _rounds
from modelstate.formats.manifest import BLOCK_BYTES
from modelstate.formats.safetensors import Layout, layout
from modelstate.formats.sharded import in_shards
from modelstate.text_format import size

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

VOTES = 6
"""The number of phases of a save. Each phase ends with one all-reduce."""
VOTE_BYTES = 64
BROADCASTS = 4
"""The first rank tells the others the files that it has created, and what it has committed, each after a length."""
SHARD_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class Cluster:
    """Assumptions about the machines."""

    message_seconds: float = 20e-6
    """Of a small message from one rank to another."""
    store_seconds: float = 20e-6
    """Of a request to the store of the process group, which serves one after the other."""
    sync_seconds: float = 5e-3
    """Of a flush of a file or a directory, or a rename, on the shared file system."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What one save costs."""

    ranks: int
    nbytes: int
    files: int
    parts: int
    """Contiguous ranges of the files, each written by one rank."""
    most_writes: int
    """Writes of the rank with the most of them, each of at most 4 MiB."""
    most_files: int
    """Files that one rank opens and flushes, at most."""
    most_received_bytes: int
    """Of rows that are exchanged, on the rank that receives the most, its own included."""
    rounds: int
    """The number of exchanges of rows. In an exchange every rank sends to all others."""
    planning_steps: int
    """How often a rank compares a part with a region, for the rows that are exchanged."""
    digest_bytes: int
    """What the first rank receives at the end."""
    told_bytes: int
    """What the first rank broadcasts about the files that it has created."""

    @property
    def vote_bytes(self) -> int:
        """The bytes that a rank sends for the votes: the ring of gloo passes each part of a vote twice."""
        return math.ceil(VOTES * VOTE_BYTES * 2 * (self.ranks - 1) / self.ranks)

    @property
    def connections(self) -> int:
        """The connections of a rank: gloo connects each rank to all others."""
        return self.ranks - 1

    def commit_seconds(self, cluster: Cluster) -> float:
        """The time from the last byte of a tensor on the disk to the return of the save.

        Digests come to the first rank one after the other. It flushes each file once more, renames it, and flushes the
        directory before and after the index gets its name. Two votes go around the ring twice, every rank asks the
        store what has been decided, and the result is broadcast along a tree.
        """
        votes = 2 * 2 * (self.ranks - 1) * cluster.message_seconds
        digests = (self.ranks - 1) * cluster.message_seconds
        decision = self.ranks * cluster.store_seconds
        told = 2 * math.ceil(math.log2(self.ranks)) * cluster.message_seconds
        return votes + digests + decision + told + (2 * self.files + 3) * cluster.sync_seconds


def cost_of(shapes: Shapes, ranks: int, shard_bytes: int | None = SHARD_BYTES) -> SaveCost:
    """Returns the cost of a save of tensors that are sharded by rows over all ranks, as FSDP2 does."""
    writer = CollectiveWriter(Agreement(range(ranks), 1.0), "model.safetensors")
    tensors = dict(_sharded(shapes, ranks, writer))
    writer._total_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    groups = [tensors] if shard_bytes is None else in_shards(tensors, shard_bytes)
    layouts: list[Layout] = [layout(group, lambda _: {}) for group in groups]
    meshes = writer._meshes(layouts)
    files = writer._pieces(layouts, {mesh: mesh for mesh in meshes})
    writes, received, opened, digests = Counter[int](), Counter[int](), Counter[int](), 0
    steps = rounds = 0
    for pieces in files:
        opened.update({piece.rank for piece in pieces})
        exchanged = [piece for piece in pieces if piece.part.region is None]
        rounds += len(_rounds(exchanged))
        for piece in pieces:
            writes[piece.rank] += math.ceil(piece.nbytes / BLOCK_BYTES)
            digests += piece.digest_length
        for piece in exchanged:
            received[piece.rank] += piece.nbytes
            width = piece.parts.row_elements
            steps += sum(1 for _ in piece.parts.overlapping(piece.part.start // width, piece.part.end // width))
    return SaveCost(
        ranks,
        writer._total_bytes,
        len(files),
        sum(map(len, files)),
        max(writes.values()),
        max(opened.values()),
        max(received.values(), default=0),
        rounds,
        steps,
        digests,
        len(json.dumps([[f"model-{number:05}.safetensors" for number in range(len(files))], meshes])),
    )


def _sharded(shapes: Shapes, ranks: int, writer: CollectiveWriter) -> Iterator[tuple[str, ShardedTensor]]:
    nothing = torch.empty(0, device="meta")
    mesh = (ranks,), tuple(range(ranks))
    for name, (shape, dtype) in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        yield (
            name,
            ShardedTensor(
                dtype, shape, name, _unread, True, 0, {name: nbytes}, nothing, (Shard(0),), mesh, writer=writer
            ),
        )


def _unread(first: int, end: int) -> torch.Tensor:
    raise AssertionError("nothing is written")


def llama_70b(layers: int = 80, width: int = 8192, hidden: int = 28672, vocabulary: int = 128256) -> Shapes:
    """A model in bfloat16, with the two moments of Adam in float32."""
    rows = {"q": width, "k": width // 8, "v": width // 8, "o": width, "gate": hidden, "up": hidden}
    block = {name: (count, width) for name, count in rows.items()}
    norms: dict[str, tuple[int, ...]] = {"norm1": (width,), "norm2": (width,)}
    model: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    for layer in range(layers):
        for name, shape in {**block, "down": (width, hidden), **norms}.items():
            model[f"layers.{layer}.{name}"] = shape
    shapes: Shapes = {f"model.{name}": (shape, torch.bfloat16) for name, shape in model.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        shapes |= {f"optimizer.state.{name}.{moment}": (shape, torch.float32) for name, shape in model.items()}
    return shapes


RANKS = (8, 64, 512, 4096, 16384)
HEAD = (
    *("ranks", "bytes of a rank", "files", "parts", "most writes of a rank", "rows received by a rank", "exchanges"),
    *("votes, sent by a rank", "digests to the first rank", "connections of a rank", "commit"),
)


def rows_of(costs: Iterable[SaveCost], cluster: Cluster) -> Iterator[tuple[str, ...]]:
    for cost in costs:
        numbers = (cost.files, cost.parts, cost.most_writes)
        yield (
            *(f"{cost.ranks:,}", size(cost.nbytes // cost.ranks), *(f"{number:,}" for number in numbers)),
            *(size(cost.most_received_bytes), f"{cost.rounds:,}", size(cost.vote_bytes), size(cost.digest_bytes)),
            *(f"{cost.connections:,}", f"{cost.commit_seconds(cluster):.2f} s"),
        )


TABLE = InPage(
    "scale.md",
    "scale",
    "<!-- End of the table -->",
    HEAD,
    lambda: rows_of((cost_of(llama_70b(), ranks) for ranks in RANKS), Cluster()),
)

if __name__ == "__main__":
    TABLE.main(__doc__)
