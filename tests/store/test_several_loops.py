"""Loops one after another, and loops within each other's steps, which are refused."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
from modelstate.errors import OptionError
from tests.programs import run_program
from tests.store.common import Held

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
@pytest.mark.parametrize("kind", ["one", "own"])
def test_a_signal_ends_the_loops_behind(tmp_path: Path, kind: str) -> None:
    stopped = "SIGTERM was received"
    assert run(AFTER, tmp_path, kind, 3) == [f"0 3 3 (2, 3) {stopped}", f"0 0 3 () {stopped}"]
    assert run(AFTER, tmp_path, kind, 8) == ["3 5 5 (2, 3, 4, 5) ", f"0 3 8 (2, 3) {stopped}"]
    assert run(AFTER, tmp_path, kind, 0) == ["5 5 5 (2, 3, 4, 5) ", "3 5 10 (2, 3, 4, 5) "]


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


@pytest.mark.parametrize("wrapped", [iter, passed_on, PassedOn])
@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_loop_within_a_step_of_another_one_is_refused(tmp_path: Path, wrapped: Any, is_made_before: bool) -> None:
    inner_store, of, done = ms.Store(tmp_path / "inner"), {"a": Held(b=1)}, []
    inner = ms.resumable(inner_store, of, steps=9, save_every=1) if is_made_before else None
    outer = ms.resumable(ms.Store(tmp_path / "outer"), of, steps=3, save_every=1)

    def train() -> None:
        for number in wrapped(outer):
            done.append(number)
            for _ in inner or ms.resumable(inner_store, of, steps=9, save_every=1):
                done.append("inner")

    with pytest.raises(OptionError, match="within another loop's step"):
        train()
    assert (done, inner_store.steps()) == ([0], ())
    assert list(ms.resumable(inner_store, of, steps=2, save_every=1)) == [0, 1]  # nothing is left of the outer loop


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
