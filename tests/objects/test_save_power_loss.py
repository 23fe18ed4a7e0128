"""After a power cut at any point of a save, the old checkpoint or the new one is there in full."""

from pathlib import Path

import pytest

from modelstate.io import atomic
from tests.lossy_disk import LossyDisk, lossy_disk
from tests.objects import saves
from tests.objects.saves import NAME, PAIRS, save, version_at
from tests.sweeps import EXHAUSTIVE, spread

SEEDS = range(4 if EXHAUSTIVE else 1)


def recorded(directory: Path, old: str, new: str) -> LossyDisk:
    directory.mkdir()
    save(directory, 1, old)
    with lossy_disk(directory) as disk:
        save(directory, 2, new)
    return disk


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [*PAIRS, ("past the page cache", "shards")])
def test_old_or_new_at_every_point(tmp_path: Path, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if old not in saves.KINDS:  # as large files are written
        old = "shards"
        monkeypatch.setattr(atomic, "LEAST_UNCACHED_BYTES", 0)
        monkeypatch.setattr(saves, "LENGTH", 3000)
    disk = recorded(tmp_path / "disk", old, new)
    seen = set()
    for point in {*spread(range(len(disk.calls)), 60), len(disk.calls)}:
        for keep in ("synced", "everything", *SEEDS):
            into = tmp_path / f"{point}-{keep}"
            disk.write(into, point, keep)
            found = version_at(into / NAME)
            assert found == 1 if not point else found in (1, 2)
            if point == len(disk.calls):
                assert found == 2
            seen.add(found)
    assert seen == {1, 2}
