"""The page of the benchmarks and their tables: what was measured, as Markdown."""

import argparse
import io
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.comparisons import Compared, compared
from bench.measure import ROOT, Stage, median
from bench.measured import Measured, Part, Runs
from bench.sections import LOADS, ON_GPU
from modelstate.text_format import size


@dataclass(frozen=True, slots=True)
class Group:
    """Parts of the harness whose times compare, since one version of the code was measured."""

    title: str
    """Also the key of its rows in `bench.comparisons.COMPARISONS`."""
    words: str
    """What its tables have in common, beside fresh processes in alternation."""
    parts: tuple[str, ...]
    """In the order in which their tables stand."""


GROUPS = (
    Group(
        "Loading",
        "The files are in the page cache, unless a title says that they are cold. Before the clock starts, the target "
        "module is built (unless a title or the name of a contender says otherwise), and the contender has loaded and "
        "run a tiny model once, so that imports and the start of threads do not count.",
        ("limits", *LOADS),
    ),
    Group(
        "On a GPU",
        "On a machine without a GPU, `make bench` leaves these rows as they are. The clock stops when the device has "
        "finished. GPU memory is the most that torch had allocated during the load, less the module.",
        tuple(ON_GPU),
    ),
    Group("Converting, merging, comparing", "", ("convert", "merge", "diff", "opening", "state-dict")),
    Group("Saving", "", ("save",)),
    Group("Serving", "", ("live", "serving")),
)
PARTS = tuple(part for group in GROUPS for part in group.parts)
PAGE, PLOT = ROOT / "docs" / "benchmarks.md", "benchmarks.svg"
TABLES = "tables.md"
"""The file with all tables, in the folder of the results that they show."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column text and the others numbers."""
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load_table(results: Runs) -> str:
    """Both times with their ratio to the first contender's, and memory."""
    medians = {name: (median(runs, "ready"), median(runs, "forward")) for name, runs in results.items()}
    first_ready, first_forward = next(iter(medians.values()))
    rows = [
        [
            name,
            milliseconds(ready.seconds),
            ratio(ready.seconds, first_ready.seconds),
            milliseconds(forward.seconds),
            ratio(forward.seconds, first_forward.seconds),
            size(ready.anonymous_bytes),
            size(ready.total_bytes),
        ]
        for name, (ready, forward) in medians.items()
    ]
    return table(
        ["", "ready ms", "×", "to the end of the first forward ms", "×", "own memory", "with file pages"], rows
    )


def cast_table(results: Runs) -> str:
    """The time until ready with its ratio to the first contender's, and memory."""
    words = f"\n\nThe module itself takes {size(next(iter(results.values()))[0]['check'].facts['nbytes'])}."
    return _ready_table(results, "with file pages", lambda ready: ready.total_bytes) + words


def gpu_table(results: Runs) -> str:
    """The time until ready with its ratio to the first contender's, and memory of the host and of the GPU."""
    return _ready_table(results, "GPU memory beside the module", lambda ready: ready.facts["device_bytes"])


def _ready_table(results: Runs, last: str, last_bytes: Callable[[Stage], int]) -> str:
    medians = {name: median(runs, "ready") for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [
            name,
            milliseconds(one.seconds),
            ratio(one.seconds, first.seconds),
            size(one.anonymous_bytes),
            size(last_bytes(one)),
        ]
        for name, one in medians.items()
    ]
    return table(["", "ready ms", "×", "own memory", last], rows)


def convert_table(results: Runs) -> str:
    """Times with their ratio to the first contender's, and the memory on top while it ran."""
    medians = {name: median(runs, "ready") for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [name, milliseconds(one.seconds), ratio(one.seconds, first.seconds), size(one.anonymous_bytes)]
        for name, one in medians.items()
    ]
    return table(["", "ready ms", "×", "own memory"], rows)


def limits_table(results: Runs) -> str:
    rows = []
    for name, runs in results.items():
        found = median(runs, "ready")
        nbytes = found.facts.get("nbytes")
        speed = f"{nbytes / found.seconds / 1e9:.1f}" if nbytes else ""
        rows.append([name, milliseconds(found.seconds), speed])
    return table(["", "ms", "GB/s"], rows)


def save_table(results: Runs) -> str:
    """Times with their ratio to the first row's."""
    medians = {name: median(runs, "ready") for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [
            name,
            milliseconds(one.seconds),
            ratio(one.seconds, first.seconds),
            f"{one.facts['nbytes'] / one.seconds / 1e9:.1f}",
        ]
        for name, one in medians.items()
    ]
    return table(["", "ms", "×", "GB/s"], rows)


