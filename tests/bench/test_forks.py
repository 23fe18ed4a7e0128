"""The memory of forked workers that share a `Live`."""

from pathlib import Path

import pytest

from tests.programs import run_program

MB = 64


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="proportional sets are Linux's")
def test_workers_share_the_weights_of_a_file_that_they_swap_in() -> None:
    code = f"from bench.forks import measure\nfor row in measure(2, {MB}, 0): print(row.private_mb)"
    done = run_program(code, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr
    forked, answered, *swapped = map(float, done.stdout.split())
    assert answered - forked < MB / 2
    assert all(private - answered < MB / 2 for private in swapped)
    assert len(swapped) == 3
