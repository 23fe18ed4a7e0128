"""The benchmark of loads on several ranks."""

from pathlib import Path

import pytest

from bench import sharded
from bench.measure import MeasurementError
from bench.sharded import CONTENDERS, OURS, Loaded
from tests.bench.forked import run_forked


def test_the_table_compares_medians_with_ours() -> None:
    other = next(name for name in CONTENDERS if name != OURS)
    results = {
        OURS: [Loaded(seconds, 1000, 2000, 3000, ("x",)) for seconds in (0.1, 0.2, 0.9)],
        other: [Loaded(0.5, 10, 20, 30, ("x",))],
    }
    assert list(sharded.table_rows(results)) == [
        (OURS, "200.0", "1.00", "1.0 kB", "2.0 kB", "3.0 kB"),
        (other, "500.0", "2.50", "10 B", "20 B", "30 B"),
    ]
    assert {len(row) for row in sharded.table_rows(results)} == {len(sharded.HEAD)}


@pytest.mark.slow
def test_a_contender_runs_on_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = sharded.write(tmp_path / "again", 64, 2)
    monkeypatch.setattr(sharded, "run", run_forked)
    monkeypatch.setattr(sharded, "CONTENDERS", {OURS: CONTENDERS[OURS]})
    (loaded,) = sharded.measured(1, 64, 2, tmp_path)[OURS]
    assert nbytes <= loaded.read_bytes <= 1.5 * nbytes  # with what the ranks say to each other
    assert len(set(loaded.digests)) == 4
    found = iter([loaded, Loaded(1.0, 0, 0, 0, ("other",))])
    monkeypatch.setattr(sharded, "measure", lambda *_: next(found))
    with pytest.raises(MeasurementError, match="different weights"):
        sharded.measured(2, 64, 2, tmp_path / "new")
