"""Help, error pages, and descriptions of safetensors files and stores need no torch, whose import takes a second."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

import modelstate as ms
from tests.cli.command import run
from tests.programs import Forks

COMMAND = "import sys; from modelstate.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs commands where `import torch` fails."""
    directory = tmp_path_factory.mktemp("torch")
    (directory / "torch.py").write_text("raise ImportError('torch was imported')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}
    with Forks("import modelstate.cli.main", environment) as forks:
        yield forks


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--help", 0, "Usage: modelstate"),
        ("--version", 0, "modelstate "),
        ("load --help", 0, "--allow-missing"),
        ("store --help", 0, "prune"),
        ("explain", 0, "size-mismatch"),
        ("explain PlanError", 0, "ms.load"),
        ("inspect", 2, "Missing argument 'SOURCE'"),
        ("nosuch", 2, "No such command"),
    ],
)
def test_it_needs_no_torch(without_torch: Forks, arguments: str, code: int, says: str) -> None:
    ended = without_torch.run(COMMAND, *arguments.split())
    assert (ended.returncode, says in ended.stdout + ended.stderr) == (code, True), ended


def test_the_commands_are_known_without_the_library(without_torch: Forks) -> None:
    ended = without_torch.run(
        "import sys; print(*(n.split('.')[1] for n in sys.modules if n.startswith('modelstate.')))"
    )
    assert {*ended.stdout.split()} == {"cli", "forks", "lazy", "text_format", "version"}, ended


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
    without_torch: Forks, checkpoints: Path, arguments: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = without_torch.run(COMMAND, *arguments.split(), cwd=checkpoints)
    monkeypatch.chdir(checkpoints)
    with_torch = run(*arguments.split())
    assert ended.returncode == with_torch.exit_code == code, ended.stderr
    assert _without_times(ended.stdout) == _without_times(with_torch.stdout)
    assert ended.stderr == with_torch.stderr


def _without_times(text: str) -> str:
    return re.sub(r"[\d.]+ (?:ms|µs|s)$", "TIME", text, flags=re.MULTILINE)


def test_other_formats_do(without_torch: Forks, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    ended = without_torch.run(COMMAND, "inspect", "x.pt", cwd=tmp_path)
    assert "torch was imported" in ended.stderr
