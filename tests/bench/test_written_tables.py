"""Tables in docs/ and bench/results/ are what the programs find that have written them."""

from pathlib import Path

import pytest
import torch

from bench import convert_kinds, endurance, suggest_pairs
from bench.pages import InPage, cells
from tests.programs import code_of, run_program

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS, PAIRS = convert_kinds.TABLE, suggest_pairs.TABLE


def need_this_torch(table: InPage) -> None:
    version = torch.__version__.partition("+")[0]
    if f"Seen on torch {version}." not in table.page.read_text():
        pytest.skip(f"the table was not made with torch {version}")


def first_cells(table: InPage, count: int = 1) -> list[tuple[str, ...]]:
    return [tuple(line.removeprefix("| ").split(" | ")[:count]) for line in table.written()]


def test_the_pages_have_every_row() -> None:
    assert first_cells(KINDS) == [(kind,) for kind in convert_kinds.KINDS]
    assert first_cells(PAIRS, 2) == list(suggest_pairs.PAIRS)
    assert len(suggest_pairs.PAIRS) >= 12


@pytest.mark.slow
def test_the_page_shows_what_is_seen_of_conversions() -> None:
    need_this_torch(KINDS)
    done = run_program(code_of(["-m", "bench.convert_kinds"]), cwd=ROOT)  # it makes a process group
    assert done.returncode == 0, done.stderr
    seen = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert seen[0] == f"| {' | '.join(convert_kinds.HEAD)} |"
    for now, then in zip(seen[1:], KINDS.written(), strict=True):
        if "not run: needs" not in now and "not run: needs" not in then:
            assert now == then, "python -m bench.convert_kinds --write"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "what"), list(enumerate(suggest_pairs.PAIRS)), ids=[" to ".join(what) for what in suggest_pairs.PAIRS]
)
def test_the_page_shows_what_is_seen_of_suggestions(at: int, what: tuple[str, str]) -> None:
    need_this_torch(PAIRS)
    now, then = suggest_pairs.row(what), PAIRS.written()[at]
    if "not run: needs" in now[2] or "not run: needs" in then:
        pytest.skip(now[2])
    assert len(now) == len(suggest_pairs.HEAD)
    assert cells(now) == then, "python -m bench.suggest_pairs --write"


def test_nothing_is_silently_wrong() -> None:
    for table, right in ((KINDS, ("right", "refused: ", "not run: ")), (PAIRS, ("same ", "loads", "not loaded"))):
        for line in table.written():
            assert line.removesuffix(" |").rpartition(" | ")[2].startswith(right), line


@pytest.mark.slow
def test_the_table_of_endurance(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 1, "BLOCK_SECONDS": 0.05, "SWAPS": 60, "SIZED_SWAPS": 3}.items():
        monkeypatch.setattr(endurance, name, value)
    endurance.main(["eager", "exported", "--requests", "300", "--seconds", "60"])
    rows = dict(line.removeprefix("| ").split(" | ", 1) for line in capsys.readouterr().out.splitlines()[2:])
    assert [cell.split(" of ")[0] for cell in rows["torn answers"].split(" | ")] == ["0", "0", "0 |"]
    assert rows["versions alive: while a swap tries one; at the end"] == "2; 1 | 2; 1 | 2; 1 |"
    page = InPage("bench/results/endurance.md", "endurance", "<!-- End of the table -->", (), tuple)
    assert first_cells(page) == [(row,) for row in rows]
