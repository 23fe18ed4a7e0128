"""`python -m bench.endurance`, with few requests and swaps."""

import pytest

from bench import endurance
from bench.pages import InPage


@pytest.mark.slow
def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 1, "BLOCK_SECONDS": 0.05, "SWAPS": 60, "SIZED_SWAPS": 3}.items():
        monkeypatch.setattr(endurance, name, value)
    endurance.main(["eager", "exported", "--requests", "300", "--seconds", "60"])
    rows = dict(line.removeprefix("| ").split(" | ", 1) for line in capsys.readouterr().out.splitlines()[2:])
    assert rows["torn answers"].startswith("0 of 3")
    assert rows["versions alive: while a swap tries one; at the end"] == "2; 1 | 2; 1 | 2; 1 |"
    page = InPage("bench/results/endurance.md", "endurance", "<!-- End of the table -->", (), tuple)
    assert [line.removeprefix("| ").split(" | ")[0] for line in page.written()] == list(rows)
