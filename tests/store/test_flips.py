"""A single bit that is another one, anywhere in a stored checkpoint, is found, and never comes back into a model."""

import random
from pathlib import Path

import pytest

import modelstate as ms
from modelstate import errors
from tests.store.common import flip
from tests.store.killed import DELTA, Job

FLIPS = 60


@pytest.mark.slow
@pytest.mark.parametrize("delta", [None, DELTA], ids=["whole", "a delta"])
def test_every_flip_is_found(tmp_path: Path, delta: ms.Delta | None) -> None:
    chance, job = random.Random(0), Job(delta)
    store = ms.Store(tmp_path, shard_size_bytes=4000, delta=delta)
    for number in (1,) if delta is None else (3, 2, 1):
        job.train()
        step = Path(store.save(number, job.objects(number)).path)
    files = sorted(path for path in step.iterdir() if path.stat().st_size)
    assert len(files) > 6
    found = dict.fromkeys(files, 0)
    for number in range(FLIPS):
        # Half of them anywhere in a file, half of them anywhere at all.
        sizes = [1 if number % 2 else path.stat().st_size for path in files]
        (path,) = chance.choices(files, sizes)
        place, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, place, bit)
        where = f"{path.name}, byte {place}, bit {bit}"
        # Another one each time: a store remembers what it has found.
        assert ms.Store(tmp_path).verify()[1], where
        target = Job()
        before = target.digest()
        with pytest.raises((errors.StoreError, errors.NewerManifestError)):
            ms.Store(tmp_path).restore(target.objects(None), step=1)
        assert target.digest() == before, where
        flip(path, place, bit)
        found[path] += 1
    assert min(found.values())
    assert set(ms.Store(tmp_path).verify().values()) == {""}
