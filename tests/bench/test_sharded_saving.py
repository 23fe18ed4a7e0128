"""The benchmark of saves on several ranks."""

from pathlib import Path

import pytest

from bench import sharded_saving, sharded_traffic
from bench.measure import MeasurementError
from bench.sharded_saving import CONTENDERS, OURS, Saved
from tests.bench.forked import run_forked


def test_the_table_compares_medians_with_ours() -> None:
    other = next(name for name in CONTENDERS if name != OURS)
    results = {
        OURS: [Saved(seconds, 1000, 500, 3000, "x") for seconds in (0.1, 0.2, 0.9)],
        other: [Saved(0.5, 10, 20, 30, "x")],
    }
    assert list(sharded_saving.table_rows(results)) == [
        (OURS, "200.0", "1.00", "1.0 kB", "500 B", "3.0 kB"),
        (other, "500.0", "2.50", "10 B", "20 B", "30 B"),
    ]
    assert {len(row) for row in sharded_saving.table_rows(results)} == {len(sharded_saving.HEAD)}


@pytest.mark.slow
def test_a_contender_runs_on_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_saving, "run", run_forked)
    monkeypatch.setattr(sharded_saving, "CONTENDERS", {OURS: CONTENDERS[OURS]})
    (saved,) = sharded_saving.measured(1, 64, 2, tmp_path)[OURS]
    assert saved.disk_bytes > 2 * 8 * 64 * 64
    found = iter([saved, Saved(1.0, 0, 0, 0, "other")])
    monkeypatch.setattr(sharded_saving, "measure", lambda *_: next(found))
    with pytest.raises(MeasurementError, match="different weights"):
        sharded_saving.measured(2, 64, 2, tmp_path)


@pytest.mark.slow
def test_ranks_send_no_more_than_their_shards_and_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_traffic, "run", run_forked)
    stages = sharded_traffic.measure(sharded_traffic.COLUMNS, 2, tmp_path, 64, 2)
    shards = stages[0].facts["shards"]
    assert all(0 < stage.facts["votes"] < 5000 for stage in stages)
    assert shards // 2 < max(stage.facts["all"] for stage in stages) < shards + 5000
