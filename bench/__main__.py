"""Measure everything, print the medians, and write them down."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import models, tables
from bench.contenders import CONVERT, MATERIALISED, META
from bench.tables import Section, convert_table, different_weights, grid, load_table
from modelstate.cli.measure import Stage, alternate, run

ROOT = Path(__file__).resolve().parent.parent
Runs = Mapping[str, Sequence[Mapping[str, Stage]]]

SLOW_ON_MANY = {"safetensors load_model", "to_empty + safetensors load_model", "torch.load + assign"}
"""Left out for the small tensors: they take what `load_file` + assign takes, many seconds, and say no more."""


class Bench:
    """One run of the harness."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.quick: bool = options.quick
        self.runs: int = options.runs
        self.folder = folder
        self.sizes = models.QUICK if self.quick else models.Sizes()

    def child(self, kind: str, **arguments: Any) -> Callable[[], dict[str, Stage]]:
        command = ["-m", "bench.child", kind, json.dumps(arguments)]
        return partial(run, command, environment={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})

    def measure(self, contenders: Mapping[str, Callable[[], dict[str, Stage]]]) -> Runs:
        return alternate({name: _announced(name, child) for name, child in contenders.items()}, self.runs)

    def load(self, case: str) -> list[Section]:
        models.write("tiny", self.sizes, self.folder)
        models.write(case, self.sizes, self.folder)
        size = f"{(self.folder / f'{case}.pt').stat().st_size / 1e6:,.0f} MB"
        what = "A decoder" if case == "large" else f"{4 * self.sizes.small_blocks:,} tensors of 1 to 16 KB"
        sections = []
        for target, contenders in (("meta", META), ("materialised", MATERIALISED)):
            names = [name for name in contenders if case == "large" or name not in SLOW_ON_MANY]
            _warm(self.folder)
            found = self.measure(
                {
                    name: self.child(
                        "load", target=target, contender=name, case=case, folder=str(self.folder), quick=self.quick
                    )
                    for name in names
                }
            )
            different = different_weights(found)
            words = "Every contender ends with the same weights, bit for bit."
            if different:
                words = f"The weights differ from the first row's: {', '.join(different)}."
            where = "a module on meta" if target == "meta" else "a module that has memory"
            sections.append(_shown(Section(f"{what}, {size}, into {where}", words, load_table(found))))
        return sections

    def state_dict(self) -> list[Section]:
        by_count = {
            count: self.measure(
                {
                    name: self.child("state_dict", contender=contender, count=count)
                    for name, contender in (
                        ("modelstate.load_state_dict", "modelstate"),
                        ("Module.load_state_dict", "torch"),
                    )
                }
            )
            for count in self.sizes.children
        }
        table = grid(_by_name({f"{count:,} children": found for count, found in by_count.items()}), "ready ms")
        words = (
            "A state dict in memory into a module with many children of one small tensor each: torch filters the whole "
            "dict for every child."
        )
        return [_shown(Section("load_state_dict by the number of modules", words, table))]

    def convert(self) -> list[Section]:
        sections = []
        for case in ("large", "small"):
            found = self.measure(
                {name: self.child("convert", contender=name, case=case, quick=self.quick) for name in CONVERT}
            )
            module = models.on_meta(case, self.sizes)
            nbytes = sum(parameter.nbytes for parameter in module.parameters())
            what = "a decoder" if case == "large" else f"{4 * self.sizes.small_blocks:,} small tensors"
            words = (
                "A module in memory. The ratios are to torch's own. Own memory is what the process grew by on the way, "
                "at the most; the module itself is half as large afterwards."
            )
            title = f"From float32 to bfloat16: {what}, {nbytes / 1e6:,.0f} MB"
            sections.append(_shown(Section(title, words, convert_table(found))))
        return sections

    def opening(self) -> list[Section]:
        files: dict[str, Path] = {}
        models.write("small", self.sizes, self.folder)
        many = f"{4 * self.sizes.small_blocks:,} tensors"
        files[f"{many}, torch"] = self.folder / "small.pt"
        files[f"{many}, safetensors"] = self.folder / "small" / "model.safetensors"
        for nbytes in self.sizes.open_bytes:
            models.write_sparse(nbytes, self.folder)
            for suffix, name in (("pt", "torch"), ("safetensors", "safetensors")):
                files[f"{nbytes / 1e9:g} GB, {name}"] = self.folder / f"sparse-{nbytes}.{suffix}"
        found = {}
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for case, path in files.items():
            names = ["modelstate.open"]
            if path.stat().st_size < memory:  # the others map it as memory that may be written, which must exist
                names.append(
                    "safetensors safe_open + get_slice" if path.suffix == ".safetensors" else "torch.load(mmap)"
                )
            found[case] = self.measure({n: self.child("opening", contender=n, path=str(path)) for n in names})
        words = (
            "From the path to the names and shapes of everything in it. The files of 1 and 100 GB have 100 tensors and "
            "are sparse. `torch.load(mmap=True)` and `safe_open` cannot map a file larger than memory."
        )
        return [_shown(Section("Opening", words, grid(_by_name(found), "ready ms")))]


