"""What is measured of programs that serve."""

import pytest

from bench import live, pages, run
from bench.live import MEMCPY
from bench.other import Others
from bench.run import Runner
from tests.bench.forked import run_forked
from tests.serve.packages import package_of


@pytest.mark.slow
def test_the_readers_see_what_is_torn() -> None:
    for _ in range(5):  # which requests tear is up to the scheduler
        seen, swaps = live.torture("load_state_dict, in place", 0.5)
        assert seen.requests > 20
        assert swaps > 2
        assert not seen.errors
        if seen.torn:
            break
    assert seen.torn


@pytest.mark.slow
def test_packages_are_swapped_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "target_of", lambda kind, module, x: package_of(module.eval(), x))
    for way in (name for name in live.WAYS if "aoti" in name or "AOTInductor" in name):
        request, swap = live.WAYS[way]()
        for k in (2, 3):
            swap(k)
            assert bool((request()[1] == k).all()), way


def test_the_readers_see_errors_and_versions_that_are_not_named() -> None:
    class Ended:
        left = 5

        def is_set(self) -> bool:
            self.left -= 1
            return self.left < 0

    answers = iter([(2, 2.0), (3, 2.0), (2, 2.0), (4, 4.0)])

    def request() -> tuple[int, live.torch.Tensor]:
        version, value = next(answers)
        return version, live.torch.full((2,), value)

    assert live.read(request, Ended()) == (5, 0, 1, 1, 1)  # type: ignore[arg-type]


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
