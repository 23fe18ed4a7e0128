"""Ranks that are killed while they save: all ranks restore the newest step that was reported, and no mixture of steps.

MODELSTATE_EXHAUSTIVE=1 kills a rank before each of its calls that write, and all ranks at 100 random moments.
"""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import modelstate as ms
from tests.distributed import models
from tests.distributed.ranks import WORLD_SIZE, Ranks
from tests.store.common import litter
from tests.sweeps import EXHAUSTIVE

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
