import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.cli.command import run, tiny


@pytest.fixture(autouse=True)
def training(models: Path) -> None:
    torch.save({"epoch": 3, "model_state": tiny().state_dict()}, "training.pt")


class TestInspect:
    def test_shows_the_tree(self) -> None:
        done = run("inspect", "tiny.safetensors")
        assert done.exit_code == 0
        assert "7 tensors" in done.stdout
        assert "running_mean" in done.stdout
        assert done.stderr == ""

    def test_works_where_the_working_directory_was_removed(self, models: Path) -> None:
        (models / "gone").mkdir()
        os.chdir(models / "gone")  # the fixture goes back
        (models / "gone").rmdir()
        assert run("inspect", str(models / "tiny.safetensors")).exit_code == 0
        done = run("inspect", "tiny.safetensors")
        assert done.exit_code == 1
        assert "the working directory has been removed" in done.stderr
        done = run("plan", "no_such_module:f", str(models / "tiny.safetensors"))
        assert done.exit_code == 2
        assert "cannot import 'no_such_module'" in done.stderr

    def test_of_a_part(self) -> None:
        done = run("inspect", "training.pt", "--key", "model_state")
        assert done.exit_code == 0
        assert "epoch" not in done.stdout

    def test_json(self) -> None:
        found = json.loads(run("inspect", "training.pt", "--json").stdout)
        assert found["extra"] == {"epoch": 3}
        assert found["totals"]["tensors"] == 7

    @pytest.mark.parametrize(
        ("content", "says"),
        [(None, "missing.pt"), (b"", "empty"), (b"hello", ""), (b"<!DOCTYPE html><html></html>", "web page")],
    )
    def test_wrong_file(self, content: bytes | None, says: str) -> None:
        path = Path("missing.pt")
        if content is not None:
            path.write_bytes(content)
        done = run("inspect", "missing.pt")
        assert done.exit_code == 1
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert says in done.stderr
        assert "Traceback" not in done.stderr

    def test_debug_shows_the_traceback_too(self) -> None:
        done = run("inspect", "missing.pt", "--debug")
        assert done.exit_code == 1
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1] == run("inspect", "missing.pt").stderr.splitlines()[-1]


class TestSuggest:
    @pytest.fixture(autouse=True)
    def renamed(self) -> None:
        state = {f"net.{name}".replace(".1.", ".bn."): tensor for name, tensor in tiny().state_dict().items()}
        save_file(state, "renamed.safetensors")
        torch.save({"epoch": 3, "model_state": state}, "nested.pt")

    def test_prints_python_that_works(self) -> None:
        done = run("suggest", "MODELS:building", "renamed.safetensors")
        assert done.exit_code == 0, done.output
        scope: dict[str, object] = {"ms": ms}
        exec(done.stdout, scope)
        model = tiny()
        assert ms.plan(model, "renamed.safetensors", rules=scope["rules"]).ok
        assert "building" in done.stderr

    def test_nothing_to_do(self) -> None:
        done = run("suggest", "MODELS:tiny", "tiny.safetensors")
        assert done.exit_code == 0
        assert done.stdout.startswith("rules = []")

    def test_what_stays_open_is_exit_code_1(self) -> None:
        done = run("suggest", "MODELS:wide", "renamed.safetensors")
        assert done.exit_code == 1
        assert "0.weight" in done.stdout
        assert done.stderr == ""

    def test_json(self) -> None:
        done = run("suggest", "MODELS:tiny", "nested.pt", "--key", "model_state", "--json")
        assert done.exit_code == 0
        found = json.loads(done.stdout)
        assert found["complete"]
        assert found["explained"] == found["total"] == 7

    def test_a_guess_is_marked(self) -> None:
        state = {name.replace("0.", "alpha."): tensor for name, tensor in tiny().state_dict().items()}
        save_file(state | {"beta": torch.ones(3)}, "guessed.safetensors")
        done = run("suggest", "MODELS:tiny", "guessed.safetensors", "--json")
        assert done.exit_code == 1
        found = json.loads(done.stdout)
        assert not found["complete"]
        assert found["guesses"]
        assert all(rule["guess"] is True for rule in found["rules"])
        assert "ms.rules.Guess(" in run("suggest", "MODELS:tiny", "guessed.safetensors").stdout
        done = run("plan", "MODELS:tiny", "guessed.safetensors", "--suggest", "--allow-unexpected", "beta")
        assert done.exit_code == 0, done.output

    def test_a_plan_with_the_rules_that_it_works_out(self) -> None:
        assert run("plan", "MODELS:tiny", "renamed.safetensors").exit_code == 1
        done = run("plan", "MODELS:tiny", "renamed.safetensors", "--suggest")
        assert done.exit_code == 0, done.output
        rules, plan = done.stdout.split("\n\n", 1)
        scope: dict[str, object] = {"ms": ms}
        exec(rules, scope)
        with ms.skeleton():
            model = tiny()
        assert plan == f"{ms.plan(model, 'renamed.safetensors', rules=scope['rules'])}\n"  # type: ignore[arg-type]

    def test_a_plan_with_other_rules_too(self) -> None:
        done = run("plan", "MODELS:tiny", "renamed.safetensors", "--suggest", "--strip-prefix", "net.")
        assert done.exit_code == 2
        assert "leave out the options that change names" in done.stderr


