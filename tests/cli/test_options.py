"""What an error proposes on the command line works there, to the letter."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.cli.command import run, tiny
from tests.programs import run_program

pytestmark = pytest.mark.usefixtures("models")

STATE = tiny().state_dict()


def proposed(text: str) -> list[str]:
    """The options in what an error says to do."""
    remedies = [remedy for line in re.findall(r"^ *to do: (.*)", text, re.MULTILINE) for remedy in line.split("; ")]
    assert remedies, text
    return [remedy.removeprefix("or ") for remedy in remedies if remedy.removeprefix("or ").startswith("--")]


def options_of(remedy: str) -> list[str]:
    """The options of a remedy, without the words behind them."""
    return shlex.split(remedy.partition(", ")[0])


def works_as_proposed(model: str, path: str, *more: str) -> str:
    """Asserts that both commands fail, and work with the one remedy that they propose, which is returned."""
    for command in ("plan", "load"):
        done = run(command, model, path, *more)
        assert done.exit_code == 1, done.output
        (line,) = proposed(done.output)
        again = run(command, model, path, *more, *options_of(line))
        assert again.exit_code == 0, again.output
    return line


@pytest.mark.parametrize(
    ("change", "option"),
    [
        (lambda name: f"model.{name}", "--strip-prefix model."),
        (lambda name: f"-odd name.{name}", "--strip-prefix='-odd name.'"),
    ],
    ids=["a prefix", "an odd prefix"],
)
def test_other_names(change: Any, option: str) -> None:
    save_file({change(name): value for name, value in STATE.items()}, "other.safetensors")
    assert works_as_proposed("MODELS:tiny", "other.safetensors").startswith(option)


def test_names_of_which_nothing_is_proved() -> None:
    """The command that finds rules out is named, and it does."""
    save_file({f"{'ab'[name[0] == '0']}.{name}": value for name, value in STATE.items()}, "other.safetensors")
    done = run("plan", "MODELS:tiny", "other.safetensors")
    assert "modelstate suggest MODEL SOURCE works out rules" in done.stdout
    assert any(line.startswith("--allow-unexpected") for line in proposed(done.stdout))
    assert run("suggest", "MODELS:tiny", "other.safetensors").exit_code == 0


def test_a_prefix_that_the_file_lacks() -> None:
    save_file({name.partition(".")[2]: value for name, value in STATE.items() if name[0] == "0"}, "part.safetensors")
    line = works_as_proposed("MODELS:tiny", "part.safetensors", "--allow-missing", "1.*")
    assert line == "--add-prefix 0."


def test_a_head_of_another_size() -> None:
    save_file({**STATE, "0.weight": torch.ones(5, 4), "0.bias": torch.ones(5)}, "wider.safetensors")
    line = works_as_proposed("MODELS:tiny", "wider.safetensors", "--no-skeleton")
    assert line.startswith("--ignore 0.weight --ignore 0.bias --allow-missing 0.weight --allow-missing 0.bias,")


@pytest.mark.parametrize("prefix", ["", "module."])
def test_what_the_file_lacks_and_has_beyond(prefix: str) -> None:
    save_file({prefix + name: value for name, value in STATE.items() if name != "0.bias"}, "part.safetensors")
    save_file({**STATE, "more": torch.ones(1), "odd[0]": torch.ones(1)}, "more.safetensors")
    lacking = works_as_proposed("MODELS:tiny", "part.safetensors", "--no-skeleton")
    assert lacking.startswith("--allow-missing 0.bias")
    beyond = works_as_proposed("MODELS:tiny", "more.safetensors")
    assert beyond.startswith("--allow-unexpected more")


def test_two_different_values_for_a_tie() -> None:
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    torch.save(state, "untied.pt")
    (line,) = [line for line in proposed(run("plan", "MODELS:tied", "untied.pt").stdout) if "--ignore" in line]
    choices = line.partition(",")[0].split(" or ")
    assert choices == ["--ignore 1.weight", "--ignore 0.weight"]  # which value is right, only the user knows
    for choice in choices:
        assert run("load", "MODELS:tied", "untied.pt", *shlex.split(choice)).exit_code == 0


def test_a_cast_that_loses_something() -> None:
    assert works_as_proposed("MODELS:half", "tiny.safetensors").startswith("--dtype float16")


def test_an_adapter_is_merged_in_python() -> None:
    low = {"0.lora_A.weight": torch.ones(2, 4), "0.lora_B.weight": torch.ones(3, 2)}
    save_file({**STATE, **{f"base_model.model.{name}": value for name, value in low.items()}}, "adapted.safetensors")
    for command in ("plan", "load"):
        done = run(command, "MODELS:tiny", "adapted.safetensors")
        assert done.exit_code == 1
        call = "modelstate.load(model, modelstate.open([BASE, ADAPTER], combine=modelstate.merge.LoRA()))"
        assert f"an adapter is merged in Python: {call}" in done.output


def test_several_state_dicts() -> None:
    torch.save({"model": STATE, "ema": STATE}, "two.pt")
    for command in ("plan", "load"):
        (line,) = proposed(run(command, "MODELS:tiny", "two.pt").stderr)
        assert run(command, "MODELS:tiny", "two.pt", *shlex.split(line)).exit_code == 0
    assert "--key KEY" in run("inspect", "two.pt", "--key", "modle").stderr


@pytest.mark.slow
def test_a_class_that_has_to_be_allowed(models: Path) -> None:
    module = os.environ["MODELS"]
    code = f"""
