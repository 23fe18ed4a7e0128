"""The summary of the benchmarks: our time beside that of the best peer, for each job that people have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bench import live, saving
from bench.measured import Measured

Found = Mapping[str, Measured]
"""Everything that was measured, by its key."""
OURS = "modelstate.load"


class NotMeasuredError(Exception):
    """A row's tables, or its contenders, are not there."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the summary: a job, and the row of our time in a table."""

    job: str
    key: str
    ours: str
    stage: str = "ready"
    peers: Callable[[Found, str], bool] = lambda found, row: True
    """Whether another row of the table does the same job."""
    case: str | None = None
    """The column of a grid; without one, the first."""


def _keeps_references(found: Found, key: str, row: str) -> bool:
    """Returns whether a contender loads into the parameters that the optimizer refers to."""
    check = found[key].at(row, "check")
    assert check is not None
    return bool(check.facts["references_kept"])


COMPARISONS = {
    "Loading": (
        Comparison(
            "1.2 GB file into a module with its optimizer",
            "default/large",
            OURS,
            peers=lambda found, row: _keeps_references(found, "default/large", row),
        ),
        Comparison(
            "90 MB with ties, BatchNorm and frozen parameters",
            "default/mixed",
            OURS,
            peers=lambda found, row: _keeps_references(found, "default/mixed", row),
        ),
        Comparison("1.2 GB file, cold, into a module with its optimizer", "cold/memory", OURS),
        Comparison("float32 file into a bfloat16 module", "cast/memory", f"{OURS}, dtype=bfloat16"),
        Comparison(
            "20,000 small tensors into a module",
            "small/memory",
            OURS,
            peers=lambda found, row: _keeps_references(found, "small/memory", row),
        ),
        Comparison("1.2 GB file onto meta, to the end of the first forward", "large/meta", OURS, "forward"),
        Comparison("float32 file onto meta, as int8 weights", "int8", f"{OURS}, transform=Quantize"),
        Comparison("a Llama of transformers, with its construction", "hub/load", "modelstate.load, with construction"),
    ),
    "On a GPU": (
        *(
            Comparison(
                f"{what} into a module on a GPU",
                f"gpu/{case}",
                OURS,
                peers=partial(lambda key, found, row: _keeps_references(found, key, row), f"gpu/{case}"),
            )
            for case, what in (("large", "1.2 GB file"), ("middle", "90 MB file"), ("small", "20,000 small tensors"))
        ),
        Comparison("float32 file into a bfloat16 module on a GPU", "gpu/cast", f"{OURS}, dtype=bfloat16"),
        Comparison("1.2 GB file into a module on meta, onto a GPU", "gpu/meta", OURS),
        *(
            Comparison(
                f"until the {turn} background save of 1.2 GB has copied the state",
                "gpu/save",
                name.format(saving.STORE),
                peers=partial(lambda turn, found, row: row.endswith(turn), turn),
            )
            for turn, name in (("first", saving.FIRST), ("second", saving.SECOND))
        ),
    ),
    "Converting, merging, comparing": (
        Comparison(
            "1.2 GB module in memory, from float32 to bfloat16",
            "convert/large",
            "modelstate.convert",
            peers=lambda found, row: "modelstate" not in row,
        ),
        Comparison(
            "20,000 small tensors in memory, from float32 to bfloat16",
            "convert/small",
            "modelstate.convert",
            peers=lambda found, row: "modelstate" not in row,
        ),
        Comparison("the average of three checkpoints of 1.2 GB", "merge/average", "modelstate.load, merge.Average"),
        Comparison("a LoRA adapter merged into 1.2 GB", "merge/lora", "modelstate.load, merge.LoRA"),
        Comparison(
            "two checkpoints of 1.2 GB compared",
            "diff",
            "modelstate.diff",
            peers=lambda found, row: row.startswith("two torch.load"),
        ),
        *(
            Comparison(
                f"names and shapes of 20,000 tensors, a {kind} file",
                "opening",
                "modelstate.open + every shape",
                case=f"20,000 tensors, {kind}",
            )
            for kind in ("safetensors", "torch")
        ),
        Comparison("load_state_dict of 5,000 modules", "state-dict", "modelstate.load_state_dict"),
    ),
    "Saving": (
        Comparison(
            "1.2 GB module to safetensors, synced to the disk",
            "save",
            "modelstate.save",
            peers=lambda found, row: row.endswith(", then fsync"),
        ),
        Comparison(
            "until a background save of 1.2 GB returns",
            "store",
            saving.BLOCKED,
            peers=lambda found, row: row == saving.MEMCPY,
        ),
    ),
    "Serving": (
        *(
            Comparison(
                f"staging of a swap of 100 MB from a file, {kind}",
                "live/swap",
                live.STAGED_FILE.format(kind),
                peers=lambda found, row: row == live.MEMCPY,
            )
            for kind in live.KINDS
        ),
        *(
            Comparison(
                f"a request to a small program, {kind}",
                f"live/request/{kind}",
                live.LIVE.format(kind),
                peers=lambda found, row: row == live.MODULE or row in live.BARE.values(),
            )
            for kind in live.KINDS
        ),
    ),
}
"""The rows of the summary, by group."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of the summary, with what was found."""

    job: str
    ours: str
    our_seconds: float
    peer: str
    """The fastest other contender that does the same job."""
    peer_seconds: float
    range: tuple[float, float]
    """The least and the largest ratio of both times in one turn, in which each contender runs once."""

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return self.our_seconds / self.peer_seconds

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        times = (_short(seconds) for seconds in (self.our_seconds, self.peer_seconds))
        ours, peer = map(" ".join, zip((self.ours, self.peer), times, strict=True))
        return [self.job, ours, peer, f"{self.ratio:.2f}", "{:.2f} to {:.2f}".format(*self.range)]


def compared(found: Found, group: str) -> list[Compared]:
    """Returns the rows of a group of the summary, of those that were measured."""
    rows = []
    for one in COMPARISONS[group]:
        try:
            peer = _best(found, one.key, one.stage, partial(one.peers, found), one.case)
            ours, theirs = (_seconds(found, one.key, row, one.stage, one.case) for row in (one.ours, peer))
        except NotMeasuredError:
            continue
        cases = found[one.key].cases
        runs = next(iter(cases.values())) if one.case is None else cases[one.case]
        turns = [
            mine[one.stage].seconds / other[one.stage].seconds
            for mine, other in zip(runs[one.ours], runs[peer], strict=False)
        ]
        rows.append(Compared(one.job, one.ours, ours, peer, theirs, (min(turns), max(turns))))
    return rows


def _best(found: Found, key: str, stage: str, which: Callable[[str], bool], case: str | None) -> str:
    """Returns the fastest of the other contenders."""
    if key not in found:
        raise NotMeasuredError(key)
    measured = found[key].rows if case is None else found[key].cases.get(case, ())
    rows = [row for row in measured if not row.startswith("modelstate") and which(row)]
    if not rows:
        raise NotMeasuredError(f"{key}: no other contender")
    return min(rows, key=lambda row: _seconds(found, key, row, stage, case))


def _seconds(found: Found, key: str, row: str, stage: str, case: str | None) -> float:
    measured = found[key].at(row, stage, case)
    if measured is None:
        raise NotMeasuredError(f"{key}: {row}")
    return measured.seconds


def _short(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds * 1000:,.0f} ms"
