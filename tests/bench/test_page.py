"""The page is what was measured, and says what was not."""

import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import goals, limits, live, measure, measured, merging, pages, reasons, run, saving
from bench.__main__ import RESULTS, main
from bench.__main__ import pages as pages_of
from bench.contenders import CONVERT
from bench.measure import MeasurementError, Stage
from bench.measured import Measured, Part
from bench.models import QUICK, with_memory
from bench.other import Others
from bench.pages import PAGES, PARTS, Page
from bench.run import Runner, different_weights
from bench.sections import IMPORT, WITHOUT_TORCH, Load
from tests.bench.forked import run_forked

MB = 1_000_000
DOCS = Path(__file__).resolve().parents[2] / "docs"


def one_run(ready: float, forward: float, weights: str = "x", own: int = 0, pages: int = 0) -> dict[str, Stage]:
    check = Stage(9.0, 0, 0, {"weights": weights, "nbytes": 100 * MB, "references_kept": True})
    return {"ready": Stage(ready, own, pages, {}), "forward": Stage(forward, 0, 0, {}), "check": check}


def table_of(key: str, rows: Mapping[str, dict[str, Stage]], form: str = "load") -> Measured:
    return Measured(key, f"Title of {key}", "Words.", form, {"": {name: [run] for name, run in rows.items()}}, 1)


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
    page, again = once / "benchmarks_converting.md", twice / "benchmarks_converting.md"
    assert {path.stem for path in once.iterdir()} == {page.stem}  # of the others nothing was measured
    assert "## load_state_dict by the number of modules" in page.read_text()
    assert not list((tmp_path / "files").iterdir())
    main(["--from", str(keep), "--out", str(twice)])
    assert again.read_text() == page.read_text()


