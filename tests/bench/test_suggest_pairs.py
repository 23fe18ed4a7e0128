"""The table of docs/suggest.md is what `bench.suggest_pairs` finds."""

import pytest
import torch

from bench.pages import cells
from bench.suggest_pairs import HEAD, PAIRS, TABLE, row


def test_the_page_has_every_pair() -> None:
    assert [tuple(line.removeprefix("| ").split(" | ")[:2]) for line in TABLE.written()] == list(PAIRS)
    assert len(PAIRS) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(("at", "what"), list(enumerate(PAIRS)), ids=[" to ".join(what) for what in PAIRS])
def test_the_page_shows_what_is_seen(at: int, what: tuple[str, str]) -> None:
    version = torch.__version__.partition("+")[0]
    if f"Seen on torch {version}." not in TABLE.page.read_text():
        pytest.skip(f"the table was not made with torch {version}")
    now, then = row(what), TABLE.written()[at]
    if "not run: needs" in now[2] or "not run: needs" in then:
        pytest.skip(now[2])
    assert len(now) == len(HEAD)
    assert cells(now) == then, "python -m bench.suggest_pairs --write"


def test_nothing_is_wrong() -> None:
    for line in TABLE.written():
        *_, loaded = line.removesuffix(" |").split(" | ")
        assert loaded.startswith(("same ", "loads", "not loaded")), line
