"""A loop that saves between its steps, and goes on where it was."""

import errno
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, SaveFailedWarning, StepNotFoundError, UnsupportedValueError, WriteFailedError
from modelstate.write import system
from tests.store.common import Held


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "rng": ms.RNG()}


def step(of: dict[str, Any]) -> float:
    loss = of["model"](torch.randn(4, 3)).square().mean()
    of["optimizer"].zero_grad()
    loss.backward()
    of["optimizer"].step()
    return loss.item()


def uninterrupted(steps: int) -> list[float]:
    of = objects()
    return [step(of) for _ in range(steps)]


@pytest.mark.parametrize("block", [True, False])
def test_a_loop_that_is_left_goes_on_where_it_was_saved(tmp_path: Path, block: bool) -> None:
    expected, losses = uninterrupted(11), dict[int, float]()
    for leave_at in (4, 6, None):
        of = objects()
        with ms.Store(tmp_path) as store:
            loop = ms.resumable(store, of, steps=11, save_every=2, block=block)
            for number in loop:
                losses[number] = step(of)
                if number == leave_at:
                    break
    assert [losses[number] for number in range(11)] == expected
    assert (loop.start, loop.done, loop.stopped) == (6, 11, "")
    assert store.steps() == (2, 4, 6, 8, 10, 11)


def test_a_run_that_is_over_has_no_steps(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), objects()
    for _ in ms.resumable(store, of, steps=3, save_every=5):
        step(of)
    again = ms.resumable(store, objects(), steps=3, save_every=5)
    assert list(again) == []
    assert (again.start, store.steps()) == (3, (3,))


def test_a_signal_ends_it_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), objects()
    loop = ms.resumable(store, of, steps=100, save_every=50, deadline=ms.Deadline(hours=None))
    before = signal.getsignal(signal.SIGTERM)
    for number in loop:
        step(of)
        if number == 6:
            os.kill(os.getpid(), signal.SIGTERM)
    assert (loop.done, loop.stopped) == (7, "SIGTERM was received")
    assert store.steps() == (7,)
    assert signal.getsignal(signal.SIGTERM) is before
    assert ms.resumable(store, objects(), steps=100, save_every=50).start == 7


def test_the_deadline_learns_from_steps_and_saves(tmp_path: Path) -> None:
    deadline = ms.Deadline(hours=1, since="now")
    at_first = deadline.margin_seconds
    store, of = ms.Store(tmp_path), objects()
    for _ in ms.resumable(store, of, steps=4, save_every=2, deadline=deadline):
        step(of)
    assert deadline.margin_seconds < at_first


def test_a_deadline_that_is_over_saves_what_it_got(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), objects()
    loop = ms.resumable(store, of, steps=4, save_every=2, deadline=ms.Deadline(hours=1, margin=3599.9999, since="now"))
    for _ in loop:
        step(of)
    assert loop.stopped
    assert store.steps() == (loop.done,)


def test_metrics_and_values_come_back(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), {**objects(), "epoch": 3}
    loop = ms.resumable(store, of, steps=2, save_every=1)
    for number in loop:
        loop.metrics["loss"] = 1.0 / (number + 1)
    assert [info.metrics for info in store.infos()] == [{"loss": 1.0}, {"loss": 0.5}]
    again = ms.resumable(store, {**objects(), "epoch": 0}, steps=2, save_every=1)
    assert again.restored is not None
    assert dict(again.restored) == {"epoch": 3}


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_save_in_the_background_that_fails_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, of, done = ms.Store(tmp_path), objects(), []
    has_failed, real = threading.Event(), system.pwritev

    def full_once(*args: Any) -> None:
        monkeypatch.setattr(system, "pwritev", real)
        has_failed.set()
        full()

    def train() -> None:
        for number in ms.resumable(store, of, steps=9, save_every=2):
            done.append(number)
            if number == 3:
                store.wait()
                monkeypatch.setattr(system, "pwritev", full_once)
            if number == 4:
                assert has_failed.wait(60)

    with pytest.warns(SaveFailedWarning, match="(?s)step 4 was not saved: .*No space left"):
        train()
    assert done == list(range(9))
    assert store.steps() == (2, 6, 8, 9)


@pytest.mark.parametrize("call", ["mkdir", "pwritev", "fsync", "replace"])
def test_where_the_disk_stays_full_the_last_save_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store, of, done = ms.Store(tmp_path), objects(), []
    monkeypatch.setattr(system, call, full)
    with pytest.warns(SaveFailedWarning, match="step 2"), pytest.raises(WriteFailedError, match="No space left"):
        done.extend(ms.resumable(store, of, steps=5, save_every=2))
    monkeypatch.undo()
    assert store.steps() == ()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", ["listdir", "stat", "open"])
def test_a_store_that_cannot_be_looked_at_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store, of, done, real = ms.Store(tmp_path), objects(), [], getattr(os, call)

    def failing(path: Any = ".", *args: Any, **how: Any) -> Any:
        if str(tmp_path) in str(path):
            raise OSError(code, os.strerror(code))
        return real(path, *args, **how)

    def train() -> None:
        for number in ms.resumable(store, of, steps=8, save_every=1):
            done.append(number)
            if number == 3:
                store.wait()
                monkeypatch.setattr(os, call, failing)
            if number == 5:
                with suppress(OSError):
                    store.wait()
                monkeypatch.setattr(os, call, real)

    with pytest.warns(SaveFailedWarning) as warned:
        train()
    assert done == list(range(8))
    assert store.steps() == (1, 2, 3, 6, 7, 8)
    for step, warning in zip((4, 5), warned, strict=True):
        assert str(warning.message).startswith(f"step {step} was not saved: ")
        assert os.strerror(code) in str(warning.message)
        assert warning.filename == __file__


@pytest.mark.parametrize("block", [True, False])
def test_what_cannot_be_saved_raises_at_once(tmp_path: Path, block: bool) -> None:
    store, held, done = ms.Store(tmp_path), Held(value=1), []

    def train() -> None:
        for number in ms.resumable(store, {"held": held}, steps=8, save_every=2, block=block):
            done.append(number)
            if number == 3:
                held.values["value"] = object()

    with pytest.raises(UnsupportedValueError):
        train()
    assert done == [0, 1, 2, 3]
    assert store.steps() == (2,)


def test_a_store_in_which_all_is_damaged_is_no_empty_one(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, objects())
    (tmp_path / "step-000000001" / "checkpoint.json").write_bytes(b"{}")
    with pytest.raises(StepNotFoundError, match="can be used"):
        ms.resumable(store, objects(), steps=2, save_every=1)


def test_options(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    for bad in ({"steps": 0}, {"save_every": 0}, {"deadline": 4}, {"steps": True}):
        with pytest.raises(OptionError):
            ms.resumable(store, objects(), **{"steps": 1, "save_every": 1, **bad})
    with pytest.raises(OptionError, match="allow_missing") as caught:
        ms.resumable(store, objects(), steps=1, save_every=1, allow_mising=["x"])
    assert (caught.value.expected, caught.value.found) == ("allow_missing", "allow_mising")
    for bad in ({"nope": 1}, {"self": 1}):
        with pytest.raises(OptionError):
            ms.resumable(store, objects(), steps=1, save_every=1, **bad)
    assert list(ms.resumable(ms.Store(tmp_path / "of"), {"a": 1}, steps=1, save_every=1, allow_missing=["x"])) == [0]
    assert not any(path.name != "of" for path in tmp_path.iterdir())
