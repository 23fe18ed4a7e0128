"""What a store never takes away, and never relies upon."""

import errno
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import modelstate as ms
from modelstate.errors import ReadFailedError, TargetExistsError
from tests.commands import run_command
from tests.faults import failing
from tests.store.common import flip


def tensors_of(directory: Path, step: int) -> Path:
    return next((directory / f"step-{step:09d}").glob("state*.safetensors"))


def saved(directory: Path, *steps: int) -> ms.Store:
    store = ms.Store(directory)
    for step in steps:
        store.save(step, {"state": {"w": torch.full((1000,), float(step))}})
    return store


def test_a_save_does_not_take_itself_away_when_the_clock_has_gone_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ms.Store(tmp_path, keep=1)
    store.save(10, {"value": 10})
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert store.save(5, {"value": 5}).pruned == ()
    assert store.latest() == 5
    assert store.restore({"value": None})["value"] == 5


@pytest.mark.parametrize("by", ["object", "command line"])
def test_the_last_good_ones_stay_where_the_newest_is_damaged(tmp_path: Path, by: str) -> None:
    saved(tmp_path, 1, 2, 3).close()
    flip(tensors_of(tmp_path, 3))
    if by == "object":
        with ms.Store(tmp_path) as store:
            assert store.prune(1, dry_run=True) == (1,)
            assert store.prune(1) == (1,)
    else:
        for option in (["--dry-run"], []):
            result = run_command("store", "prune", tmp_path, "--keep-last", "1", *option)
            assert result.exit_code == 0, result.output
            assert "1 step: 1" in result.output
    store = ms.Store(tmp_path)
    assert store.verify(2) == {2: ""}
    with pytest.warns(ms.errors.DamagedCheckpointWarning):
        assert store.restore({"state": {"w": torch.zeros(1000)}}).step == 2


def test_a_step_that_is_saved_again_is_not_taken_for_the_damaged_one(tmp_path: Path) -> None:
    """The file system may give the new directory the inode of the one that was removed."""
    store = saved(tmp_path, 5)
    for _ in range(3):
        flip(tensors_of(tmp_path, 5))
        assert store.verify(5)[5]
        store.save(6, {"value": 6}, overwrite=True)
        assert store.prune(1) == (5,)
        store.save(5, {"state": {"w": torch.full((1000,), 5.0)}})
        assert store.verify(5) == {5: ""}
        assert store.restore({"state": {"w": torch.zeros(1000)}}).step == 5


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_pin_that_cannot_be_read_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    store = saved(tmp_path, 1, 2, 3)
    store.pin(1)
    with monkeypatch.context() as patched:
        for name in ("stat", "lstat"):
            real = getattr(os, name)

            def fails(path: object, *args: object, real: Callable[..., object] = real, **named: object) -> object:
                if str(path).endswith("1/pinned"):
                    raise OSError(error, os.strerror(error))
                return real(path, *args, **named)

            patched.setattr(os, name, fails)
        assert store.prune(1) == (2,)
        store.pin(3)
    assert store.steps() == (1, 3)
    for _ in range(2):
        store.unpin(1)
    for _ in range(2):
        store.pin(3)
    store.save(4, {"value": 4})
    assert store.prune(1) == (1,)
    assert store.steps() == (3, 4)


@pytest.mark.parametrize("name", ["state-", "state.safetensors.index.json"])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
def test_tensors_that_cannot_be_read_for_now_are_not_damaged(tmp_path: Path, error: int, name: str) -> None:
    saved(tmp_path, 1, 2).close()
    store = ms.Store(tmp_path)
    uses: list[Callable[[], object]] = [
        lambda: store.restore({"state": None}, 2),
        lambda: store.open("state", 2, verify=True),
        lambda: store.index.first_usable(2, store.index.whole),
    ]
    with failing(OSError(error, os.strerror(error)), "open", f"step-000000002/{name}"):
        for use in uses:
            with pytest.raises(ReadFailedError, match=r"step-000000002.*cannot be (read|opened)"):
                use()
        with pytest.warns(ms.errors.DamagedCheckpointWarning, match="cannot be"):
            assert store.restore({"state": None}).step == 1
        assert set(store.verify()) == {1, 2}
        with pytest.raises(TargetExistsError):
            store.save(2, {"state": {"w": torch.zeros(9)}})
        assert store.prune(1) == ()
    assert store.verify() == {1: "", 2: ""}


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("call", ["open", "stat"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_for_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    store = ms.Store(tmp_path, keep=ms.Keep(last=1, best=1, metric="loss"))
    for step in (1, 2, 3):
        store.save(step, {"state": {"w": torch.full((9,), float(step))}}, metrics={"loss": float(step)})
    assert store.steps() == (1, 3)
    real, name, failure = os.stat, tensors_of(tmp_path, 1).name, OSError(error, os.strerror(error))

    def fails(path: object, *args: object, **named: object) -> object:
        if str(path).endswith(f"step-000000001/{name}"):
            raise failure
        return real(path, *args, **named)  # type: ignore[arg-type]

    with (
        monkeypatch.context() as patched,
        failing(failure, "open", "step-000000001/checkpoint.json$") if call == "open" else nullcontext(),
    ):
        if call == "stat":
            patched.setattr(os, "stat", fails)
        found = [(info.step, info.intact, info.state) for info in store.infos()]
        assert found == [(1, False, "not readable"), (3, True, "")]
        with pytest.raises(ReadFailedError, match="cannot be read"):
            store.restore({"state": None}, 1)
        assert store.save(4, {"state": {"w": torch.zeros(9)}}, metrics={"loss": 4.0}).pruned == ()
        assert store.prune(1) == (3,)
        with pytest.raises(TargetExistsError, match="leaves this checkpoint as it is"):
            store.save(1, {"state": {"w": torch.zeros(9)}})
        store.save(1, {"state": {"w": torch.ones(9)}}, metrics={"loss": 0.0}, overwrite=True)
        assert store.restore({"state": None}, 1)["state"]["w"].sum() == 9
    assert (tmp_path / "step-000000001").is_dir()
    assert store.verify() == {1: "", 4: ""}
    assert ms.load(torch.nn.ParameterDict({"w": torch.zeros(9)}), tmp_path / "step-000000001")


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_the_newest_stays_where_a_prune_cannot_read_it_for_now(tmp_path: Path, error: int) -> None:
    with ms.Store(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, {"state": {"w": torch.ones(9)}}, metrics={"loss": float(step)})
    keep, failure = ms.Keep(best=1, metric="loss"), OSError(error, os.strerror(error))
    with failing(failure, "open", f"{tensors_of(tmp_path, 3)}$"), ms.Store(tmp_path) as store:
        assert store.prune(keep) == ()  # step 2 is the newest that is known to be whole
    with ms.Store(tmp_path) as store:
        assert store.prune(keep) == (2,)
        assert store.verify() == {1: "", 3: ""}


def test_a_run_that_went_back_is_restored_by_the_command_line_as_by_restore(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 15).close()
    target = tmp_path / "out.safetensors"
    result = run_command("store", "restore", tmp_path, target, "--object", "state")
    assert result.exit_code == 0, result.output
    assert ms.open(target).tensor("w")[0] == 15
    infos = sorted(ms.Store(tmp_path).infos(), key=lambda info: info.serial)
    assert [info.step for info in infos] == [10, 20, 15]
