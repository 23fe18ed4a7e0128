"""Contenders in fresh processes: which can run here, in alternation, and whether they ended with the same weights."""

import importlib.util
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from bench import child, files
from bench.contenders import TABLES, Way
from bench.measure import ROOT, Arguments, MeasurementError, Stage, alternate, call, last_line, run
from bench.measured import Measured, Runs
from bench.models import KINDS, on_meta, sizes_of
from bench.sections import Load

Child = Callable[..., dict[str, Stage]]
"""Runs a program and gives its stages; a time limit can be given."""
Alternated = tuple[dict[str, list[dict[str, Stage]]], dict[str, str]]
"""The results of contenders, and why others failed."""


class Runner:
    """Starts children, and remembers what has been written for them."""

    def __init__(self, folder: Path, runs: int, quick: bool) -> None:
        self.folder, self.runs, self.quick = folder, runs, quick
        self._written: set[tuple[str, str]] = set()

    def child(self, function: Callable[Arguments, object], *_: Arguments.args, **arguments: Arguments.kwargs) -> Child:
        """A function that calls another one in a new process. What that writes for a time is in the runner's folder."""
        paths = f"{ROOT}:{ROOT / 'src'}"
        environment = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.folder)}
        return partial(run, call(function, *_, **arguments), environment=environment)

    def write(self, case: str, formats: set[str]) -> None:
        """The checkpoint of the case in these formats, unless they are there already. Raises `MeasurementError`."""
        for name in sorted(one for one in formats if (case, one) not in self._written):
            self.child(child.write, case=case, formats=[name], folder=str(self.folder), quick=self.quick)()
            self._written.add((case, name))

    def forget(self, needed: Collection[str]) -> None:
        """Removes the checkpoints of other cases, so that what is read has a place in the page cache."""
        for case in {case for case, _ in self._written} - set(needed):
            for path in files.of_case(case, self.folder):
                path.unlink()
            self._written = {one for one in self._written if one[0] != case}

    def alternate(self, contenders: Mapping[str, Child], runs: int | None = None) -> Alternated:
        """Runs children in alternation, and prints the times of each; as often as the runner's children run."""
        return alternate(contenders, self.runs if runs is None else runs, _times)

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
                    children[f"{head}\n{name}"] = self.child(
                        child.load,
                        table=section.table,
                        contender=name,
                        case=case,
                        folder=str(self.folder),
                        quick=self.quick,
                        cold=section.cold,
                    )
        found, failed = self.alternate(children)
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
            absent[name] = last_line(error)
            return False
        return True

    def _title(self, section: Load) -> str:
        case = next(iter(section.cases.values()))
        state = on_meta(case, sizes_of(self.quick)).state_dict(keep_vars=True)
        nbytes = sum({id(value): value.nbytes for value in state.values()}.values())  # tied weights are one tensor
        return section.title.format(size=f"{nbytes / 1e6:,.0f} MB", count=f"{len(state):,}")


def _times(stages: Mapping[str, Stage]) -> str:
    seconds = {name: stage.facts.get("seconds", stage.seconds) for name, stage in stages.items() if name != "check"}
    return ", ".join(f"{name} {each * 1000:,.3g} ms" for name, each in seconds.items())


def _words(cases: Mapping[str, Runs]) -> str:
    if not any(cases.values()):
        return ""
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
