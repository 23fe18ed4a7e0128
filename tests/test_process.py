"""What `modelstate.process` keeps for each thread, and signals that are deferred."""

import asyncio
import gc
import signal
import threading

import pytest

from modelstate.process import deferred_signals, gc_paused


def test_an_event_loop_handles_a_deferred_signal_once() -> None:
    handled: list[str] = []

    async def save() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.append, "once")
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            assert not handled
        await asyncio.sleep(0.05)

    asyncio.run(save())
    assert handled == ["once"]


def test_every_handler_runs_where_one_raises() -> None:
    handled: list[int] = []

    def fail(number: int, _: object) -> None:
        raise KeyError(number)

    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        signal.signal(signal.SIGUSR1, fail)
        signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
        with pytest.raises(KeyError):  # noqa: PT012, SIM117
            with deferred_signals():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR2)
        assert handled == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is fail
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


# The garbage collector, which is paused.


def test_the_collector_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_the_collector_goes_on_when_the_last_of_several_threads_has_ended(first_to_leave: int) -> None:
    inside, leave = ([threading.Event() for _ in range(2)] for _ in range(2))

    def work(number: int) -> None:
        with gc_paused():
            inside[number].set()
            leave[number].wait(60)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        inside[number].wait(60)
    for number in (first_to_leave, 1 - first_to_leave):
        assert not gc.isenabled()
        leave[number].set()
        threads[number].join()
    assert gc.isenabled()
