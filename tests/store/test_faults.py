"""A disk that fails, at every call of a save in turn: a clear error, what was there is there, and training goes on."""

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.conftest import Log
from tests.faults import Faults, Request, failing, faulty_reads, faulty_writes
from tests.store.common import Training, contents, litter
from tests.store.killed import DELTA, change_few
from tests.sweeps import sample

CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "EACCES": errno.EACCES}


class Half(Training):
    """One half is frozen, so that there is something to link. With deltas, training changes some elements."""

    def __init__(self, seed: int = 0, delta: ms.Delta | None = None) -> None:
        super().__init__(seed)
        if delta is not None:
            change_few(self.model)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": nn.ModuleDict({"a": self.model, "b": self.frozen}), "optimizer": self.optimizer, "plain": 1}


def fails_from(number: int, error: OSError) -> AbstractContextManager[Faults]:
    def fail(request: Request) -> None:
        if request.number >= number:
            raise error

    return faulty_writes(before=fail)


def same(store: ms.Store, step: int, bits: dict[str, bytes]) -> bool:
    fresh = Half(5)
    store.restore(fresh.objects, step)
    return fresh.bits() == bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "lasting", "delta"), [("ENOSPC", False, None), ("EIO", True, None), ("ENOSPC", False, DELTA)]
)
def test_every_call_in_turn(tmp_path: Path, code: str, lasting: bool, delta: ms.Delta | None) -> None:
    store, training = ms.Store(tmp_path, keep=2, delta=delta), Half(delta=delta)
    bits = {}
    for step in (0, 1):
        store.save(step, training.train().objects)
        bits[step] = training.bits()
    with faulty_writes() as clean:
        store.save(2, training.train().objects)
    bits[2] = training.bits()
    failed = survived = 0
    for number, _ in sample([(each.number, each.call) for each in clean.requests], lambda place: place[1], more=8):
        step = store.latest() or 0
        was = contents(tmp_path)
        training.train()
        error = OSError(CODES[code], os.strerror(CODES[code]))
        done = None
        with fails_from(number, error) if lasting else faulty_writes(at=number, error=error) as faults:
            try:
                done = store.save(step + 1, training.objects)
            except errors.WriteFailedError as raised:
                said = str(raised)
        if done is None:
            assert os.strerror(CODES[code]) in said
        calls = faults.requests
        assert set(store.verify().values()) == {""}, calls[-1]
        assert done or len(calls) >= number
        if done is None:
            failed += 1
            assert same(store, step, bits[step])
            if not lasting:
                assert contents(tmp_path) == was, calls[-1]
        else:
            survived += 1
        # Training is not held up, and the next save works.
        training.train()
        following = (store.latest() or 0) + 1
        store.save(following, training.objects)
        bits[following] = training.bits()
        assert same(store, following, bits[following])
        assert not litter(tmp_path), calls[number - 1]
        assert len(store.steps()) == 2
    assert failed > 10
    assert survived  # of links, and of what takes away old ones


def test_in_the_background(tmp_path: Path) -> None:
    store, training = ms.Store(tmp_path, keep=2), Half()
    store.save(0, training.train().objects)
    bits = training.bits()
    for number, code in zip((1, 5, 9, 20), CODES.values(), strict=True):
        was = contents(tmp_path)
        with faulty_writes(at=number + 2, error=OSError(code, os.strerror(code))):
            pending = store.save(1, training.train().objects, background=True)
            assert pending is not None
            with pytest.raises(errors.WriteFailedError, match=os.strerror(code)):
                pending.result()
        assert contents(tmp_path) == was
        assert same(store, 0, bits)
    pending = store.save(1, training.objects, background=True)
    assert pending is not None
    pending.result()
    assert store.verify() == {0: "", 1: ""}


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_disk_that_has_become_read_only(tmp_path: Path, code: int) -> None:
    store, training = ms.Store(tmp_path), Half().train()
    store.save(1, training.objects)
    bits, was = training.bits(), contents(tmp_path)
    with faulty_writes(error=OSError(code, os.strerror(code))):
        with pytest.raises(errors.WriteFailedError):
            store.save(2, training.train().objects)
        with pytest.raises(errors.WriteFailedError):
            store.pin(1)
        with pytest.raises(errors.WriteFailedError) as raised:
            store.check(training.objects)
        assert raised.value.where == str(tmp_path)
        with pytest.raises(errors.WriteFailedError):
            ms.Store(tmp_path / "other").save(1, {"value": 1})
        assert same(store, 1, bits)
        assert store.prune(1) == ()
    assert contents(tmp_path) == was
    store.save(2, training.objects)


def test_a_file_that_another_writer_removes_before_the_commit(tmp_path: Path) -> None:
    """Some network file systems lock out writers of one machine only."""

    def remove(request: Request) -> None:
        if request.call == "fsync" and request.path.endswith("checkpoint.json"):
            for file in Path(request.path).parent.glob("model-*"):
                file.unlink()

    with ms.Store(tmp_path) as store, faulty_writes(before=remove):
        with pytest.raises(errors.WriteFailedError, match=r"without model-\w+\.safetensors"):
            store.save(1, {"model": nn.Linear(2, 2)})
        assert (store.steps(), litter(tmp_path)) == ((), [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
def test_checkpoints_that_users_have_changed_are_replaced_and_removed() -> None:
    """They were made read-only, and a tokenizer was put into them."""

    def use(directory: Path) -> bool:
        objects = {"model": nn.Linear(2, 2)}
        with ms.Store(directory) as store:
            store.save(1, objects)
            store.save(2, objects)
            for path in directory.glob("step-*"):
                (path / "tokenizer").mkdir()
                (path / "tokenizer" / "vocabulary.txt").touch()
                path.chmod(0o555)
            store.save(2, objects, overwrite=True)
            return store.prune(1) == (1,) and store.verify() == {2: ""} and not litter(directory)

    with TemporaryDirectory() as parent:
        assert use(Path(parent, "any user"))
        os.chmod(parent, 0o777)
        child = os.fork()
        if not child:
            try:
                if os.geteuid() == 0:  # root may do everything
                    os.setuid(65534)
                os._exit(0 if use(Path(parent, "no rights")) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_checkpoint_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path, log: Log) -> None:
    with ms.Store(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, {"value": step})
    busy = OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # as of a mount point
    with failing(busy, "replace", "step-000000001$"), ms.Store(tmp_path, keep=1) as store:
        store.save(4, {"value": 4})
        assert store.steps() == (1, 4)
        assert "not removed" in log.text
        with pytest.raises(errors.WriteFailedError, match="busy"):
            store.prune()


@pytest.mark.slow
def test_reads_that_fail(tmp_path: Path) -> None:
    """At every request of a restore: the objects are what they were, and no checkpoint is given up for it."""
    store, training = ms.Store(tmp_path), Half().train()
    store.save(1, training.objects)
    target = Half(7)
    bits = target.bits()
    with faulty_reads() as faults:
        store.restore(Half(8).objects, 1)
    for number in range(1, len(faults.requests) + 1):
        with faulty_reads(at=number, error=OSError(errno.EIO, "an I/O error")):
            try:
                store.restore(target.objects, 1)
                target = Half(7)
            except errors.ModelStateError:
                assert target.bits() == bits, number
        store = ms.Store(tmp_path)
    store.restore(target.objects)
    assert target.bits() == training.bits()
