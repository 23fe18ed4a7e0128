"""How writers put a file where one is already: what decides whether a file is mapped (docs/checkpoints.md)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import modelstate as ms

IN_PLACE, REPLACED = "in place", "replaced"
WRITERS: dict[str, tuple[Callable[[dict[str, torch.Tensor], Path], object], str]] = {
    "torch.save": (torch.save, IN_PLACE),
    "torch.distributed.checkpoint.save": (
        lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
        IN_PLACE,
    ),
    "safetensors.torch.save_file": (save_file, REPLACED),
    "modelstate.save": (ms.save, REPLACED),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITERS)
def test_how_a_file_is_written_over(name: str, tmp_path: Path) -> None:
    write, expected = WRITERS[name]
    path = tmp_path / "model.safetensors"
    write({"weight": torch.ones(64)}, path)
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    with file.open("rb") as first:
        before = first.read()
        write({"weight": torch.zeros(64)}, path)
        first.seek(0)
        assert (first.read() == before) is (expected == REPLACED)
        with file.open("rb") as now:
            assert now.read() != before
            assert os.path.sameopenfile(first.fileno(), now.fileno()) is (expected == IN_PLACE)
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    assert any(line.startswith(f"| `{name}`") and f" {expected} " in line for line in page.splitlines())
