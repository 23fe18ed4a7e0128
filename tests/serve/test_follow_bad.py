"""`follow`: what is bad is skipped and said once, and the old version serves on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import (
    CanaryError,
    DamagedCheckpointError,
    ModelStateError,
    PlanError,
    SkippedCheckpointError,
    StepNotFoundError,
    WeightsError,
)
from tests.serve.followed import actions, by_hand, flipped, nan, serves
from tests.serve.models import linear
from tests.serve.stores import X, cut, damage, objects, save, spoil_record


def other_shape(store: ms.Store, step: int) -> None:
    store.save(step, {"model": nn.Linear(4, 5)})


def other_names(store: ms.Store, step: int) -> None:
    store.save(step, {"model": nn.Sequential(linear(1))})


def no_model(store: ms.Store, step: int) -> None:
    store.save(step, {"network": linear(1)})


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
    nan: WeightsError,
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


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("spoiled", BAD, ids=lambda spoiled: spoiled.__name__)
def test_a_bad_one_is_skipped_and_reported_once(tmp_path: Path, spoiled: Callable[[ms.Store, int], None]) -> None:
    store, live = ms.Store(tmp_path / "run"), ms.Live(linear(0))
    following, log = by_hand(live, store, canary=lambda new: bool(new(X).mean() < 500))
    save(store, 10)
    assert actions(following) == [("swapped", 10)]
    spoiled(store, 20)
    (event,) = following.poll()
    assert (event.action, event.step) == ("skipped", 20)
    assert (following.step, live.version().id) == (10, 2)
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
    assert log.causes == ["DamagedCheckpointError", "WeightsError"]


def test_a_damaged_step_that_is_saved_again(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    following, log = by_hand(live, store)
    flipped(store, 1)
    assert actions(following) == [("skipped", 1)]
    store.save(1, objects(2), overwrite=True)
    assert actions(following) == [("swapped", 1)]
    assert log.skipped == [1]


def test_a_canary_that_what_serves_does_not_answer_is_said_at_once(tmp_path: Path) -> None:
    """Else every good checkpoint would be taken for a bad one."""
    live = ms.Live(nn.Linear(2, 2))
    with pytest.raises(CanaryError, match="the version that serves raised"):
        ms.follow(live, tmp_path, canary=ms.Canary((torch.ones(1, 3),)))
