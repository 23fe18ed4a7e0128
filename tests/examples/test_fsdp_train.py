"""The example of a sharded training run: a rank is killed, and the run goes on with fewer ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SAVE_EVERY, STEPS = 5, 60


def start(ranks: int, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.Popen(
        [*command, "examples/fsdp_train.py", str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if ranks == 2 else subprocess.DEVNULL,
        text=True,
    )


def run_and_kill_a_rank(directory: Path) -> int | None:
    """Returns the last step that four ranks have printed; None where the run has ended before the kill."""
    run = start(4, directory)
    last = -1
    assert run.stdout is not None
    for line in run.stdout:
        if found := re.match(r"step (\d+) of 4 ranks", line):
            last = int(found[1])
            if last == 12:
                psutil.Process(run.pid).children()[-1].kill()
    return None if run.wait(90) == 0 else last


def test_a_run_goes_on_with_two_of_four_ranks_after_one_was_killed(tmp_path: Path) -> None:
    last, directory = None, tmp_path
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        if (last := run_and_kill_a_rank(directory)) is not None:
            break
    assert last is not None
    resumed = start(2, directory)
    text, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, text[-4000:]
    steps = [int(step) for step in re.findall(r"step (\d+) of 2 ranks: loss \d", text)]
    assert steps == list(range(steps[0], STEPS))
    assert steps[0] % SAVE_EVERY == 0
    assert SAVE_EVERY <= steps[0] <= last + 1
    assert f"from step {steps[0]} to {STEPS}: all steps are done" in text
