"""`follow` in the background: another process trains, threads send requests, and the interpreter ends when it likes."""

import functools
import itertools
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import SkippedCheckpointError
from tests.faults import until
from tests.programs import CONTEXT, as_process_of_its_own
from tests.serve.followed import Target
from tests.serve.models import Constant, linear, weights_of
from tests.serve.stores import save
from tests.store.common import program

SECONDS = 60.0


def train(orders: Connection, directory: str) -> None:
    """Saves a step with weights which are all k for each k that it is sent."""
    as_process_of_its_own()
    model, store = Constant(4, 64), ms.Store(directory, keep=ms.Keep(last=2))
    for step in itertools.count(1):
        model.load_state_dict(weights_of(model, orders.recv()))
        store.save(step, {"model": model, "step": step}, metrics={"loss": 1 / step})
        orders.send("saved")


@pytest.mark.slow
def test_what_another_process_saves_serves_and_no_request_fails(tmp_path: Path) -> None:
    live, x = ms.Live(Constant(4, 64).eval()), torch.ones(1, 64)
    errors: list[Exception] = []
    wrong: list[str] = []
    seen: set[float] = set()
    over = threading.Event()
    orders, theirs = CONTEXT.Pipe()
    training = CONTEXT.Process(target=train, args=(theirs, str(tmp_path / "run")), daemon=True)
    training.start()

    def skipped() -> list[int | None]:
        """Without what the first look may say: that there is no directory yet."""
        return [error.step for error in errors if isinstance(error, SkippedCheckpointError)]

    def ask() -> None:
        last = 0
        while not over.is_set():
            try:
                value, version = live.answer(x)
            except BaseException as error:
                wrong.append(repr(error))
                return
            several = {round(float(one), 3) for one in value.detach().flatten()}
            if len(several) != 1 or version < last:
                wrong.append(f"{several} of version {version} after {last}")
            seen.update(several)
            last = version

    readers = [threading.Thread(target=ask) for _ in range(2)]
    with ms.follow(live, tmp_path / "run", poll_seconds=0.02, on_error=errors.append) as following:
        try:
            for reader in readers:
                reader.start()
            for step in range(1, 13):
                bad = step in (4, 9)
                orders.send(float("nan") if bad else step)
                assert orders.recv() == "saved"
                until(lambda step=step, bad=bad: len(skipped()) == step // 4 if bad else following.step == step)
        finally:
            over.set()
            training.kill()
            training.join()
            for reader in readers:
                reader.join()
    assert not wrong
    assert seen <= {1.0, *map(float, range(1, 13))} - {4.0, 9.0}
    assert [event.step for event in following.events if event.action == "swapped"] == [1, 2, 3, 5, 6, 7, 8, 10, 11, 12]
    assert skipped() == [4, 9]
    assert live.version().id == 11
    assert not following.is_running


def test_stopping_while_it_waits_and_while_it_swaps(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    following = ms.follow(ms.Live(linear(0)), store, poll_seconds=10_000)
    assert following.is_running
    assert not following.wait(0.05)
    assert following.stop()
    assert (following.is_running, following.wait(0)) == (False, True)

    begun, go_on = threading.Event(), threading.Event()

    def canary(new: Any) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    save(store, 1)
    live = ms.Live(linear(0))
    following = ms.follow(live, store, poll_seconds=10_000, canary=canary)
    assert begun.wait(SECONDS)
    assert not following.stop(0.05)
    go_on.set()
    assert following.stop(SECONDS)
    assert (live.version().id, following.step) == (2, 1)


def test_behind_a_stop_nothing_more_is_tried(tmp_path: Path) -> None:
    store, tried, begun, go_on = ms.Store(tmp_path), list[object](), threading.Event(), threading.Event()
    for step in (1, 2, 3):
        save(store, step)

    def canary(new: Any) -> bool:
        tried.append(new)
        begun.set()
        assert go_on.wait(SECONDS)
        return False

    following = ms.follow(ms.Live(linear(0)), store, canary=canary, on_error=lambda error: None)
    assert begun.wait(SECONDS)
    following.stop(0)
    go_on.set()
    assert following.stop(SECONDS)
    assert len(tried) == 1


def test_two_looks_at_once_swap_once(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    save(store, 1)
    with ms.follow(live, store, poll_seconds=0.001) as following:
        threads = [threading.Thread(target=following.poll) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event.action for event in following.events] == ["swapped"]


@pytest.mark.slow
def test_polls_are_spread(tmp_path: Path) -> None:
    """Without it, two polls would never begin sooner after each other than `poll_seconds`."""
    save(ms.Store(tmp_path), 1)
    times: tuple[list[float], list[float]] = [], []

    def busy(own: list[float]) -> None:
        own.append(time.monotonic())
        raise TimeoutError  # so that each poll tries again

    def gaps() -> list[list[float]]:
        return [[later - earlier for earlier, later in itertools.pairwise(own)] for own in times]

    targets = [Target(*[functools.partial(busy, own)] * 9999) for own in times]
    followers = [ms.follow(target, tmp_path, poll_seconds=0.2, on_error=lambda error: None) for target in targets]
    until(lambda: all(min(own, default=1) < 0.2 < max(own) for own in gaps()))
    assert all(follower.stop(SECONDS) and not follower.is_running for follower in followers)
    first, second = ended = gaps()
    assert first != second
    assert min(*first, *second) >= 0.18
    time.sleep(0.25)
    assert gaps() == ended


def started_and_over(following: ms.serve.Following) -> None:
    following.start()
    assert following.wait(SECONDS)


def test_what_ends_the_thread_is_said(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    save(store, 1)

    def canary(new: Any) -> None:
        raise SystemExit("the canary has had enough")

    following = ms.follow(ms.Live(linear(0)), store, canary=canary, background=False)
    with pytest.warns(ms.errors.FollowWarning, match="enough"):
        started_and_over(following)
    assert [event.action for event in following.events] == ["ended"]
    assert "enough" in following.events[0].error


EXIT = """
import sys, threading, time
import torch
from torch import nn
import modelstate as ms

live = ms.Live(nn.Linear(4, 4))
begun = threading.Event()

def canary(new):
    begun.set()
    time.sleep(float(sys.argv[2]))

ms.follow(live, sys.argv[1], poll_seconds=0.01 if len(sys.argv) < 4 else float(sys.argv[3]), canary=canary)
assert begun.wait(60)
print("over", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("canary_seconds", "poll_seconds"), [(0, 0.001), (0, 10_000), (600, 1)])
def test_the_end_of_the_interpreter_does_not_wait(tmp_path: Path, canary_seconds: float, poll_seconds: float) -> None:
    """Not while it looks, not while it sleeps, and not while a swap goes on that takes ten minutes."""
    with ms.Store(tmp_path) as store:
        store.save(1, {"model": linear(1)})
    done = program(EXIT, tmp_path, canary_seconds, poll_seconds, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
