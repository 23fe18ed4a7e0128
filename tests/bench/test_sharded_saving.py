"""The benchmark of saves on several ranks."""

from pathlib import Path

import pytest

from bench import sharded, sharded_saving, sharded_traffic
from bench.measure import MeasurementError
from bench.sharded_saving import CONTENDERS, OURS, Saved
from tests.bench.forked import run_together_forked


@pytest.mark.slow
def test_a_contender_runs_on_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "run_together", run_together_forked)
    monkeypatch.setattr(sharded_saving, "CONTENDERS", {OURS: CONTENDERS[OURS]})
    saved = sharded_saving.measure(OURS, tmp_path, 64, 2)
    assert saved.disk_bytes > 2 * 8 * 64 * 64
    found = iter([saved, Saved(1.0, 0, 0, 0, "other")])
    monkeypatch.setattr(sharded_saving, "measure", lambda *_: next(found))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(MeasurementError, match="different weights"):
        sharded_saving.rows(2, 64, 2)


@pytest.mark.slow
def test_ranks_send_no_more_than_their_shards_and_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "run_together", run_together_forked)
    stages = sharded_traffic.measure(sharded_traffic.COLUMNS, 2, tmp_path, 64, 2)
    shards = stages[0].facts["shards"]
    assert all(0 < stage.facts["votes"] < 5000 for stage in stages)
    assert shards // 2 < max(stage.facts["all"] for stage in stages) < shards + 5000
