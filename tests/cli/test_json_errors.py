"""With `--json`, an error is one JSON value on stdout, with the exit code that it has without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from tests.cli.command import run

FIELDS = {"error", "what", "where", "expected", "found", "to_do", "page"}


@pytest.fixture(autouse=True)
def checkpoints(models: Path) -> None:
    save_file({"w": torch.ones(2)}, "other.safetensors")
    Path("damaged.safetensors").write_bytes(b"\xff" * 20)
    Path("taken.pt").write_bytes(b"")
    ms.Store("run").save(1, {"model": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("inspect nowhere.pt", "SourceNotFoundError"),
        ("inspect damaged.safetensors", "UnknownFormatError"),
        ("verify other.safetensors", "ChecksumError"),
        ("diff nowhere.pt other.safetensors", "SourceNotFoundError"),
        ("convert other.safetensors taken.pt", "TargetExistsError"),
        ("load MODELS:tiny other.safetensors", "PlanError"),
        ("load MODELS:fails other.safetensors", "ModelCodeError"),
        ("plan MODELS:number other.safetensors", "ModelCodeError"),
        ("suggest MODELS:tiny nowhere.pt", "SourceNotFoundError"),
        ("store ls nowhere", "SourceNotFoundError"),
        ("store ls other.safetensors", "SourceTypeError"),
        ("store verify run --step 7", "StepNotFoundError"),
        ("store diff run 1 7", "StepNotFoundError"),
        ("inspect", "UsageError"),
        ("nosuch", "UsageError"),
        ("inspect other.safetensors --filter weight", "UsageError"),
        ("convert other.safetensors new.xyz", "UsageError"),
        ("convert other.safetensors new.pt --shard-size 0", "UsageError"),
        ("plan no_such_module:f other.safetensors", "UsageError"),
        ("store prune run", "UsageError"),
        ("explain zzzzzzzzz", "UsageError"),
    ],
)
def test_an_error_is_one_value(command: str, error: str) -> None:
    arguments = command.split()
    plain = run(*arguments)
    done = run(*arguments, "--json")
    value: dict[str, Any] = json.loads(done.stdout)
    assert value.keys() == FIELDS
    assert value["error"] == error
    assert value["what"]
    assert done.stdout.count("\n") == 1
    assert done.exit_code == plain.exit_code != 0
    assert plain.stdout == ""
    assert "Error:" not in done.stderr
    assert "error:" not in done.stderr


def test_the_fields_are_those_of_the_error() -> None:
    value = json.loads(run("inspect", "nowhere.pt", "--json").stdout)
    with pytest.raises(ms.errors.SourceNotFoundError) as caught:
        ms.open("nowhere.pt")
    error = caught.value
    assert (value["what"], value["where"], value["found"]) == (error.what, error.where, error.found)
    assert (value["to_do"], value["page"], value["expected"]) == (error.remedy, error.page, None)


def test_what_to_do_is_an_option_of_the_command() -> None:
    value = json.loads(run("convert", "other.safetensors", "taken.pt", "--json").stdout)
    assert "--overwrite" in value["to_do"]
    value = json.loads(run("inspect", "--json").stdout)
    assert value["to_do"] == "modelstate inspect --help"


def test_an_unexpected_error_and_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: BaseException) -> Any:
        def inspect(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(ms, "inspect", inspect)
        return run("inspect", "other.safetensors", "--json")

    done = fails(ZeroDivisionError("odd"))
    value = json.loads(done.stdout)
    assert (done.exit_code, value["error"], value["what"]) == (1, "ZeroDivisionError", "odd")
    assert "--debug" in value["to_do"]
    done = fails(KeyboardInterrupt())
    assert (done.exit_code, json.loads(done.stdout)["error"]) == (130, "KeyboardInterrupt")
    done = fails(PermissionError(13, "Permission denied"))
    assert (done.exit_code, json.loads(done.stdout)["error"]) == (1, "PermissionError")


def test_a_traceback_goes_to_stderr() -> None:
    done = run("inspect", "nowhere.pt", "--json", "--debug")
    assert json.loads(done.stdout)["error"] == "SourceNotFoundError"
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("command", ["", "inspect", "store", "store ls", "plan", "explain"])
def test_a_short_option_shows_the_help(command: str) -> None:
    long, short = (run(*command.split(), option) for option in ("--help", "-h"))
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "Usage: modelstate" in short.stdout
