"""The example of a sharded model, on four ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import RANKS, code_of, run_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_each_rank_holds_a_quarter_and_the_output_is_that_of_the_whole_model(real_file: Callable[[str], Path]) -> None:
    real_file("minilm")
    imported = "torch.distributed.fsdp transformers.models.bert.modeling_bert"
    done = run_program(RANKS, 4, imported, "examples/fsdp.py", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "103 of 103 slots filled" in done.stdout
    assert "4 ranks: 90.9 MB read" in done.stdout
    assert "rank 0 holds 22,714,752 bytes of 90,852,864" in done.stdout
    assert "largest difference from the whole model: 0.0e+00" in done.stdout


SHOW = """
import json, os, sys

rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
address = (os.environ["MASTER_ADDR"] != "", int(os.environ["MASTER_PORT"]) > 0)
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    json.dump([__name__, sys.argv[2:], os.getcwd(), rank, os.environ["LOCAL_RANK"], world_size, address], file)
"""


def test_torchrun_starts_ranks_as_the_test_above_does(tmp_path: Path) -> None:
    """With a program that imports nothing: an interpreter takes eight seconds to import what the example needs."""
    program, torchrun, ours = (tmp_path / name for name in ("show.py", "torchrun", "ours"))
    program.write_text(SHOW)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", program, torchrun, "--option"]
    shown = []
    for folder, start in ((torchrun, [code_of(command)]), (ours, [RANKS, 4, "", program, ours, "--option"])):
        folder.mkdir()
        done = run_program(*start)
        assert done.returncode == 0, done.stderr[-4000:]
        shown.append([(folder / str(rank)).read_text() for rank in range(4)])
    assert shown[0] == shown[1]