def _by_name(found: Mapping[str, Runs]) -> dict[str, dict[str, Sequence[Mapping[str, Stage]]]]:
    turned: dict[str, dict[str, Sequence[Mapping[str, Stage]]]] = {}
    for case, runs in found.items():
        for name, results in runs.items():
            turned.setdefault(name, {})[case] = results
    return turned


def _announced(name: str, child: Callable[[], dict[str, Stage]]) -> Callable[[], dict[str, Stage]]:
    def measure() -> dict[str, Stage]:
        found = child()
        times = ", ".join(f"{stage} {one.seconds * 1000:,.1f} ms" for stage, one in found.items() if stage != "check")
        print(f"  {name}: {times}", file=sys.stderr, flush=True)
        return found

    return measure


def _shown(section: Section) -> Section:
    print(f"\n{section}\n", flush=True)
    return section


def _warm(folder: Path) -> None:
    """Bring the files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("sparse"):
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def _clear(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


def _options(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one run, writes no page: a smoke test")
    parser.add_argument("--runs", type=int, help="runs of each contender (default 5)")
    parser.add_argument(
        "--only", nargs="+", choices=("large", "small", "state-dict", "opening", "convert"), help="some of it"
    )
    parser.add_argument("--out", type=Path, help="the page to write (default docs/benchmarks.md if all is measured)")
    parser.add_argument("--folder", type=Path, help="where the files are made and removed (default $TMPDIR, or .venv)")
    options = parser.parse_args(arguments)
    options.runs = options.runs or (1 if options.quick else 5)
    if options.out is None and not options.quick and not options.only:
        options.out = ROOT / "docs" / "benchmarks.md"
    return options


def _command(options: argparse.Namespace) -> str:
    """What to type to get the same again, wherever the files are made."""
    quick = ["--quick"] if options.quick else []
    only = ["--only", *options.only] if options.only else []
    return " ".join(["python -m bench", *quick, f"--runs {options.runs}", *only])


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    parent = options.folder or os.environ.get("TMPDIR") or ROOT / ".venv"
    sections: list[Section] = []
    with tempfile.TemporaryDirectory(prefix="modelstate-bench-", dir=parent) as name:
        bench = Bench(options, Path(name))
        parts: dict[str, Callable[[], list[Section]]] = {
            "large": partial(bench.load, "large"),
            "small": partial(bench.load, "small"),
            "state-dict": bench.state_dict,
            "opening": bench.opening,
            "convert": bench.convert,
        }
        for part in options.only or parts:
            sections += parts[part]()
            _clear(bench.folder)
    print(tables.machine())
    if options.out:
        tables.write(sections, options.out, _command(options), options.runs)
        print(f"written: {options.out}")


if __name__ == "__main__":
    main()
