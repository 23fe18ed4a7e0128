"""Every code block of the README and of the pages runs."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import modelstate
from tests.programs import RANKS, run_program
from tests.serve.packages import needs_a_compiler

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ERRORS = ROOT / "docs" / "errors"
"""Pages whose code is meant to fail in places: `test_error_pages.py` runs it."""
WITH_CODE = [path for path in PAGES if "```python" in path.read_text() and path.parent != ERRORS]

COMPILED = 'kind="aoti"'
"""What only runs where a C++ compiler is."""

SHARDED = "sharded.md"
"""The page whose blocks are a program for several ranks."""

MODULE = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 10))
"""


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def run_in_order(folder: Path, code: list[str], *arguments: object) -> None:
    ignored = ["lightning.pytorch.utilities._pytree"]  # it calls what torch is going to replace
    done = run_program("\n".join(code), *arguments, cwd=folder, errors=FutureWarning, ignored_warnings=ignored)
    assert done.returncode == 0, done.stderr


def run_commands(folder: Path, commands: list[list[str]]) -> None:
    """Runs what the console script `modelstate` runs."""
    for command in commands:
        done = run_program("from modelstate.cli.main import main; main()", *command[1:], cwd=folder)
        differs = "diff" in command[:2] and len({*command[2:4]}) == 2  # exits as diff does
        assert done.returncode == (1 if differs else 0), done.stderr
        assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in WITH_CODE if path.name != SHARDED], ids=lambda path: path.name)
def test_python_blocks_run_in_their_order(path: Path, tmp_path: Path) -> None:
    """All of them, where a C++ compiler is; elsewhere those that need none."""
    found = blocks(path, "python")
    if COMPILED not in "".join(found):
        run_in_order(tmp_path, found)
        return
    try:
        needs_a_compiler()
    except pytest.skip.Exception:
        found = [block for block in found if COMPILED not in block]
    run_in_order(tmp_path, found)


@pytest.mark.slow
def test_python_blocks_of_several_ranks_run_on_as_many(tmp_path: Path) -> None:
    """As torchrun runs them."""
    page = ROOT / "docs" / SHARDED
    (ranks,) = {int(number) for number in re.findall(r"--nproc_per_node[ \n](\d+)", page.read_text())}
    (tmp_path / "program.py").write_text("\n".join(blocks(page, "python")))
    run_in_order(tmp_path, [RANKS], ranks, "", "program.py")


@pytest.mark.slow
def test_the_quick_start_can_be_pasted_into_an_interpreter(tmp_path: Path) -> None:
    lines = "\n".join(blocks(ROOT / "README.md", "python")).split("\n")
    console = f"import code; console = code.InteractiveConsole(); [console.push(line) for line in {lines}]"
    done = run_program(console, cwd=tmp_path)
    assert "Error" not in done.stderr.replace("PlanError", "")
    assert "torch.Size([8, 10])" in done.stdout


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "models.py").write_text(MODULE)
    run_in_order(tmp_path, blocks(ROOT / "README.md", "python"))
    lines = "".join(blocks(ROOT / "README.md", "sh")).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("modelstate ")]
    names = "inspect plan load suggest convert diff verify store explain"
    assert " ".join(command[1] for command in commands) == names
    run_commands(tmp_path, commands)


@pytest.mark.slow
def test_the_commands_of_their_page_run(tmp_path: Path) -> None:
    page = ROOT / "docs" / "cli.md"
    run_in_order(tmp_path, blocks(page, "python"))
    lines = "".join(blocks(page, "sh")).splitlines()
    assert len(lines) == 13
    run_commands(tmp_path, [shlex.split(line, comments=True) for line in lines])


def test_links_lead_somewhere() -> None:
    dead = []
    for path in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)]+)\)", path.read_text()):
            file, _, anchor = target.partition("#")
            found = path.parent / file if file else path
            if not found.exists():
                dead.append(f"{path.name}: {target}")
            elif anchor:
                headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                if anchor not in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}:
                    dead.append(f"{path.name}: {target}")
    assert not dead


def test_the_reference_has_each_public_name_once() -> None:
    listed = [
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        if page.name != "integrations.md"  # other libraries would be imported
        for name in re.findall(r"^::: modelstate\.([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    rooms = {path.parent.name for path in (ROOT / "src" / "modelstate").glob("*/__init__.py")}
    public = {name for name in modelstate.__all__ if name not in rooms and not hasattr(modelstate.errors, name)}
    for room in rooms:
        names = getattr(importlib.import_module(f"modelstate.{room}"), "__all__", ())
        public |= {f"{room}.{name}" for name in names if name not in modelstate.__all__}
    assert sorted(listed) == sorted(public)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_library_exist(path: Path) -> None:
    names = re.findall(r"`(?:ms|modelstate)\.([A-Za-z_][\w.]*)", path.read_text())
    assert [name for name in names if not exists(name.rstrip("."))] == []


def exists(name: str) -> bool:
    """Whether there is a module, an attribute of it, or a field of a class of this name below `modelstate`."""
    found: object = modelstate
    module = "modelstate"
    for part in name.split("."):
        module += f".{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif part in getattr(found, "__annotations__", {}):
            return True
        else:
            try:
                found = importlib.import_module(module)
            except ImportError:
                return False
    return True
