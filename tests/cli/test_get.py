"""`modelstate get`, and `modelstate inspect --stats`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from modelstate.cli.main import app

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


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_tensor_becomes_an_array() -> None:
    done = run("get", "m.safetensors", "layer.0.weight", "w.npy")
    assert (done.exit_code, done.stdout) == (0, "w.npy: [2, 3] float32\n")
    assert np.array_equal(np.load("w.npy"), STATE["layer.0.weight"].numpy())
    assert run("get", "m.safetensors", "count", "count.npy").exit_code == 0
    assert np.load("count.npy").shape == ()
    assert run("get", "m.pt", "w", "t.npy", "--key", "model").exit_code == 0
    assert np.array_equal(np.load("t.npy"), STATE["layer.0.weight"].t().numpy())


def test_dtypes_that_numpy_lacks_become_float32() -> None:
    done = run("get", "m.safetensors", "half", "h.npy")
    assert done.stdout == "h.npy: [2] bfloat16, written as float32\n"
    assert np.load("h.npy").tolist() == [1.5, -2.0]


def test_conjugate_views_and_dtypes_that_have_no_float32() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"conj": values.conj(), "pairs": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "c.pt")
    assert run("get", "c.pt", "conj", "c.npy").exit_code == 0
    assert np.load("c.npy").tolist() == [1 - 2j, 3 + 4j]
    done = run("get", "c.pt", "pairs", "p.npy")
    assert (done.exit_code, "float4_e2m1fn_x2" in done.stderr) == (1, True)
    assert "--debug" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("get", "m.safetensors", "count", "s3://bucket/x.npy"), ("inspect", "m.pt", "--html", "s3://bucket/x.npy")],
)
def test_what_is_written_here_only(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert "error: s3://bucket/x.npy: this file is written on this machine only" in done.stderr
    assert "download" not in done.stderr


def test_a_file_that_is_there_stays() -> None:
    Path("w.npy").write_text("mine")
    done = run("get", "m.safetensors", "layer.0.weight", "w.npy")
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert Path("w.npy").read_text() == "mine"
    assert run("get", "m.safetensors", "layer.0.weight", "w.npy", "--overwrite").exit_code == 0


def test_wrong_names_and_targets(project: Path) -> None:
    done = run("get", "m.safetensors", "layer.0.wieght", "w.npy")
    assert done.exit_code == 1
    assert "did you mean 'layer.0.weight'?" in done.stderr
    assert "--key" not in done.stderr
    assert run("get", "m.safetensors", "half", "w.txt").exit_code == 2
    done = run("get", "m.pt", "s", "w.npy")
    assert done.exit_code == 1
    assert "sparse_coo" in done.stderr
    assert sorted(path.name for path in project.iterdir()) == ["m.pt", "m.safetensors"]


def test_remedies_are_those_of_the_command_line() -> None:
    assert "modelstate inspect SOURCE lists the names" in run("get", "m.safetensors", "xyzzy", "out.npy").stderr
    unmatched = run("inspect", "m.safetensors", "--stats", "--filter", "zz*")
    assert unmatched.exit_code == 1
    assert "only=" not in unmatched.stderr


def test_statistics() -> None:
    done = run("inspect", "m.safetensors", "--stats")
    assert done.exit_code == 0
    assert "layer.*.weight (2 ×)" in done.stdout
    assert len(run("inspect", "m.safetensors", "--stats", "--no-fold").stdout.splitlines()) == 9
    rows = run("inspect", "m.safetensors", "--stats", "--depth", "1", "--sort", "size").stdout.splitlines()
    assert rows[4].startswith("layer ")
    found = json.loads(run("inspect", "m.safetensors", "--stats", "--filter", "*.weight", "--json").stdout)
    assert [tensor["max"] for tensor in found["tensors"]] == [5.0, 10.0]


@pytest.mark.parametrize("option", [["--no-fold"], ["--depth", "2"], ["--filter", "*"], ["--sort", "size"]])
def test_options_of_statistics_alone_are_a_wrong_command_line(option: list[str]) -> None:
    assert run("inspect", "m.safetensors", *option).exit_code == 2


def test_an_unknown_order_is_a_wrong_command_line() -> None:
    assert run("inspect", "m.safetensors", "--stats", "--sort", "weight").exit_code == 2
