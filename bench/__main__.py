"""Measure everything, print the medians, and write them down."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench import pages as markdown
from bench.measure import ROOT, temporary_folder
from bench.measured import Measured, Part, code, keep, kept
from bench.models import KINDS
from bench.other import Others
from bench.pages import GROUPS, PARTS
from bench.run import Runner
from bench.sections import LOADS, ON_GPU

RESULTS = ROOT / "bench" / "results"
"""What the pages of the documentation are made of."""


def _options(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one run, writes no page: a smoke test")
    parser.add_argument("--runs", type=int, help="runs of each contender (default 7)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some of it")
    parser.add_argument("--out", type=Path, help="the folder to write the page into (default docs/ if all is measured)")
    parser.add_argument("--folder", type=Path, help="where the files are made and removed (default $TMPDIR, or .venv)")
    parser.add_argument(
        "--keep", type=Path, help="a folder for what each part has found, as JSON (default bench/results/ if all is)"
    )
    parser.add_argument(
        "--from",
        type=Path,
        nargs="?",
        const=RESULTS,
        dest="source",
        help="measure nothing: write the pages of what `--keep` has put there",
    )
    options = parser.parse_args(arguments)
    if options.runs is None:
        options.runs = 1 if options.quick else 7
    elif options.runs < 1:
        parser.error("--runs must be at least 1")
    if not options.quick and not options.only:
        options.out = options.out or ROOT / "docs"
        options.keep = options.keep or RESULTS
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    return options


def _measure(options: argparse.Namespace) -> list[Part]:
    found = []
    with temporary_folder(options.folder) as folder:
        runner = Runner(folder, options.runs, options.quick)
        others = Others(runner)
        functions: dict[str, Callable[[], list[Measured]]] = {
            "limits": others.limits,
            **{
                part: partial(lambda sections: [runner.load(one) for one in sections], sections)
                for part, sections in LOADS.items()
            },
            "gpu": lambda: [*map(runner.load, ON_GPU["gpu"]), others.save_from_gpu()],
            "save": others.save,
            "state-dict": others.state_dict,
            "opening": others.opening,
            "diff": others.diff,
            "convert": others.convert,
            "merge": others.merge,
            "live": others.live,
            "serving": others.serving,
        }
        asked = [part for part in PARTS if not options.only or part in options.only]
        if not torch.cuda.is_available() and (left_out := [part for part in asked if part in ON_GPU]):
            print(f"no CUDA device: not measured: {', '.join(left_out)}", file=sys.stderr)
            asked = [part for part in asked if part not in ON_GPU]
        for at, part in enumerate(asked):
            runner.forget({case for later in asked[at:] for case in _cases(later)})
            measured = functions[part]()
            for one in measured:
                print(f"\n{markdown.section(one)}\n", flush=True)
            found.append(Part(part, measured, code(), markdown.machine()))
            if options.keep:
                keep(found[-1], options.keep)
    return found


def _cases(part: str) -> set[str]:
    """The checkpoints that a part needs, and the tiny ones that its contenders begin with."""
    cases = {case for section in (LOADS | ON_GPU).get(part, ()) for case in section.cases.values()}
    cases |= {"limits": {"large"}, "opening": {"small"}, "diff": {"large"}}.get(part, set())
    return cases | {KINDS[case].tiny for case in cases}


def of_one_code(parts: Sequence[Part]) -> None:
    """Ends the program where the parts of a group were measured with several versions of the code.

    The times of one group compare only where they are of one version; each group may be of another.
    """
    for group in GROUPS:
        by_code: dict[str, list[str]] = {}
        for part in (one for one in parts if one.name in group.parts):
            by_code.setdefault(part.code, []).append(part.name)
        if len(by_code) > 1:
            found = "; ".join(f"{', '.join(names)} with {version}" for version, names in by_code.items())
            old = [name for version, names in by_code.items() if version != code() for name in names]
            sys.exit(
                f"{group.title}: the parts were measured with {len(by_code)} versions of the code: {found}; this is "
                f"{code()}. No page is written. Measure again: python -m bench --keep bench/results --only "
                f"{' '.join(old)}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    parts = kept(options.source, PARTS) if options.source else _measure(options)
    if not parts:
        sys.exit(f"nothing was kept in {options.source}" if options.source else "nothing was measured")
    of_one_code(parts)
    if options.out:
        text, image = markdown.page(parts)
        (options.out / markdown.PAGE.name).write_text(text)
        (options.out / markdown.PLOT).write_text(image)
        (options.source or options.keep or options.out).joinpath(markdown.TABLES).write_text(markdown.tables(parts))
        print(f"written: {options.out / markdown.PAGE.name}")
    print(markdown.machine())


if __name__ == "__main__":
    main()
