"""A run that goes on from a checkpoint of torch, loaded by modelstate, equals the run that was not interrupted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import modelstate as ms
from tests.distributed import models
from tests.distributed.models import Net
from tests.distributed.ranks import Ranks
from tests.sweeps import EXHAUSTIVE

pytestmark = pytest.mark.slow

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
KINDS = ("fsdp", "hsdp", "uneven", "tied") if EXHAUSTIVE else ("hsdp", "uneven")


def _optimizer(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def _steps(net: Net, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Three steps on tokens that depend on the step and on the rank."""
    losses = []
    for step in range(first, first + 3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(18, (2, 5), generator=generator)
        optimizer.zero_grad()
        loss = net(tokens).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _bits(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = models.gathered(net)
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{name}.{key}"] = models.whole(value).clone()
    return state


def _train(kind: str, folder: Path) -> list[str]:
    """What differs between the two runs, on this rank."""
    torch.manual_seed(dist.get_rank())
    net = models.sharded(kind)
    optimizer = _optimizer(net)
    _steps(net, optimizer, 0)
    saved = {
        "model": get_model_state_dict(net, options=FULL),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=FULL),
    }
    if dist.get_rank() == 0:
        torch.save(copy.deepcopy(saved), folder / "checkpoint.pt")
    losses = _steps(net, optimizer, 3)
    expected = _bits(net, optimizer)
    dist.barrier()

    resumed = models.sharded(kind, meta=True)
    ms.load(resumed, folder / "checkpoint.pt", key="model")
    other = _optimizer(resumed)
    ms.load_optimizer_state(resumed, other, ms.open(folder / "checkpoint.pt").value("optimizer"))
    wrong = [] if _steps(resumed, other, 3) == losses else ["the losses"]
    found = _bits(resumed, other)
    assert found.keys() == expected.keys()
    return wrong + [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_after_a_load_equal_those_without_one(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(_train, kind, tmp_path) == [[]] * 4
