"""A power cut at any point of saves and prunes: what was reported as saved is there, whole."""

from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
from tests.faults import failing
from tests.lossy_disk import lossy_disk
from tests.store.common import litter
from tests.store.killed import DELTA, Job
from tests.sweeps import spread

SEEDS = (1,)


def saves(directory: Path, job: Job, reported: dict[int, tuple[int, str]], calls: list[str]) -> None:
    """A new store, steps with links, prunes, one that is replaced, and what was reported after how many calls."""
    store = ms.Store(directory / "run", keep=2, delta=job.delta)
    for step in (1, 2, 3, 3):
        job.train()
        store.save(step, job.objects(step), overwrite=step == 3)
        reported[len(calls)] = step, job.digest()
    store.close()


def restored(directory: Path) -> tuple[int, str]:
    """The latest step and the digest of what it gives back, if there is one."""
    store, job = ms.Store(directory / "run"), Job()
    assert set(store.verify().values()) <= {""}
    if store.latest() is None:
        return 0, ""
    found = store.restore(job.objects(None))
    assert found.skipped == {}
    assert found["digest"] == job.digest()
    return found.step, found["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("delta", [None, DELTA], ids=["whole", "deltas"])
def test_at_every_point(tmp_path: Path, delta: ms.Delta | None) -> None:
    (tmp_path / "disk").mkdir()
    reported: dict[int, tuple[int, str]] = {0: (0, "")}
    with lossy_disk(tmp_path / "disk") as disk:
        saves(tmp_path / "disk", Job(delta), reported, disk.calls)
    everything = list(reported.values())
    for point in {*spread(range(len(disk.calls)), 20), len(disk.calls)}:
        newest = sum(after <= point for after in reported) - 1
        for keep in ("synced", "everything", *SEEDS):
            into: Any = tmp_path / f"{point}-{keep}"
            disk.write(into, point, keep)
            # What was reported, or what was about to be.
            assert restored(into) in everything[newest : newest + 2], (point, keep, disk.calls[point - 1])
        if point % 5 == 0:
            step = restored(into)[0] + 1
            store = ms.Store(into / "run", keep=1, delta=delta)
            store.save(step, Job().objects(step))
            assert store.verify() == {step: ""}
            assert not litter(into)


def test_the_parent_of_the_directory_need_not_be_readable(tmp_path: Path) -> None:
    refused = PermissionError(13, "Permission denied")
    with failing(refused, "open_to_write", f"{tmp_path}$"), ms.Store(tmp_path / "run") as store:
        store.save(1, {"value": 1})
    assert ms.Store(tmp_path / "run").latest() == 1