import torch, {module} as made
torch.manual_seed(0)
torch.save({{"model": made.tiny().state_dict(), "settings": made.Settings()}}, "settings.pt")
"""
    run_program(code, cwd=models)
    for arguments in (["inspect"], ["plan", "MODELS:tiny"], ["load", "MODELS:tiny"]):
        command = [*arguments, "settings.pt", "--key", "model"]
        done = run(*command)
        assert done.exit_code == 1
        trusted, without = proposed(done.stderr)
        assert trusted == f"--allow {module}.Settings if you trust them"
        assert run(*command, "--allow", f"{module}.Settings").exit_code == 0
        assert without == "--skip-forbidden"
        assert run(*command, without).exit_code == 0


def test_one_shard_of_several() -> None:
    Path("shards").mkdir()
    save_torch_state_dict(STATE, "shards", max_shard_size=60)
    shard = next(str(path) for path in sorted(Path("shards").glob("*.safetensors")))
    for command in ("plan", "load"):
        done = run(command, "MODELS:tiny", shard)
        assert done.exit_code == 1
        (index,) = re.findall(r"to do: load the index: SOURCE (\S+)", done.output)
        assert run(command, "MODELS:tiny", index).exit_code == 0


def test_paths_below_the_home_directory(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(models / "home"))
    assert run("convert", "tiny.safetensors", "~/new/tiny.pt").exit_code == 0
    assert run("load", "MODELS:tiny", "~/new/tiny.pt", "--html", "~/page.html").exit_code == 0
    assert {path.name for path in (models / "home").iterdir()} == {"new", "page.html"}
    assert "home/nowhere.pt: there is no such file" in run("inspect", "~/nowhere.pt").stderr


def test_a_store_in_the_place_of_a_file() -> None:
    ms.Store("runs").save(1, {"model": nn.Linear(2, 2)})
    for command in (("inspect", "runs"), ("load", "MODELS:tiny", "runs"), ("convert", "runs", "out.pt")):
        assert "to do: it is a store: give the directory of a step" in run(*command).stderr
    assert run("store", "restore", "runs", "model.pt").exit_code == 0
    assert run("inspect", "model.pt").exit_code == 0


def test_what_must_not_be_trusted_is_not_proposed() -> None:
    class Runs:
        def __reduce__(self) -> object:
            return os.system, ("true",)

    torch.save({"a": Runs()}, "bad.pt")
    done = run("inspect", "bad.pt")
    assert done.exit_code == 1
    assert "--allow" not in done.stderr
    assert "do not trust" in done.stderr


@pytest.mark.parametrize("factory", ["looks", "swallows", "reads_in_a_hook"])
def test_what_fails_without_values_works_with_them(factory: str) -> None:
    save_file(nn.Linear(4, 3).state_dict(), "linear.safetensors")
    path = "tiny.safetensors" if factory == "reads_in_a_hook" else "linear.safetensors"
    for command in ("plan", "load"):
        done = run(command, f"MODELS:{factory}", path)
        assert done.exit_code == 1
        assert "--no-skeleton builds the model with values" in done.stderr
        done = run(command, f"MODELS:{factory}", path, "--no-skeleton")
        assert done.exit_code == 0, done.output


def test_a_model_itself() -> None:
    """It is not called: a module can be, and would run its forward pass."""
    for command in ("plan", "load", "suggest"):
        done = run(command, "MODELS:instance", "tiny.safetensors")
        assert done.exit_code == 0, done.output
    done = run("plan", "MODELS:torch", "tiny.safetensors")
    assert done.exit_code == 2
    assert "a function that returns a torch.nn.Module, or one itself" in " ".join(done.stderr.split())


def test_the_model_initialises_what_the_file_lacks() -> None:
    save_file({name: value for name, value in STATE.items() if name != "0.weight"}, "part.safetensors")
    for command in ("plan", "load"):
        done = run(command, "MODELS:tiny", "part.safetensors")
        assert done.exit_code == 1
        (line,) = proposed(done.output)  # --allow-missing would leave it on meta
        assert options_of(line) == ["--init-missing"]
        done = run(command, "MODELS:tiny", "part.safetensors", "--init-missing")
        assert done.exit_code == 0
        assert "initialised by Linear.reset_parameters: 0.weight" in done.output


def test_a_hook_that_raises() -> None:
    for command in ("plan", "load"):
        done = run(command, "MODELS:hooked", "tiny.safetensors")
        assert done.exit_code == 1
        assert proposed(done.stderr) == ["--debug shows the traceback of the cause"]
        assert "the hook is broken" in run(command, "MODELS:hooked", "tiny.safetensors", "--debug").stderr


@pytest.mark.parametrize("factory", ["ends", "ends_in_a_hook"])
@pytest.mark.parametrize("command", ["plan", "load"])
def test_code_of_the_model_does_not_decide_the_exit_code(factory: str, command: str) -> None:
    done = run(command, f"MODELS:{factory}", "tiny.safetensors")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "SystemExit" in done.stderr
    assert "--debug" in done.stderr
    assert "--debug" not in run(command, f"MODELS:{factory}", "tiny.safetensors", "--debug").stderr


def test_what_a_model_prints_is_not_in_the_output() -> None:
    for command in ("plan", "load"):
        done = run(command, "MODELS:prints", "tiny.safetensors", "--json")
        assert done.stdout.startswith("{")
        assert "loading" in done.stderr


def test_a_device_that_is_not_here() -> None:
    done = run("load", "MODELS:tiny", "tiny.safetensors", "--device", "cuda:77")
    assert done.exit_code == 2
    assert "this machine has no such device: 'cuda:77'" in done.stderr
    assert "give cpu" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--dtype", "int8"), "--dtype must be a floating-point dtype"),
        (("--dtype", "nn"), "--dtype must be a floating-point dtype"),
        (("--device", "meta"), "meta device"),
        (("--device", "nowhere"), "no such device"),
        (("--rename", "("), "PATTERN=REPLACEMENT"),
        (("--rename", "a.*=b"), "'--rename': 'a.*' and 'b': the wildcards of a rule do not correspond; give as many *"),
        (("--rename", "a=a"), "changes nothing"),
        (("--rename-regex", "(=x"), "regular expression"),
        (("--rename-regex", r"a=\9"), "regular expression"),
        (("--ignore", ""), "'--ignore': give at least one character"),
        (("--strip-prefix", ""), "'--strip-prefix': give at least one character"),
        (("--add-prefix", ""), "'--add-prefix': give at least one character"),
    ],
)
def test_a_wrong_command_line_exits_2(option: tuple[str, str], says: str) -> None:
    for command in ("plan", "load"):
        done = run(command, "MODELS:tiny", "tiny.safetensors", *option)
        assert done.exit_code == 2, done.output
        assert says in " ".join(done.stderr.replace("│", "").split())


def test_rules_apply_in_their_order() -> None:
    state = {f"module.net.{name}": value for name, value in STATE.items()}
    save_file(state, "other.safetensors")
    rules = ["--strip-prefix", "module.", "--strip-prefix", "net", "--add-prefix", "a=b", "--rename", "a=b.*=c.*"]
    done = run("load", "MODELS:tiny", "other.safetensors", *rules, "--rename-regex", r"^c\.=")
    assert done.exit_code == 0, done.output


def test_rules_from_a_module() -> None:
    Path("their_rules.py").write_text(
        "import modelstate as ms\n"
        "rules = [ms.rules.Prefix(strip='net.')]\n"
        "schema = ms.rules.Schema('1', [ms.rules.Migration('2', rules)], recognise={'1': lambda names: True})\n"
        "nothing = 7\n"
    )
    save_file({f"net.{name}": value for name, value in STATE.items()}, "old.safetensors")
    save_file({f"net.{name.replace('0.', 'x.')}": value for name, value in STATE.items()}, "older.safetensors")
    for command in ("plan", "load"):
        assert run(command, "MODELS:tiny", "old.safetensors", "--rules", "their_rules:rules").exit_code == 0
        assert run(command, "MODELS:tiny", "old.safetensors", "--rules", "their_rules:schema").exit_code == 0
        more = ["--rules", "their_rules:rules", "--rename", "x.*=0.*"]
        assert run(command, "MODELS:tiny", "older.safetensors", *more).exit_code == 0
        for wrong, says in (
            ("their_rules:nothing", "has no rules"),
            ("their_rules:absent", "it has rules, schema, nothing"),
            ("absent:rules", "cannot import"),
            ("rules", "no rules: give"),
        ):
            done = run(command, "MODELS:tiny", "old.safetensors", "--rules", wrong)
            assert done.exit_code == 2
            assert says in " ".join(done.stderr.replace("│", "").split())
        both = run(command, "MODELS:tiny", "old.safetensors", "--rules", "their_rules:schema", "--ignore", "a")
        assert both.exit_code == 2


def test_a_rule_that_applies_to_nothing_is_a_problem() -> None:
    done = run("load", "MODELS:tiny", "tiny.safetensors", "--strip-prefix", "modul.")
    assert done.exit_code == 1
    assert "modul." in done.stderr


def test_a_file_without_checksums() -> None:
    done = run("verify", "tiny.safetensors")
    assert "to do: modelstate convert SOURCE PATH.safetensors writes a file that keeps checksums" in done.stderr
    assert run("convert", "tiny.safetensors", "new.safetensors").exit_code == 0
    assert run("verify", "new.safetensors").exit_code == 0


def test_what_needs_python_says_so() -> None:
    save_file({name: value.to(torch.int8) for name, value in STATE.items()}, "numbers.safetensors")
    assert "a transform is given in Python" in run("plan", "MODELS:tiny", "numbers.safetensors").stdout


def test_values_that_would_stay_on_meta() -> None:
    done = run("plan", "MODELS:lost", "tiny.safetensors")
    assert done.exit_code == 1
    assert proposed(done.stdout)[0].startswith("--no-skeleton")
