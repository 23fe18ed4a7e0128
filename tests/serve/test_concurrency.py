"""`Live` where threads meet: pins, swaps, rollbacks, canaries that serve, and interrupts."""

import linecache
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import serve as package
from modelstate.errors import CanaryError, SwapBusyError, VersionGoneError
from tests.serve.bad_weights import Tied, X
from tests.serve.models import weights_of
from tests.serve.targets import KINDS, target_of
from tests.sweeps import at_instruction, spread

every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("mode", ["available", "in_place"])


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
    block, errors = live.pin(), []
    block.__enter__()

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    in_a_thread(leave).join(60)
    assert not errors
    live.swap(state(2), mode="in_place", timeout_seconds=60)
    assert live(X).unique().tolist() == [2.0]


@pytest.mark.slow
@every_kind
def test_a_pin_of_an_older_version_lets_nobody_in_while_weights_are_overwritten(kind: str) -> None:
    live = live_of(kind)
    pinned, inside, asked = threading.Event(), threading.Event(), threading.Event()
    answers: list[tuple[list[float], int]] = []

    def reader() -> None:
        with live.pin() as v:
            pinned.set()
            assert inside.wait(60)
            assert v(X).unique().tolist() == [1.0]
            asked.set()
            value, version = live.answer(X)
            answers.append((value.unique().tolist(), version))

    def canary(_: Any) -> bool:
        inside.set()
        assert asked.wait(60)
        time.sleep(0.1)  # a request that does not wait has its answer by now
        return not answers

    thread = in_a_thread(reader)
    assert pinned.wait(60)
    live.swap(state(2), timeout_seconds=0)
    assert live.swap(state(3), mode="in_place", canary=canary).version == 3
    thread.join(60)
    assert answers == [([3.0], 3)]


@every_mode
def test_a_canary_that_asks_the_program_itself(mode: Any) -> None:
    """Beside the new version there is an old one to be asked; in place there is none, and nobody waits for ever."""
    live = live_of()
    found: list[Any] = []

    def canary(v: Any) -> bool:
        try:
            found.append(live(X))
        except SwapBusyError as error:
            found.append(error)
            raise
        return True

    def swap() -> None:
        if mode == "available":
            live.swap(state(2), canary=canary)
        else:
            with pytest.raises(CanaryError, match="within a swap in place"):
                live.swap(state(2), mode=mode, canary=canary)

    thread = in_a_thread(swap)
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(found[0], SwapBusyError) == (mode == "in_place")
    assert live.version == (2 if mode == "available" else 1)
    assert live(X).unique().tolist() == [float(live.version)]


@pytest.mark.slow
@every_kind
def test_a_rollback_does_not_wait_for_requests(kind: str) -> None:
    live = live_of(kind)
    pinned, may_end = threading.Event(), threading.Event()

    def reader() -> None:
        with live.pin():
            pinned.set()
            may_end.wait(60)

    threads = [in_a_thread(reader)]
    assert pinned.wait(60)
    reports: list[ms.serve.SwapReport] = []
    threads.append(in_a_thread(lambda: reports.append(live.swap(state(2)))))
    while live.version == 1:
        time.sleep(0.001)
    assert live.rollback() == 1
    assert live.swap(state(3), timeout_seconds=0).version == 3
    assert not reports  # the first one is still waiting for the request
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert [report.version for report in reports] == [2]
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
    assert live.version == 1
    assert [event.action for event in live.history()][-2:] == ["rolled back", "refused"]
    assert live.swap(state(4)).previous == 1


def test_copies_that_requests_hold_on_to_are_counted() -> None:
    live = live_of(keep_versions=0)
    with live.pin():
        assert live.swap(state(2)).copies == 2
        assert live.swap(state(3)).copies == 3
    assert live.swap(state(4)).copies == 2
    assert live.swap(state(5), mode="in_place").copies == 2


