"""Loops within each other's steps, and one after another: what ends one of them ends all."""

import itertools
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
from modelstate.errors import OptionError
from tests.programs import run_program
from tests.store.common import Held

NESTED = """
import os, signal, sys
import modelstate as ms

class Count:
    n = 0
    def state_dict(self): return {"n": self.n}
    def load_state_dict(self, state): self.n = state["n"]

count, signal_at = Count(), int(sys.argv[3])
shared = ms.Deadline(hours=4)
def deadline(): return {"one": shared, "own": ms.Deadline(hours=4), "inner": None}[sys.argv[2]]
epochs, steps = ms.Store(sys.argv[1] + "/epochs"), ms.Store(sys.argv[1] + "/steps")
outer = ms.resumable(epochs, {"count": count}, steps=4, save_every=1, deadline=deadline())
for epoch in outer:
    inner = ms.resumable(steps, {"count": count}, steps=(epoch + 1) * 5, save_every=2, deadline=deadline() or shared)
    for step in inner:
        count.n += 1
        if count.n == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
print(outer.done, inner.done, count.n, epochs.steps(), steps.steps()[-1], outer.stopped)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""

AFTER = """
import os, signal, sys
import modelstate as ms

class Count:
    n = 0
    def state_dict(self): return {"n": self.n}
    def load_state_dict(self, state): self.n = state["n"]

count, signal_at = Count(), int(sys.argv[3])
shared = ms.Deadline(hours=4)
def deadline(): return shared if sys.argv[2] == "one" else ms.Deadline(hours=4)
stores = [ms.Store(sys.argv[1] + name) for name in ("/first", "/second")]
for store in stores:
    loop = ms.resumable(store, {"count": count}, steps=5, save_every=2, deadline=deadline())
    for step in loop:
        count.n += 1
        if count.n == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
    print(loop.start, loop.done, count.n, store.steps(), loop.stopped)