class TestPlan:
    def test_allow_lists(self) -> None:
        save_file({"0.weight": torch.zeros(3, 4), "more": torch.zeros(1)}, "part.safetensors")
        missing = ["--allow-missing", "0.bias", "--allow-missing", "1.*"]
        unexpected = ["--allow-unexpected", "m*"]
        for command in ("plan", "load"):
            assert run(command, "MODELS:tiny", "part.safetensors", *missing).exit_code == 1
            assert run(command, "MODELS:tiny", "part.safetensors", *unexpected).exit_code == 1
            done = run(command, "MODELS:tiny", "part.safetensors", *missing, *unexpected)
            assert done.exit_code == 0, done.stderr


class TestLoad:
    @pytest.mark.parametrize("path", ["tiny.safetensors", "training.pt"])
    def test_that_fits(self, path: str) -> None:
        done = run("load", "MODELS:tiny", path)
        assert done.exit_code == 0, done.stderr
        assert done.stdout

    def test_dtype(self) -> None:
        done = run("load", "MODELS:tiny", "tiny.safetensors", "--dtype", "bfloat16", "--device", "cpu")
        assert done.exit_code == 0, done.stderr
        assert "bfloat16" in done.stdout

    def test_a_class_attribute_names_a_factory_too(self) -> None:
        save_file(nn.Linear(4, 3).state_dict(), "linear.safetensors")
        assert run("load", "MODELS:Zoo.small", "linear.safetensors").exit_code == 0


class TestExplain:
    def test_all_of_them(self) -> None:
        lines = run("explain").stdout.splitlines()
        assert len(lines) > 15
        assert any(line.split()[:3] == ["size-mismatch", "size", "mismatch"] for line in lines)

    def test_a_typo(self) -> None:
        done = run("explain", "WrongShap")
        assert done.exit_code == 0
        assert done.stdout == run("explain", "size-mismatch").stdout
        assert "no page about 'WrongShap'; the nearest is size-mismatch" in done.stderr

    def test_what_errors_say_works(self) -> None:
        for command in (["inspect", "missing.pt"], ["load", "MODELS:wide", "tiny.safetensors"]):
            (line,) = [line for line in run(*command).stderr.splitlines() if "more: " in line]
            _, _, asked = line.partition("more: modelstate ")
            assert run(*asked.split()).exit_code == 0


class TestModelArgument:
    @pytest.mark.parametrize(
        ("spec", "says", "code"),
        [
            ("MODELS", "package.module:factory", 2),
            ("no_such_module:tiny", "cannot import 'no_such_module'", 2),
            ("broken_zoo:tiny", "there_is_no_such_module", 2),
            ("broken_zoo.py:tiny", "give broken_zoo:tiny", 2),
            ("MODELS:tinny", "no 'tinny'", 2),
            ("MODELS:not_callable", "callable", 2),
            ("MODELS:fails", "LookupError: no such size", 1),
            ("MODELS:number", "gave a value of type int", 1),
            ("MODELS:needs", "must work without arguments", 1),
        ],
    )
    def test_that_gives_no_model(self, spec: str, says: str, code: int) -> None:
        done = run("load", spec, "tiny.safetensors")
        assert (done.exit_code, done.stdout) == (code, "")
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        if code == 1 and spec != "MODELS:number":
            assert "Traceback" in run("load", spec, "tiny.safetensors", "--debug").stderr

    def test_import_error_with_debug_shows_where(self) -> None:
        done = run("load", "broken_zoo:tiny", "tiny.safetensors", "--debug")
        assert done.exit_code == 2
        assert "broken_zoo.py" in done.stderr


