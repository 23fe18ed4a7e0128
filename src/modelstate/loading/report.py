"""The report of a load or a conversion, with a step for each slot."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import asdict

from modelstate.html.page import Page
from modelstate.planning.plan import LoadSummary, steps_page, ways
from modelstate.text_format import count, listed, printable, seconds, size


class RankReport(msgspec.Struct, frozen=True):
    """What one rank of a load into a sharded model did."""

    rank: int
    read_bytes: int
    """Bytes that the plan of the rank reads from files; without those of mapped tensors, which are read when used."""
    planning_seconds: float
    reading_seconds: float
    """The time of reading, casting and staging, without the time that the rank waited for others."""
    commit_seconds: float


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class LoadReport(LoadSummary):
    """The report of a load or a conversion. Created by `modelstate.load` and `modelstate.convert`.

    `print` shows a summary.

    Examples:
        >>> report = modelstate.load(model, "model.safetensors")
        >>> report.coverage, report.references_lost
        (1.0, ())
        >>> slowest = max(report.steps, key=lambda step: step.seconds)
    """

    seconds: float
    """The time from the call to the return."""
    peak_memory_bytes: int
    """The most memory that the load used at once in addition to the final tensors: buffers, values before they are
    copied, old values for an undo, and the memory that a `ModuleTransform` declares. At most
    `LoadPlan.peak_memory_bytes` and the buffers of files that are read past the page cache."""
    verified_bytes: int = 0
    """Bytes that were compared with their checksums."""
    references_lost: tuple[str, ...] = ()
    """Names, ties, views and optimizer references that the model's own code has replaced by other objects. Empty where
    every reference was kept."""
    left_behind: tuple[str, ...] = ()
    """Optimizers that were not passed to a conversion, and whose state now has another dtype or device than their
    parameters. Pass them: `convert(..., optimizers=[...])`."""
    action: str = ""
    """The action of a conversion, such as "converted to bfloat16"; empty for a load."""
    ranks: tuple[RankReport, ...] = ()
    """What each rank of a load into a sharded model did; empty for a load on one rank. All other fields are about this
    rank."""
    reread_bytes: int = 0
    """Bytes that more than one rank read, since the model has replicas of them, counted for each further rank."""

    def __repr__(self) -> str:
        """A summary in one line."""
        first, *_ = self._conversion() if self.action else self._load()
        notes = f", {count(len(self.notes), 'note')}" if self.notes else ""
        lost = f", {len(self.references_lost)} references lost" if self.references_lost else ""
        return f"<{type(self).__name__}: {first}, {size(self.bytes)} in {self.seconds:.3f} s{notes}{lost}>"

    def __str__(self) -> str:
        lines = self._conversion() if self.action else self._load()
        lines += [f"  {line}" for line in ways(self.steps)]
        lines += [f"  {line}" for line in self._of_ranks()]
        lines += [f"  note: {printable(note)}" for note in self.notes]
        if self.verified_bytes:
            lines.append(f"  {size(self.verified_bytes)} verified against their checksums")
        if self.references_lost:
            lines.append(f"  references lost: {listed(self.references_lost, 8, '; ')}")
        elif not self.left_behind:
            lines.append("  all references kept")
        if self.left_behind:
            lines.append(f"  left behind: {listed(self.left_behind, 8, '; ')}; pass them with optimizers=[...]")
        return "\n".join(lines)

    def _conversion(self) -> list[str]:
        return [
            f"{self.target} {self.action}: {len(self.steps)} of {self.slots} tensors changed",
            f"  {size(self.bytes)} in {self.seconds:.3f} s, "
            f"at most {size(self.peak_memory_bytes)} of memory beyond what the module had",
        ]

    def _of_ranks(self) -> list[str]:
        if not self.ranks:
            return []
        read = [rank.read_bytes for rank in self.ranks]
        slowest = [
            f"{name} {max(getattr(rank, f'{name}_seconds') for rank in self.ranks):.3f} s"
            for name in ("planning", "reading", "commit")
        ]
        return [
            f"{len(self.ranks)} ranks: {size(sum(read))} read, {size(min(read))} to {size(max(read))} each, "
            f"{size(self.reread_bytes)} more than once",
            f"slowest rank of each phase: {', '.join(slowest)}",
        ]

    def _load(self) -> list[str]:
        mapped = sum(step.nbytes for step in self.steps if step.mapped)
        read = self.bytes - mapped
        return [
            f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled",
            f"  {size(read)} read, {size(mapped)} mapped in {self.seconds:.3f} s, "
            f"at most {size(self.peak_memory_bytes)} of memory beyond the final tensors",
        ]

    def _page(self) -> Page:
        title = f"{self.target} {self.action}" if self.action else f"{self.source} into {self.target}"
        facts = (
            ("Slots", f"{len(self.steps):,} of {self.slots:,} {'changed' if self.action else 'filled'}"),
            ("Bytes", size(self.bytes)),
            ("Time", seconds(self.seconds)),
            ("Memory beyond the final tensors", size(self.peak_memory_bytes)),
            ("References lost", ", ".join(self.references_lost) or "none"),
        )
        return steps_page(title, facts, self.steps, (*self._of_ranks(), *self.notes))

    def to_json(self) -> str:
        """Returns the whole report as JSON."""
        own = {
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "verified_bytes": self.verified_bytes,
            "references_lost": self.references_lost,
            "left_behind": self.left_behind,
            "action": self.action or "loaded",
            "reread_bytes": self.reread_bytes,
            "ranks": [asdict(rank) for rank in self.ranks],
        }
        return self._json(own, lambda step: {**step.as_dict(), "seconds": step.seconds})