"""


def run(script: str, *arguments: object) -> list[str]:
    done = run_program(script, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "inner"])
def test_a_signal_ends_loops_within_each_other(tmp_path: Path, kind: str) -> None:
    # In the second of five steps of the third epoch, which is not done and not saved.
    assert run(NESTED, tmp_path, kind, 12) == ["2 12 12 (1, 2) 12 SIGTERM was received"]
    assert run(NESTED, tmp_path, kind, 0) == ["4 20 20 (1, 2, 3, 4) 20 "]


@pytest.mark.slow
def test_a_signal_in_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    assert run(NESTED, tmp_path, "own", 10) == ["2 10 10 (1, 2) 10 SIGTERM was received"]
    assert run(NESTED, tmp_path, "own", 0) == ["4 20 20 (1, 2, 3, 4) 20 "]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "own"])
def test_a_signal_ends_the_loops_behind(tmp_path: Path, kind: str) -> None:
    stopped = "SIGTERM was received"
    assert run(AFTER, tmp_path, kind, 3) == [f"0 3 3 (2, 3) {stopped}", f"0 0 3 () {stopped}"]
    assert run(AFTER, tmp_path, kind, 8) == ["3 5 5 (2, 3, 4, 5) ", f"0 3 8 (2, 3) {stopped}"]
    assert run(AFTER, tmp_path, kind, 0) == ["5 5 5 (2, 3, 4, 5) ", "3 5 10 (2, 3, 4, 5) "]


@pytest.mark.parametrize("of_the_step", [True, False])
def test_the_time_of_a_step_is_not_that_of_the_loop(tmp_path: Path, of_the_step: bool) -> None:
    job = ms.Deadline(1e-9, 0, since="now", signals=())
    outer = ms.resumable(ms.Store(tmp_path / "outer"), {"a": Held(b=1)}, steps=3, save_every=1)
    for number in outer:
        deadline = ms.Deadline(1e-9, 0, since="now", signals=()) if of_the_step else job
        store = ms.Store(tmp_path / f"{number}")
        inner = ms.resumable(store, {"a": Held(b=1)}, steps=9, save_every=9, deadline=deadline)
        assert list(inner) == []
        assert inner.stopped
    assert (outer.done, bool(outer.stopped)) == ((3, False) if of_the_step else (0, True))


def nested(store: ms.Store, inner: ms.Store, of: dict[str, Any]) -> None:
    for _ in ms.resumable(store, of, steps=3, save_every=1):
        ms.resumable(inner, of, steps=9, save_every=1)


def test_one_store_for_both_is_refused(tmp_path: Path) -> None:
    of = {"a": Held(b=1)}
    with pytest.raises(OptionError, match="mixed up"):
        nested(ms.Store(tmp_path / "a"), ms.Store(tmp_path / "a"), of)
    nested(ms.Store(tmp_path / "a"), ms.Store(tmp_path / "b"), of)
    ms.resumable(ms.Store(tmp_path / "a"), of, steps=3, save_every=1)  # nothing is left of the loop that raised


def test_a_loop_that_raised_is_not_taken_for_one_around_while_its_error_is_kept(tmp_path: Path) -> None:
    """As an interpreter keeps the last one, with the frames in which the loop still is."""
    of, store = {"a": Held(b=1)}, ms.Store(tmp_path)

    def raising() -> None:
        steps = iter(ms.resumable(store, of, steps=5, save_every=1))
        for step in steps:
            if step == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        raising()
    loop = ms.resumable(store, of, steps=5, save_every=1)
    assert list(loop) == [2, 3, 4]
    assert kept.tb is not None


def passed_on(steps: Iterable[int]) -> Iterator[int]:
    """As progress bars do."""
    yield from steps


class PassedOn:
    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = iter(steps)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self.steps)


@pytest.mark.parametrize("wrapped", [passed_on, PassedOn])
@pytest.mark.parametrize("again", [False, True])
def test_one_store_for_both_is_refused_whoever_asks_for_the_steps(tmp_path: Path, wrapped: Any, again: bool) -> None:
    of = {"a": Held(b=1)}
    done = []

    def train() -> None:
        store = ms.Store(tmp_path)
        for epoch in wrapped(ms.resumable(store, of, steps=3, save_every=1)):
            for step in wrapped(ms.resumable(store, of, steps=(epoch + 1) * 10, save_every=5)):
                done.append((epoch, step))

    if again:
        ms.Store(tmp_path).save(1, of)
    with pytest.raises(OptionError, match="mixed up"):
        train()
    assert {epoch for epoch, _ in done} == {int(again)}  # nothing of the outer loop has come behind
    assert ms.Store(tmp_path).steps() == ((1, 5, 10, 15, 20) if again else (5, 10))


@pytest.mark.parametrize("kills", [[(1, "begin")], [(1, 6)], [(1, "end"), (2, "begin")]])
def test_nested_loops_resume_in_order_where_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: list[tuple[int, int | str]]
) -> None:
    """The newest checkpoint is that of an epoch, that of a step, or that of an epoch behind a step of another process.

    Args:
        kills: the epoch of each process in which it is killed: at its begin, before a step, or when all are done.
    """
    counter = Held(n=0)
    clock = itertools.count(2_000_000_000, -1000)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))

    def run(kill: tuple[int, int | str] | None) -> None:
        with ms.Store(tmp_path / "epochs") as epochs, ms.Store(tmp_path / "steps") as steps:
            for epoch in ms.resumable(epochs, {"counter": counter}, steps=3, save_every=1, background=False):
                if kill == (epoch, "begin"):
                    raise InterruptedError
                for step in ms.resumable(
                    steps, {"counter": counter}, steps=(epoch + 1) * 4, save_every=1, background=False
                ):
                    if kill == (epoch, step):
                        raise InterruptedError
                    counter.values["n"] += 1
                if kill == (epoch, "end"):
                    raise InterruptedError
                counter.values["n"] += 100

    for number, kill in enumerate([*kills, None]):
        counter.values["n"] = -1 if number else 0
        with suppress(InterruptedError), ThreadPoolExecutor(1) as new_thread:  # it knows of no checkpoint
            new_thread.submit(run, kill).result()
    assert counter.values["n"] == 312


def test_a_loop_that_was_left_does_not_go_on_behind_another_one(tmp_path: Path) -> None:
    of, store = {"a": Held(b=1)}, ms.Store(tmp_path)
    left = ms.resumable(store, of, steps=9, save_every=1)
    assert list(itertools.islice(left, 3)) == [0, 1, 2]
    assert list(itertools.islice(left, 2)) == [2, 3]  # alone it does
    other = ms.resumable(store, of, steps=7, save_every=1)
    assert list(other) == [3, 4, 5, 6]
    with pytest.raises(OptionError, match="mixed up"):
        list(left)
    assert store.steps() == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("before", "behind", "expected"), [(0, 0, 100), (200, 0, 200), (0, 300, 300)])
def test_the_margin_is_the_longest_time_between_looks_of_any_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float, behind: float, expected: float, is_shared: bool
) -> None:
    """And not an epoch, where the loop within it has looked all the time."""
    now, of = [0.0], {"a": Held(b=1)}
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    deadline, other = (ms.Deadline(hours=40, since="now", signals=()) for _ in range(2))
    epochs, steps = ms.Store(tmp_path / "epochs"), ms.Store(tmp_path / "steps")
    for epoch in ms.resumable(epochs, of, steps=2, save_every=1, background=False, deadline=deadline):
        now[0] += before
        within = deadline if is_shared else other
        for _ in ms.resumable(steps, of, steps=(epoch + 1) * 9, save_every=2, background=False, deadline=within):
            now[0] += 100
        now[0] += behind
    assert deadline.margin_seconds == (expected if is_shared else 900 + before + behind)
    assert is_shared or other.margin_seconds == 100


def test_a_loop_that_raised_does_not_count_for_the_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, of, deadline = [0.0], {"a": Held(b=1)}, ms.Deadline(hours=40, since="now", signals=())
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def raising() -> None:
        steps = iter(ms.resumable(ms.Store(tmp_path), of, steps=5, save_every=1, deadline=deadline))
        for _ in steps:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        raising()
    now[0] += 5000
    again = ms.resumable(ms.Store(tmp_path), of, steps=5, save_every=1, background=False, deadline=deadline)
    assert len(list(again)) == 5
    assert deadline.margin_seconds == 30
    assert kept.tb is not None
