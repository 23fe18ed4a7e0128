"""Help, error pages, and descriptions of safetensors files and stores need no torch, whose import takes a second."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from typer.testing import CliRunner

import modelstate as ms
from modelstate.cli.main import app

Run = Callable[..., subprocess.CompletedProcess[str]]

FORKS = """
import json, os, sys
from modelstate.cli.main import main

for line in sys.stdin:
    arguments, cwd, *paths = json.loads(line)
    if not (child := os.fork()):
        for descriptor, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(cwd)
        sys.argv[1:] = arguments
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs commands in forks of one interpreter, which is started once."""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs commands where `import torch` fails."""
    directory = tmp_path_factory.mktemp("torch")
    (directory / "torch.py").write_text("raise ImportError('torch was imported')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}
    paths = [str(directory / name) for name in ("out", "err")]
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forks:

        def run(arguments: str, cwd: Path = directory) -> subprocess.CompletedProcess[str]:
            assert forks.stdin is not None
            assert forks.stdout is not None
            print(json.dumps([arguments.split(), str(cwd), *paths]), file=forks.stdin, flush=True)
            code = int(forks.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, *(Path(path).read_text() for path in paths))

        yield run


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
def test_it_needs_no_torch(without_torch: Run, arguments: str, code: int, says: str) -> None:
    ended = without_torch(arguments)
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
    without_torch: Run, checkpoints: Path, arguments: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = without_torch(arguments, checkpoints)
    monkeypatch.chdir(checkpoints)
    with_torch = CliRunner().invoke(app, arguments.split())
    assert ended.returncode == with_torch.exit_code == code, ended.stderr
    assert _without_times(ended.stdout) == _without_times(with_torch.stdout)
    assert ended.stderr == with_torch.stderr


def _without_times(text: str) -> str:
    return re.sub(r"[\d.]+ (?:ms|µs|s)$", "TIME", text, flags=re.MULTILINE)


def test_other_formats_do(without_torch: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    ended = without_torch("inspect x.pt", tmp_path)
    assert "torch was imported" in ended.stderr
