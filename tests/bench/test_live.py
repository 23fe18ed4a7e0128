"""What is measured of programs that serve."""

import pytest

from bench import tables, torture
from bench.live import MEMCPY
from bench.live_sections import measure
from bench.run import Runner
from bench.sizes import QUICK, Sizes
from tests.serve.packages import needs_a_compiler


@pytest.mark.slow
def test_the_readers_see_what_is_torn() -> None:
    for _ in range(5):  # which requests tear is up to the scheduler
        seen, swaps = torture.torture("load_state_dict, in place", 0.5)
        assert seen.requests > 20
        assert swaps > 2
        assert not seen.errors
        if seen.torn:
            break
    assert seen.torn


@pytest.mark.slow
def test_packages_are_swapped_in_every_way() -> None:
    needs_a_compiler()
    for way in (name for name in torture.WAYS if "aoti" in name or "AOTInductor" in name):
        request, swap = torture.WAYS[way]()
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

    def request() -> tuple[int, torture.torch.Tensor]:
        version, value = next(answers)
        return version, torture.torch.full((2,), value)

    assert torture.read(request, Ended()) == (5, 0, 1, 1, 1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["modelstate.Live, eager", "load_state_dict, in place"]
    monkeypatch.setattr(torture, "WAYS", {name: torture.WAYS[name] for name in few})
    monkeypatch.setattr(torture, "KINDS", ("eager",))
    sizes = Sizes(matrices=QUICK.matrices, torture_seconds=QUICK.torture_seconds)
    torn, swaps, requests = measure(Runner(tmp_path_factory.mktemp("live"), 1, quick=True), sizes)
    assert torn.rows == few
    ours = torn.at(few[0])
    assert ours is not None
    assert (ours.facts["torn"], ours.facts["mislabelled"], ours.facts["back"], ours.facts["errors"]) == (0, 0, 0, 0)
    assert swaps.rows[0] == MEMCPY
    assert requests.rows[0] == "the module"
    for one in (torn, swaps, requests):
        assert f"## {one.title}" in tables.section(one)
        assert not one.absent
    assert "| 0 | 0.0% | 0 | 0 | 0 |" in tables.section(torn)
