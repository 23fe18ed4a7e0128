"""`follow`: what is saved is taken up, what is bad is skipped and said once, and the old version serves on."""

import gc
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import (
    AppAnswerError,
    CanaryError,
    ChecksumError,
    DamagedCheckpointError,
    FollowWarning,
    LiveTargetError,
    ModelStateError,
    NonFiniteWeightError,
    OptionError,
    PlanError,
    ReadFailedError,
    SaveTargetError,
    SkippedCheckpointError,
    SourceNotFoundError,
    StepNotFoundError,
    SwapBusyError,
    SwapTimeoutError,
    WriteFailedError,
)
from tests.live.stores import X, cut, damage, linear, objects, save, spoil_record
from tests.live.targets import target_of


class Log(list[Exception]):
    """What has been reported."""

    @property
    def skipped(self) -> list[int | None]:
        return [error.step for error in self if isinstance(error, SkippedCheckpointError)]

    @property
    def causes(self) -> list[str]:
        return [type(error.__cause__ or error).__name__ for error in self]


def by_hand(target: Any, store: Any, **options: Any) -> tuple[ms.Following, Log]:
    log = Log()
    return ms.follow(target, store, background=False, on_error=log.append, **options), log


def serves(live: ms.Live) -> float:
    """The k of the weights that serve."""
    (found,) = {float(value) / 5 for value in live(X).detach().flatten()}
    return round(found, 4)


def actions(following: ms.Following) -> list[tuple[str, int | None]]:
    return [(event.action, event.step) for event in following.poll()]


# What is taken up.


def test_each_new_checkpoint_serves(tmp_path: Path) -> None:
    live, store = ms.Live(linear(0)), ms.Store(tmp_path / "run", keep=2)
    following, log = by_hand(live, store)
    for step in (10, 20, 30, 40):
        path = save(store, step)
        (event,) = following.poll()
        assert (event.action, event.step, event.source, event.error) == ("swapped", step, str(path), "")
        assert (event.version, following.step) == (live.version, step)
        assert serves(live) == pytest.approx(step, abs=0.01)
        assert following.poll() == ()
    assert log == []
    assert [event.step for event in following.events] == [10, 20, 30, 40]
    assert "step 40, not running" in repr(following)
    assert "model.safetensors" in live.history()[-1].source


@pytest.mark.parametrize("kind", ["eager", "exported"])
@pytest.mark.parametrize("mode", ["available", "frugal"])
def test_it_is_what_was_saved_and_the_first_look_takes_the_newest(tmp_path: Path, kind: str, mode: str) -> None:
    torch.manual_seed(1)
    trained = nn.Linear(4, 4)
    store = ms.Store(tmp_path)
    save(store, 1)
    store.save(2, {"model": trained, "epoch": 2})
    live = ms.Live(target_of(kind, linear(0), X))
    following, log = by_hand(live, str(tmp_path), mode=mode)
    assert actions(following) == [("swapped", 2)]
    assert torch.equal(live(X), trained(X))
    assert log == []


def test_the_object_that_has_the_weights(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"model": linear(1), "ema": linear(2), "nets": {"small": linear(3)}})
    for name, k in (("model", 1), ("ema", 2), ("nets.small", 3)):
        live = ms.Live(linear(0))
        following, _ = by_hand(live, tmp_path, object=name)
        assert actions(following) == [("swapped", 1)]
        assert serves(live) == k
    following, log = by_hand(ms.Live(linear(0)), tmp_path, object="teacher")
    assert actions(following) == [("skipped", 1)]
    assert log.causes == ["StepNotFoundError"]
    assert "ema, model, nets.small" in str(log[0]) or "model, ema, nets.small" in str(log[0])


def test_options_are_those_of_the_swap(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"model": nn.Sequential(linear(1))})
    live = ms.Live(linear(0))
    tried = []
    following, log = by_hand(live, store, rules=[ms.Prefix(strip="0.")], canary=tried.append)
    assert actions(following) == [("swapped", 1)]
    assert (serves(live), len(tried), log) == (1, 1, [])


