"""The ranks that the other tests here use, and the models on them, before anything is loaded."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.distributed import models
from tests.distributed.ranks import WORLD_SIZE, Ranks


def _sum() -> int:
    tensor = torch.tensor(dist.get_rank())
    dist.all_reduce(tensor)
    return int(tensor)


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    return os.getpid()


def _die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def _describe(kind: str, meta: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    net = models.sharded(kind, meta=meta)
    facts = {}
    for name, parameter in net.named_parameters():
        placements = str(getattr(parameter, "placements", "plain"))
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        facts[name] = (placements, tuple(local.shape))
        assert local.is_meta == meta, name
    if not meta:
        whole = models.gathered(net)
        expected = models.plain(kind, seed=1)
        for name, parameter in expected.named_parameters(remove_duplicate=False):
            assert torch.equal(whole[name], parameter), name
    return facts


def test_a_call_runs_on_all_ranks_and_a_group_is_used_again(ranks: Ranks) -> None:
    assert ranks.values(_sum) == [6] * WORLD_SIZE
    outcomes = ranks.run(_fail_on, 2)
    assert [outcome.failure is not None for outcome in outcomes] == [False, False, True, False]
    assert outcomes[2].failure is not None
    assert outcomes[2].failure.classes[0] == "ValueError"
    assert ranks.values(_sum) == [6] * WORLD_SIZE
    assert ranks.values(os.getpid)[0] == outcomes[0].value


@pytest.mark.slow
def test_ranks_that_die_are_replaced(ranks: Ranks) -> None:
    outcomes = ranks.run(_die_on, 1)
    assert [outcome.died for outcome in outcomes] == [False, True, False, False]
    assert ranks.values(_sum) == [6] * WORLD_SIZE
    assert not {outcome.value for outcome in outcomes} & set(ranks.values(os.getpid))


@pytest.mark.slow
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", models.SHARD)
def test_the_models_are_sharded_as_their_names_say(kind: str, meta: bool, ranks: Ranks) -> None:
    facts = ranks.values(_describe, kind, meta)
    row = [fact["blocks.0.q.weight"] for fact in facts]
    expected = {
        "fsdp": [("(Shard(dim=0),)", (2, 8))] * 4,
        "hsdp": [("(Replicate(), Shard(dim=0))", (4, 8))] * 4,
        "tp": [("(Shard(dim=0),)", (2, 8))] * 4,
        "fsdp+tp": [("(_StridedShard(dim=0, sf=2), Shard(dim=0))", (2, 8))] * 4,
        "shard1": [("(Shard(dim=1),)", (8, 2))] * 4,
        "uneven": [("(Shard(dim=0),)", (rows, 6)) for rows in (2, 2, 2, 0)],
        "empty": [("(Shard(dim=0),)", (rows, 3)) for rows in (1, 1, 1, 0)],
        "replicated": [("(Replicate(),)", (8, 8))] * 4,
        "tied": [("(Shard(dim=0),)", (2, 8))] * 4,
    }
    assert row == expected[kind]
    assert ("head.weight" in facts[0]) == (kind != "tied")
