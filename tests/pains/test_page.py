"""The page that lists all of this names every test file here, and no others."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "pains.md"


def test_the_page_names_them_all() -> None:
    named = re.findall(r"\| `(test_\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in HERE.glob("test_*.py") if path != Path(__file__))


def test_every_row_is_complete() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert all(cells), row
