"""Every kind of bad weights into every kind of target, each in a process of its own: none of them ends it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.bad_weights import BAD, CRASH
from tests.serve.targets import KINDS

ROOT = Path(__file__).resolve().parent.parent.parent


def outcomes(kind: str, mode: str, folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve.bad_weights", kind, mode, str(folder), *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mode", ["available", "in_place"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_is_refused_while_requests_go_on(kind: str, mode: str, tmp_path: Path) -> None:
    found = outcomes(kind, mode, tmp_path)
    assert {name: one["outcome"] for name, one in found.items()} == {name: bad.refused for name, bad in BAD.items()}
    for name, one in found.items():
        assert BAD[name].says in one["text"], name
        assert one["version"] == 1, name
        assert one["seen"] == [1], name
        assert one["wrong"] == 0, (name, one["errors"])


def test_what_ends_a_process_has_its_name(tmp_path: Path) -> None:
    """The test above could not pass by accident."""
    found = outcomes("eager", "available", tmp_path, "NaN", CRASH, "infinity")
    assert found[CRASH] == {"outcome": "the process ended with -11"}
    assert found["infinity"]["outcome"] == "NonFiniteWeightError"
