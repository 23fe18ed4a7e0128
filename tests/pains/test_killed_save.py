"""A process that is killed while it saves: torch leaves neither file, safetensors its litter."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.store.killed import said, save_in_place, start

pytestmark = pytest.mark.slow

ROUNDS = 6
"""As many as show that ours survives."""
AT_MOST = 200
"""Where one of five kills does harm and one is enough, none of so many does by a chance of 10^-20."""


def kill_a_save(how: str, path: Path, chance: random.Random) -> int:
    """Kills at a random moment whoever saves to this path over and over; the last number that was reported as saved."""
    process, report = start(save_in_place, how, str(path))
    assert report.poll(60)
    first = report.recv()
    time.sleep(chance.random() * 0.05)
    process.kill()
    process.join()
    return int(max([first, *said(report)]))


def holds(path: Path, at_least: int) -> bool:
    try:
        with ms.open(path) as opened:
            numbers = {float(value) for name in opened for value in opened.tensor(name).unique()}
    except (ms.ModelStateError, OSError):
        return False
    return len(numbers) == 1 and numbers.pop() >= at_least


def kills_until(harm: Callable[[int], bool], how: str, path: Path) -> int | None:
    """How many kills it takes until there is harm, which is asked with the last number that was reported."""
    chance = random.Random(0)
    return next((kill for kill in range(1, AT_MOST + 1) if harm(kill_a_save(how, path, chance))), None)


def test_stock_loses_it(tmp_path: Path, stock_fails: StockFails) -> None:
    path = tmp_path / "model.pt"
    kills = kills_until(lambda newest: not holds(path, newest), "torch", path)
    print(f"torch.save: lost by kill {kills}")
    stock_fails("the file of before cannot be read any more", kills is not None)


def test_stock_leaves_litter_that_nobody_takes_away(tmp_path: Path, stock_fails: StockFails) -> None:
    path = tmp_path / "model.safetensors"

    def litter() -> list[int]:
        return [other.stat().st_size for other in tmp_path.iterdir() if other != path]

    kills = kills_until(lambda _: bool(litter()), "safetensors", path)
    save_file({"w": torch.ones(1)}, path)
    print(f"save_file: {len(litter())} files and {sum(litter()):,} bytes left by kill {kills}")
    stock_fails("unfinished files stay for ever", bool(litter()))


def test_ours_never_does(tmp_path: Path) -> None:
    path, chance = tmp_path / "model.safetensors", random.Random(0)
    for _ in range(ROUNDS):
        assert holds(path, at_least=kill_a_save("ours", path, chance))
    ms.save({"w": torch.ones(1)}, path)
    assert list(tmp_path.iterdir()) == [path]
