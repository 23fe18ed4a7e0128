"""Help, error pages, and descriptions of safetensors files and stores need no torch, whose import takes a second."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from typer.testing import CliRunner

import modelstate as ms
from modelstate.cli.main import app


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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of the kinds that need no torch."""
    directory = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    ms.save(model, directory / "model.safetensors", schema="1")
    for name in ("ours", "theirs"):
        (directory / name).mkdir()
    ms.save(model.bfloat16(), directory / "ours" / "model", shard_size_bytes=40)
    ms.save({"model": model, "step": 3}, directory / "nested.safetensors")
    save_file({"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.float8_e4m3fn)}, directory / "theirs.safetensors")
    save_torch_state_dict({f"w{i}": torch.ones(8, 8) for i in range(4)}, directory / "theirs", max_shard_size=300)
    (directory / "damaged.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-1])
    store = ms.Store(directory / "store")
    for step in range(2):
        store.save(step, {"model": model, "optimizer": optimizer}, metrics={"loss": 0.5 / (step + 1)})
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("inspect model.safetensors", 0),
        ("inspect model.safetensors --json", 0),
        ("inspect nested.safetensors --key model", 0),
        ("inspect nested.safetensors", 0),
        ("inspect theirs.safetensors --json", 0),
        ("inspect ours", 0),
        ("inspect ours --json", 0),
        ("inspect theirs", 0),
        ("inspect store/step-000000001", 0),
        ("inspect damaged.safetensors", 1),
        ("inspect nosuch.safetensors", 1),
        ("verify model.safetensors", 0),
        ("verify ours", 0),
        ("verify theirs", 1),
        ("verify store", 0),
        ("store ls store", 0),
        ("store ls store --json", 0),
        ("store ls theirs", 1),
        ("store verify store --step 1", 0),
        ("store verify store --step 7", 1),
    ],
)
def test_these_formats_need_no_torch(
    without_torch: dict[str, str],
    checkpoints: Path,
    arguments: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-m", "modelstate", *arguments.split()]
    ended = subprocess.run(command, env=without_torch, cwd=checkpoints, capture_output=True, text=True, timeout=60)
    monkeypatch.chdir(checkpoints)
    with_torch = CliRunner().invoke(app, arguments.split())
    assert ended.returncode == with_torch.exit_code == code, ended.stderr
    assert _without_times(ended.stdout) == _without_times(with_torch.stdout)
    assert ended.stderr == with_torch.stderr


def _without_times(text: str) -> str:
    return re.sub(r"[\d.]+ (?:ms|µs|s)$", "TIME", text, flags=re.MULTILINE)


def test_other_formats_do(without_torch: dict[str, str], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    command = [sys.executable, "-m", "modelstate", "inspect", str(tmp_path / "x.pt")]
    ended = subprocess.run(command, env=without_torch, capture_output=True, text=True, timeout=60)
    assert "torch was imported" in ended.stderr
