"""When a loop has to end: by the time of its job, by what saves take, and by real signals."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import modelstate as ms
from modelstate.errors import OptionError

HOUR = 3600.0


class Clock:
    """Both clocks of the machine, which are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boot, self.wall = 5000.0, 1.8e9
        monkeypatch.setattr(time, "clock_gettime", lambda which: self.boot)
        monkeypatch.setattr(time, "time", lambda: self.wall)

    def advance(self, seconds: float) -> None:
        self.boot += seconds
        self.wall += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Fails a test that leaves another handler than it found."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number, handler in before.items():
        if after[number] != handler:
            signal.signal(number, handler)
    assert after == before


def test_the_end_of_the_time(clock: Clock) -> None:
    deadline = ms.Deadline(hours=4, margin_seconds=100, since="now")
    assert (deadline.reached, deadline.reason) == (False, "")
    assert (deadline.remaining_seconds, deadline.margin_seconds) == (4 * HOUR, 100)
    clock.advance(4 * HOUR - 100.5)
    assert not deadline.reached
    clock.advance(0.5)
    assert deadline.reached
    assert deadline.reason == "100 s of 14,400 s are left, the margin is 100 s"
    clock.advance(500)
    assert deadline.remaining_seconds == 0
    assert deadline.reason == "100 s of 14,400 s are left, the margin is 100 s"


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_setting_the_wall_clock_changes_nothing(clock: Clock, jump: float) -> None:
    deadline = ms.Deadline(hours=4, margin_seconds=100, since=clock.wall - 600)
    clock.wall += jump
    assert deadline.remaining_seconds == pytest.approx(4 * HOUR - 600)
    clock.advance(60)
    assert deadline.remaining_seconds == pytest.approx(4 * HOUR - 660)


@pytest.mark.parametrize(("hours", "margin"), [(4, 600), (1, 180), (0.1, 18)])
def test_the_margin_before_anything_is_known(clock: Clock, hours: float, margin: float) -> None:
    deadline = ms.Deadline(hours, since="now")
    assert deadline.margin_seconds == pytest.approx(margin)
    deadline.stepped(7)
    assert deadline.margin_seconds == pytest.approx(margin + 7)


def test_the_margin_is_learned(clock: Clock) -> None:
    deadline = ms.Deadline(4, since="now")
    deadline.saved(5)
    assert deadline.margin_seconds == 30
    deadline.saved(100)
    for seconds in (3, 11.5, 2):
        deadline.stepped(seconds)
    deadline.saved(20)
    assert deadline.margin_seconds == 211.5
    short = ms.Deadline(0.1, since="now")
    short.saved(0)
    assert short.margin_seconds == pytest.approx(18)


def test_reached_does_not_take_itself_back(clock: Clock) -> None:
    deadline = ms.Deadline(4, since="now")
    clock.advance(4 * HOUR - 599)
    assert deadline.reached
    deadline.saved(1)
    assert deadline.margin_seconds == 30
    assert deadline.reached


def test_time_counts_from_the_start_of_the_process() -> None:
    age = time.time() - psutil.Process().create_time()
    assert HOUR - ms.Deadline(hours=1).remaining_seconds == pytest.approx(age, abs=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGRTMIN + 3])
def test_a_signal_is_taken_as_often_as_it_comes(handlers: None, number: int) -> None:
    called: list[int] = []
    before = signal.signal(number, lambda *_: called.append(1))
    try:
        mine = signal.getsignal(number)
        with ms.Deadline(since="now", signals=(number, signal.SIGUSR2)) as deadline:
            assert not deadline.reached
            for _ in range(3):
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert deadline.reached
        name = "signal 37" if number == signal.SIGRTMIN + 3 else signal.Signals(number).name
        assert deadline.reason == f"{name} was received"
        assert signal.getsignal(number) is mine
        assert not called
    finally:
        signal.signal(number, before)


