"""What is measured of programs that serve."""

import pytest

from bench import live, pages, run
from bench.live import MEMCPY
from bench.other import Others
from bench.run import Runner
from tests.bench.forked import run_forked


@pytest.mark.slow
def test_the_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", run_forked)
    few = ["modelstate.Live, eager", "load_state_dict, in place"]
    monkeypatch.setattr(live, "WAYS", {name: live.WAYS[name] for name in few})
    monkeypatch.setattr(live, "KINDS", ("eager",))
    torn, swaps, requests = Others(Runner(tmp_path_factory.mktemp("live"), 1, quick=True)).live()
    assert torn.rows == few
    ours = torn.at(few[0])
    assert ours is not None
    assert (ours.facts["torn"], ours.facts["mislabelled"], ours.facts["back"], ours.facts["errors"]) == (0, 0, 0, 0)
    assert swaps.rows[0] == MEMCPY
    assert requests.rows[0] == "the module"
    for one in (torn, swaps, requests):
        assert f"## {one.title}" in pages.section(one)
        assert not one.absent
    assert "| 0 | 0.0% | 0 | 0 | 0 |" in pages.section(torn)
