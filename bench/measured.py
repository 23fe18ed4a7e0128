"""What a run found, and how it is kept in files, so that sections may be measured one after another."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import ROOT, Stage, median

Runs = Mapping[str, Sequence[Mapping[str, Stage]]]
"""By the name of the contender: what each of its runs found, by stage."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One table before it is written down."""

    key: str
    """By which the summary finds it."""
    title: str
    words: str
    form: str
    """How it is shown: `load`, `cast`, `convert`, `grid`, `limits`, `save`, `torture`, `swap`, `request`, `serving`."""
    cases: Mapping[str, Runs]
    """By the head of the column; all but a grid have one case without a name."""
    runs: int
    absent: Mapping[str, str] = field(default_factory=dict)
    """Contenders that could not run here, and why."""
    left_out: str = ""
    """Which were not asked to, and why."""

    def at(self, row: str, stage: str = "ready", case: str | None = None) -> Stage | None:
        """The medians; None where the contender has not run."""
        found = (next(iter(self.cases.values())) if case is None else self.cases.get(case, {})).get(row)
        return median(found, stage) if found else None

    @property
    def rows(self) -> list[str]:
        """Of the first case."""
        return list(next(iter(self.cases.values())))


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the harness measured, and with what."""

    name: str
    measured: Sequence[Measured]
    code: str
    """A digest of the sources that were measured, and of those that measured."""
    machine: str


def code() -> str:
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]):
        if path.name not in _ONLY_WORDS:
            digest.update(f"{path.relative_to(ROOT)} {len(path.read_bytes())} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


_ONLY_WORDS = {"comparisons.py", "pages.py"}
"""Changing how results are shown does not make them others."""


def keep(part: Part, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part.name}.json").write_text(json.dumps(asdict(part), separators=(",", ":")) + "\n")


def kept(folder: Path, order: Iterable[str]) -> list[Part]:
    """The parts that are there, in this order."""
    paths = [folder / f"{name}.json" for name in order]
    return [_part(json.loads(path.read_text())) for path in paths if path.exists()]


def _part(found: Mapping[str, Any]) -> Part:
    return Part(**{**found, "measured": [_measured(one) for one in found["measured"]]})


def _measured(found: Mapping[str, Any]) -> Measured:
    cases = {
        case: {
            row: [{name: Stage(**stage) for name, stage in run.items()} for run in results]
            for row, results in runs.items()
        }
        for case, runs in found["cases"].items()
    }
    return Measured(**{**found, "cases": cases})
