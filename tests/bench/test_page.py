"""The page is what was measured, and says what was not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import comparisons, measure, measured, merging, pages, run
from bench.__main__ import RESULTS, main
from bench.measure import MeasurementError, Stage
from bench.measured import Measured, Part
from bench.models import QUICK, with_memory
from bench.pages import PARTS
from bench.run import Runner, different_weights
from bench.sections import Load
from tests.bench.forked import run_forked

MB = 1_000_000


def one_run(ready: float, forward: float, weights: str = "x", own: int = 0, pages: int = 0) -> dict[str, Stage]:
    check = Stage(9.0, 0, 0, {"weights": weights, "nbytes": 100 * MB, "references_kept": True})
    return {"ready": Stage(ready, own, pages, {}), "forward": Stage(forward, 0, 0, {}), "check": check}


@pytest.mark.slow
def test_a_run_prints_ratios_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run", run_forked)
    once, twice, keep = tmp_path / "once", tmp_path / "twice", tmp_path / "kept"
    for folder in (once, twice, tmp_path / "files"):
        folder.mkdir()
    given = ["--quick", "--only", "state-dict", "--folder", str(tmp_path / "files"), "--out", str(once)]
    main([*given, "--keep", str(keep)])
    assert "| modelstate.load_state_dict |" in capsys.readouterr().out
    tables, again = keep / "tables.md", twice / "benchmarks.md"
    assert "## load_state_dict by the number of modules" in tables.read_text()
    assert not list((tmp_path / "files").iterdir())
    main(["--from", str(keep), "--out", str(twice)])
    assert again.read_text() == (once / "benchmarks.md").read_text()


def test_merges_end_with_the_same_weights(tmp_path: Path) -> None:
    merging.write(tmp_path / "tiny", QUICK, "tiny")
    for ways in (merging.LORA, merging.AVERAGE):
        found = []
        for name, work in ways.items():
            if "peft" in name:
                continue
            found.append(with_memory("tiny", QUICK))
            work(found[-1], tmp_path / "tiny")
        first, second = (model.state_dict() for model in found)
        assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


@pytest.mark.slow
def test_a_load_is_measured_in_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = "modelstate.load", "safetensors load_file + assign"

    def others_forked(command: list[str], **options: Any) -> dict[str, Stage]:
        is_ours = any(f'"contender": "{ours}"' in argument for argument in command)
        return (measure.run if is_ours else run_forked)(command, **options)

    monkeypatch.setattr(run, "run", others_forked)
    section = Load("tiny", "Of {count} tensors, {size}", "meta", {"": "tiny"}, only=(ours, theirs), cold=True)
    found = Runner(tmp_path, 1, quick=True).load(section)
    assert found.title == "Of 20 tensors, 1 MB"
    if found.absent:  # a file system without a disk
        assert "does not take files out of the page cache" in "".join(found.absent.values())
        return
    assert found.rows == [ours, theirs]
    assert found.words == "Every contender ends with the same weights, bit for bit."
    assert all(0 < found.at(row).seconds < found.at(row, "forward").seconds for row in found.rows)


PAIRED = {
    "modelstate.load": [one_run(0.25, 1.5), one_run(0.25, 1.2), one_run(0.25, 2.1)],
    "modelstate.load, map=False": [one_run(0.1, 0.1)] * 3,
    "torch.load + assign": [one_run(0.5, 2.0)] * 3,
    "safetensors load_file + assign": [one_run(0.75, 1.0), one_run(0.75, 1.6), one_run(0.75, 1.0)],
}


@pytest.mark.slow
def test_a_page_begins_with_our_time_over_that_of_the_best_peer(tmp_path: Path) -> None:
    part = Part("large", [Measured("large/meta", "A title", "Words.", "load", {"": PAIRED}, 3)], "a", "a machine")
    measured.keep(part, tmp_path)
    main(["--from", str(tmp_path), "--out", str(tmp_path)])
    text, image = ((tmp_path / f"benchmarks.{kind}").read_text() for kind in ("md", "svg"))
    (job,) = (row.job for row in comparisons.COMPARISONS["Loading"] if row.key == "large/meta")
    peer = "safetensors load_file + assign 1,000 ms"
    assert f"| {job} | modelstate.load 1,500 ms | {peer} | 1.50 | 0.75 to 2.10 |" in text
    assert text.index("](benchmarks.svg)") < text.index(f"| {job} |") < text.index("## How it is measured")
    assert {job, "1.50"} <= texts_of(image)
    assert "## A title" in (tmp_path / "tables.md").read_text()


def texts_of(image: str) -> set[str]:
    """What stands in a plot."""
    return set(re.findall(r"<text[^>]*>([^<]+)</text>", image))


@pytest.mark.slow
def test_the_page_says_what_the_results_say() -> None:
    parts = measured.kept(RESULTS, PARTS)
    text, image = pages.page(parts)
    assert pages.PAGE.read_text() == text
    assert texts_of((pages.PAGE.parent / pages.PLOT).read_text()) == texts_of(image)
    assert (RESULTS / pages.TABLES).read_text() == pages.tables(parts)


def test_a_contender_that_fails_is_named_with_the_reason(tmp_path: Path) -> None:
    calls = []

    def broken() -> dict[str, Stage]:
        calls.append(1)
        raise MeasurementError("the process failed: Traceback\n  at some line\nRuntimeError: no such thing")

    found, failed = Runner(tmp_path, 3, quick=True).alternate({"good": lambda: one_run(1, 2), "bad": broken}, 3)
    assert len(found["good"]) == 3
    assert len(calls) == 1
    assert failed == {"bad": "RuntimeError: no such thing"}
    shown = pages.section(Measured("k", "T", "", "load", {"": found}, 3, failed))
    assert "- Not run here: bad: RuntimeError: no such thing." in shown


def test_ratios_are_to_the_first_row() -> None:
    runs = {
        "ours": [one_run(0.1, 0.2, own=1000, pages=2 * MB)] * 3,
        "theirs": [one_run(0.3, 0.3), one_run(0.5, 0.5, "y"), one_run(0.2, 0.2)],
    }
    lines = pages.load_table(runs).splitlines()
    assert lines[2] == "| ours | 100.0 | 1.00 | 200.0 | 1.00 | 1.0 kB | 2.0 MB |"
    assert lines[3] == "| theirs | 300.0 | 3.00 | 300.0 | 1.50 | 0 B | 0 B |"
    assert different_weights(runs) == ["theirs"]
