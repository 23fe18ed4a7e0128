"""Saving over the file that a live model shows: with torch.save its weights change, or the process ends."""

from pathlib import Path

import pytest
import torch

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.programs import run_program

CHILD = """
import sys, torch, modelstate as ms
from torch import nn

how, path = sys.argv[1:]
save = ms.save if how == "ours" else torch.save
save({"weight": torch.full((512, 512), 1.0), "bias": torch.zeros(512)}, path)
with ms.skeleton():
    model = nn.Linear(512, 512)
ms.load(model, path)
assert all(step.mapped for step in ms.plan(nn.Linear(512, 512, device="meta"), path).steps)
if how == "smaller":
    torch.save({"bias": torch.zeros(512)}, path)
elif how == "other":
    torch.save({"weight": torch.full((512, 512), 2.0), "bias": torch.zeros(512)}, path)
else:
    ms.save({"weight": model.weight * 2, "bias": model.bias}, path)
    assert ms.open(path).tensor("weight")[3, 3] == 2
print(sorted(set(model.weight.flatten().tolist())))
"""


def after_saving(how: str, folder: Path) -> tuple[int, str]:
    """How the process ended, and what its weights were in the end."""
    done = run_program(CHILD, how, folder / "model.safetensors", timeout=120)
    return done.returncode, done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["smaller", "other"])
def test_stock_writes_into_the_live_model(how: str, tmp_path: Path, stock_fails: StockFails) -> None:
    stock_fails("its weights change, or it is ended", after_saving(how, tmp_path) != (0, "[1.0]"))


@pytest.mark.slow
def test_ours_replaces_the_file(tmp_path: Path) -> None:
    assert after_saving("ours", tmp_path) == (0, "[1.0]")


def test_a_model_is_saved_over_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ms.save({"weight": torch.arange(12.0).view(3, 4)}, path)
    with ms.skeleton():
        model = torch.nn.Linear(4, 3, bias=False)
    ms.load(model, path)
    with torch.no_grad():
        model.weight += 1
    ms.save(model, path)
    assert torch.equal(model.weight, torch.arange(12.0).view(3, 4) + 1)
    assert torch.equal(ms.open(path).tensor("weight"), model.weight)