def serving_table(results: Runs) -> str:
    """Times of requests, with the ratio of the slowest hundredth to the first row's, and what came of the answers."""
    medians = {name: median(runs, "ready") for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [
            name,
            f"{one.facts['requests']:,}",
            milliseconds(one.facts["median_seconds"]),
            milliseconds(one.seconds),
            ratio(one.seconds, first.seconds),
            f"{one.facts['failed']:,}",
            f"{one.facts['checked']:,}",
            f"{one.facts['wrong']:,}",
        ]
        for name, one in medians.items()
    ]
    return table(["", "requests", "p50 ms", "p99 ms", "×", "failed", "answers checked", "wrong"], rows)


def torture_table(results: Runs) -> str:
    """How many requests there were, and how many went wrong."""
    rows = []
    for name, runs in results.items():
        facts = median(runs, "ready").facts
        bad = [f"{facts[key]:,}" for key in ("torn", "mislabelled", "back", "errors")]
        share = f"{facts['torn'] / max(facts['requests'], 1):.1%}"
        rows.append([name, f"{facts['requests']:,}", f"{facts['swaps']:,}", bad[0], share, *bad[1:]])
    return table(["", "requests", "swaps", "torn", "", "of another version", "gone back", "errors"], rows)


def swap_table(results: Runs) -> str:
    """Times with their ratio to the first row's."""
    medians = {name: median(runs, "ready").seconds for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [name, milliseconds(one) if one >= 1e-3 else f"{one * 1e3:.3f}", ratio(one, first)]
        for name, one in medians.items()
    ]
    return table(["", "ms", "×"], rows)


def request_table(results: Runs) -> str:
    """Times of one call, and how much more than the first row's they are."""
    medians = {name: median(runs, "ready").seconds for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [name, f"{one * 1e6:.1f}", ratio(one, first), f"{(one - first) * 1e6:+.1f}"] for name, one in medians.items()
    ]
    return table(["", "µs", "×", "µs more"], rows)


def grids(cases: Mapping[str, Runs]) -> str:
    """Milliseconds by contender (rows) and case (columns), for each stage that the runs have."""
    stages = {stage for runs in cases.values() for results in runs.values() for stage in results[0]}
    texts = [grid(cases, "ready", "ready ms")]
    if "forward" in stages:
        texts.append(grid(cases, "forward", "to the end of the first forward ms"))
    return "\n\n".join(texts)


def grid(cases: Mapping[str, Runs], stage: str, corner: str) -> str:
    """Empty where a contender has no such case."""
    names = dict.fromkeys(name for runs in cases.values() for name in runs)
    rows = [
        [name, *(milliseconds(median(runs[name], stage).seconds) if name in runs else "" for runs in cases.values())]
        for name in names
    ]
    return table([corner, *cases], rows)


FORMS: dict[str, Callable[[Runs], str]] = {
    "load": load_table,
    "cast": cast_table,
    "gpu": gpu_table,
    "convert": convert_table,
    "limits": limits_table,
    "save": save_table,
    "serving": serving_table,
    "torture": torture_table,
    "swap": swap_table,
    "request": request_table,
}


def section(measured: Measured) -> str:
    """A heading, words, a table, and the contenders that are not in it."""
    shown = grids(measured.cases) if measured.form == "grid" else _single(measured)
    absent = "\n".join(f"- Not run here: {name}: {why}." for name, why in measured.absent.items())
    left_out = f"Left out: {measured.left_out}." if measured.left_out else ""
    words = f"{measured.words} {_runs(measured)}".strip()
    return "\n\n".join(part for part in (f"## {measured.title}", words, shown, left_out, absent) if part)


def _runs(measured: Measured) -> str:
    """How many runs the medians are of."""
    fewer: dict[int, dict[str, None]] = {}
    for runs in measured.cases.values():
        for name, results in runs.items():
            if len(results) != measured.runs:
                fewer.setdefault(len(results), {})[name] = None
    exceptions = "".join(f", of {count} for {'; '.join(names)}" for count, names in fewer.items())
    plural = "s" if measured.runs > 1 else ""
    return f"Medians of {measured.runs} run{plural}{exceptions}."


def _single(measured: Measured) -> str:
    runs = next(iter(measured.cases.values()))
    return FORMS[measured.form](runs) if runs else ""


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}" if seconds < 1 else f"{seconds * 1000:,.0f}"


def ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of else ""


def machine() -> str:
    """The machine in words, without its name."""
    cores = len(os.sched_getaffinity(0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cores} cores ({platform.machine()}), {total / 2**30:.0f} GiB of memory, {accelerator}; {platform.system()}, "
        f"Python {sys.version_info[0]}.{sys.version_info[1]}, {', '.join(_versions())}."
    )


