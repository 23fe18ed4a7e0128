"""A save that does not come to its end: stock torch has destroyed the file that was there."""

from pathlib import Path

import pytest
import torch

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.programs import run_program

pytestmark = pytest.mark.slow

LIMITED = """
import resource, sys, torch, modelstate as ms
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
save = {"torch": torch.save, "ours": ms.save}[sys.argv[1]]
try:
    save({f"w{n}": torch.ones(1 << 16) for n in range(9)}, sys.argv[2])
except Exception as error:
    print("failed")
"""


def failing_save(how: str, path: Path) -> None:
    """A save in a process of its own, whose files may not become as large as they would."""
    done = run_program(LIMITED, how, path)
    assert done.stdout == "failed\n" or done.returncode


def opens(path: Path) -> bool:
    try:
        return torch.equal(ms.open(path).tensor("good"), torch.ones(3))
    except ms.ModelStateError:
        return False


def test_stock_destroys_the_last_good_file(tmp_path: Path, stock_fails: StockFails) -> None:
    path = tmp_path / "model.pt"
    torch.save({"good": torch.ones(3)}, path)
    assert opens(path)
    failing_save("torch", path)
    stock_fails("the file of before cannot be read any more", not opens(path))


def test_ours_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ms.save({"good": torch.ones(3)}, path)
    failing_save("ours", path)
    assert opens(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
