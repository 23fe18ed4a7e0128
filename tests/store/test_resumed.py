"""A run that is killed several times has the losses of one that is not, bit for bit."""

import random
import time
from pathlib import Path

import pytest

from tests.store.killed import said, start
from tests.store.resumed import run

pytestmark = pytest.mark.slow

STEPS, KILLS = 100, 3


def test_losses_are_those_of_a_run_without_interruption(tmp_path: Path) -> None:
    whole, report = start(run, None, STEPS)
    first, *steps = said(report)
    whole.join()
    expected = dict(steps)
    assert first == ("from", 0)
    assert len(expected) == STEPS
    assert float.fromhex(expected[STEPS]) < 0.8 * float.fromhex(expected[1])  # it has learned something
    chance, found, begins = random.Random(1), {}, []
    for number in range(KILLS + 1):
        process, report = start(run, str(tmp_path), STEPS)
        what, begin = report.recv()
        assert what == "from"
        begins.append(begin)
        if number < KILLS:
            for _ in range(chance.randrange(2, 20)):
                step, loss = report.recv()
                assert found.setdefault(step, loss) == loss == expected[step]
            time.sleep(chance.random() * 0.02)
            process.kill()
        for step, loss in said(report):
            assert found.setdefault(step, loss) == loss == expected[step]
        process.join()
    assert found == expected
    assert begins == sorted(begins)
    assert len(set(begins)) > KILLS / 2
    print(f"{KILLS} interruptions, resumed from {begins}")
