"""Commands import nothing from the working directory, except where an argument names a module there."""

import os
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from tests.commands import run_command
from tests.programs import run_program

pytestmark = pytest.mark.slow

HOSTILE = "import os\nos.write(os.open(os.environ['RAN'], os.O_CREAT | os.O_WRONLY | os.O_APPEND), b'{} ')\n"
NAMED = "plan mine_in_folder:build settings.pt --allow mine_in_folder.Settings --rules mine_in_folder:rules"
LOADED = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
STARTS: list[tuple[str, dict[str, str], list[str]]] = [
    (
        "script",
        {"PYTHONSAFEPATH": "1"},
        [
            "inspect net.safetensors",
            "inspect net.safetensors --stats --html out/page.html",
            "diff net.pt net.safetensors --json",
            "convert net.pt out/other.safetensors --dtype bfloat16",
            "store restore run out/restored.safetensors",
            "explain PlanError",
            "plan mine_in_folder:build net.safetensors --html out/plan.html",
            NAMED,
        ],
    ),
    (
        "script",
        {"PYTHONPATH": os.pathsep + "/nowhere"},
        [
            "plan torch.nn:Identity net.pt",  # an installed package comes before the working directory
            "load mine_in_folder:build net.pt --rules mine_in_folder:rules --json",
            "suggest mine_in_folder:build net.safetensors",
            "inspect settings.pt --allow mine_in_folder.Settings",
        ],
    ),
    ("module", {}, ["inspect net.safetensors --stats --html out/page.html"]),
]
"""How the command is started, its environment, and the commands that one process runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints, a module, and a file for each module of Python and of the installed packages."""
    directory = tmp_path_factory.mktemp("hostile")
    (directory / "probe_of_names.py").write_text(LOADED)
    probe = subprocess.run(
        [sys.executable, "-m", "probe_of_names"], cwd=directory, capture_output=True, text=True, check=True
    )
    (directory / "mine_in_folder.py").write_text(
        "from torch import nn\nrules = []\nbuild = lambda: nn.Linear(2, 2)\nclass Settings: pass\n"
    )
    model = torch.nn.Linear(2, 2)
    save_file(dict(model.state_dict()), directory / "net.safetensors")
    torch.save(model.state_dict(), directory / "net.pt")
    program = "import torch, mine_in_folder as m; torch.save({'w': torch.ones(2), 's': m.Settings()}, 'settings.pt')"
    run_program(program, cwd=directory).check_returncode()
    installed = {module.name for module in pkgutil.iter_modules()} | set(sys.stdlib_module_names)
    # `python -m` loads what the probe has found before any code of a package.
    for name in installed - {"modelstate", *probe.stdout.split()}:
        (directory / f"{name}.py").write_text(HOSTILE.format(name))
    ms.Store(directory / "run").save(1, {"model": model})
    (directory / "out").mkdir()
    return directory


def installed_command(directory: Path) -> list[str]:
    """The command as an installer writes it, from the entry point in `pyproject.toml`, for several commands."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["modelstate"].partition(":")
    script = directory / "modelstate"
    script.write_text(
        f"import sys\nfrom {module} import {function}\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv[1:] = command.split()\n"
        "    try:\n"
        f"        {function}()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code in (None, 0, 1), (command, ended.code)\n"
    )
    return [sys.executable, str(script)]


def modules_run(
    folder: Path, program: Sequence[str], environment: Mapping[str, str], log: Path
) -> tuple[list[str], str]:
    """Runs a program in the folder. Returns the hostile modules that ran, and the output."""
    for path in (folder / "out").iterdir():
        path.unlink()
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    ended = subprocess.run(
        program, cwd=folder, env={**given, "RAN": str(log), **environment}, capture_output=True, text=True
    )
    assert ended.returncode in (0, 1), ended.stderr
    assert "Traceback" not in ended.stderr
    return log.read_text().split() if log.exists() else [], ended.stdout + ended.stderr


@pytest.mark.parametrize(("start", "environment", "commands"), STARTS)
def test_nothing_of_the_working_directory_runs(
    folder: Path, tmp_path: Path, start: str, environment: dict[str, str], commands: list[str]
) -> None:
    module = [sys.executable, "-m", "modelstate", *commands[0].split()]
    program = module if start == "module" else [*installed_command(tmp_path), *commands]
    ran, output = modules_run(folder, program, environment, tmp_path / "ran")
    assert ran == []
    assert "No module named" not in output
    assert "weight" in output
    if NAMED in commands:
        assert "error" not in output.split("settings.pt into Linear")[1]


def test_a_module_that_an_argument_names_is_found_there(folder: Path, tmp_path: Path) -> None:
    command = [*installed_command(tmp_path), NAMED]
    _, output = modules_run(folder, command, {"PYTHONPATH": "."}, tmp_path / "ran")
    assert "settings.pt into Linear" in output
    assert "error" not in output


def test_the_working_directory_may_be_that_of_modelstate(tmp_path: Path) -> None:
    source = Path(ms.__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-m", "modelstate", "--version"], cwd=source, capture_output=True, text=True
    )
    assert ended.stdout.startswith("modelstate "), ended.stderr


def test_the_module_is_named_whose_attribute_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    ended = run_command("plan", "json:build", "x.pt")
    assert ended.exit_code == 2
    assert "'json'" in ended.stderr
    assert os.path.join("json", "__init__.py") in ended.stderr
