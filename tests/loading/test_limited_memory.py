"""A checkpoint that is larger than the memory there is, into a target that is smaller: the kernel sets the limit."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.programs import run_program

pytestmark = pytest.mark.slow

LIMIT_BYTES = 512 << 20
"""Less than the file. What was imported before the fork does not count."""
WIDTH = 4096
LAYERS = LIMIT_BYTES // (WIDTH * WIDTH * 4) + 1
FILE_BYTES = LAYERS * WIDTH * WIDTH * 4

PROGRAM = """
import sys
from pathlib import Path

Path(sys.argv[1]).write_text("0")  # into the group whose memory is limited

import torch
from torch import nn

import modelstate as ms

path, layers = sys.argv[2], int(sys.argv[3])

def skeleton(layers):
    with ms.skeleton():
        return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(layers)))

{work}
print("done", torch.tensor([1.0]).item())
"""

OURS = {
    "as int8": """
from torchao.quantization import Int8WeightOnlyConfig

model = skeleton(layers)
budget = 160 << 20
report = ms.load(model, path, transform=ms.loading.Quantize(Int8WeightOnlyConfig()), max_memory_bytes=budget)
assert report.peak_memory_bytes <= budget and report.bytes == layers * 4096 * 4096 * 4
assert model[-1].weight.qdata.dtype is torch.int8
assert torch.equal(model[-1].weight.dequantize().sign(), model[0].weight.dequantize().sign())
""",
    "some of the names, some rows of each, and mapped": """
model = skeleton(2)
ms.load(model, path, map=False, allow_unexpected=["*"], max_memory_bytes=1 << 20)
assert model[1].weight.isfinite().all()

with ms.open(path) as checkpoint:
    rows = torch.empty(layers, 256, 4096)
    for at, name in enumerate(checkpoint):
        checkpoint.read_into(name, rows[at], 1024, 1280)
assert torch.equal(rows[0], rows[-1])

model = skeleton(layers)
ms.load(model, path)
with torch.inference_mode():
    assert model(torch.ones(1, 4096)).isfinite().any()
""",
}
ALL_IN_MEMORY = """
import safetensors.torch

state = safetensors.torch.load(Path(path).read_bytes())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """The file to write a process into, so that it and its files' pages have no more than `LIMIT_BYTES`."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (one, "memory.limit_in_bytes") if one.exists() else (two, "memory.max")
    folder = root / f"modelstate-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group can be made here, so that memory cannot be limited: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / 64
    save_file({f"{index}.weight": weight.clone() for index in range(LAYERS)}, path)
    return path


def run(work: str, group: Path, path: Path) -> "subprocess.CompletedProcess[str]":
    return run_program(PROGRAM.format(work=work), group, path, LAYERS)


@pytest.mark.parametrize("work", OURS.values(), ids=OURS)
def test_a_checkpoint_larger_than_memory(work: str, group: Path, path: Path) -> None:
    assert path.stat().st_size > FILE_BYTES > LIMIT_BYTES
    done = run(work, group, path)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


def test_the_limit_is_one(group: Path, path: Path) -> None:
    """A program that reads the whole file into its memory is killed."""
    assert run(ALL_IN_MEMORY, group, path).returncode == -9
