"""Every kind of bad weights into every kind of target, each in a process of its own: none of them ends it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program
from tests.serve.bad_weights import BAD, CRASH, cases
from tests.serve.targets import KINDS

pytestmark = pytest.mark.slow


def outcomes(kind: str, folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    code = "import sys; from pathlib import Path; from tests.serve.bad_weights import main; "
    code += "main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])"
    done = run_program(code, kind, folder, *names, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_refused_while_requests_go_on(kind: str, tmp_path: Path) -> None:
    found = outcomes(kind, tmp_path)
    for name in cases(kind):
        bad, outcome = BAD[name], found.pop(name)
        assert outcome["outcome"] == bad.refused, (name, outcome["text"])
        assert bad.says in outcome["text"], name
        assert outcome["version"] == 1, name
        assert outcome["seen"] == [1], name
        assert outcome["wrong"] == 0, (name, outcome["errors"])
    assert not found


def test_what_ends_a_process_has_its_name(tmp_path: Path) -> None:
    """The test above could not pass by accident."""
    found = outcomes("eager", tmp_path, "NaN", CRASH)
    assert found[CRASH] == {"outcome": "the process ended with -11"}
    assert found["NaN"]["outcome"] == "CanaryError"