class Cache(nn.Module):
    """A buffer of the checkpoint that requests replace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, x])
        return self.cache.sum(0)


def test_a_swap_in_place_that_is_refused_undoes_what_its_canary_has_replaced() -> None:
    live, x = ms.Live(Cache().eval()), torch.zeros(1, 2)
    with pytest.raises(CanaryError):
        live.swap({"cache": torch.full((1, 2), 5.0)}, mode="in_place", canary=lambda v: bool(v(x).sum() > 99))
    assert live(x).tolist() == [1.0, 1.0]


REQUESTS = frozenset(
    [
        "WeakHandle",
        "wait_all",
        "ConcurrentWeakSet",
        "SwapLock",
        "SwapLockGuard",
        "Entry",
        "Version",
        "PinContext",
        "Pin",
        "Method",
        "_method_of",
        "_keep_in_use",
        "_generator",
        "_coroutine",
        "_async_generator",
    ]
)
"""The classes and functions of `modelstate.serve.versions` by which a request holds its version, or a swap its lock."""


class Interrupt:
    """Raises `KeyboardInterrupt` before a line of the package's code: `sys.settrace` takes it."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0
        self.first: dict[tuple[object, int], int] = {}
        """The count at which each line came for the first time."""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        path = Path(frame.f_code.co_filename)
        # A request, and the few lines that take and give back a lock, have moments in which nothing can help.
        ours = path.parent == Path(package.__file__).parent and frame.f_code.co_qualname.split(".")[0] not in REQUESTS
        return self._line if ours and frame.f_code.co_name not in ("__call__", "pin") else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with ", "finally:")):
            self.lines += 1
            self.first.setdefault((frame.f_code, frame.f_lineno), self.lines)
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line


def interrupted_swap(live: ms.Live, mode: Any, at: int) -> Interrupt:
    """Swaps, with an interrupt before the line that comes as number `at`; without one for 0."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        live.swap(state(2), mode=mode, canary=ms.Canary((X,), atol=9.0))
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupt


@pytest.mark.slow
@every_mode
def test_an_interrupt_at_any_line_leaves_one_version_that_serves(mode: Any) -> None:
    done = 0
    moments = sorted(interrupted_swap(live_of(), mode, 0).first.values())
    assert len(moments) > 50
    for at in spread(moments, 70):
        live = live_of()
        assert interrupted_swap(live, mode, at).lines == at
        value, version = live.answer(X)
        assert value.unique().tolist() == [float(version)], at
        last = live.history()[-1]
        assert last.action in (["swapped"] if version == 2 else ["started", "refused"]), at
        assert last.version == version, at
        done += version == 2
        report = live.swap(state(version + 1), mode=mode, timeout_seconds=60)
        assert report.drained, at
        assert live(X).unique().tolist() == [version + 1.0]
    assert done


SWAPS = {function.__code__ for function in (ms.Live._swap_beside, ms.Live._swap_in_place, ms.Live._serving)}


def rolled_back_swap(mode: Any, at: int) -> tuple[ms.Live, int]:
    """Swaps while another thread rolls back. Returns the number of instructions of the swap, too."""
    live = live_of()
    live.swap(state(2))

    def roll_back() -> None:
        with suppress(SwapBusyError, VersionGoneError):  # a swap in place is under way, or has dropped the version
            live.rollback(timeout_seconds=0)

    rolls_back = at_instruction(at, SWAPS.__contains__, lambda: in_a_thread(roll_back).join(60))
    with rolls_back as found, suppress(SwapBusyError):
        assert live.swap(state(3), mode=mode, timeout_seconds=1).drained
    return live, found.count


@pytest.mark.slow
@every_mode
def test_a_rollback_in_another_thread_at_any_moment_of_a_swap(mode: Any) -> None:
    """The swap succeeds, or says that the version was rolled back."""
    _, count = rolled_back_swap(mode, 0)
    assert count > 100
    for at in [*range(1, 40), *spread(range(40, count + 1), 60)]:
        live, _ = rolled_back_swap(mode, at)
        value, version = live.answer(X)
        assert value.unique().tolist() == [float(version)], f"a rollback before instruction {at}"
