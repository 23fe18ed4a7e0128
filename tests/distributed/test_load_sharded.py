"""Loads into sharded models: the local shard of every rank is the slice of the load into the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from tests.distributed import models
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.slow
KINDS = ["fsdp", "hsdp", "tp", "fsdp+tp", "shard1", "uneven", "empty", "replicated", "tied"]
FORWARD = ["fsdp", "hsdp", "shard1", "uneven", "empty", "tied"]


def expected(kind: str, path: str, **options: Any) -> dict[str, torch.Tensor]:
    whole = models.plain(kind, seed=7)
    ms.load(whole, path, **options)
    return {name: tensor.detach() for name, tensor in whole.state_dict().items()}


def loads_its_shards(kind: str, path: str, meta: bool, options: dict[str, Any]) -> list[str]:
    """The names whose values are not those of a load into the whole model."""
    wanted = expected(kind, path, **options)
    net = models.sharded(kind, meta=meta)
    before = {name: id(param) for name, param in net.named_parameters()}
    report = ms.load(net, path, **options)
    assert report.coverage == 1.0
    assert before == {name: id(param) for name, param in net.named_parameters()}
    found = models.gathered(net)
    assert all(not param.is_meta for param in net.parameters())
    wrong = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    if kind in FORWARD:  # FSDP2 gathers from memory of its own, which has to be the memory of the parameters
        whole = models.plain(kind, seed=7)
        ms.load(whole, path, **options)
        tokens = torch.arange(5)
        wrong += [] if torch.allclose(net(tokens), whole(tokens), rtol=1e-4) else ["forward"]
    return wrong


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sharding(ranks: Ranks, kind: str, meta: bool, tmp_path: Path) -> None:
    ms.save(models.plain(kind, seed=5), tmp_path / "x.safetensors")
    assert ranks.values(loads_its_shards, kind, str(tmp_path / "x.safetensors"), meta, {}) == [[]] * 4
