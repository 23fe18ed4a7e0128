"""Ranks that are killed while they save: all ranks restore the newest step that was reported, and no mixture of steps.

MODELSTATE_EXHAUSTIVE=1 kills each rank before each of its system calls that write and before each of its collectives,
prints what came of it, and kills all ranks at 100 random moments.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import modelstate as ms
from modelstate.distributed.connections import Connections
from tests.distributed import models
from tests.distributed.ranks import WORLD_SIZE, Ranks
from tests.faults import Request, faulty_writes
from tests.pains.conftest import stock_fails
from tests.store.common import litter
from tests.sweeps import EXHAUSTIVE

__all__ = ["stock_fails"]
pytestmark = pytest.mark.slow
COLLECTIVES = ("maximum", "gathered", "broadcast", "exchange")
RANDOM_KILLS = 100 if EXHAUSTIVE else 2


def objects_of(value: int) -> dict[str, Any]:
    """A sharded network and AdamW. All elements of their tensors have the same value."""
    net = models.sharded("fsdp")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    objects = {"model": net, "optimizer": optimizer}
    fill(objects, value)
    return objects


def tensors_of(objects: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the local tensors of this rank."""
    net, optimizer = objects["model"], objects["optimizer"]
    moments = [values[key] for values in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    yield from (tensor.detach().to_local() for tensor in (*net.parameters(), *moments))
    yield net.steps


def fill(objects: dict[str, Any], value: int) -> None:
    for tensor in tensors_of(objects):
        tensor.fill_(value)


def values_in(objects: dict[str, Any]) -> list[float]:
    """The different elements that this rank holds."""
    return sorted({float(element) for tensor in tensors_of(objects) for element in tensor.unique()})


# What saves and restores.


def save_in_store(folder: Path, objects: dict[str, Any], step: int) -> None:
    ms.Store(folder / "store", timeout_seconds=20).save(step, objects)


def restore_from_store(folder: Path, objects: dict[str, Any]) -> None:
    assert ms.Store(folder / "store").restore(objects).step in values_in(objects)


Save = Callable[[Path, dict[str, Any], int], None]
Restore = Callable[[Path, dict[str, Any]], None]
STORE: tuple[Save, Restore] = save_in_store, restore_from_store


# Kills.


@contextmanager
def killed_before(kind: str, number: int) -> Iterator[list[str]]:
    """Kills this process before one of its calls of a kind, counted from 0."""
    made: list[str] = []

    def note(name: str) -> None:
        made.append(name)
        if len(made) > number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            note(name)
            return real(*arguments, **options)

        return mock.patch.object(owner, name, call)

    def on_call(request: Request) -> None:
        note(request.call)

    if kind == "call":
        with faulty_writes(before=on_call):
            yield made
    else:
        patches = [counted(Connections, name) for name in COLLECTIVES]
        for patch in patches:
            patch.start()
        try:
            yield made
        finally:
            for patch in patches:
                patch.stop()


def save_and_be_killed(folder: Path, save: Save, kind: str, rank: int, number: int) -> bool:
    """Saves step 1, and step 2 with a kill of one rank. Returns whether it was saved."""
    objects = objects_of(1)
    save(folder, objects, 1)
    fill(objects, 2)
    dist.barrier()
    if dist.get_rank() != rank:
        save(folder, objects, 2)
        return True
    with killed_before(kind, number):
        save(folder, objects, 2)
    return True


def restored_values(folder: Path, restore: Restore) -> list[float]:
    objects = objects_of(7)
    restore(folder, objects)
    return values_in(objects)


def outcome_of(ranks: Ranks, folder: Path, way: tuple[Save, Restore], kind: str, rank: int, number: int) -> str:
    """What all ranks restore after a kill: "old", "new", "mixed" or "lost"; empty where no rank was killed."""
    save, restore = way
    folder.mkdir()
    saved = ranks.until_failure(save_and_be_killed, folder, save, kind, rank, number)
    reported = [outcome.rank for outcome in saved.values() if outcome.value]
    if len(reported) == WORLD_SIZE:
        return ""
    ranks.discard()
    restored = ranks.run(restored_values, folder, restore)
    if any(outcome.failure or outcome.died for outcome in restored):
        ranks.discard()
        return "lost"
    found = [outcome.value for outcome in restored]
    if found == [[2.0]] * WORLD_SIZE:
        return "new"
    if found == [[1.0]] * WORLD_SIZE:
        return "lost" if reported else "old"
    return "mixed"


def sweep(
    ranks: Ranks, folder: Path, way: tuple[Save, Restore], kind: str, rank: int, numbers: Sequence[int]
) -> Counter[str]:
    """Kills a rank before some of its calls of a kind, or before each of them."""
    outcomes = []
    for number in count() if EXHAUSTIVE else numbers:
        outcomes.append(outcome_of(ranks, folder / str(number), way, kind, rank, number))
        if not outcomes[-1]:
            break
    print(f"{way[0].__name__}, rank {rank}, before each {kind}: {' '.join(outcomes)}", flush=True)
    return Counter(outcomes)


PLACES = {("call", 0): [15], ("call", 2): [1], ("collective", 1): [9, 29]}
if EXHAUSTIVE:
    PLACES = {(kind, rank): [] for kind in ("call", "collective") for rank in range(WORLD_SIZE)}


@pytest.mark.parametrize(("kind", "rank"), PLACES)
def test_a_rank_that_is_killed(ranks: Ranks, tmp_path: Path, kind: str, rank: int) -> None:
    outcomes = sweep(ranks, tmp_path, STORE, kind, rank, PLACES[kind, rank])
    assert outcomes["old"]
    assert bool(outcomes["new"]) == (kind == "collective") or EXHAUSTIVE
    assert outcomes.keys() <= {"old", "new", ""}
    for run in tmp_path.iterdir():
        store = ms.Store(run / "store")
        assert set(store.verify().values()) == {""}
        store.save(3, {"value": 3})
        assert not litter(run)


def go_on(folder: Path, steps: int) -> int:
    """Restores the latest step, and saves the next ones, each third one in the background. Reports them in a file."""
    objects, at = objects_of(0), 0
    with ms.Store(folder / "store", keep=2) as store, (folder / f"reports {dist.get_rank()}").open("ab", 0) as reports:
        if store.latest() is not None:
            at = store.restore(objects).step
            assert values_in(objects) == [at]
        reports.write(f"{at}\n".encode())
        for step in range(at + 1, at + 1 + steps):
            fill(objects, step)
            saved = store.save(step, objects, background=step % 3 == 0)
            fill(objects, -step)  # what is staged is a copy
            if saved is not None and step % 3 == 0:
                saved.result()  # type: ignore[union-attr]
            reports.write(f"{step}\n".encode())
    return at


def test_all_ranks_are_killed_at_random_moments(ranks: Ranks, tmp_path: Path) -> None:
    chance = random.Random(0)
    reports = [tmp_path / f"reports {rank}" for rank in range(WORLD_SIZE)]
    newest = in_a_save = 0

    def kill(after_seconds: float) -> None:
        while not all(path.exists() and path.read_text() for path in reports):
            time.sleep(0.01)
        time.sleep(after_seconds)
        ranks.kill()

    for number in range(RANDOM_KILLS):
        for path in reports:
            path.unlink(missing_ok=True)
        killer = threading.Thread(target=kill, args=(chance.random() * 0.4,), daemon=True)
        killer.start()
        outcomes = ranks.until_failure(go_on, tmp_path, 10_000)
        killer.join()
        ranks.discard()
        assert not any(
            outcome.failure and "RankLostError" not in outcome.failure.classes for outcome in outcomes.values()
        )
        steps = [[int(line) for line in path.read_text().split()] for path in reports]
        assert len({own[0] for own in steps}) == 1, "the ranks have restored different steps"
        assert steps[0][0] >= newest, f"kill {number}: a step that was reported is gone"
        newest = max(max(own) for own in steps)
        in_a_save += bool(litter(tmp_path))
    assert ranks.values(go_on, tmp_path, 3)[0] >= newest
    assert not litter(tmp_path)
    print(f"{RANDOM_KILLS} kills of all ranks, {in_a_save} in a save, {newest} steps")
