"""Runs that are killed have the losses of one that is not, bit for bit, however the loop is built."""

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.store.killed import start
from tests.store.loops import LOOPS, run
from tests.sweeps import EXHAUSTIVE

pytestmark = pytest.mark.slow

KILLS = 2 if EXHAUSTIVE else 1


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_that_is_killed_has_the_losses_of_one_that_is_not(tmp_path: Path, name: str) -> None:
    *losses, end = messages(*start(run, None, name))
    assert end == "end"
    expected = dict(losses)
    chance, resumed = random.Random(name), set[int]()
    for number in range(KILLS + 1):
        process, report = start(run, str(tmp_path / "run"), name)
        coming, found = messages(process, report), list[Any]()
        if number < KILLS:
            found += itertools.islice(coming, chance.randrange(len(expected) // 6, len(expected) // 3))
            # The kill must not come before there is something to resume from.
            while not any(tmp_path.glob("run/*/step-*")) and (said := next(coming, None)) is not None:
                found.append(said)
            time.sleep(chance.random() * 0.01)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # as a scheduler does it, with the processes of the loaders
        found += coming
        process.join()
        losses = [one for one in found if one != "end"]
        assert losses, f"the run ended with {process.exitcode}"
        assert {step: loss for step, loss in losses if loss != expected[step]} == {}
        resumed.add(losses[0][0])
    assert found[-1] == "end"
    assert len(resumed) > 1


def messages(process: Any, report: Connection) -> Iterator[Any]:
    """What a process says until it ends."""
    while wait([report, process.sentinel], timeout=100) and report in wait([report, process.sentinel]):
        try:
            yield report.recv()
        except (EOFError, OSError):
            return
