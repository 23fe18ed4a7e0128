"""The example of a sharded training run: a rank is killed, and the run goes on with fewer ranks."""

import re
import time
from pathlib import Path

import psutil
import pytest

from tests.programs import RANKS, Program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SAVE_EVERY, STEPS = 5, 60


def start(ranks: int, directory: Path) -> Program:
    return Program(RANKS, ranks, "", "examples/fsdp_train.py", directory, cwd=ROOT)


def run_and_kill_a_rank(directory: Path) -> int | None:
    """Returns the last step that four ranks have printed; None where the run has ended before the kill."""
    run = start(4, directory)
    while "step 12 of 4 ranks" not in run.written():
        assert not run.has_ended, run.wait().stderr
        time.sleep(0.01)
    if ranks := psutil.Process(run.pid).children():
        ranks[-1].kill()
    done = run.wait(90)
    return None if done.returncode == 0 else max(map(int, re.findall(r"^step (\d+) of 4 ranks", done.stdout, re.M)))


def test_a_run_goes_on_with_two_of_four_ranks_after_one_was_killed(tmp_path: Path) -> None:
    last, directory = None, tmp_path
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        if (last := run_and_kill_a_rank(directory)) is not None:
            break
    assert last is not None
    resumed = start(2, directory).wait(120)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    text = resumed.stdout
    steps = [int(step) for step in re.findall(r"step (\d+) of 2 ranks: loss \d", text)]
    assert steps == list(range(steps[0], STEPS))
    assert steps[0] % SAVE_EVERY == 0
    assert SAVE_EVERY <= steps[0] <= last + 1
    assert f"from step {steps[0]} to {STEPS}: all steps are done" in text
