"""`modelstate diff` and `modelstate store diff`."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.cli.command import run


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    state = {f"layer.{index}.weight": torch.randn(4, 4) for index in range(5)}
    save_file(state, "a.safetensors")
    save_file({name: tensor + int(name[6] in "13") for name, tensor in state.items()}, "b.safetensors")
    torch.save({"model_state": state, "ema": state, "step": 3}, "training.pt")
    return tmp_path


def test_equal_checkpoints_exit_with_0() -> None:
    done = run("diff", "a.safetensors", "a.safetensors")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("a.safetensors and a.safetensors: equal")


def test_differing_checkpoints_exit_with_1() -> None:
    done = run("diff", "a.safetensors", "b.safetensors")
    assert (done.exit_code, done.stderr) == (1, "")
    assert "3 equal, 2 changed" in done.stdout
    assert "layer.*.weight (2 ×)" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("diff", "a.safetensors"),
        ("diff", "a.safetensors", "b.safetensors", "--top", "0"),
        ("diff", "a.safetensors", "b.safetensors", *["--key", "a"] * 3),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_missing_file_is_an_error() -> None:
    done = run("diff", "a.safetensors", "missing.safetensors")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "missing.safetensors" in done.stderr


def test_a_part_of_each_side() -> None:
    assert run("diff", "training.pt", "training.pt", "--key", "model_state", "--key", "ema").exit_code == 0
    assert run("diff", "training.pt", "training.pt", "--key", "model_state").exit_code == 0
    done = run("diff", "training.pt", "a.safetensors", "--key", "nothing")
    assert done.exit_code == 2
    assert "give --key twice" in done.stderr
    assert run("diff", "training.pt", "a.safetensors", "--key", "ema", "--key", "").exit_code == 0


@pytest.mark.parametrize("arguments", [("training.pt", "a.safetensors"), ("a.safetensors", "training.pt")])
def test_the_remedy_for_several_state_dicts_names_the_side(arguments: tuple[str, str]) -> None:
    done = run("diff", *arguments)
    assert done.exit_code == 2
    keys = shlex.split(done.stderr.partition("to do: ")[2].splitlines()[0])
    assert run("diff", *arguments, *keys).exit_code == 0


def test_a_page_that_cannot_be_written_does_not_hide_the_result() -> None:
    for page in ("a.safetensors/diff.html", "."):
        done = run("diff", "a.safetensors", "b.safetensors", "--html", page)
        assert done.exit_code == 2
        assert "3 equal, 2 changed" in done.stdout
        assert "to do: give" in done.stderr


def test_rules() -> None:
    state = torch.load("training.pt")["ema"]
    save_file({name.replace("layer", "blocks"): tensor for name, tensor in state.items()}, "renamed.safetensors")
    assert run("diff", "a.safetensors", "renamed.safetensors", "--rename", "layer.*=blocks.*").exit_code == 0
    refused = run("diff", "a.safetensors", "renamed.safetensors")
    assert refused.exit_code == 2
    assert "no name in common" in refused.stderr
    assert "to do: --key twice" in refused.stderr


def test_what_is_shown() -> None:
    unfolded = run("diff", "a.safetensors", "b.safetensors", "--no-fold", "--top", "1")
    assert "and 1 more rows" in unfolded.stdout
    assert "more rows" not in run("diff", "a.safetensors", "b.safetensors", "--no-fold", "--all").stdout
    assert run("diff", "a.safetensors", "b.safetensors", "--no-values").exit_code == 0
    assert run("diff", "a.safetensors", "b.safetensors", "--only", "layer.0.*").exit_code == 0
    found = json.loads(run("diff", "a.safetensors", "b.safetensors", "--json").stdout)
    assert found["totals"]["statuses"] == {"equal": 3, "changed": 2}


def test_steps_of_a_store() -> None:
    model = nn.Linear(3, 3)
    with ms.Store("run") as store:
        for step in (1, 2):
            store.save(step, {"model": model, "step": step})
    done = run("store", "diff", "run", "1", "2")
    assert done.exit_code == 1
    assert "step  1  ->  2" in done.stdout
    assert run("store", "diff", "run", "1", "2", "--only", "model.*").exit_code == 0
    assert run("store", "diff", "run", "2", "2").exit_code == 0
    assert run("store", "diff", "run", "2", "3").exit_code == 2
    assert run("store", "diff", "a.safetensors", "1", "2").exit_code == 2


def test_all_objects_of_two_steps_are_compared(project: Path) -> None:
    state = {"w": torch.ones(2, 2), "b": torch.ones(3)}
    with ms.Store("run") as store:
        store.save(1, {"model": state, "ema": {"x": torch.zeros(5)}})
        store.save(2, {"model": state})
    done = run("store", "diff", "run", "1", "2")
    assert done.exit_code == 1
    assert "ema.x" in done.stdout
    assert str(project) not in done.stdout
    assert str(project) not in run("store", "diff", "run", "1", "2", "--json").stdout


def test_a_page_replaces_pages_only(project: Path) -> None:
    content = (project / "a.safetensors").read_bytes()
    done = run("diff", "a.safetensors", "b.safetensors", "--html", "a.safetensors")
    assert done.exit_code == 2
    assert "web pages only" in done.stderr
    assert (project / "a.safetensors").read_bytes() == content
    assert [run("diff", "a.safetensors", "b.safetensors", "--html", "a.html").exit_code for _ in "12"] == [1, 1]
