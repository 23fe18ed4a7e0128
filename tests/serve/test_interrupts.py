"""An interrupt at any moment of a request, a pin, a swap or a rollback leaves nothing taken, shut or counted.

It comes before each instruction of the code in turn, which is more than a signal can do.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate import serve as package
from tests.serve.models import Constant, weights_of
from tests.serve.targets import target_of
from tests.sweeps import spread

pytestmark = pytest.mark.slow

X = torch.ones(2, 8)
OURS = {str(Path(package.__file__).with_name(f"{name}.py")) for name in ("live", "versions")}
MODULE = Constant(2, 8)


def state(k: float) -> dict[str, torch.Tensor]:
    return weights_of(MODULE, k)


class Interrupt:
    """Raises `KeyboardInterrupt` before an instruction: `sys.settrace` takes it."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0
        self.first: dict[tuple[object, int], int] = {}
        """When each instruction came for the first time."""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in OURS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self.count += 1
            self.first.setdefault((frame.f_code, frame.f_lasti), self.count)
            if self.count == self.at:
                raise KeyboardInterrupt
        return self._step


def request(live: ms.Live) -> None:
    live(X)


def pin(live: ms.Live) -> None:
    with live.pin() as v:
        v(X)


def answer(live: ms.Live) -> None:
    live.answer(X)


def available(live: ms.Live) -> None:
    live.swap(state(3), canary=ms.Canary((X,), atol=9.0))


def in_place(live: ms.Live) -> None:
    live.swap(state(3), canary=ms.Canary((X,), atol=9.0), mode="in_place")


def refused(live: ms.Live) -> None:
    """The weights are put back, which an interrupt must not keep from happening."""
    live.swap(state(3), canary=lambda v: bool(v(X).sum() > 1e9), mode="in_place")


def rollback(live: ms.Live) -> None:
    live.rollback()


WORK: list[Callable[[ms.Live], None]] = [request, pin, answer, rollback, available, in_place, refused]


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it hangs, or has raised"
    return found[0]


def holder(live: ms.Live) -> "weakref.ref[Any]":
    with live.pin() as v:
        return weakref.ref(v._entry().program.weights_module)


def run(work: Callable[[ms.Live], None], at: int, kind: str) -> tuple[ms.Live, Interrupt]:
    live = ms.Live(target_of(kind, Constant(2, 8), X))
    live.swap(state(2))
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        work(live)
    except (KeyboardInterrupt, ms.ModelStateError):
        pass
    finally:
        sys.settrace(before)
    return live, interrupt


def interrupted(work: Callable[[ms.Live], None], at: int) -> "tuple[ms.Live, weakref.ref[Any]]":
    """Afterwards all goes on, in this thread and in others. The version that served then has been retired."""
    live, _ = run(work, at, "eager")
    value, version = in_a_thread(lambda: live.answer(X))
    assert value.unique().tolist() == live(X).unique().tolist() == [float(version)]
    current = holder(live)
    assert live.swap(state(4), mode="in_place", timeout_seconds=60).drained
    for k in (5, 6):
        assert live.swap(state(k), timeout_seconds=60).drained
    assert live(X).unique().tolist() == [6.0]
    return live, current


@pytest.mark.parametrize("work", WORK)
def test_an_interrupt_before_any_instruction(work: Callable[[ms.Live], None]) -> None:
    _, interrupt = run(work, 0, "eager")
    moments = sorted(interrupt.first.values())
    assert len(moments) >= 10
    for at in spread(moments, 100):
        try:
            # In a thread of its own: where the interrupt comes while an error is handled, Python keeps that for ever.
            _, current = in_a_thread(lambda at=at: interrupted(work, at))
            if current() is not None:
                gc.collect()  # an error may be in a cycle with the frame that has caught it
            assert current() is None
        except AssertionError as error:
            raise AssertionError(f"an interrupt before instruction {at}") from error


def rolled_back_to(work: Callable[[ms.Live], None], at: int) -> "tuple[float, int]":
    """What a version answers that a swap has replaced right after the interrupt, and that a rollback has brought back.

    No request comes between: it would put the weights back first.
    """
    live, _ = run(work, at, "eager")
    version = live.version
    live.swap(state(9), timeout_seconds=60)
    assert live.rollback() == version
    (value,) = live(X).unique().tolist()
    return value, version


@pytest.mark.parametrize("work", [in_place, refused])
def test_a_swap_right_after_an_interrupted_undo_keeps_no_overwritten_weights(work: Callable[[ms.Live], None]) -> None:
    _, interrupt = run(work, 0, "eager")
    assert len(interrupt.first) > 100
    for at in spread(sorted(interrupt.first.values()), 100):
        value, version = in_a_thread(lambda at=at: rolled_back_to(work, at))
        assert value == version, f"an interrupt before instruction {at}"
