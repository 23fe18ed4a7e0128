"""Contenders in fresh processes: which can run here, in alternation, and whether they ended with the same weights."""

import importlib.util
import json
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from bench import files
from bench.contenders import TABLES, Way
from bench.measure import MeasurementError, Stage, run
from bench.measured import ROOT, Measured, Runs
from bench.models import KINDS, QUICK, Sizes, on_meta
from bench.sections import Load

Child = Callable[..., dict[str, Stage]]
"""Runs a program and gives its stages; a time limit can be given."""


class Runner:
    """Starts children, and remembers what has been written for them."""

    def __init__(self, folder: Path, runs: int, quick: bool) -> None:
        self.folder, self.runs, self.quick = folder, runs, quick
        self._written: set[tuple[str, str]] = set()

    def child(self, kind: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> Child:
        command = ["-m", "bench.child", kind, json.dumps(arguments)]
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"}
        return partial(run, command, environment={**paths, **(environment or {})})

    def write(self, case: str, formats: set[str]) -> None:
        """The checkpoint of the case in these formats, unless they are there already. Raises `MeasurementError`."""
        missing = sorted(one for one in formats if (case, one) not in self._written)
        for name in missing:
            self.child("write", case=case, formats=[name], folder=str(self.folder), quick=self.quick)()
            self._written.add((case, name))

    def forget(self, needed: Collection[str]) -> None:
        """Removes the checkpoints of other cases, so that what is read has a place in the page cache."""
        for case in {case for case, _ in self._written} - set(needed):
            for path in files.of_case(case, self.folder):
                path.unlink()
            self._written = {one for one in self._written if one[0] != case}

    def alternate(self, contenders: Mapping[str, Child], runs: int) -> tuple[dict[str, list[Any]], dict[str, str]]:
        """Every contender once, then again, and so on, so that a slow minute of the machine meets all of them.

        Each time in another order, the same in every run of the program: who comes first after some that took little
        memory may find that the host of the machine has taken it back, and pays for all who come after. One that fails
        runs no more; the second result says why.
        """
        found: dict[str, list[dict[str, Stage]]] = {name: [] for name in contenders}
        failed: dict[str, str] = {}
        for turn in range(runs):
            for name, child in Random(turn).sample(list(contenders.items()), len(contenders)):
                if name in failed:
                    continue
                try:
                    found[name].append(child())
                except MeasurementError as error:
                    failed[name] = _last_line(error)
                    del found[name]
                    print(f"  {_plain(name)}: failed: {error}", file=sys.stderr, flush=True)
                    continue
                stages = found[name][-1].items()
                times = ", ".join(f"{stage} {one.seconds * 1000:,.1f} ms" for stage, one in stages if stage != "check")
                print(f"  {_plain(name)}: {times}", file=sys.stderr, flush=True)
        return found, failed

    def load(self, section: Load) -> Measured:
        table = TABLES[section.table]
        ways = {n: w for n, w in table.items() if n not in section.without and (not section.only or n in section.only)}
        absent: dict[str, str] = {}
        for name, way in ways.items():
            if way.package and importlib.util.find_spec(way.package) is None:
                absent[name] = f"{way.package} is not installed"
        children: dict[str, Child] = {}
        for head, case in section.cases.items():
            for name, way in ways.items():
                if name not in absent and self._has_files(case, name, way, absent):
                    children[f"{head}\n{name}"] = self._load_child(section, case, name, way)
            if not section.cold:
                files.warm(files.of_case(case, self.folder))
        found, failed = self.alternate(children, self.runs)
        absent |= {name.partition("\n")[2]: why for name, why in failed.items()}
        cases = {
            head: {name: found[f"{head}\n{name}"] for name in ways if f"{head}\n{name}" in found}
            for head in section.cases
        }
        left_out = [name for name in table if name not in ways]
        return Measured(
            section.key,
            self._title(section),
            " ".join(part for part in (section.words, _words(cases)) if part),
            section.form,
            cases,
            self.runs,
            absent,
            f"{'; '.join(left_out)}: {section.why}" if section.why and left_out else "",
        )

    def _has_files(self, case: str, name: str, way: Way, absent: dict[str, str]) -> bool:
        try:
            for one in (case, KINDS[case].tiny):
                self.write(one, {way.files, "safetensors"})
        except MeasurementError as error:
            absent[name] = _last_line(error)
            return False
        return True

    def _load_child(self, section: Load, case: str, name: str, way: Way) -> Child:
        return self.child(
            "load",
            dict(way.environment),
            table=section.table,
            contender=name,
            case=case,
            folder=str(self.folder),
            quick=self.quick,
            cold=section.cold,
        )

    def _title(self, section: Load) -> str:
        case = next(iter(section.cases.values()))
        state = on_meta(case, QUICK if self.quick else Sizes()).state_dict()
        nbytes = sum(value.nbytes for value in state.values())
        return section.title.format(size=f"{nbytes / 1e6:,.0f} MB", count=f"{len(state):,}")


def _plain(name: str) -> str:
    """A case and a contender on one line."""
    return ", ".join(part for part in name.split("\n") if part)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200].rstrip(".") if lines else type(error).__name__


def _words(cases: Mapping[str, Runs]) -> str:
    texts = ["Every contender ends with the same weights, bit for bit."]
    different = [f"{name} {head}".strip() for head, runs in cases.items() for name in different_weights(runs)]
    if different:
        texts = [f"The weights differ from the first row's: {'; '.join(different)}."]
    lost = {n for runs in cases.values() for n, found in runs.items() if not found[0]["check"].facts["references_kept"]}
    if lost:
        texts.append(
            f"Afterwards the optimizer has parameters that are no longer the model's: {'; '.join(sorted(lost))}."
        )
    return " ".join(texts)


def different_weights(results: Runs) -> list[str]:
    """The contenders that did not end with the weights that the first one has."""
    prints = {name: {run["check"].facts["weights"] for run in runs} for name, runs in results.items()}
    expected = next(iter(prints.values()), set())
    return [name for name, found in prints.items() if found != expected]
