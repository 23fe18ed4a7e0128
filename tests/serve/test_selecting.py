"""Which checkpoints are wanted: the laws of an order."""

import math
from typing import Any

import pytest

from modelstate.errors import OptionError
from modelstate.serve.follow import selection
from modelstate.store.retention import CheckpointInfo


def info(step: int, serial: int, loss: float | None = None, *, intact: bool = True, store: str = "a") -> CheckpointInfo:
    metrics = {} if loss is None else {"loss": loss}
    return CheckpointInfo(step, 0.0, metrics, problem="" if intact else "damaged", serial=serial, store=store)


def steps(text: str, infos: list[CheckpointInfo]) -> list[int]:
    return [candidate.info.step for candidate in selection(text).ranked(infos)]


def test_the_latest_is_the_one_that_was_saved_last() -> None:
    """Training has gone back from 30 to 10, and on from there."""
    assert steps("latest", [info(10, 1), info(20, 2), info(30, 3), info(15, 4)]) == [15, 30, 20, 10]


def test_a_damaged_one_comes_behind_the_step_before_it_in_time() -> None:
    """Whatever it says of itself."""
    infos = [info(10, 1), info(20, 99, intact=False), info(30, 3), info(40, 0, intact=False)]
    assert steps("latest", infos) == [40, 30, 20, 10]


def test_the_best() -> None:
    infos = [info(10, 1, 0.5), info(20, 2, 0.2), info(30, 3, math.nan), info(40, 4), info(50, 5, 0.2), info(60, 6, 0.9)]
    assert steps("best:loss", infos) == [20, 50, 10, 60]
    assert steps("best:loss:min", infos) == [20, 50, 10, 60]
    assert steps("best:loss:max", infos) == [60, 10, 20, 50]
    assert steps("best:accuracy", infos) == []


@pytest.mark.parametrize(
    ("text", "metric", "highest"),
    [
        ("best:loss", "loss", False),
        ("best:eval:loss", "eval:loss", False),
        ("best:eval:loss:max", "eval:loss", True),
        ("best:max", "max", False),
        ("best:max:max", "max", True),
        ("best:loss:", "loss:", False),
        ("latest", None, False),
    ],
)
def test_how_it_is_spelled(text: str, metric: str | None, highest: bool) -> None:
    found = selection(text)
    assert (found.metric, found.highest) == (metric, highest)


@pytest.mark.parametrize("text", ["", "best", "best:", "newest", "loss", None, 3, b"latest"])
def test_what_means_nothing_is_refused(text: Any) -> None:
    with pytest.raises(OptionError, match="select= has an unknown value"):
        selection(text)


def test_those_of_another_store_cannot_be_compared() -> None:
    (old,) = selection("latest").ranked([info(100, 50)])
    (new,) = selection("latest").ranked([info(1, 1, store="b")])
    (lost,) = selection("latest").ranked([info(1, 1, store="", intact=False)])
    assert new.is_preferred_to(old)
    assert not lost.is_preferred_to(old)
