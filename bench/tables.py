"""What was measured, as Markdown."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from modelstate.cli.measure import Stage, median
from modelstate.words import size

Results = Mapping[str, Sequence[Mapping[str, Stage]]]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, words and a table."""

    title: str
    words: str
    table: str

    def __str__(self) -> str:
        return "\n\n".join(part for part in (f"## {self.title}", self.words, self.table) if part)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column text and the others numbers."""
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load_table(results: Results) -> str:
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


def convert_table(results: Results) -> str:
    """Times with their ratio to the first contender's, and the memory on top while it ran."""
    medians = {name: median(runs, "ready") for name, runs in results.items()}
    first = next(iter(medians.values()))
    rows = [
        [name, milliseconds(one.seconds), ratio(one.seconds, first.seconds), size(one.anonymous_bytes)]
        for name, one in medians.items()
    ]
    return table(["", "ready ms", "×", "own memory"], rows)


def grid(results: Mapping[str, Mapping[str, Sequence[Mapping[str, Stage]]]], corner: str) -> str:
    """Milliseconds until ready by contender (rows) and case (columns); empty where a contender has no such case."""
    cases = list(dict.fromkeys(case for by_case in results.values() for case in by_case))
    rows = []
    for name, by_case in results.items():
        found = {case: milliseconds(median(runs, "ready").seconds) for case, runs in by_case.items()}
        rows.append([name, *(found.get(case, "") for case in cases)])
    return table([corner, *cases], rows)


def different_weights(results: Results) -> list[str]:
    """The contenders that did not end with the weights that the first one has."""
    prints = {name: {run["check"].facts["weights"] for run in runs} for name, runs in results.items()}
    expected = next(iter(prints.values()))
    return [name for name, found in prints.items() if found != expected]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}" if seconds < 1 else f"{seconds * 1000:,.0f}"


def ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of else ""


def machine() -> str:
    """The machine in words, without its name."""
    cores = len(os.sched_getaffinity(0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "safetensors", "accelerate", "modelstate"))
    return (
        f"{cores} cores ({platform.machine()}), {total / 2**30:.0f} GiB of memory, {accelerator}; {platform.system()}, "
        f"Python {sys.version_info[0]}.{sys.version_info[1]}, {versions}."
    )


def write(sections: Sequence[Section], path: Path, command: str, runs: int) -> None:
    """The whole page."""
    head = f"""# Benchmarks

This page is written by `{command}`. Every contender runs in a fresh process, in alternation with the others; medians
of {runs} runs. The files are in the page cache. Before the clock starts, the
target module is built (unless the name of a contender says otherwise), and the contender has loaded and run a
tiny model once, so that imports and the start of threads do not count.

- **ready**: from the file to the module with its weights. **×**: compared with the first row of the table.
- **own memory**: the most anonymous memory that the process grew by until then; pages of a mapped file are not in it.
- **with file pages**: the most resident memory that it grew by, those included.

The machine: {machine()}
"""
    path.write_text("\n\n".join([head.rstrip(), *map(str, sections)]) + "\n")
