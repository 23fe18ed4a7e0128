"""A process that is killed while it saves: torch leaves neither file, safetensors its litter."""

import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.store.killed import said, save_in_place, start

ROUNDS = 12


def lost(how: str, path: Path) -> int:
    """After how many kills at random moments the file could not be read, or was not what had been reported."""
    chance, count = random.Random(0), 0
    for _ in range(ROUNDS):
        process, report = start(save_in_place, how, str(path))
        assert report.poll(60)
        first = report.recv()
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.join()
        newest = max([first, *said(report)])
        count += not holds(path, newest)
    return count


def holds(path: Path, at_least: int) -> bool:
    try:
        with ms.open(path) as opened:
            numbers = {float(value) for name in opened for value in opened.tensor(name).unique()}
    except (ms.ModelStateError, OSError):
        return False
    return len(numbers) == 1 and numbers.pop() >= at_least


def test_stock_loses_it(tmp_path: Path, stock_fails: StockFails) -> None:
    count = lost("torch", tmp_path / "model.pt")
    print(f"torch.save: {count} of {ROUNDS} lost")
    stock_fails("the file of before cannot be read any more", count > 0)


def test_stock_leaves_litter_that_nobody_takes_away(tmp_path: Path, stock_fails: StockFails) -> None:
    lost("safetensors", tmp_path / "model.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    left = [path.stat().st_size for path in tmp_path.iterdir() if path.name != "model.safetensors"]
    print(f"save_file: {len(left)} files and {sum(left):,} bytes left after {ROUNDS} kills")
    stock_fails("unfinished files stay for ever", len(left) > 0)


def test_ours_never_does(tmp_path: Path) -> None:
    assert lost("ours", tmp_path / "model.safetensors") == 0
    ms.save({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