def test_the_handler_of_somebody_else_stays(handlers: None) -> None:
    def theirs(*arguments: Any) -> None: ...

    with ms.Deadline():
        signal.signal(signal.SIGTERM, theirs)
    assert signal.getsignal(signal.SIGTERM) is theirs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_second_interrupt_interrupts(handlers: None) -> None:
    with ms.Deadline(since="now", signals=(signal.SIGINT,)) as deadline:
        os.kill(os.getpid(), signal.SIGINT)
        assert deadline.reached
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_can_be_used_again_and_within_itself(handlers: None) -> None:
    deadline = ms.Deadline(since="now")
    for _ in range(2):
        with deadline:
            with deadline:
                pass
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_within_another(handlers: None, number: int) -> None:
    with (
        ms.Deadline(since="now", signals=[number]) as outer,
        ms.Deadline(since="now", signals=[signal.SIGUSR2]) as other,
    ):
        with ms.Deadline(since="now", signals=[number]) as inner:
            os.kill(os.getpid(), number)
        assert (inner.reached, outer.reached, other.reached) == (True, True, False)


def test_a_signal_reaches_those_whose_time_had_begun(handlers: None) -> None:
    made = ms.Deadline(since="now")
    with ms.Deadline(since="now", signals=[signal.SIGTERM, signal.SIGINT]):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert made.reason == "SIGTERM was received"
    assert ms.Deadline().reason == "SIGTERM was received"  # since the process began
    assert not ms.Deadline(since="now").reached
    with ms.Deadline(signals=[signal.SIGINT]) as later:
        assert not later.reached


def test_another_thread_is_refused_unless_it_takes_no_signals(handlers: None) -> None:
    caught: list[object] = []

    def enter(*signals: int) -> None:
        try:
            with ms.Deadline(since="now", signals=signals) as deadline:
                caught.append(deadline.reached)
        except OptionError as error:
            caught.append(error.what)

    for signals in [(signal.SIGTERM,), ()]:
        thread = threading.Thread(target=enter, args=signals)
        thread.start()
        thread.join()
    assert caught == ["signals can be received in the main thread alone", False]


def test_another_thread_may_enter_what_is_entered(handlers: None, tmp_path: Path) -> None:
    loops: list[Any] = []

    def train(deadline: ms.Deadline) -> None:
        loop = ms.resumable(ms.Store(tmp_path), {"epoch": 1}, steps=9, save_every=1, deadline=deadline)
        loops.append(loop)
        for number in loop:
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                while not deadline.reached:  # the main thread receives it
                    time.sleep(0.01)

    with ms.Deadline(since="now") as deadline:
        thread = threading.Thread(target=train, args=(deadline,))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert (loops[0].done, loops[0].stopped) == (4, "SIGTERM was received")


@pytest.mark.slow
def test_a_forked_child_can_be_ended(handlers: None) -> None:
    with ms.Deadline(since="now") as deadline:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not deadline.reached


def exit_of_a_child_with_a_signal() -> int:
    """Of one that ends with 7 when nothing else happens."""
    with ms.Deadline(since="now"):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(7)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)


def test_a_forked_child_does_not_end_by_a_signal_to_all(handlers: None) -> None:
    assert exit_of_a_child_with_a_signal() == 7


def test_a_forked_child_has_the_handler_that_was_there(handlers: None) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
    try:
        assert exit_of_a_child_with_a_signal() == 9
    finally:
        signal.signal(signal.SIGUSR1, before)


BAD: list[dict[str, Any]] = [
    *({"hours": hours} for hours in (0, math.nan, math.inf, "4", True)),
    *({"margin_seconds": seconds} for seconds in (-1, math.nan, 4 * HOUR, "much", None)),
    *({"since": since} for since in ("yesterday", None, math.nan, -math.inf, True, 1.8e12)),
    *({"signals": numbers} for numbers in (signal.SIGTERM, "SIGTERM", ("SIGTERM",), (0,), (10_000,))),
    *({"signals": (number,)} for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV)),
    {"hours": None, "signals": ()},
]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_what_means_nothing(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ms.Deadline(**given)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "5", None, True])
def test_what_is_no_time(seconds: Any) -> None:
    deadline = ms.Deadline(since="now")
    before = deadline.margin_seconds
    for tell in (deadline.saved, deadline.stepped):
        with pytest.raises(OptionError):
            tell(seconds)
    assert deadline.margin_seconds == before
