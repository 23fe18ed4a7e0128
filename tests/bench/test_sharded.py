"""The benchmark of loads on several ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import sharded
from bench.measure import MeasurementError, temporary_folder
from bench.sharded import CONTENDERS, OURS, Loaded
from tests.bench.forked import run_together_forked


@pytest.mark.slow
def test_a_contender_runs_on_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No variable of the environment: the server of forks, which may start here, would keep it for all other tests.
    monkeypatch.setattr(sharded, "temporary_folder", partial(temporary_folder, tmp_path))
    nbytes = sharded.write(tmp_path / "again", 64, 2)
    monkeypatch.setattr(sharded, "run_together", run_together_forked)
    monkeypatch.setattr(sharded, "CONTENDERS", {OURS: CONTENDERS[OURS]})
    found = []

    def kept(*given: Any) -> Loaded:
        found.append(measure(*given))
        return found[-1]

    measure = sharded.measure
    monkeypatch.setattr(sharded, "measure", kept)
    ((name, *_),) = sharded.rows(1, 64, 2)
    assert name == OURS
    (loaded,) = found
    assert nbytes <= loaded.read_bytes <= 1.5 * nbytes  # with what the ranks say to each other
    assert len(set(loaded.digests)) == 4
    several = iter([loaded, Loaded(1.0, 0, 0, 0, ("other",))])
    monkeypatch.setattr(sharded, "measure", lambda *_: next(several))
    with pytest.raises(MeasurementError, match="different weights"):
        sharded.rows(2, 64, 2)
