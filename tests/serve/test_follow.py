"""`follow`: what is saved is taken up, what is bad is skipped and said once, and the old version serves on."""

import math
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import FollowWarning, LiveTargetError, OptionError, UnsavableError
from tests.serve.followed import Target, actions, by_hand, flipped, nan, serves
from tests.serve.models import linear
from tests.serve.stores import X, save
from tests.serve.targets import target_of

# What is taken up.


def test_each_new_checkpoint_serves(tmp_path: Path) -> None:
    live, store = ms.Live(linear(0)), ms.Store(tmp_path / "run", keep=2)
    following, log = by_hand(live, store)
    for step in (10, 20, 30, 40):
        path = save(store, step)
        (event,) = following.poll()
        assert (event.action, event.step, event.source, event.error) == ("swapped", step, str(path), "")
        assert (event.version, following.step) == (live.version().id, step)
        assert serves(live) == pytest.approx(step, abs=0.01)
        assert following.poll() == ()
    assert log == []
    assert [event.step for event in following.events] == [10, 20, 30, 40]
    assert "step 40, not running" in repr(following)
    assert "model.safetensors" in live.history()[-1].source


@pytest.mark.parametrize("kind", ["eager", "exported"])
def test_it_is_what_was_saved_and_the_first_look_takes_the_newest(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    trained = nn.Linear(4, 4)
    store = ms.Store(tmp_path)
    save(store, 1)
    store.save(2, {"model": trained, "epoch": 2})
    live = ms.Live(target_of(kind, linear(0), X))
    following, log = by_hand(live, str(tmp_path))
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


def test_training_that_goes_back_and_on_from_there(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, _ = by_hand(live, store)
    for step in (10, 20, 30, 15):
        save(store, step)
        assert actions(following) == [("swapped", step)]
    save(store, 15, 16, overwrite=True)
    assert actions(following) == [("swapped", 15)]
    assert serves(live) == pytest.approx(16, abs=0.01)
    for info in store.infos()[1:]:
        shutil.rmtree(info.path)
    save(store, 20)
    assert actions(following) == [("swapped", 20)]


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


@pytest.mark.parametrize(
    ("select", "step"),
    [
        ("latest", 4),
        ("best:loss", 2),
        ("best:loss:min", 2),
        ("best:loss:max", 1),
        ("best:eval:loss", 3),
        ("best:eval:loss:max", 1),
        ("best:max", 3),
        ("best:max:max", 2),
        ("best:accuracy", None),
    ],
)
def test_which_checkpoint_is_selected(tmp_path: Path, select: str, step: int | None) -> None:
    """Of equal ones the earlier is better; one with NaN, or without the metric, is left out."""
    store = ms.Store(tmp_path)
    rows = {1: (0.5, 3.0, 1.0), 2: (0.2, 2.0, 2.0), 3: (0.2, 1.0, 0.0), 4: (math.nan, math.nan, math.nan)}
    for number, (loss, other, most) in rows.items():
        store.save(number, {"model": linear(number)}, metrics={"loss": loss, "eval:loss": other, "max": most})
    following, log = by_hand(ms.Live(linear(0)), store, select=select)
    following.poll()
    assert (following.step, log) == (step, [])


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


# Arguments.


@pytest.mark.parametrize(
    "wrong",
    [
        *({"select": text} for text in ("", "best", "best:", "newest", "loss", None, 3, b"latest")),
        {"poll_seconds": 0},
        {"poll_seconds": -1},
        {"poll_seconds": float("nan")},
        {"poll_seconds": float("inf")},
        {"poll_seconds": "5"},
        {"poll_seconds": True},
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
        with pytest.raises(UnsavableError):
            ms.follow(ms.Live(linear(0)), wrong)  # type: ignore[arg-type]


def test_an_option_that_no_swap_takes_ends_it(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    save(store, 1)
    following, log = by_hand(ms.Live(linear(0)), store, buffers="fast")
    with pytest.raises(OptionError, match="buffers="):
        following.poll()
    assert log == []
    running = ms.follow(ms.Live(linear(0)), store, buffers="fast", on_error=log.append)
    assert running.wait(60)
    assert [type(error) for error in log] == [OptionError]
    assert [event.action for event in running.events] == ["ended"]


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


def test_callbacks_may_look_and_stop(tmp_path: Path) -> None:
    store, seen = ms.Store(tmp_path), []
    save(store, 1)
    made: list[ms.serve.Following] = []
    ready = threading.Event()

    def on_swap(event: object) -> None:
        ready.wait()
        seen.append((made[0].poll(), made[0].stop()))

    made.append(ms.follow(ms.Live(linear(0)), store, on_swap=on_swap))
    ready.set()
    assert made[0].wait(60)
    assert seen == [((), False)]
