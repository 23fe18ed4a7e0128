"""Which checkpoints are kept: rules by example, and the laws by which pruning at any time is safe."""

import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import modelstate as ms
from modelstate.errors import OptionError
from modelstate.store.retention import as_keep, kept
from tests.sweeps import examples

HOUR = 3600.0
floats = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-3, 3).map(float))
metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), floats, max_size=2)
hours = st.one_of(st.floats(0.5, 30), st.integers(1, 24))


@st.composite
def rules(draw: st.DrawFn) -> ms.Keep:
    best = draw(st.none() | st.integers(1, 4))
    given: dict[str, Any] = {
        "last": draw(st.none() | st.integers(1, 5)),
        "every_steps": draw(st.none() | st.integers(1, 60)),
        "every_hours": draw(st.none() | hours),
        "best": best,
        "metric": None if best is None else draw(st.sampled_from(["loss", "accuracy", "none has it"])),
        "mode": draw(st.sampled_from(["min", "max"])),
    }
    if not any(given[name] for name in ("last", "every_steps", "every_hours", "best")):
        given["last"] = 1
    return ms.Keep(**given)


@st.composite
def histories(draw: st.DrawFn, ascending: bool = False) -> list[ms.store.CheckpointInfo]:
    steps = draw(st.lists(st.integers(0, 300), unique=True, max_size=25))
    times = draw(st.lists(st.floats(0, 50 * HOUR), unique=True, min_size=len(steps), max_size=len(steps)))
    if ascending:
        steps, times = sorted(steps), sorted(times)
    return [
        ms.store.CheckpointInfo(
            step,
            1.8e9 + time,
            draw(metrics),
            pinned=draw(st.integers(0, 9)) == 0,
            problem=draw(st.sampled_from(("", "", "", "", "damaged"))),
        )
        for step, time in zip(steps, times, strict=True)
    ]


def of(infos: list[ms.store.CheckpointInfo], steps: set[int]) -> list[ms.store.CheckpointInfo]:
    return [info for info in infos if info.step in steps]


def infos(*steps: int, **values: Any) -> list[ms.store.CheckpointInfo]:
    return [ms.store.CheckpointInfo(step, 1.8e9 + step, **values) for step in steps]


@pytest.mark.slow
@given(histories(ascending=True), rules())
@settings(max_examples=examples(300))
def test_pruning_after_each_save_keeps_what_pruning_at_the_end_does(
    history: list[ms.store.CheckpointInfo], keep: ms.Keep
) -> None:
    there: list[ms.store.CheckpointInfo] = []
    for info in history:
        there = of([*there, info], kept([*there, info], keep))
    assert {info.step for info in there} == kept(history, keep)


@pytest.mark.slow
@given(histories(), rules())
@settings(max_examples=examples(300))
def test_what_is_never_removed(history: list[ms.store.CheckpointInfo], keep: ms.Keep) -> None:
    stay = kept(history, keep)
    assert stay <= {info.step for info in history}
    assert {info.step for info in history if info.pinned} <= stay
    intact = [info for info in history if info.intact]
    if not intact:
        assert stay == {info.step for info in history}
    else:
        assert max(info.step for info in intact) in stay
        assert max(intact, key=lambda info: (info.time, info.step)).step in stay


def test_the_last() -> None:
    assert kept(infos(10, 30, 20, 40), ms.Keep(2)) == {30, 40}
    assert kept(infos(10), ms.Keep(2)) == {10}
    assert kept([], ms.Keep(2)) == set()


def test_the_first_of_every_so_many_steps() -> None:
    assert kept(infos(0, 300, 600, 900, 1200, 1500, 1999, 2100), ms.Keep(every_steps=1000)) == {0, 1200, 2100}


def test_the_first_of_every_so_many_hours() -> None:
    start = 1_800_000_000 // (6 * HOUR) * 6 * HOUR
    saved = [
        ms.store.CheckpointInfo(step, start + HOUR * hour) for step, hour in enumerate([1, 2, 5.9, 6, 11, 13, 13.5])
    ]
    assert kept(saved, ms.Keep(every_hours=6)) == {0, 3, 5, 6}  # the newest besides


@pytest.mark.parametrize(("mode", "expected"), [("min", {1, 3, 6}), ("max", {2, 4, 6})])
def test_the_best(mode: Any, expected: set[int]) -> None:
    losses = [0.5, 1.0, 0.5, 2.0, 0.7, math.nan]
    saved = [ms.store.CheckpointInfo(step, step, {"loss": loss}) for step, loss in enumerate(losses, 1)]
    saved.append(ms.store.CheckpointInfo(0, 0))  # without the metric
    assert kept(saved, ms.Keep(best=2, metric="loss", mode=mode)) == expected


def test_of_equally_good_ones_the_earlier() -> None:
    saved = [ms.store.CheckpointInfo(step, step, {"loss": 1}) for step in (1, 2, 3)]
    assert kept(saved, ms.Keep(best=1, metric="loss")) == {1, 3}


def test_a_run_that_went_back_keeps_what_it_has_just_written() -> None:
    saved = [*infos(100, 400, 500), ms.store.CheckpointInfo(150, 1.9e9)]
    assert kept(saved, ms.Keep(2)) == {400, 500, 150}


def test_damaged_ones_go_when_they_would_have_gone() -> None:
    saved = [*infos(1, 2), *infos(3, problem="damaged"), *infos(4)]
    assert kept(saved, ms.Keep(2)) == {2, 3, 4}
    assert kept([*saved, *infos(5)], ms.Keep(2)) == {4, 5}
    assert kept(infos(1, 2, 3, problem="damaged"), ms.Keep(1)) == {1, 2, 3}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mode": "max"},
        *({"last": count} for count in (0, -1, True, 2.0, "3")),
        *({"every_steps": count} for count in (0, 1.5)),
        *({"every_hours": hours} for hours in (0, 1e-300, math.nan, math.inf, "6", True)),
        {"best": 3},
        {"best": 0, "metric": "loss"},
        {"metric": "loss"},
        {"last": 3, "metric": "loss"},
        {"best": 1, "metric": 5},
        {"best": 1, "metric": "loss", "mode": "least"},
    ],
)
def test_rules_that_mean_nothing(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ms.Keep(**given)


@pytest.mark.parametrize("given", [0, -2, True, 1.5, "all", [1]])
def test_what_is_no_rule(given: Any) -> None:
    with pytest.raises(OptionError, match="keep=") as caught:
        as_keep(given)
    assert ">= 1" in caught.value.expected
    assert "Keep" in caught.value.expected
