"""Process groups that end and begin within a process, on two ranks."""

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import modelstate as ms
from modelstate import errors
from modelstate.distributed.agreement import Agreement
from modelstate.store.saving import NewStep
from modelstate.torch_compat import sharding
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks, whose process group tests may replace."""
    started = Ranks(2)
    yield started
    started.close()


STORES: list[dist.Store] = []


def begins(address: str) -> None:
    """Begins a process group as a program does, or one without connections of torch, over a store that is kept."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind, _, place = address.partition("://")
    if kind == "new":
        dist.init_process_group("gloo", f"tcp://{place}", timedelta(seconds=10), rank=rank, world_size=size)
        return
    if len(STORES) == 0:
        host, _, port = place.partition(":")
        STORES.append(dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timedelta(seconds=10)))
    FakeStore()  # has torch know the backend
    dist.init_process_group("fake", store=STORES[0], rank=rank, world_size=size)


def ends(keeps_store: bool) -> None:
    if not keeps_store:
        STORES.clear()
    dist.destroy_process_group()


def votes() -> list[list[str]]:
    """Votes on two channels, and returns the texts of both ranks on each."""
    found = []
    for channel in ("", "another"):
        agreement = Agreement((0, 1), 10, channel=channel)
        with agreement.phase("reading", decides=True):
            pass
        found.append(agreement.texts("saying", f"{dist.get_rank()} on {channel}"))
    return found


@pytest.mark.parametrize("kind", ["tcp", "new"])
def test_process_groups_one_after_another_in_a_process(pair: Ranks, kind: str) -> None:
    # A mesh of the first group keeps its store, with its keys. Torch itself cannot make a group over the keys of a
    # group that is gone: no connection of ours may keep a store.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{listener.getsockname()[1]}"
    for life in range(4):
        pair.values(ends, life > 0)
        pair.values(begins, f"{kind}://{place}")
        assert pair.values(votes) == [[["0 on ", "1 on "], ["0 on another", "1 on another"]]] * 2


def save_and_destroy(folder: Path, rank: int) -> tuple[str, str, tuple[int, ...]]:
    """The error of a save in the background in which a rank, or each of them, destroys the group, and the steps."""
    model, write, can_write = fully_shard(nn.Linear(4, 4)), NewStep._write, threading.Event()

    def write_later(*args: Any) -> None:
        can_write.wait()
        write(*args)

    with ms.Store(folder, timeout_seconds=60) as store:
        store.save(1, {"model": model})
        with mock.patch.object(sharding, "CHECK_SECONDS", 0.2), mock.patch.object(NewStep, "_write", write_later):
            pending = store.save(2, {"model": model}, background=True)
            assert pending is not None
            dist.barrier()
            if rank in (-1, dist.get_rank()):
                dist.destroy_process_group()
            can_write.set()
            with pytest.raises(errors.DistributedError, match="the process group was destroyed") as raised:
                pending.result()
    if dist.is_initialized():
        dist.destroy_process_group()
    return raised.value.what, raised.value.remedy, store.steps()


def save_and_restore(folder: Path) -> tuple[int, ...]:
    objects = {"model": fully_shard(nn.Linear(4, 4))}
    with ms.Store(folder, timeout_seconds=60) as store:
        store.save(3, objects)
        store.save(4, objects, background=True)
        store.restore(objects)
        assert not list(folder.glob("*.unfinished"))
        return store.steps()


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_a_process_group_that_is_destroyed_in_a_save_in_the_background(pair: Ranks, tmp_path: Path, rank: int) -> None:
    ends = pair.values(save_and_destroy, tmp_path / "store", rank, timeout=30)
    for here, (what, remedy, steps) in enumerate(ends):
        assert ("" if rank in (-1, here) else f"rank {rank}: ") + "the process group was destroyed" in what
        assert "wait for `result()` first" in remedy
        assert steps == (1,)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{listener.getsockname()[1]}"
    pair.values(begins, f"new://{place}")
    assert pair.values(save_and_restore, tmp_path / "store", timeout=30) == [(1, 3, 4)] * 2
