"""Killed at any moment: what was reported as saved is there, whole, and nothing else is taken for a checkpoint."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import modelstate as ms
from tests.store.common import litter
from tests.store.killed import DELTA, Job, publish, said, start, train

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("MODELSTATE_KILLS", "8"))
"""At random moments; the figures in the docs are of 300."""


def check(directory: Path, newest: int) -> int:
    """The store opens, has the newest step that was reported or a later one, and gives back what was saved."""
    store = ms.Store(directory)
    assert set(store.verify().values()) <= {""}
    latest = store.latest() or 0
    assert latest >= newest
    for step in store.steps():
        job = Job()
        restored = store.restore(job.objects(None), step)
        assert restored["digest"] == job.digest()
        assert restored["step"] == step
    return latest


@pytest.mark.parametrize("delta", [None, DELTA], ids=["whole", "deltas"])
def test_at_random_moments(tmp_path: Path, delta: ms.Delta | None) -> None:
    chance = random.Random(0)
    newest = kills = unfinished = 0
    began, seconds = time.monotonic(), 0.3
    while kills < KILLS:
        process, report = start(train, str(tmp_path), 10_000, delta)
        assert report.poll(60)
        assert report.recv()[0] == "began"
        time.sleep(chance.random() * seconds)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        steps = [step for what, step in said(report) if what == "saved"]
        newest = max([newest, *steps])
        unfinished += bool(litter(tmp_path))
        newest = check(tmp_path, newest)
        kills += 1
    process, report = start(train, str(tmp_path), 3, delta)
    process.join()
    assert said(report)[-1] == ("ended", newest + 3)
    assert not litter(tmp_path)
    assert ms.Store(tmp_path).steps() == (newest + 2, newest + 3)
    print(f"{kills} kills, {newest} steps, {unfinished} in a save, {time.monotonic() - began:.0f} s")
    assert unfinished  # else it was not the saves that were killed


def test_two_publishers_at_one_store(tmp_path: Path) -> None:
    """Each step is that of one of them, also as a difference to one of the other."""
    publishers = [start(publish, str(tmp_path), seed, 10) for seed in range(2)]
    saved = [said(report) for _, report in publishers]
    for process, _ in publishers:
        process.join()
    assert sorted(saved[0] + saved[1]) == [*range(1, 21)]
    assert check(tmp_path, 20) == 20
    assert any(info.patches for info in ms.Store(tmp_path).infos())
