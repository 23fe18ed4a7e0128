"""The targets of the Makefile do what they say. `make test` itself runs setup, lint, types and pytest.

The targets run in a copy of the checkout, with the virtual environment of these tests, to which nothing is installed.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAMPS = ("python", ".torch", ".test", ".real", ".demo", ".serve", ".docs", ".bench")
"""What says that something is installed."""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, with the bytecode of its modules."""
    folder = tmp_path / "checkout"
    left_out = shutil.ignore_patterns(".git", ".venv*", "dist", "*.pyc.*", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def make(folder: Path, target: str, *options: str) -> subprocess.CompletedProcess[str]:
    venv = sys.prefix
    old = [f"--old-file={venv}/{'bin/' if name == 'python' else ''}{name}" for name in STAMPS]
    command = ["make", f"VENV={venv}", "PIP=false", *old, target, *options]
    # The code of the copy comes before that of an editable installation.
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_every_target_is_phony_and_make_test_runs_all_checks() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(re.findall(r"^([a-z-]+):", text, re.MULTILINE)) == set(phony.split())
    dependencies = dict(re.findall(r"^(test|lint|types|pytest): (.*)$", text, re.MULTILINE))
    assert dependencies == {"test": "lint types pytest", "lint": "setup", "types": "setup", "pytest": "setup"}


@pytest.mark.slow
def test_fast_tests_leave_out_the_slow_ones(checkout: Path) -> None:
    folder = checkout / "tests" / "of_this_test"
    folder.mkdir()
    some = "import pytest\ndef test_one(): pass\n@pytest.mark.slow\ndef test_other(): assert False\n"
    few = '@pytest.mark.slow_except(2)\n@pytest.mark.parametrize("case", range(9))\ndef test_few(case): pass\n'
    (folder / "test_some.py").write_text(some + few)
    (folder / "test_all.py").write_text(
        "import pytest\npytestmark = pytest.mark.slow\nraise AssertionError('imported')"
    )
    done = make(checkout, "test-fast", f"TESTS={folder.relative_to(checkout)}", "JOBS=0")
    assert "3 passed, 8 deselected" in done.stdout


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(checkout: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: run make setup")
    make(checkout, "docs")
    assert (checkout / "dist" / "site" / "training_loops" / "index.html").exists()


@pytest.mark.slow
def test_clean_removes_what_was_made_and_nothing_else(checkout: Path) -> None:
    before = {path.relative_to(checkout) for path in checkout.rglob("*")}
    for name in (".venv/bin", "dist/site", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"):
        (checkout / name).mkdir(parents=True)
    done = subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.relative_to(checkout) for path in checkout.rglob("*")} == before
