"""`follow`, where stores and checkpoints come and go, cannot be read, or are saved to meanwhile."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
from modelstate.errors import (
    ReadFailedError,
    SkippedCheckpointError,
    SourceNotFoundError,
    SwapBusyError,
    WriteFailedError,
)
from tests.serve.followed import Target, actions, by_hand, serves
from tests.serve.models import linear
from tests.serve.stores import objects, save

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


@pytest.mark.parametrize("error", [SwapBusyError("busy"), ConnectionRefusedError("no"), TimeoutError("late")])
def test_what_is_not_the_checkpoints_fault_is_tried_again(tmp_path: Path, error: Exception) -> None:
    store, target = ms.Store(tmp_path), Target(*[error] * 10)
    following, log = by_hand(target, store)
    for step in (1, 2):
        save(store, step)
    assert [actions(following) for _ in range(10)] == [[("waiting", 2)], *[[]] * 9]
    assert actions(following) == [("swapped", 2)]
    assert log == [error]
    assert len(target.given) == 11


@pytest.mark.parametrize("error", [ReadFailedError("disk"), MemoryError("none left")])
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
    from modelstate.io import system

    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    save(store, 1)
    following, log = by_hand(live, store)
    with monkeypatch.context() as patch:

        def full(*given: Any) -> Any:
            raise OSError(28, "No space left on device")

        patch.setattr(system, "mkdir", full)
        pending = store.save(2, objects(2), background=True)
        assert pending is not None
        while not pending.done:
            threading.Event().wait(0.01)
    assert actions(following) == [("swapped", 1)]
    assert log == []
    with pytest.raises(WriteFailedError):
        store.wait()