def test_a_page_of_nothing_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing was kept"):
        main(["--from", str(tmp_path), "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_gpu_leaves_its_part_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="nothing was measured"):
        main(["--quick", "--only", "gpu", "--folder", str(tmp_path)])
    assert "no CUDA device: not measured: gpu" in capsys.readouterr().err


@pytest.mark.slow
def test_conversions_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", run_forked)
    for found in Others(Runner(tmp_path, 1, quick=True)).convert():
        assert set(found.rows) == set(CONVERT)  # all of them: what builds the model does not get in their way
        assert not found.absent
        assert found.runs == 1


@pytest.mark.slow
def test_merges_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", run_forked)
    without_peft = {name: work for name, work in merging.LORA.items() if "peft" not in name}  # its import takes long
    monkeypatch.setattr(merging, "LORA", without_peft)
    lora, average = Others(Runner(tmp_path, 1, quick=True)).merge()
    assert set(average.rows) == set(merging.AVERAGE)
    assert set(lora.rows) == set(without_peft)
    assert not lora.absent
    assert not list(tmp_path.iterdir())


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
def test_a_load_is_measured_in_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written_by_forks(command: list[str], **options: Any) -> dict[str, Stage]:
        return (run_forked if "bench.child:write" in command else measure.run)(command, **options)

    monkeypatch.setattr(run, "run", written_by_forks)
    ours, theirs = "modelstate.load", "safetensors load_file + assign"
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
SUMMARY = """\
# Benchmarks

|  | modelstate | best peer | our time / the best peer's | range |
| --- | ---: | ---: | ---: | ---: |
| {} | modelstate.load 1,500 ms | safetensors load_file + assign 1,000 ms | 1.50 | 0.75 to 2.10 |

"""


@pytest.mark.slow
def test_a_page_begins_with_our_time_over_that_of_the_best_peer(tmp_path: Path) -> None:
    part = Part("large", [Measured("large/meta", "A title", "Words.", "load", {"": PAIRED}, 3)], "a", "a machine")
    measured.keep(part, tmp_path)
    main(["--from", str(tmp_path), "--out", str(tmp_path)])
    text, image = ((tmp_path / f"benchmarks.{kind}").read_text() for kind in ("md", "svg"))
    (job,) = (one.job for one in goals.COMPARISONS["benchmarks.md"] if one.key == "large/meta")
    assert text.startswith(SUMMARY.format(job))
    assert text.index("](benchmarks.svg)") < text.index("## How it is measured") < text.index("## Goals")
    assert {job, "1.50"} <= texts_of(image)


def texts_of(image: str) -> set[str]:
    """What stands in a plot."""
    return set(re.findall(r"<text[^>]*>([^<]+)</text>", image))


def test_a_table_of_loads_onto_a_gpu_has_its_memory() -> None:
    runs = {name: one_run(ready, 1) for name, ready in (("modelstate.load", 0.05), ("another", 0.1))}
    for extra_bytes, stages in enumerate(runs.values()):
        stages["ready"] = replace(stages["ready"], facts={"device_bytes": extra_bytes * 8 * MB})
    text = pages.section(table_of("gpu/large", runs, "gpu"))
    assert "| modelstate.load | 50.0 | 1.00 | 0 B | 0 B |" in text
    assert "| another | 100.0 | 2.00 | 0 B | 8.0 MB |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_a_page_compares_at_most_eight_jobs(page: Page) -> None:
    assert 1 <= len(goals.COMPARISONS[page.file]) <= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_the_first_table_of_a_published_page_repeats_figures_of_the_tables_below_it(page: Page) -> None:
    if not measured.kept(RESULTS, page.parts):
        pytest.skip(f"no results of {page.file} are kept")
    text = (DOCS / page.file).read_text()
    first, _, rest = text.partition("## How it is measured")
    _, _, *rows = (row.strip("| ").split(" | ") for row in first.splitlines() if row.startswith("|"))
    assert 1 <= len(rows) <= 8
    for _, ours, theirs, ratio, *_ in rows:
        times = []
        for cell in (ours, theirs):
            name, number, unit = cell.rsplit(" ", 2)
            assert re.search(rf"^\| (\*\*)?{re.escape(name)}(\*\*)? \|.*\b{number}\b", rest, re.MULTILINE), cell
            times.append(float(number.replace(",", "")) * {"ms": 1e-3, "µs": 1e-6}[unit])
        # The times are rounded to a tenth, which is up to 1% of a few milliseconds.
        assert times[0] / times[1] == pytest.approx(float(ratio), rel=0.01, abs=0.011)


def test_parts_of_different_code_make_no_page(tmp_path: Path) -> None:
    for name, code in (("large", "a"), ("small", measured.code())):
        measured.keep(Part(name, [table_of(name, {"modelstate.load": one_run(1, 2)})], code, "a machine"), tmp_path)
    assert [part.name for part in measured.kept(tmp_path, PARTS)] == ["large", "small"]
    (tmp_path / "pages").mkdir()
    with pytest.raises(SystemExit, match=r"2 versions of the code: large with a; .* --only large$"):
        main(["--from", str(tmp_path), "--out", str(tmp_path / "pages")])
    assert not list((tmp_path / "pages").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_a_page_says_what_the_results_say(page: Page) -> None:
    parts = measured.kept(RESULTS, page.parts)
    if not parts:
        pytest.skip(f"no results of {page.file} are kept")
    if len({part.code for part in parts}) > 1:
        pytest.skip("the results are of several versions of the code: run make bench")
    ((_, reached, compared),) = pages_of(parts)
    assert (DOCS / page.file).read_text() == pages.page(page, parts, reached, compared)
    assert texts_of((DOCS / page.image).read_text()) == texts_of(pages.plot(compared))


def test_every_goal_is_on_one_page() -> None:
    assert sorted(key for page in PAGES for key in page.goals) == sorted(goals.ROWS)


def test_what_is_kept_comes_back_as_it_was(tmp_path: Path) -> None:
    part = Part("large", [table_of("large/meta", {"ours": one_run(0.1, 0.2)})], "code", "machine")
    measured.keep(part, tmp_path)
    assert measured.kept(tmp_path, ["large", "small"]) == [part]


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


def test_a_contender_that_fails_in_a_grid_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(command: list[str], **_: Any) -> dict[str, Stage]:
        if "Module.load_state_dict" in command[-1] and '"count": 100' in command[-1]:
            raise MeasurementError("the process failed:\nMemoryError: too many")
        return one_run(1, 2)

    monkeypatch.setattr(run, "run", one)
    (found,) = Others(Runner(tmp_path, 1, quick=True)).state_dict()
    assert found.absent == {"Module.load_state_dict, 100 children": "MemoryError: too many"}
    assert "| Module.load_state_dict | 1,000 |  |" in pages.section(found)


def test_tied_weights_count_once_in_a_title(tmp_path: Path) -> None:
    section = Load("key", "Of {size}", "default", {"": "mixed"})
    assert Runner(tmp_path, 1, quick=False)._title(section) == "Of 92 MB"


@pytest.mark.parametrize("runs", ["0", "-1", "many"])
def test_a_number_of_runs_that_is_none(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--quick", "--runs", runs])
    assert ended.value.code == 2
    assert "--runs" in capsys.readouterr().err


def test_the_page_says_which_medians_are_of_fewer_runs() -> None:
    found = {"near": [one_run(1, 2)] * 7, "far": [one_run(1, 2)] * 3}
    assert "Medians of 7 runs, of 3 for far." in pages.section(Measured("k", "T", "", "load", {"": found}, 7))


def test_ratios_are_to_the_first_row() -> None:
    runs = {
        "ours": [one_run(0.1, 0.2, own=1000, pages=2 * MB)] * 3,
        "theirs": [one_run(0.3, 0.3), one_run(0.5, 0.5, "y"), one_run(0.2, 0.2)],
    }
    lines = pages.load_table(runs).splitlines()
    assert lines[2] == "| ours | 100.0 | 1.00 | 200.0 | 1.00 | 1.0 kB | 2.0 MB |"
    assert lines[3] == "| theirs | 300.0 | 3.00 | 300.0 | 1.50 | 0 B | 0 B |"
    assert different_weights(runs) == ["theirs"]


def everything(ours: float) -> dict[str, Measured]:
    """A run in which every other contender takes a second, and modelstate this long."""
    mine, copied, mapped = one_run(ours, ours), one_run(1, 1, own=100 * MB), one_run(1, 1)
    limit = {limits.TOUCHED.format("1 thread"): one_run(0.05, 0), limits.FORWARD: one_run(0.05, 0)}
    limit |= {limits.DIRECT.format("4 threads"): one_run(0.05, 0)}
    own = f"{goals.OURS}, map=False"
    peers = {"mapped": mapped, "copied": copied}
    sized = {"20,000 tensors": {n: [mine] for n in (goals.OURS, own)}}
    sized["100,000 tensors"] = {n: [one_run(5 * ours, 1)] for n in (goals.OURS, own)}
    cut = {head: {n: [mine] for n in (goals.OURS, own)} for head in ("1 file", "10 shards")}
    default = {goals.OURS: mine, f"{goals.OURS}, torch file": mine, "torch.load": copied, "load_model": copied}
    opened = {"9 tensors, safetensors": {"modelstate.open + every shape": [mine], "safe_open": [mapped]}}
    start = dict.fromkeys((f"modelstate {name}" for name in WITHOUT_TORCH), mine)
    start |= {IMPORT: one_run(ours / 10, 1), "import torch": mapped, "python -c pass": mapped}
    return {
        "limits": table_of("limits", limit, "limits"),
        **{key: table_of(key, default) for key in goals.DEFAULT},
        "cold/memory": table_of("cold/memory", {goals.OURS: mine, **peers}),
        "cast/memory": table_of("cast/memory", {f"{goals.OURS}, dtype=bfloat16": mine, **peers}, "cast"),
        "small/memory": table_of("small/memory", {goals.OURS: mine, **peers}),
        "convert/large": table_of(
            "convert/large", {"module.to": mapped, "module.to, modelstate.reference_keeping": mine}, "convert"
        ),
        **{
            f"merge/{kind.lower()}": table_of(
                f"merge/{kind.lower()}", {f"modelstate.load, merge.{kind}": mine, "load_file + …": copied}, "convert"
            )
            for kind in ("Average", "LoRA")
        },
        "opening": Measured("opening", "", "", "grid", opened, 1),
        "start": Measured("start", "", "", "grid", {"": {row: [run] for row, run in start.items()}}, 1),
        "large/meta": table_of("large/meta", {goals.OURS: mine, own: mine, **peers}),
        "large/memory": table_of(
            "large/memory", {f"{goals.OURS}, in_place=True": mine, "torch.load + load_state_dict": copied}
        ),
        "cold": table_of("cold", {goals.OURS: mine, **peers}),
        "cast": table_of("cast", {f"{goals.OURS}, dtype=bfloat16": mine, **peers}, "cast"),
        "int8": table_of("int8", {f"{goals.OURS}, transform=Quantize": mine, **peers}, "cast"),
        "small/meta": table_of(
            "small/meta", {goals.OURS: mine, "accelerate load_checkpoint_in_model": mapped, **peers}
        ),
        "many": Measured("many", "", "", "grid", sized, 1),
        "shards": Measured("shards", "", "", "grid", cut, 1),
        "save": table_of(
            "save",
            {
                "modelstate.save": mine,
                "torch.save": one_run(1, 1),
                "torch.save, then fsync": one_run(1, 1),
                saving.BARE_SYNCED.format(2): one_run(0.1, 0.1),
            },
        ),
        "store": table_of(
            "store",
            {
                saving.BLOCKED: mine,
                saving.MEMCPY: one_run(0.1, 0.1),
                saving.FULL: one_run(1, 1),
                saving.FROZEN: mine,
            },
        ),
        **serving(ours),
    }


def serving(ours: float) -> dict[str, Measured]:
    def requests(torn: int) -> dict[str, Stage]:
        facts = {"requests": 1000, "torn": torn, "mislabelled": 0, "back": 0, "errors": 0, "swaps": 9}
        return {"ready": Stage(60.0, 0, 0, facts)}

    one = one_run(ours / 100, 1)
    ways = {name: requests(50 if name in live.STOCK else int(ours)) for name in live.WAYS}
    of_kinds = (live.STAGED, live.STAGED_FILE, live.FLIP)
    swaps = {live.MEMCPY: one_run(0.1 / 100, 1)} | {row.format(kind): one for row in of_kinds for kind in live.KINDS}
    found = {"live/torn": table_of("live/torn", ways, "torture"), "live/swap": table_of("live/swap", swaps, "swap")}
    for kind, bare in (("eager", live.MODULE), ("exported", live.BARE["exported"])):
        rows = {bare: one_run(0.1 / 100, 1), live.LIVE.format(kind): one}
        found[f"live/request/{kind}"] = table_of(f"live/request/{kind}", rows, "request")
    return found


def test_goals_are_met_by_what_is_fast_enough() -> None:
    assert {one.job: one.verdict for one in goals.reached(everything(0.1))} == {
        job: "met" for job, _, _ in goals.ROWS.values()
    }


def test_goals_are_not_met_by_what_is_slow() -> None:
    found = goals.reached(everything(2.0))
    linear = ("many", "shards")  # the same time for each file, however slow
    assert {one.verdict for key, one in zip(goals.ROWS, found, strict=True) if key not in linear} == {"not met"}
    assert "**0.50x as fast as the best peer**" in pages.goals(found)


def test_who_leaves_the_optimizer_with_other_parameters_is_no_peer_in_place() -> None:
    found = everything(0.1)
    run = one_run(0.01, 0.01)
    run["check"].facts["references_kept"] = False  # type: ignore[index]
    rows = {name: runs[0] for name, runs in found["large/memory"].cases[""].items()}
    found["large/memory"] = table_of("large/memory", {**rows, "puts others in": run})
    (row,) = (one for one in goals.reached(found) if one.job == goals.ROWS["in-place"][0])
    assert row.verdict == "met"


def test_memory_above_the_bound_is_no_goal_met() -> None:
    found = everything(0.1)
    large = one_run(0.1, 0.1, own=230 * MB, pages=330 * MB)
    found["cast"] = table_of("cast", {f"{goals.OURS}, dtype=bfloat16": large, "theirs": one_run(1, 1)}, "cast")
    (row,) = (one for one in goals.reached(found) if one.job == goals.ROWS["cast"][0])
    assert (row.verdict, row.reached) == ("not met", "10.00x as fast as the best peer; **target + 130.0 MB**")


@pytest.mark.parametrize("key", ["mapped", "first-forward"])
@pytest.mark.parametrize("table", [table for table in goals.MAPPED if table != "large/meta"])
def test_the_fastest_of_all_is_so_in_every_table(table: str, key: str) -> None:
    found, (ours, what) = everything(0.1), goals.MAPPED[table]
    found[table] = table_of(table, {ours: one_run(0.1, 0.1), "theirs": one_run(0.05, 0.05)})
    (row,) = goals.reached(found, [key])
    assert row.verdict == "not met"
    assert f"**0.50x as fast as the best peer{what}**" in row.reached
    assert "10.00x as fast as the best peer;" in row.reached


def test_what_was_not_measured_is_no_goal_met_or_missed() -> None:
    assert {one.verdict for one in goals.reached({})} == {"not measured"}
    assert pages.goals(goals.reached({})).count("**not measured**") == len(goals.ROWS)


def test_the_sentence_with_the_limit_stands_below_a_row_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reasons.LIMITS, "mapped", lambda _: "opening alone takes that long.")
    assert "- file to ready on a meta target (mapped): opening alone" in pages.goals(goals.reached(everything(2.0)))
    assert "opening alone" not in pages.goals(goals.reached(everything(0.1)))


def test_the_sentences_are_for_rows_that_there_are() -> None:
    assert set(reasons.LIMITS) <= set(goals.ROWS)


def test_the_machine_is_described_without_its_name() -> None:
    assert platform.node() not in pages.machine().split()
    assert "cores" in pages.machine()


def test_a_server_is_shown_with_what_came_of_its_answers() -> None:
    def of(p50: float, p99: float, **facts: int) -> list[dict[str, Stage]]:
        known = {"median_seconds": p50, "requests": 10_000, "failed": 0, "checked": 10_000, "wrong": 0, **facts}
        return [{"ready": Stage(p99, 0, 0, known)}]

    rows = {"no swaps": of(0.01, 0.02), "100 swaps": of(0.011, 0.03, failed=2, checked=9_998, wrong=1)}
    lines = pages.section(Measured("serving", "T", "Words.", "serving", {"": rows}, 1)).splitlines()
    assert lines[-2] == "| no swaps | 10,000 | 10.0 | 20.0 | 1.00 | 0 | 10,000 | 0 |"
    assert lines[-1] == "| 100 swaps | 10,000 | 11.0 | 30.0 | 1.50 | 2 | 9,998 | 1 |"
