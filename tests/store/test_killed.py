"""Killed at any moment: what was reported as saved is there, whole, and nothing else is taken for a checkpoint."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import modelstate as ms
from tests.faults import faulty_reads, faulty_writes, killed_at
from tests.programs import run_program
from tests.store.common import contents, litter
from tests.store.killed import DELTA, Job, publish, said, start, train
from tests.sweeps import spread

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


def kill_at_every_call(directory: Path) -> None:
    """Kills a publisher, which also prunes, and a program that restores and serves: before each call in turn."""
    job = Job(DELTA)

    def publish_next() -> None:
        with ms.Store(directory, keep=2, delta=DELTA) as store:
            step = (store.latest() or 0) + 1
            store.save(step, job.objects(step))

    def apply() -> None:
        store, target = ms.Store(directory), Job()
        live = ms.Live(target.model)
        for step in store.steps():
            live.swap(store.open("model", step), verify=True)
        store.restore(target.objects(None))

    for _ in range(3):
        job.train()
        publish_next()
    with faulty_writes() as writes:
        publish_next()
    newest = 4
    for request in spread(writes.requests, 16):
        job.train()
        assert killed_at(request.number, publish_next), request
        found = check(directory, newest)
        assert found <= newest + 1, request
        publish_next()  # at once, and what is left of the other one is removed
        assert not litter(directory), request
        newest = found + 1
    assert check(directory, newest) == newest
    was = contents(directory)
    with faulty_reads() as reads:
        apply()
    for request in spread(reads.requests, 5):
        assert killed_at(request.number, apply, faulty_reads), request
    assert contents(directory) == was
    publish_next()


SWEEP = """
import sys
from pathlib import Path
from tests.store.test_killed import kill_at_every_call

kill_at_every_call(Path(sys.argv[1]))
"""


def test_at_every_call(tmp_path: Path) -> None:
    """In a small process, as for `ms.save`."""
    done = run_program(SWEEP, tmp_path)
    assert done.returncode == 0, done.stderr
