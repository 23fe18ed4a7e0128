"""The garbage collector, which is off for a while."""

import gc
import threading
from contextlib import suppress

import pytest

from modelstate.process import gc_paused


def test_it_is_off_for_a_while() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with suppress(KeyError), gc_paused():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_threads_that_overlap(first_to_leave: int) -> None:
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
