"""The costs of a save on paper, `bench.scale`, against a save of four ranks."""

import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from bench import scale
from modelstate.distributed import connections, writing
from tests.distributed import models
from tests.distributed.ranks import Ranks

SHAPES: scale.Shapes = {
    "long": ((1024, 3000), torch.float32),  # 3 MB on each rank, written where they are
    "rows": ((64, 1000), torch.bfloat16),  # exchanged
    "few": ((3, 5), torch.float32),
    "line": ((4099,), torch.float32),
}


def counted(path: str, shard_bytes: int | None) -> Counter[str]:
    """What this rank does in a save."""
    mesh = models.mesh(4)
    state = {
        name: distribute_tensor(torch.ones(shape, dtype=dtype), mesh, [Shard(0)])
        for name, (shape, dtype) in SHAPES.items()
    }
    ms.save(state, path, shard_size_bytes=shard_bytes)  # connects the ranks
    found = Counter[str]()

    def count(name: str, module: Any, attribute: str, amount: Any = lambda *_: 1) -> Any:
        function = getattr(module, attribute)

        def counting(*args: Any, **options: Any) -> Any:
            found[name] += amount(*args)
            return function(*args, **options)

        return mock.patch.object(module, attribute, counting)

    def parts(output: object, _: object, tensors: list[Any], *__: object) -> int:
        return 0 if output is None else len(tensors)

    with (
        count("votes", connections, "all_reduce_maximum"),
        count("broadcasts", connections, "broadcast"),
        count("exchanges", connections, "all_to_all"),
        count("parts", writing, "write_blocks", parts),
        count("files", writing._RankFile, "close", lambda file: file._output is not None),
        count("received", writing.CollectiveWriter, "_exchanged", _received),
    ):
        ms.save(state, path, shard_size_bytes=shard_bytes)
    return found


def _received(writer: Any, pieces: list[Any]) -> int:
    return sum(piece.nbytes for piece in pieces if piece.rank == torch.distributed.get_rank())


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [None, 100_000])
def test_the_costs_are_those_of_a_save(ranks: Ranks, shard_bytes: int | None, tmp_path: Path) -> None:
    found = ranks.values(counted, str(tmp_path / "x.safetensors"), shard_bytes)
    cost = scale.cost_of(SHAPES, 4, shard_bytes)
    assert sum(rank["parts"] for rank in found) == cost.parts
    assert max(rank["files"] for rank in found) == cost.most_files
    assert max(rank["received"] for rank in found) == cost.most_received_bytes > 0
    assert {rank["votes"] for rank in found} == {scale.VOTES}
    assert {rank["broadcasts"] for rank in found} == {scale.BROADCASTS}
    assert {rank["exchanges"] for rank in found} == {cost.rounds + 1}  # and that of the digests
    assert cost.files == len(list(tmp_path.glob("*.safetensors")))


def test_the_parts_of_a_rank_shrink_and_what_is_sent_for_votes_does_not_grow() -> None:
    shapes = scale.llama_70b(layers=2, width=512, hidden=1024, vocabulary=4096)
    few, many = (scale.cost_of(shapes, ranks) for ranks in (8, 256))
    assert many.most_writes <= few.most_writes
    assert many.most_received_bytes <= few.nbytes
    assert few.vote_bytes <= many.vote_bytes <= 2 * scale.VOTES * scale.VOTE_BYTES
    assert few.nbytes == sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    assert few.commit_seconds(scale.Cluster()) < many.commit_seconds(scale.Cluster())
    (row,) = scale.rows_of([many], scale.Cluster())
    assert len(row) == len(scale.HEAD)
