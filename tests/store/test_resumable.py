"""A loop that saves between its steps, and goes on where it was."""

import errno
import logging
import math
import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import modelstate as ms
from modelstate.errors import CodecError, OptionError, SaveFailedWarning, StepNotFoundError, WriteFailedError
from tests.conftest import Log
from tests.faults import failing
from tests.store.common import Held, contents, litter


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


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_loop_that_is_left_goes_on_where_it_was_saved(tmp_path: Path, background: bool) -> None:
    expected, losses = uninterrupted(11), dict[int, float]()
    for leave_at in (4, 6, None):
        of = objects()
        with ms.Store(tmp_path) as store:
            loop = ms.resumable(store, of, steps=11, save_every=2, background=background)
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


def test_metrics_and_values_come_back(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), {**objects(), "epoch": 3}
    loop = ms.resumable(store, of, steps=2, save_every=1)
    for number in loop:
        loop.metrics["loss"] = 1.0 / (number + 1)
    assert [info.metrics for info in store.infos()] == [{"loss": 1.0}, {"loss": 0.5}]
    again = ms.resumable(store, {**objects(), "epoch": 0}, steps=2, save_every=1)
    assert again.restored is not None
    assert dict(again.restored) == {"epoch": 3}


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["mkdir", "fsync"])
def test_where_the_disk_stays_full_the_last_save_raises(tmp_path: Path, call: str) -> None:
    store, of, done = ms.Store(tmp_path), objects(), []
    loop = ms.resumable(store, of, steps=5, save_every=2)
    with (
        failing(FULL, call),
        pytest.warns(SaveFailedWarning, match="step 2"),
        pytest.raises(WriteFailedError, match="No space left"),
    ):
        done.extend(loop)
    assert (done, store.steps()) == ([0, 1, 2, 3, 4], ())


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("call", ["mkdir", "pwritev", "fsync", "replace"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_directory_that_cannot_be_written_is_found_out_before_the_first_step(
    tmp_path: Path, call: str, is_resumed: bool
) -> None:
    if is_resumed:
        ms.Store(tmp_path).save(1, objects())
    before = contents(tmp_path)
    with failing(FULL, call), pytest.raises(WriteFailedError, match="No space left") as caught:
        ms.resumable(tmp_path, objects(), steps=5, save_every=2)
    assert caught.value.__traceback__ is not None  # keeps the store, which has to be unlocked all the same
    assert {name: contents(tmp_path)[name] for name in before} == before
    assert litter(tmp_path) == []
    assert list(ms.resumable(tmp_path, objects(), steps=5, save_every=2)) == [*range(is_resumed, 5)]


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["listdir", "stat", "open"])
def test_a_store_that_cannot_be_looked_at_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store, of, done, real = ms.Store(tmp_path), objects(), [], getattr(os, call)
    error = OSError(code, os.strerror(code))

    def fail(path: Any = ".", *args: Any, **how: Any) -> Any:
        if str(tmp_path) in str(path):
            raise error
        return real(path, *args, **how)

    def train() -> None:
        with ExitStack() as faults:
            for number in ms.resumable(store, of, steps=8, save_every=1):
                done.append(number)
                if number == 3:
                    store.wait()
                    monkeypatch.setattr(os, call, fail)
                    if call == "open":
                        faults.enter_context(failing(error, "open_to_write"))
                if number == 5:
                    with suppress(OSError):
                        store.wait()
                    monkeypatch.setattr(os, call, real)
                    faults.close()

    with pytest.warns(SaveFailedWarning) as warned:
        train()
    assert done == list(range(8))
    assert store.steps() == (1, 2, 3, 6, 7, 8)
    for step, warning in zip((4, 5), warned, strict=True):
        assert str(warning.message).startswith(f"step {step} was not saved: ")
        assert os.strerror(code) in str(warning.message) or "permission to read" in str(warning.message)
        assert warning.filename == __file__


@pytest.mark.parametrize("background", [True, False])
def test_what_cannot_be_saved_raises_at_once(tmp_path: Path, background: bool) -> None:
    store, held, done = ms.Store(tmp_path), Held(value=1), []

    def train() -> None:
        for number in ms.resumable(store, {"held": held}, steps=8, save_every=2, background=background):
            done.append(number)
            if number == 3:
                held.values["value"] = object()

    with pytest.raises(CodecError):
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
    assert (caught.value.remedy, caught.value.found) == ("allow_missing=, if that is meant", "allow_mising=['x']")
    for bad in ({"nope": 1}, {"self": 1}):
        with pytest.raises(OptionError):
            ms.resumable(store, objects(), steps=1, save_every=1, **bad)
    assert list(ms.resumable(ms.Store(tmp_path / "of"), {"a": 1}, steps=1, save_every=1, allow_missing=["x"])) == [0]
    assert not any(path.name != "of" for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_path_is_a_store_of_its_own(tmp_path: Path) -> None:
    losses, expected = dict[int, float](), uninterrupted(7)
    for leave_at in (4, None):
        of = objects()
        loop = ms.resumable(tmp_path / "run", of, steps=7, save_every=2, keep=2)
        for number in loop:
            losses[number] = step(of)
            if number == leave_at:
                break
        ms.Store(tmp_path / "run").save(100 + loop.done, of)  # the directory is free again
        shutil.rmtree(tmp_path / "run" / f"step-000000{100 + loop.done}")
    assert [losses[number] for number in range(7)] == expected
    assert (loop.start, loop.store.steps()) == (4, (6, 7))
    with pytest.raises(OptionError, match="keep="):
        ms.resumable(ms.Store(tmp_path), objects(), steps=1, save_every=1, keep=2)


def test_what_cannot_be_saved_is_found_out_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CodecError):
        ms.resumable(tmp_path, {**objects(), "held": Held(value=object())}, steps=9, save_every=9)
    with pytest.raises(OptionError, match="StatefulDataLoader"):
        ms.resumable(tmp_path, {**objects(), "data": DataLoader([1, 2])}, steps=9, save_every=9)  # type: ignore[arg-type]


def test_what_cannot_be_saved_is_found_out_after_the_first_step(tmp_path: Path) -> None:
    held, done = Held(), []

    def train() -> None:
        for number in ms.resumable(tmp_path, {"held": held}, steps=9, save_every=9):
            done.append(number)
            held.values["made by the first step"] = object()

    with pytest.raises(CodecError):
        train()
    assert done == [0]


def test_looking_whether_objects_can_be_saved_draws_nothing_and_builds_no_iterator(tmp_path: Path) -> None:
    generator = torch.Generator()
    loader: Any = StatefulDataLoader([1, 2], shuffle=True, generator=generator)  # type: ignore[arg-type]
    of = {"loader": loader, "drawing": Drawing(), "rng": ms.RNG({"loader": generator})}

    def drawn() -> list[float]:
        torches = [torch.rand((), generator=each).item() for each in (None, generator)]
        return [*torches, random.random(), np.random.random()]

    rng = ms.RNG({"loader": generator})
    before = rng.state_dict()
    expected = drawn()
    rng.load_state_dict(before)
    ms.Store(tmp_path).check(of)
    assert drawn() == expected
    assert loader._iterator is None
    assert contents(tmp_path).keys() == {"store.json"}
    assert litter(tmp_path) == []


class Drawing(Held):
    def state_dict(self) -> dict[str, Any]:
        return {"seed": torch.randint(9, ()), "other": random.random()}


def test_too_little_space_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    space = os.statvfs_result((4096, 4096, 1, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    ms.Store(tmp_path).check(objects())
    assert "0 B are free" in log.text


def test_a_run_that_goes_on_says_so(tmp_path: Path, log: Log) -> None:
    logging.getLogger("modelstate").setLevel(logging.INFO)
    assert list(ms.resumable(tmp_path, objects(), steps=3, save_every=5)) == [0, 1, 2]
    assert log.records == []
    ms.resumable(tmp_path, objects(), steps=5, save_every=5)
    (record,) = log.records
    assert (record.levelname, record.getMessage()[:30]) == ("INFO", "going on from step 3 of 5, sav")
    assert list(ms.resumable(tmp_path, objects(), steps=2, save_every=5)) == []
    assert log.records[-1].levelname == "WARNING"
    assert "steps=2 is less than the 3 steps that are done already" in log.text


def with_metric(path: Path, **given: Any) -> list[int]:
    keep = ms.Keep(last=2, best=1, metric="val_loss")
    loop, done = ms.resumable(path, {"a": Held(b=1)}, steps=6, save_every=1, keep=keep, background=False, **given), []
    for number in loop:
        done.append(number)
        loop.metrics["loss"] = 1.0
    return done


def test_a_metric_that_is_never_given_is_an_error_and_removes_nothing(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="val_loss") as caught:
        with_metric(tmp_path)
    assert caught.value.found == "loss"
    assert ms.Store(tmp_path).steps() == (1, 2, 3)
    with pytest.raises(OptionError, match="val_loss"):
        ms.Store(tmp_path).prune(ms.Keep(best=1, metric="val_loss"))
    assert ms.Store(tmp_path).steps() == (1, 2, 3)


def test_a_metric_that_is_not_known_yet_is_given_as_nan(tmp_path: Path) -> None:
    keep = ms.Keep(last=1, best=1, metric="val_loss")
    loop = ms.resumable(tmp_path, {"a": Held(b=1)}, steps=6, save_every=1, keep=keep)
    loop.metrics = {"val_loss": math.nan}
    for number in loop:
        if number == 2:
            loop.metrics["val_loss"] = 0.5
        elif number > 2:
            loop.metrics["val_loss"] = 1.0
    assert loop.store.steps() == (3, 6)


def test_generators_are_set_again_when_the_first_step_is_handed_out(tmp_path: Path) -> None:
    """Those of Python, NumPy and torch, and all that are among the objects."""

    def run() -> tuple[dict[str, Any], Callable[[], list[float]]]:
        one, other, own = torch.Generator(), np.random.default_rng(0), torch.Generator()
        loader: Any = StatefulDataLoader([1, 2], generator=own)  # type: ignore[arg-type]

        def draw() -> list[float]:
            torches = [torch.rand((), generator=generator).item() for generator in (None, one, own)]
            return [*torches, other.random(), random.random(), np.random.random()]

        return {"one": one, "rng": ms.RNG({"other": other}), "loader": loader}, draw

    of, draw = run()
    drawn = [draw() for _ in ms.resumable(tmp_path, of, steps=4, save_every=2) if _ < 2]
    assert len(drawn) == 2
    shutil.rmtree(tmp_path / "step-000000004")
    again, draw_again = run()
    loop = ms.resumable(tmp_path, again, steps=4, save_every=2)
    expected = draw_again()
    draw_again()
    steps = iter(loop)
    assert (next(steps), draw_again()) == (2, expected)
    assert loop.restored is not None
    assert (next(steps), draw_again() == expected) == (3, False)
    loop.restored.rewind_generators()
    assert draw_again() == expected


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (torch.tensor(0.5), "loss.item()"),
        (torch.ones(1, requires_grad=True), "loss.item()"),
        (torch.ones(3), "loss.float().mean().item()"),
        (np.ones(()), "loss.item()"),
        (None, "math.nan"),
        ("0.5", None),
        (True, None),
        (10**400, None),
    ],
)
def test_a_value_that_is_no_number_is_refused(tmp_path: Path, value: Any, remedy: str | None) -> None:
    store = ms.Store(tmp_path)
    loop = ms.resumable(store, {"a": Held(b=1)}, steps=2, save_every=2)
    for change in (
        lambda: store.save(9, {"a": Held(b=1)}, metrics={"loss": value}),
        lambda: [loop.metrics.update(loss=value) for _ in loop],
    ):
        with pytest.raises(OptionError, match="metrics\\['loss'\\]") as caught:
            change()
        assert remedy is None or remedy in caught.value.remedy
    assert store.steps() == ()
