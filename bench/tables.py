"""What was measured, as Markdown."""

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.goals import Goal
from bench.measure import median
from bench.measured import Measured, Part, Runs
from bench.pages import Page
from modelstate.text_format import size


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
    medians = {name: median(runs, "ready") for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [
            name,
            milliseconds(one.seconds),
            ratio(one.seconds, first.seconds),
            size(one.anonymous_bytes),
            size(one.total_bytes),
        ]
        for name, one in medians.items()
    ]
    words = f"\n\nThe module itself takes {size(next(iter(results.values()))[0]['check'].facts['nbytes'])}."
    return table(["", "ready ms", "×", "own memory", "with file pages"], rows) + words


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
    return table(["", "ms", "×"], [[name, f"{one * 1e3:,.3f}", ratio(one, first)] for name, one in medians.items()])


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
    "convert": convert_table,
    "limits": limits_table,
    "save": save_table,
    "serving": serving_table,
    "torture": torture_table,
    "swap": swap_table,
    "request": request_table,
}


def section(measured: Measured) -> str:
    """A heading, words, a table, and who is not in it."""
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


def goals(found: Sequence[Goal]) -> str:
    """The table at the top of the page."""
    rows = [f"| {one.job} | {one.goal} | {one.reached} | {one.by} | **{one.verdict}** |" for one in found]
    limits = [f"- {one.job}: {one.limit}" for one in found if one.limit]
    head = ["| job | goal | reached | by what | |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(
        ["## Goals", "", *head, *rows, *(["", "What keeps a goal from being met:", "", *limits] if limits else [])]
    )


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


def summary(rows: Sequence[Sequence[str]]) -> str:
    """The table that a page begins with: our time beside that of the best peer, for at most eight jobs."""
    return table(["", "modelstate", "best peer", "our time / the best peer's"], rows) if rows else ""


def page(
    of: Page, parts: Sequence[Part], found: Sequence[Goal], compared: Sequence[Sequence[str]], command: str
) -> str:
    """The text of a page: a summary, how it is measured, the goals, and a section for each table."""
    measured = [one for part in parts for one in part.measured]
    machines = dict.fromkeys(part.machine for part in parts)
    words = f"""## How it is measured

This page is written by `{command}`.{_origin(parts, command)} Every contender runs in a fresh process, in alternation
with the others of its table. {of.words}

The machine: {" Other parts: ".join(machines)}"""
    texts = [f"# {of.title}", summary(compared), words, goals(found), *map(section, measured)]
    return "\n\n".join(text for text in texts if text) + "\n"


def _origin(parts: Sequence[Part], command: str) -> str:
    """Where the figures come from, if not from one run."""
    if {part.command for part in parts} == {command}:
        return ""
    what = "of the same code" if len({part.code for part in parts}) == 1 else "**of different states of the code**"
    commands = ", ".join(f"`{one}`" for one in dict.fromkeys(part.command for part in parts))
    return f" Its parts were measured one after another, {what}, by {commands}."
