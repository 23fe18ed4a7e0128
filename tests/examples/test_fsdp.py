"""The example of a sharded model, on four ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import RANKS, code_of, run_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_each_rank_holds_a_quarter_and_the_output_is_that_of_the_whole_model(
    real_file: Callable[[str], Path],
) -> None:
    real_file("minilm")
    imported = "torch.distributed.fsdp transformers.models.bert.modeling_bert"
    done = run_program(RANKS, 4, imported, "examples/fsdp.py", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "103 of 103 slots filled" in done.stdout
    assert "4 ranks: 90.9 MB read" in done.stdout
    assert "rank 0 holds 22,714,752 bytes of 90,852,864" in done.stdout
    assert "largest difference from the whole model: 0.0e+00" in done.stdout


def test_torchrun_starts_it(real_file: Callable[[str], Path]) -> None:
    """With one rank: each is a new interpreter, which takes ten seconds of processor time to import all this."""
    real_file("minilm")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "examples/fsdp.py"]
    done = run_program(code_of(command), cwd=ROOT, environment={"PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0 holds 90,852,864 bytes of 90,852,864" in done.stdout
    assert "largest difference from the whole model: 0.0e+00" in done.stdout
