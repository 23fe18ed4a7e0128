"""`Live` where threads meet: pins, swaps, rollbacks, canaries that serve, and interrupts."""

import functools
import gc
import itertools
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import SwapBusyError
from tests.programs import run_program
from tests.serve.models import X_OF_TIED as X, Constant, Tied, weights_of
from tests.serve.targets import target_of


def state(k: float) -> dict[str, torch.Tensor]:
    return weights_of(Tied(), k)


def live_of(kind: str = "eager", keep_versions: int = 1) -> ms.Live:
    live = ms.Live(target_of(kind, Tied(), X), keep_versions=keep_versions)
    live(X)
    return live


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_canary_that_asks_the_program_itself() -> None:
    live, found = live_of(), []
    live.swap(state(2), canary=lambda v: found.append((live(X).unique().tolist(), v(X).unique().tolist())))
    assert found == [([1.0], [2.0])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "exported", "aoti"])
def test_a_rollback_does_not_wait_for_a_canary(kind: str) -> None:
    """The swap that finds another version than it began with is refused."""
    live = live_of(kind)
    live.swap(state(2))
    inside, may_end = threading.Event(), threading.Event()
    errors: list[SwapBusyError] = []

    def canary(_: Any) -> bool:
        inside.set()
        return may_end.wait(60)

    def swap() -> None:
        with pytest.raises(SwapBusyError, match="was rolled back during this swap") as caught:
            live.swap(state(3), canary=canary)
        errors.append(caught.value)

    thread = in_a_thread(swap)
    assert inside.wait(60)
    assert live.rollback(timeout_seconds=0) == 1
    assert live(X).unique().tolist() == [1.0]
    may_end.set()
    thread.join(60)
    assert errors
    assert live.version().id == 1
    assert [event.action for event in live.history()][-2:] == ["rolled back", "refused"]
    assert live.swap(state(4)).previous == 1


@pytest.mark.slow
def test_an_interrupt_at_any_moment_leaves_one_version_that_serves() -> None:
    """Ctrl-C at 40 of the calls of a swap, evenly spread. It may delay that a version is freed."""
    module, x = Constant(2, 9), torch.ones(2, 9)
    live, versions = ms.Live(module.eval(), keep_versions=0), list[weakref.ref[Any]]()

    def canary(version: Any) -> None:
        versions.append(weakref.ref(version))
        version(x)

    def swap(k: int) -> None:
        live.swap(weights_of(module, k), canary=canary, timeout_seconds=60)

    swap(2)
    events = interrupt_at(0, functools.partial(swap, 3))
    interrupted, serves, before = 0, 3, weights_in_memory()
    for moment in range(40):
        old, k = live.version().id, moment + 4
        try:
            interrupt_at(1 + events * moment // 40, functools.partial(swap, k))
        except KeyboardInterrupt:
            interrupted += 1
        value, version = live.answer(x)
        serves = k if version != old else serves
        assert value.unique().tolist() == [serves]
    assert interrupted > 20
    swap(99)
    assert live(x).unique().tolist() == [99.0]
    assert weights_in_memory() <= before
    assert sum(each() is not None for each in versions) == 1


def weights_in_memory() -> int:
    """After a collection: an error and its traceback may refer to each other. No other test has such tensors."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return len({each.data_ptr() for each in tensors if each.shape == (9, 9) and not each.is_meta})


ENDING = """
import os, signal, sys, threading
import torch
import modelstate as ms
from tests.serve.models import Constant, weights_of

torch.set_num_threads(1)
module, x, begun = Constant(2, 256).eval(), torch.ones(2, 256), threading.Event()
live = ms.Live(module)

def swap():
    k = 1
    while k < 4 or threading.main_thread().is_alive():
        k += 1
        live.swap(weights_of(module, k), canary=lambda v: begun.set())
        assert live(x).unique().tolist() == [k]
    print("right", flush=True)

threading.Thread(target=swap).start()
begun.wait(60)
if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("interrupt", 1)])
def test_a_program_that_ends_while_a_thread_swaps(how: str, code: int) -> None:
    done = run_program(ENDING, how)
    assert (done.returncode, done.stdout) == (code, "right\n"), done.stderr
    assert ("KeyboardInterrupt" in done.stderr) is (how == "interrupt")


def interrupt_at(number: int, call: Callable[[], object]) -> int:
    """Sends SIGINT at the start of function number `number` that `call` runs (0: never); returns how many it ran."""
    started = itertools.count(1)

    def on_event(_frame: object, event: str, _argument: object) -> None:
        if event == "call" and next(started) == number:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    return next(started) - 1
