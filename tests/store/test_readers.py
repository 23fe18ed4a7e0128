"""Who reads a store while another process saves and takes away: never an error, never half a checkpoint."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import modelstate as ms
from modelstate import errors
from tests.faults import Request, faulty_reads
from tests.store.killed import DELTA, Job, start, train

SAVES, READS = 15, 2
"""How many saves of the writer, and how many reads of each reader, a test goes on for at least."""


@pytest.mark.slow
@pytest.mark.filterwarnings("error::modelstate.errors.DamagedCheckpointWarning")
@pytest.mark.parametrize("delta", [None, DELTA], ids=["whole", "deltas"])
def test_readers_see_whole_checkpoints_only(tmp_path: Path, delta: ms.Delta | None) -> None:
    process, report = start(train, str(tmp_path), 100_000, delta)
    wrong: list[str] = []
    counts: dict[str, int] = {}
    over = threading.Event()
    threads: list[threading.Thread] = []

    def restore() -> None:
        job = Job()
        restored = store().restore(job.objects(None))
        assert restored["digest"] == job.digest()
        assert restored.skipped == {}

    def restore_one() -> None:
        job, here = Job(), store()
        try:
            restored = here.restore(job.objects(None), here.steps()[0])
        except errors.StepNotFoundError:
            return  # it has been taken away
        assert restored["digest"] == job.digest()

    def look() -> None:
        here = store()
        infos = here.infos()
        assert all(info.intact and info.nbytes for info in infos), infos
        assert 1 <= len(infos) <= 4
        assert 1 <= len(here.steps()) <= 4

    def verify() -> None:
        assert set(store().verify().values()) <= {""}

    def opened() -> None:
        with store().open("model") as checkpoint:
            assert len(checkpoint) == 4

    def store() -> ms.Store:
        return ms.Store(tmp_path)

    def repeat(read: Callable[[], None]) -> None:
        while not over.is_set():
            try:
                read()
                counts[read.__name__] = counts.get(read.__name__, 0) + 1
            except BaseException as error:
                wrong.append(f"{read.__name__}: {error!r}")
                return

    try:
        first = None
        while first is None or first[0] != "saved":
            assert report.poll(60)
            first = report.recv()
        readers = (restore, restore_one, look, verify, opened)
        for read in readers:
            threads.append(threading.Thread(target=repeat, args=(read,)))
            threads[-1].start()
        saved = 0
        while not wrong and (saved < SAVES or any(counts.get(read.__name__, 0) < READS for read in readers)):
            assert report.poll(60)
            saved += report.recv()[0] == "saved"
    finally:
        over.set()
        process.kill()
        process.join()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("delta", [None, DELTA], ids=["whole", "deltas"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_step_that_vanishes_while_it_is_read(tmp_path: Path, is_replaced: bool, delta: ms.Delta | None) -> None:
    """The writer takes a step away, or replaces it, when the reader opens the first file of it: three times."""
    writer, reader, job = ms.Store(tmp_path, keep=1, delta=delta), ms.Store(tmp_path), Job(delta)
    writer.save(1, job.objects(1))
    seen = [1]

    def before(request: Request) -> None:
        if request.call == "open" and "/model" in request.path and writer_is_idle.acquire(blocking=False):
            if len(seen) < 4:
                job.train()
                seen.append(1 if is_replaced else len(seen) + 1)
                writer.save(seen[-1], job.objects(seen[-1]), overwrite=is_replaced)
            writer_is_idle.release()

    writer_is_idle, target = threading.Lock(), Job()
    with faulty_reads(before=before):
        restored = reader.restore(target.objects(None), 1 if is_replaced else "latest")
    assert (restored.step, restored.skipped) == (seen[-1], {})
    assert restored["digest"] == job.digest() == target.digest()
    assert len(seen) == 4


def test_readers_write_nothing(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"value": 1})
    store.close()
    times = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    reader = ms.Store(tmp_path)
    reader.restore({"value": None})
    assert (reader.steps(), reader.verify(), len(reader.infos())) == ((1,), {1: ""}, 1)
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == times
