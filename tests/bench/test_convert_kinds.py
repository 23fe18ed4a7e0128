"""The table of docs/converting.md is what `bench.convert_kinds` finds."""

from pathlib import Path

import pytest
import torch

from bench.convert_kinds import HEAD, KINDS, TABLE
from tests.programs import code_of, run_program

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_has_every_kind() -> None:
    assert [line.split(" | ")[0].removeprefix("| ") for line in TABLE.written()] == list(KINDS)


@pytest.mark.slow
def test_the_page_shows_what_is_seen() -> None:
    version = torch.__version__.partition("+")[0]
    if f"Seen on torch {version}." not in TABLE.page.read_text():
        pytest.skip(f"the table was not made with torch {version}")
    done = run_program(code_of(["-m", "bench.convert_kinds"]), cwd=ROOT)  # it makes a process group
    assert done.returncode == 0, done.stderr
    seen = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert seen[0] == f"| {' | '.join(HEAD)} |"
    for now, then in zip(seen[1:], TABLE.written(), strict=True):
        if "not run: needs" not in now and "not run: needs" not in then:
            assert now == then, "python -m bench.convert_kinds --write"


def test_ours_is_never_silently_wrong() -> None:
    for line in TABLE.written():
        ours = line.removesuffix(" |").rpartition(" | ")[2]
        assert ours == "right" or ours.startswith(("refused: ", "not run: ")), line
