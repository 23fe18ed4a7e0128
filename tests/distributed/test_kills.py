"""Ranks that are killed while they save: all ranks restore the newest step that was reported, and no mixture of steps.

MODELSTATE_EXHAUSTIVE=1 kills a rank before each of its calls, and all ranks at 100 random moments.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import modelstate as ms
from modelstate.distributed.connections import Connections
from tests.distributed import models
from tests.distributed.ranks import WORLD_SIZE, Ranks, die, survivors
from tests.faults import faulty_reads, faulty_writes
from tests.store.common import litter
from tests.sweeps import EXHAUSTIVE, spread

pytestmark = pytest.mark.slow
RANDOM_KILLS = 100 if EXHAUSTIVE else 2


def values_in(objects: dict[str, Any]) -> list[float]:
    """The different elements that this rank holds."""
    return sorted({float(element) for tensor in models.changing(objects) for element in tensor.unique()})


# Kills.


def go_on(folder: Path, steps: int, delta: ms.Delta | None) -> int:
    """Restores the latest step, and saves the next ones, each third one in the background. Reports them in a file."""
    objects, at = models.filled(0), 0
    with (
        ms.Store(folder / "store", keep=2, delta=delta) as store,
        (folder / f"reports {dist.get_rank()}").open("ab", 0) as reports,
    ):
        if store.latest() is not None:
            at = store.restore(objects).step
            assert values_in(objects) == [at]
        reports.write(f"{at}\n".encode())
        for step in range(at + 1, at + 1 + steps):
            for tensor in models.changing(objects):
                tensor.fill_(step)
            saved = store.save(step, objects, background=step % 3 == 0)
            for tensor in models.changing(objects):
                tensor.fill_(-step)  # what is staged is a copy
            if saved is not None and step % 3 == 0:
                saved.result()  # type: ignore[union-attr]
            reports.write(f"{step}\n".encode())
    return at


@pytest.mark.parametrize("delta", [None, ms.Delta(full_every=4)], ids=["whole", "deltas"])
def test_all_ranks_are_killed_at_random_moments(ranks: Ranks, tmp_path: Path, delta: ms.Delta | None) -> None:
    chance = random.Random(0)
    reports = [tmp_path / f"reports {rank}" for rank in range(WORLD_SIZE)]
    newest = 0

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
        outcomes = ranks.until_failure(go_on, tmp_path, 10_000, delta)
        killer.join()
        ranks.discard()
        assert not any(
            outcome.failure and "RankLostError" not in outcome.failure.classes for outcome in outcomes.values()
        )
        steps = [[int(line) for line in path.read_text().split()] for path in reports]
        assert len({own[0] for own in steps}) == 1, "the ranks have restored different steps"
        assert steps[0][0] >= newest, f"kill {number}: a step that was reported is gone"
        newest = max(max(own) for own in steps)
    assert ranks.values(go_on, tmp_path, 3, delta)[0] >= newest
    assert not litter(tmp_path)


TIMEOUT_SECONDS = 5.0
OTHER = 7777
"""The value of a model before a restore."""


@contextmanager
def killed_before(number: int) -> Iterator[list[str]]:
    """Yields the calls of this rank on files and to other ranks so far. It dies before that of a number."""
    calls, run = list[str](), Connections.run

    def before(call: str) -> None:
        calls.append(call)
        if len(calls) == number:
            die()

    def counted(self: Connections, name: str, *arguments: object, **options: Any) -> None:
        before(name)
        run(self, name, *arguments, **options)

    with (
        mock.patch.object(Connections, "run", counted),
        faulty_reads(before=lambda request: before(request.call)),
        faulty_writes(before=lambda request: before(request.call)),
    ):
        yield calls


def use(folder: Path, kind: str, rank: int, number: int) -> tuple[int, str, float, list[float], int]:
    """Saves the next two steps, and uses the store in a way in which a rank may die.

    Returns the last step, the error, the seconds, the values of the model, and the number of calls.
    """
    objects, is_read = models.filled(0), kind == "restore"
    delta = ms.Delta(full_every=8) if kind == "deltas" else None
    with ms.Store(folder / "store", keep=2, delta=delta, timeout_seconds=TIMEOUT_SECONDS) as store:
        at = 0 if store.latest() is None else store.restore(objects).step
        assert values_in(objects) == [at]
        for step in (at + 1, at + 2):
            for tensor in models.changing(objects):
                tensor.fill_(step)
            store.save(step, objects)
        for tensor in models.changing(objects):
            tensor.fill_(OTHER if is_read else step + 1)
        dist.barrier()
        started, error = time.monotonic(), ""
        with killed_before(number if dist.get_rank() == rank else 0) as calls:
            try:
                _ = store.restore(objects) if is_read else store.save(step + 1, objects)
            except ms.errors.RankLostError as lost:
                error = str(lost)
        return step, error, time.monotonic() - started, values_in(objects), len(calls)


@pytest.mark.parametrize(("kind", "rank"), [("whole", 1), ("deltas", 0), ("restore", 2), *[("deltas", 3)] * EXHAUSTIVE])
def test_a_rank_is_killed_at_each_call(ranks: Ranks, tmp_path: Path, kind: str, rank: int) -> None:
    """One error on the others, and soon; each step is the old or the new one; the next run goes on at once."""
    calls = ranks.values(use, tmp_path, kind, rank, 0)[rank][4]
    for number in spread(range(calls, 0, -1), 3):
        outcomes = ranks.run(use, tmp_path, kind, rank, number, timeout=60)
        assert [outcome.died for outcome in outcomes] == [other == rank for other in range(WORLD_SIZE)], number
        store = ms.Store(tmp_path / "store")
        assert not any(store.verify().values())
        for step, error, seconds, values, _ in survivors(outcomes):
            assert seconds < TIMEOUT_SECONDS + 5, (number, seconds)
            is_done = not error or "all other ranks have loaded" in error
            if kind == "restore":
                assert values == [step if is_done else OTHER], (number, error)
            else:
                assert store.latest() in (step + 1, step + is_done), (number, error)
                assert "nothing has been changed" not in error or store.latest() == step, (number, error)
    ranks.values(use, tmp_path, kind, rank, 0)
    assert not litter(tmp_path)
