"""The example of a sharded training run: a rank is killed, and the run goes on with fewer ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def start(ranks: int, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.Popen(
        [*command, "examples/fsdp_train.py", str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
def test_a_run_goes_on_with_two_of_four_ranks_after_one_was_killed(tmp_path: Path) -> None:
    killed = start(4, tmp_path)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 12 of 4 ranks"):
            psutil.Process(killed.pid).children()[-1].kill()
    assert killed.wait(60) != 0
    resumed = start(2, tmp_path)
    text, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0
    steps = [int(step) for step in re.findall(r"step (\d+) of 2 ranks: loss \d", text)]
    assert steps == list(range(steps[0], 60))
    assert steps[0] in (5, 10, 15)
    assert f"from step {steps[0]} to 60: all steps are done" in text
