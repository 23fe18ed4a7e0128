"""`modelstate inspect`, with `--stats` and `--all`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from tests.cli.command import run

STATE = {
    "layer.0.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "layer.1.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) * 2,
    "half": torch.tensor([1.5, -2.0]).bfloat16(),
    "count": torch.tensor(7),
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(STATE, "m.safetensors")
    torch.save({"model": {"w": STATE["layer.0.weight"].t()}, "s": torch.eye(2).to_sparse()}, "m.pt")
    return tmp_path


def test_pages_are_written_on_this_machine_only() -> None:
    done = run("inspect", "m.pt", "--html", "s3://bucket/x.npy")
    assert done.exit_code == 1
    assert "error: s3://bucket/x.npy: this file is written on this machine only" in done.stderr
    assert "download" not in done.stderr


def test_statistics() -> None:
    done = run("inspect", "m.safetensors", "--stats")
    assert done.exit_code == 0
    assert "layer.*.weight (2 ×)" in done.stdout
    assert "layer.1.weight" in run("inspect", "m.safetensors", "--stats", "--all").stdout
    found = json.loads(run("inspect", "m.safetensors", "--stats", "--filter", "*.weight", "--json").stdout)
    assert [tensor["max"] for tensor in found["tensors"]] == [5.0, 10.0]
    assert run("inspect", "m.safetensors", "--filter", "*").exit_code == 2


def test_every_tensor_is_listed_without_reading_it() -> None:
    folded = run("inspect", "m.safetensors")
    assert "layer.1.weight" not in folded.stdout
    done = run("inspect", "m.safetensors", "--all")
    assert done.exit_code == 0
    rows = done.stdout.split("\n\n")[1].splitlines()
    assert [row.split()[0] for row in rows] == ["name", *ms.open("m.safetensors")]
    assert "layer.1.weight  [2, 3]  float32" in done.stdout
