"""`Live` where threads meet: pins, swaps, rollbacks, canaries that serve, and interrupts."""

import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate import serve as package
from modelstate.errors import SwapBusyError
from tests.serve.models import X_OF_TIED as X
from tests.serve.models import Tied, weights_of
from tests.serve.targets import KINDS, target_of
from tests.sweeps import spread

every_kind = pytest.mark.parametrize("kind", KINDS)


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


def test_a_pin_may_be_left_by_another_thread() -> None:
    """As generators that a web framework runs in a pool of threads do."""
    live = live_of()
    block, errors = live.version(), []
    block.__enter__()

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    in_a_thread(leave).join(60)
    assert not errors
    live.swap(state(2), timeout_seconds=60)
    assert live(X).unique().tolist() == [2.0]


def test_a_canary_that_asks_the_program_itself() -> None:
    live, found = live_of(), []
    live.swap(state(2), canary=lambda v: found.append((live(X).unique().tolist(), v(X).unique().tolist())))
    assert found == [([1.0], [2.0])]


@pytest.mark.slow
@every_kind
def test_a_rollback_does_not_wait_for_requests(kind: str) -> None:
    live = live_of(kind)
    pinned, may_end = threading.Event(), threading.Event()

    def reader() -> None:
        with live.version():
            pinned.set()
            may_end.wait(60)

    thread = in_a_thread(reader)
    assert pinned.wait(60)
    live.swap(state(2))
    assert live.rollback() == 1
    assert live.swap(state(3), timeout_seconds=0).version == 3
    may_end.set()
    thread.join(60)
    assert [event.action for event in live.history()] == ["started", "swapped", "rolled back", "swapped"]
    assert live(X).unique().tolist() == [3.0]


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


class Interrupt:
    """Raises `KeyboardInterrupt` before a line of the package's code: `sys.settrace` takes it."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0
        self.first: dict[tuple[object, int], int] = {}
        """The count at which each line came for the first time."""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        path = Path(frame.f_code.co_filename)
        return self._line if path.parent == Path(package.__file__).parent else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with ", "finally:")):
            self.lines += 1
            self.first.setdefault((frame.f_code, frame.f_lineno), self.lines)
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line


def interrupted_swap(live: ms.Live, at: int) -> Interrupt:
    """Swaps, with an interrupt before the line that comes as number `at`; without one for 0."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        live.swap(state(2), canary=ms.Canary((X,), atol=9.0))
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupt


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_one_version_that_serves() -> None:
    done = 0
    moments = sorted(interrupted_swap(live_of(), 0).first.values())
    assert len(moments) > 50
    for at in spread(moments, 30):
        live = live_of()
        assert interrupted_swap(live, at).lines == at
        value, version = live.answer(X)
        assert value.unique().tolist() == [float(version)], at
        done += version == 2
        live.swap(state(version + 1), timeout_seconds=60)
        assert live(X).unique().tolist() == [version + 1.0]
    assert done