def _versions() -> list[str]:
    names = ["torch", "safetensors", "accelerate", "transformers", "torchao"]
    names += ["fastsafetensors", "runai-model-streamer", "tensorizer", "torchsnapshot", "modelstate"]
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def plot(rows: Sequence[Compared]) -> str:
    """The summary as an SVG: a dot for the ratio of each job, and a line for its range."""
    import matplotlib
    from matplotlib.figure import Figure

    fixed: Any = {"svg.hashsalt": "modelstate", "svg.fonttype": "none", "font.size": 10}
    with matplotlib.rc_context(fixed):
        figure = Figure(figsize=(9, 1.0 + 0.4 * len(rows)), layout="constrained")
        axes: Any = figure.subplots()
        for place, row in enumerate(rows):
            axes.plot(row.range, [place, place], color="#6b8fb8", linewidth=3, solid_capstyle="round")
            axes.plot([row.ratio], [place], "o", color="#1f4e8c", markersize=7)
            axes.annotate(f"{row.ratio:.2f}", (row.ratio, place), (0, 7), textcoords="offset points", ha="center")
        axes.axvline(1, color="#444444", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), [row.job for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.set_xscale("log")
        ends = [*(end for row in rows for end in row.range), 1.0]
        axes.set_xlim(min(ends) / 1.2, max(ends) * 1.2)
        all_ticks = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
        ticks = [tick for tick in all_ticks if min(ends) / 1.2 <= tick <= max(ends) * 1.2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("our time / the best peer's (left of 1: modelstate is faster)")
        axes.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def page(parts: Sequence[Part]) -> tuple[str, str]:
    """Returns the page of the documentation and its plot: our time beside the best peer's, for each job."""
    by_group = {group.title: compared(_found(group, parts), group.title) for group in GROUPS}
    cells = []
    for title, rows in by_group.items():
        if rows:
            cells += [[f"**{title}**", "", "", "", ""], *(row.cells for row in rows)]
    machines: dict[str, list[str]] = {}
    for group in GROUPS:
        for machine in dict.fromkeys(part.machine for part in parts if part.name in group.parts):
            machines.setdefault(machine, []).append(group.title)
    text = f"""# Benchmarks

![Our time over the best peer's, with the range, for each job of the table]({PLOT})

{table(["", "modelstate", "best peer", "our time / the best peer's", "range"], cells)}

The times and their ratio are those of the medians. The range is that of the ratios of single turns. The best peer is
the fastest other way to do the same job.

## How it is measured

`make bench` measures, and writes this page and `bench/results/{TABLES}`, which has the times and the memory of every
contender. Every contender runs in a fresh process. In each turn every contender of a table runs once, in another order.

{_items((group.title, group.words) for group in GROUPS if group.words and by_group[group.title])}

The machines:

{_items((", ".join(titles), machine) for machine, titles in machines.items())}
"""
    return text, plot([row for rows in by_group.values() for row in rows])


def _items(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {words}" for name, words in pairs)


def tables(parts: Sequence[Part]) -> str:
    """Returns all tables, by group."""
    texts = ["# The tables of the benchmarks", "**×**: compared with the first row of the table."]
    for group in GROUPS:
        measured = [one for part in parts if part.name in group.parts for one in part.measured]
        if measured:
            texts += [f"# {group.title}", *map(section, measured)]
    return "\n\n".join(texts) + "\n"


def _found(group: Group, parts: Sequence[Part]) -> dict[str, Measured]:
    return {one.key: one for part in parts if part.name in group.parts for one in part.measured}


Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InPage:
    """A table that a program of its own puts into a file, between two marks."""

    file: str
    """The file, from the root of the project."""
    program: str
    """The module of `bench` that makes the table."""
    end: str
    """The mark after the table."""
    head: Sequence[str]
    rows: Callable[[], Iterable[Row]]
    """Makes the rows."""
    where: str = ""
    """What is written above the table beside the version of torch."""

    @property
    def page(self) -> Path:
        return ROOT / self.file

    @property
    def begin(self) -> str:
        """The mark before the table."""
        return f"<!-- The table: python -m bench.{self.program} --write -->"

    def written(self) -> list[str]:
        """The rows that the page has."""
        inside = self.page.read_text().partition(self.begin)[2].partition(self.end)[0]
        return [line for line in inside.splitlines() if line.startswith("| ")][1:]

    def show(self, write: bool) -> None:
        """Makes the table, and prints it or writes it into the page."""
        text = "\n".join([cells(self.head), "|---" * len(self.head) + "|", *map(cells, self.rows())])
        if not write:
            print(text)
            return
        before, _, rest = self.page.read_text().partition(self.begin)
        seen = f"Seen on torch {torch.__version__.partition('+')[0]}{self.where}.\n\n{text}"
        self.page.write_text(f"{before}{self.begin}\n{seen}\n{self.end}{rest.partition(self.end)[2]}")

    def main(self, words: str | None) -> None:
        """The command: prints the table, or writes it with `--write`."""
        parser = argparse.ArgumentParser(description=(words or "").splitlines()[0])
        parser.add_argument("--write", action="store_true", help=f"put the table into {self.file}")
        self.show(parser.parse_args().write)


def cells(one: Iterable[str]) -> str:
    texts = [re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "\\<") for text in one]
    return f"| {' | '.join(texts)} |"
