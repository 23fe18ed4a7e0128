"""What the command line says about itself does not wait for torch, whose import takes over a second."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `import torch` fails."""
    directory = tmp_path_factory.mktemp("torch")
    (directory / "torch.py").write_text("raise ImportError('torch was imported')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--help", 0, "Usage: modelstate"),
        ("--version", 0, "modelstate "),
        ("load --help", 0, "--allow-missing"),
        ("store --help", 0, "prune"),
        ("live follow --help", 0, "--token-file"),
        ("explain", 0, "lossy-cast"),
        ("explain PlanError", 0, "ms.load"),
        ("inspect", 2, "Missing argument 'PATH'"),
        ("nosuch", 2, "No such command"),
    ],
)
def test_it_needs_no_torch(without_torch: dict[str, str], arguments: str, code: int, says: str) -> None:
    command = [sys.executable, "-m", "modelstate", *arguments.split()]
    ended = subprocess.run(command, env=without_torch, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, says in ended.stdout + ended.stderr) == (code, True), ended


def test_the_work_itself_does(without_torch: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "modelstate", "inspect", str(tmp_path)]
    ended = subprocess.run(command, env=without_torch, capture_output=True, text=True, timeout=60)
    assert "torch was imported" in ended.stderr