@pytest.mark.slow
def test_in_a_pipe_that_closes_early(models: Path) -> None:
    save_file({f"a.{i}.{i}": torch.zeros(i + 1) for i in range(3000)}, models / "many.safetensors")
    command = f"{sys.executable} -m modelstate inspect many.safetensors | head -n 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert len(done.stdout.splitlines()) == 3
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("inspect nothing.pt 2>&-", 1, "", ""),
        ("explain >/dev/full", 1, "", "error: standard output: the output cannot be written"),
        ("diff tiny.safetensors tiny.safetensors >/dev/full", 2, "", "error: standard output: the output cannot be"),
        ("store --help >/dev/full", 1, "", "error: standard output: the output cannot be written"),
        ("inspect tiny.safetensors >&-", 2, "", "error: standard output is closed"),
        ("inspect $'caf\\xe9.safetensors'", 0, "caf\\udce9.safetensors\n", ""),
    ],
)
def test_streams_that_do_not_take_all_text(models: Path, command: str, code: int, out: str, err: str) -> None:
    save_file(tiny().state_dict(), models / "named.safetensors")
    os.rename("named.safetensors", os.fsdecode(b"caf\xe9.safetensors"))
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m modelstate {command}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert (done.returncode, done.stdout[: len(out)], done.stderr[: len(err)]) == (code, out, err)
    assert bool(done.stdout) == bool(out)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_no_colours_and_no_wrapping_in_a_pipe(models: Path) -> None:
    name = "a_very_long_name" * 20
    save_file({name: torch.zeros(3), f"{name}.b.c": torch.zeros(3)}, models / "long.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "modelstate", "inspect", "long.safetensors"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "40"},
    )
    assert "\x1b" not in done.stdout
    assert any(name in line and "float32" in line for line in done.stdout.splitlines())


def test_directories_on_the_way_to_the_target_are_made(models: Path) -> None:
    done = run("convert", "tiny.safetensors", "new/folder/tiny.safetensors", "--dtype", "bf16", "--json")
    fields = json.loads(done.stdout)
    assert fields["path"].endswith("tiny.safetensors")
    assert fields["tensors"] == len(ms.open(models / "new/folder/tiny.safetensors"))


def test_verify_prints_json(models: Path) -> None:
    ms.save(tiny(), models / "saved.safetensors")
    fields = json.loads(run("verify", "saved.safetensors", "--json").stdout)
    assert fields["algorithms"] == ["xxh3-128"]


def test_a_load_compares_digests_where_it_is_asked_to(models: Path) -> None:
    ms.save(tiny(), models / "saved.safetensors")
    model = f"{os.environ['MODELS']}:tiny"
    assert json.loads(run("load", model, "saved.safetensors", "--verify", "--json").stdout)["verified_bytes"]
    with open("saved.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    done = run("load", model, "saved.safetensors", "--verify")
    assert done.exit_code == 1
    assert "checksum" in done.stderr


class TestManners:
    def test_json_has_bytes_and_seconds(self, tmp_path: Path) -> None:
        calls = (
            ("inspect", "tiny.safetensors"),
            ("inspect", "tiny.safetensors", "--stats"),
            ("plan", "MODELS:tiny", "tiny.safetensors"),
            ("load", "MODELS:tiny", "tiny.safetensors"),
            ("convert", "tiny.safetensors", str(tmp_path / "new.safetensors")),
            ("verify", "training.pt"),
            ("diff", "tiny.safetensors", "tiny.safetensors"),
        )
        for call in calls:
            done = run(*call, "--json")
            assert done.exit_code == 0, done.output
            text = done.stdout
            assert isinstance(json.loads(text), dict)
            assert "nbytes" not in text
            assert "bytes" in text

    def test_paths_are_as_they_were_given(self, tmp_path: Path) -> None:
        done = run("inspect", "missing.safetensors")
        assert done.stderr.startswith("error: missing.safetensors: there is no such file")
        assert run("inspect", "./missing.pt").stderr.startswith("error: ./missing.pt: ")
        assert run("convert", "tiny.safetensors", "sub/new.safetensors").stdout.startswith("sub/new.safetensors: ")
        assert run("convert", "tiny.safetensors", "sub/new.safetensors").stderr.startswith("error: sub/new.safet")
        absolute = os.path.abspath("missing.safetensors")
        assert run("inspect", absolute).stderr.startswith(f"error: {absolute}: ")

    def test_directories_of_a_page_are_made(self) -> None:
        assert run("inspect", "tiny.safetensors", "--html", "pages/new/tiny.html").exit_code == 0
        assert os.path.isfile("pages/new/tiny.html")

    @pytest.mark.parametrize("target", ["tiny.safetensors/page.html", "."])
    def test_a_page_that_cannot_be_written(self, target: str) -> None:
        done = run("inspect", "tiny.safetensors", "--html", target)
        assert done.exit_code == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def test_arguments_in_the_wrong_order(self) -> None:
        done = run("plan", "tiny.safetensors", "MODELS:tiny")
        assert done.exit_code == 2
        assert "the model comes first" in done.stderr


def test_names_in_a_plan_cannot_control_the_terminal() -> None:
    save_file({"\x1b[31mred": torch.ones(2)}, "red.safetensors")
    done = run("plan", "MODELS:tiny", "red.safetensors", color=True)
    assert done.exit_code == 1
    assert r"\x1b[31mred [2]" in done.stdout
