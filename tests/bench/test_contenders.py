"""The harness itself: every contender loads the right weights, and the page is what was measured."""

from pathlib import Path

import pytest
import torch

from bench import models, tables
from bench.__main__ import main
from bench.contenders import MATERIALISED, META, Case
from modelstate.cli.measure import Stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("bench")
    models.write("tiny", models.QUICK, made)
    models.write("large", models.QUICK, made)
    return made


@pytest.mark.parametrize("case", ["tiny", "large"])
@pytest.mark.parametrize(
    ("target", "name"), [("meta", name) for name in META] + [("materialised", name) for name in MATERIALISED]
)
def test_every_contender_gives_the_model_of_the_file(target: str, name: str, case: str, folder: Path) -> None:
    given = Case(case, models.QUICK, folder)
    if "accelerate" in name:
        pytest.importorskip("accelerate")
    model = (META if target == "meta" else MATERIALISED)[name](given)()
    expected = torch.load(given.torch_file, weights_only=True)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_a_sparse_file_takes_no_space(tmp_path: Path) -> None:
    models.write_sparse(10**9, tmp_path)
    for path in tmp_path.iterdir():
        assert path.stat().st_size > 9 * 10**8
        assert path.stat().st_blocks * 512 < 10**7


def test_a_run_prints_ratios_and_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "files").mkdir()
    main(["--quick", "--only", "state-dict", "--folder", str(tmp_path / "files"), "--out", str(page)])
    assert "| modelstate.load_state_dict |" in capsys.readouterr().out
    assert "## load_state_dict by the number of modules" in page.read_text()
    assert "`python -m bench --quick --runs 1 --only state-dict`" in page.read_text()
    assert not list((tmp_path / "files").iterdir())


def test_ratios_are_to_the_first_row() -> None:
    def run(ready: float, forward: float, weights: str) -> dict[str, Stage]:
        check = Stage(9.0, 0, 0, {"weights": weights})
        return {"ready": Stage(ready, 1000, 2_000_000, {}), "forward": Stage(forward, 0, 0, {}), "check": check}

    results = {"ours": [run(0.1, 0.2, "x")] * 3, "theirs": [run(0.3, 0.3, "x"), run(0.5, 0.5, "y"), run(0.2, 0.2, "x")]}
    lines = tables.load_table(results).splitlines()
    assert lines[2] == "| ours | 100.0 | 1.00 | 200.0 | 1.00 | 1.0 kB | 2.0 MB |"
    assert lines[3] == "| theirs | 300.0 | 3.00 | 300.0 | 1.50 | 1.0 kB | 2.0 MB |"
    assert tables.different_weights(results) == ["theirs"]


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert platform.node() not in tables.machine().split()
    assert "cores" in tables.machine()