def test_training_that_goes_back_and_on_from_there(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, _ = by_hand(live, store)
    for step in (10, 20, 30, 15):
        save(store, step)
        assert actions(following) == [("swapped", step)]
    save(store, 15, 16, overwrite=True)
    assert actions(following) == [("swapped", 15)]
    assert serves(live) == pytest.approx(16, abs=0.01)


def test_a_store_that_is_begun_anew(tmp_path: Path) -> None:
    live, store = ms.Live(linear(0)), ms.Store(tmp_path / "run")
    following, log = by_hand(live, store)
    for step in (10, 20, 30):
        save(store, step)
        following.poll()
    store.close()
    shutil.rmtree(tmp_path / "run")
    with ms.Store(tmp_path / "run") as other:
        save(other, 5)
    assert actions(following) == [("swapped", 5)]
    assert log == []


def test_the_best(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, log = by_hand(live, store, select="best:loss")
    highest, _ = by_hand(ms.Live(linear(0)), store, select="best:loss:max")
    taken, taken_highest = [], []
    for step, loss in enumerate([0.5, 0.9, 0.3, float("nan"), 0.3, 0.4, 0.1], 1):
        save(store, step, metrics={"loss": loss})
        following.poll()
        highest.poll()
        taken.append(following.step)
        taken_highest.append(highest.step)
    save(store, 8)
    assert actions(following) == []
    assert taken == [1, 1, 3, 3, 3, 3, 7]
    assert taken_highest == [1, 2, 2, 2, 2, 2, 2]
    assert log == []


def test_a_worse_one_is_not_taken_because_the_best_is_gone(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path, keep=1), ms.Live(linear(0))
    following, _ = by_hand(live, store, select="best:loss")
    for step, loss in ((1, 0.5), (2, 0.9), (3, 0.4)):
        save(store, step, metrics={"loss": loss})
        following.poll()
    assert [event.step for event in following.events] == [1, 3]


def test_a_rollback_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, _ = by_hand(live, store)
    for step in (1, 2):
        save(store, step)
        following.poll()
    live.rollback()
    assert actions(following) == []
    assert serves(live) == pytest.approx(1, abs=0.01)
    save(store, 3)
    assert actions(following) == [("swapped", 3)]


# What is bad.


def nan(store: ms.Store, step: int) -> None:
    store.save(step, {"model": linear(float("nan"))})


def other_shape(store: ms.Store, step: int) -> None:
    store.save(step, {"model": nn.Linear(4, 5)})


def other_names(store: ms.Store, step: int) -> None:
    store.save(step, {"model": nn.Sequential(linear(1))})


def no_model(store: ms.Store, step: int) -> None:
    store.save(step, {"network": linear(1)})


def flipped(store: ms.Store, step: int) -> None:
    damage(save(store, step))


def flipped_header(store: ms.Store, step: int) -> None:
    damage(save(store, step), "model.safetensors.index.json")


def cut_off(store: ms.Store, step: int) -> None:
    cut(save(store, step))


def without_record(store: ms.Store, step: int) -> None:
    spoil_record(save(store, step))


def of_another_store(store: ms.Store, step: int) -> None:
    with ms.Store(f"{store.directory}.other") as other:
        path = save(other, step)
    shutil.copytree(path, Path(store.directory) / path.name)


def refused_by_the_canary(store: ms.Store, step: int) -> None:
    save(store, step, 1000)


BAD: dict[Callable[[ms.Store, int], None], type[ModelStateError] | None] = {
    nan: NonFiniteWeightError,
    other_shape: PlanError,
    other_names: PlanError,
    no_model: StepNotFoundError,
    flipped: DamagedCheckpointError,
    flipped_header: DamagedCheckpointError,
    cut_off: DamagedCheckpointError,
    without_record: DamagedCheckpointError,
    of_another_store: None,
    refused_by_the_canary: CanaryError,
}


@pytest.mark.parametrize("mode", ["available", "frugal"])
@pytest.mark.parametrize("spoiled", BAD, ids=lambda spoiled: spoiled.__name__)
def test_a_bad_one_is_skipped_and_reported_once(
    tmp_path: Path, spoiled: Callable[[ms.Store, int], None], mode: str
) -> None:
    store, live = ms.Store(tmp_path / "run"), ms.Live(linear(0))
    following, log = by_hand(live, store, mode=mode, canary=lambda new: bool(new(X).mean() < 500))
    save(store, 10)
    assert actions(following) == [("swapped", 10)]
    spoiled(store, 20)
    (event,) = following.poll()
    assert (event.action, event.step) == ("skipped", 20)
    assert (following.step, live.version) == (10, 2)
    assert serves(live) == pytest.approx(10, abs=0.01)
    assert following.poll() == following.poll() == ()
    (error,) = log
    assert isinstance(error, SkippedCheckpointError)
    cause = BAD[spoiled]
    assert cause is None or isinstance(error.__cause__, cause)
    assert (error.step, error.where) == (20, str(tmp_path / "run" / "step-000000020"))
    assert type(error.__cause__).__name__ in error.found
    assert type(error.__cause__).__name__ in event.error
    save(store, 30)
    assert actions(following) == [("swapped", 30)]
    assert len(log) == 1


def test_one_that_is_known_to_be_damaged_is_none_of_the_best_for_long(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    save(store, 1, metrics={"loss": 0.5})
    damage(save(store, 2, metrics={"loss": 0.1}))
    cut(save(store, 3, metrics={"loss": 0.2}))
    following, log = by_hand(live, store, select="best:loss")
    assert actions(following) == [("skipped", 2), ("skipped", 3), ("swapped", 1)]
    assert actions(following) == []
    assert log.skipped == [2, 3]


def test_behind_a_bad_one_the_next_newest_is_taken(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, log = by_hand(live, store)
    for step in (1, 2, 3):
        save(store, step)
    nan(store, 4)
    flipped(store, 5)
    assert actions(following) == [("skipped", 5), ("skipped", 4), ("swapped", 3)]
    assert actions(following) == []
    assert log.skipped == [5, 4]
    assert log.causes == ["DamagedCheckpointError", "NonFiniteWeightError"]


def test_damage_elsewhere_in_a_step_is_in_nobodys_way(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, log = by_hand(live, store)
    damage(save(store, 1), "optimizer-*.safetensors")
    assert (actions(following), log) == ([("swapped", 1)], [])


def test_a_damaged_step_that_is_saved_again(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, log = by_hand(live, store)
    flipped(store, 1)
    assert actions(following) == [("skipped", 1)]
    store.save(1, objects(2), overwrite=True)
    assert actions(following) == [("swapped", 1)]
    assert log.skipped == [1]


def test_nothing_of_a_refused_checkpoint_is_kept(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    refused: list[weakref.ref[Any]] = []

    def canary(new: Any) -> bool:
        refused.append(weakref.ref(new.holder))
        return False

    following = ms.follow(live, store, background=False, canary=canary, on_error=lambda error: None)
    save(store, 1)
    assert actions(following) == [("skipped", 1)]
    gc.collect()
    assert [ref() for ref in refused] == [None]


# What comes and goes.


def test_a_store_that_is_not_there_yet_is_waited_for_and_reported_once(tmp_path: Path) -> None:
    live = ms.Live(linear(0))
    following, log = by_hand(live, tmp_path / "run")
    assert actions(following) == [("waiting", None)]
    assert actions(following) == actions(following) == []
    assert [type(error) for error in log] == [SourceNotFoundError]
    store = ms.Store(tmp_path / "run")
    save(store, 1)
    assert actions(following) == [("swapped", 1)]
    os.rename(tmp_path / "run", tmp_path / "away")
    assert [actions(following) for _ in range(3)] == [[("waiting", None)], [], []]
    os.rename(tmp_path / "away", tmp_path / "run")
    assert actions(following) == []
    os.rename(tmp_path / "run", tmp_path / "away")
    assert actions(following) == [("waiting", None)]
    assert serves(live) == pytest.approx(1, abs=0.01)


def test_an_empty_store_is_nothing_to_report(tmp_path: Path) -> None:
    following, log = by_hand(ms.Live(linear(0)), tmp_path)
    assert (following.poll(), log) == ((), [])


def test_a_store_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ms.Store(tmp_path)
    save(store, 1)
    following, log = by_hand(ms.Live(linear(0)), store)
    real, broken = os.listdir, OSError(5, "Input/output error")

    def fails(path: Any) -> list[str]:
        raise broken

    monkeypatch.setattr(os, "listdir", fails)
    assert [actions(following) for _ in range(3)] == [[("waiting", None)], [], []]
    monkeypatch.setattr(os, "listdir", real)
    assert actions(following) == [("swapped", 1)]
    assert [type(error) for error in log] == [ReadFailedError]


class Target:
    """What takes a path, and does with it what it is told to."""

    def __init__(self, *does: Any) -> None:
        self.does, self.given = list(does), list[str]()

    def swap(self, source: str) -> None:
        self.given.append(source)
        doing = self.does.pop(0) if self.does else None
        if isinstance(doing, BaseException):
            raise doing
        if doing is not None:
            doing()


def test_anything_with_swap_gets_a_path_that_can_be_opened(tmp_path: Path) -> None:
    store, target = ms.Store(tmp_path), Target()
    following, _ = by_hand(target, store)
    path = save(store, 1)
    assert actions(following) == [("swapped", 1)]
    (given,) = target.given
    assert Path(given).parent == path
    assert set(ms.open(given)) == {"weight", "bias"}


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("raised", [ValueError("what?"), SwapBusyError("busy"), ReadFailedError("gone")])
def test_a_step_that_is_taken_away_while_it_is_read_is_not_bad(
    tmp_path: Path, replaced: bool, raised: Exception
) -> None:
    store = ms.Store(tmp_path, keep=1)

    def meanwhile() -> None:
        save(store, 1 if replaced else 2, overwrite=replaced)
        raise raised

    target = Target(meanwhile)
    following, log = by_hand(target, store)
    save(store, 1)
    assert actions(following) == [("swapped", 1 if replaced else 2)]
    assert (len(target.given), log) == (2, [])


def test_a_step_that_is_taken_away_while_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelstate.store import contents

    store, live, real = ms.Store(tmp_path, keep=1), ms.Live(linear(0)), contents.verify
    following, log = by_hand(live, store)
    save(store, 1)

    def meanwhile(directory: str, *given: Any) -> int:
        if directory.endswith("1"):
            save(store, 2)
        return real(directory, *given)

    monkeypatch.setattr(contents, "verify", meanwhile)
    assert actions(following) == [("swapped", 2)]
    assert log == []


@pytest.mark.parametrize(
    "error", [SwapBusyError("busy"), SwapTimeoutError("late"), ConnectionRefusedError("no"), TimeoutError("late")]
)
def test_what_is_not_the_checkpoints_fault_is_tried_again(tmp_path: Path, error: Exception) -> None:
    store, target = ms.Store(tmp_path), Target(*[error] * 10)
    following, log = by_hand(target, store)
    for step in (1, 2):
        save(store, step)
    assert [actions(following) for _ in range(10)] == [[("waiting", 2)], *[[]] * 9]
    assert actions(following) == [("swapped", 2)]
    assert log == [error]
    assert len(target.given) == 11


@pytest.mark.parametrize("error", [ReadFailedError("disk"), MemoryError("none left"), AppAnswerError("lost")])
def test_what_may_be_over_soon_is_tried_three_times(tmp_path: Path, error: Exception) -> None:
    store, target = ms.Store(tmp_path), Target(error, error, error)
    following, log = by_hand(target, store)
    for step in (1, 2):
        save(store, step)
    assert [actions(following) for _ in range(2)] == [[("waiting", 2)], []]
    assert actions(following) == [("skipped", 2), ("swapped", 1)]
    assert actions(following) == []
    assert [type(one) for one in log] == [type(error), SkippedCheckpointError]


def test_errors_of_a_store_that_also_saves_are_not_taken_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training in the same process gets the error of its own save in the background."""
    from modelstate.write import system

    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    save(store, 1)
    following, log = by_hand(live, store)
    with monkeypatch.context() as patch:

        def full(*given: Any) -> Any:
            raise OSError(28, "No space left on device")

        patch.setattr(system, "mkdir", full)
        pending = store.save(2, objects(2), block=False)
        assert pending is not None
        while not pending.done:
            threading.Event().wait(0.01)
    assert actions(following) == [("swapped", 1)]
    assert log == []
    with pytest.raises(WriteFailedError):
        store.wait()


def test_reading_takes_no_lock_and_writes_nothing(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    save(store, 1)
    store.close()
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    following, _ = by_hand(ms.Live(linear(0)), store)
    following.poll()
    with ms.Store(tmp_path) as writer:
        assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
        save(writer, 2)
    assert actions(following) == [("swapped", 2)]


# What is quarantined.


def test_where_nothing_serves_an_older_one_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelstate.live import live as module

    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, log = by_hand(live, store, mode="frugal", canary=lambda new: bool(new(X).mean() < 500))
    save(store, 1)
    following.poll()
    save(store, 2, 1000)
    real = module.undone_on_failure

    def broken(program: Any) -> Any:
        monkeypatch.setattr(module, "undone_on_failure", real)
        made = real(program)

        class Broken:
            def __enter__(self) -> Any:
                return made.__enter__()

            def __exit__(self, *given: Any) -> Any:
                raise ms.errors.QuarantinedError("the undo failed", found="in this test")

        return Broken()

    monkeypatch.setattr(module, "undone_on_failure", broken)
    assert actions(following) == [("skipped", 2), ("swapped", 1)]
    assert serves(live) == pytest.approx(1, abs=0.01)
    assert log.causes == ["QuarantinedError"]


# Arguments.


@pytest.mark.parametrize(
    "wrong",
    [
        {"select": "newest"},
        {"select": None},
        {"poll_s": 0},
        {"poll_s": -1},
        {"poll_s": float("nan")},
        {"poll_s": float("inf")},
        {"poll_s": "5"},
        {"poll_s": True},
        {"object": ""},
        {"object": 3},
        {"on_error": "print"},
        {"on_swap": 1},
        {"canaries": None},
        {"source": "x"},
    ],
    ids=str,
)
def test_arguments_that_mean_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ms.follow(ms.Live(linear(0)), tmp_path, **wrong)
    assert not [thread for thread in threading.enumerate() if thread.name == "modelstate-follow"]


def test_a_target_that_takes_no_weights(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    with pytest.raises(LiveTargetError, match="the program comes first"):
        ms.follow(store, ms.Live(linear(0)))  # type: ignore[arg-type]
    with pytest.raises(LiveTargetError):
        ms.follow(linear(0), store)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="canary"):
        ms.follow(Target(), store, canary=None)


def test_what_can_be_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "file", 3, "https://example.org/run"):
        with pytest.raises(SaveTargetError):
            ms.follow(ms.Live(linear(0)), wrong)  # type: ignore[arg-type]


def test_an_option_that_no_swap_takes_ends_it(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    save(store, 1)
    following, log = by_hand(ms.Live(linear(0)), store, mode="fast")
    with pytest.raises(OptionError, match="mode="):
        following.poll()
    assert log == []
    running = ms.follow(ms.Live(linear(0)), store, mode="fast", on_error=log.append)
    assert running.wait(30)
    assert [type(error) for error in log] == [OptionError]
    assert [event.action for event in running.events] == ["ended"]


def test_verified_is_what_is_read(tmp_path: Path) -> None:
    """A file that changes between the two is refused."""
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    path = save(store, 1)
    with store.open("model", 1, verify=True) as checkpoint:
        (file,) = path.glob("model-*.safetensors")
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises((ReadFailedError, ChecksumError)):
            live.swap(checkpoint)
    assert (live.version, live.history()[-1].source) == (1, checkpoint.source)


# Callbacks.


def test_callbacks_that_raise_stop_nothing(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))

    def fails(given: object) -> None:
        raise RuntimeError("in the callback")

    following = ms.follow(live, store, background=False, on_error=fails, on_swap=fails)
    nan(store, 1)
    with pytest.warns(FollowWarning, match="a callback raised RuntimeError: in the callback"):
        assert actions(following) == [("skipped", 1), ("callback", None)]
    save(store, 2)
    with pytest.warns(FollowWarning, match="in the callback"):
        assert actions(following) == [("swapped", 2), ("callback", None)]
    assert serves(live) == pytest.approx(2, abs=0.01)


def test_without_a_callback_there_is_a_warning(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    following = ms.follow(ms.Live(linear(0)), store, background=False)
    nan(store, 1)
    with pytest.warns(FollowWarning, match="step-000000001: a checkpoint is skipped") as caught:
        following.poll()
    assert len(caught) == 1
    flipped(store, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert actions(following) == [("skipped", 2)]


def test_a_swap_is_told(tmp_path: Path) -> None:
    store, told = ms.Store(tmp_path), []
    following = ms.follow(ms.Live(linear(0)), store, background=False, on_swap=told.append)
    save(store, 1)
    assert following.poll() == tuple(told)


def test_callbacks_may_look_and_stop(tmp_path: Path) -> None:
    store, seen = ms.Store(tmp_path), []
    save(store, 1)
    made: list[ms.Following] = []
    ready = threading.Event()

    def on_swap(event: object) -> None:
        ready.wait()
        seen.append((made[0].poll(), made[0].stop()))

    made.append(ms.follow(ms.Live(linear(0)), store, on_swap=on_swap))
    ready.set()
    assert made[0].wait(30)
    assert seen == [((), False)]


def test_a_look_within_a_look_does_nothing(tmp_path: Path) -> None:
    store, within = ms.Store(tmp_path), list[Any]()

    def on_swap(event: Any) -> None:
        if event.step == 1:
            save(store, 2)
            within.append((following.poll(), following.step))

    following = ms.follow(ms.Live(linear(0)), store, background=False, on_swap=on_swap)
    save(store, 1)
    assert actions(following) == [("swapped", 1)]
    assert within == [((), 1)]
    assert actions(following) == [("swapped", 2)]
