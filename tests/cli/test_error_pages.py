"""How the pages about errors are found: by their names, by classes, and by the texts of errors."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from modelstate.cli.main import find_pages, named_pages, pages

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("size-mismatch", "size-mismatch"),
        ("Size_Mismatch", "size-mismatch"),
        ("WRONG_SHAPE", "size-mismatch"),
        ("WrongShape", "size-mismatch"),
        ("modelstate.errors.PlacementError", "cannot-be-placed"),
        ("ms.PlanError", "names"),
        ("size mismatch for p: copying a param\n  more: modelstate explain objects", "objects"),
        ("Unexpected KEY(S)  in state_dict", "names"),
        ("attribute 'p' already exists", "argument"),
        ("--strip-prefix", "names"),
    ],
)
def test_by_name_and_by_text(asked: str, name: str) -> None:
    found, is_guess = find_pages(asked)
    assert [page.name for page in found] == [name]
    assert not is_guess


def test_every_name_and_every_page_is_found() -> None:
    for name, page_name in (*named_pages(), *((name, name) for name in pages())):
        assert [page.name for page in find_pages(name)[0]] == [page_name]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("WrongShap", "size-mismatch"),
        ("unknwon-format", "unknown-format"),
        ("ForbidenGlobal", "forbidden-global"),
        ('Missing key(s) in state_dict: "encoder.scale".', "names"),
        ('Unexpected key(s) in state_dict: "encoder.scale".', "names"),
        (
            "size mismatch for layers.3.weight: copying a param with shape torch.Size([7, 5]) from checkpoint, "
            "the shape in current model is torch.Size([7, 6]).",
            "size-mismatch",
        ),
        ("Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()", "left-on-meta"),
    ],
)
def test_the_nearest(asked: str, name: str) -> None:
    found, is_guess = find_pages(asked)
    assert [page.name for page in found] == [name]
    assert is_guess


@pytest.mark.parametrize("asked", ["", " ", "zzzz", "nothing of the kind is anywhere", "\N{GRINNING FACE}"])
def test_nothing(asked: str) -> None:
    assert find_pages(asked) == ((), False)


def test_links_to_other_pages_are_their_names() -> None:
    for page in pages().values():
        assert ".md)" not in page.text


@pytest.mark.slow
def test_a_wheel_has_them(tmp_path: Path) -> None:
    """A wheel is laid out by hand as the project's settings say, and asked from outside the checkout."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    (package,) = settings["wheel"]["packages"]
    shutil.copytree(ROOT / package, tmp_path / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in settings["wheel"]["force-include"].items():
        assert any(source.startswith(included.strip("/")) for included in settings["sdist"]["include"])
        shutil.copytree(ROOT / source, tmp_path / target)
    code = "import sys; sys.path.insert(0, '.'); from modelstate.cli.main import main; main()"
    command = [sys.executable, "-c", code, "explain", "WrongShape"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env={})
    assert done.stdout.rstrip() == pages()["size-mismatch"].text.rstrip()
    (tmp_path / "modelstate" / "pages" / "size-mismatch.md").unlink()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={})
    assert "# size mismatch" not in done.stdout
