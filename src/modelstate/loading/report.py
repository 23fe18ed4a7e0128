"""The report of a load: what happened to each slot; and the progress bar."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from modelstate.planning.plan import Step, placements
from modelstate.text_format import size


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What a load has done. Made by `modelstate.load`."""

    target: str
    """The class of the model."""
    source: str
    """The path of the checkpoint, and the part of it that was meant."""
    steps: tuple[Step, ...]
    """What was done, a step for each slot that was filled, with the time that it took."""
    notes: tuple[str, ...]
    """What was passed over, and what else is worth knowing."""
    slots: int
    """Tensors of the model and extra states: a tied tensor once, and no buffers that only the constructor fills."""
    seconds: float
    """From the call to the return."""
    peak_memory_bytes: int
    """The most memory that the load held at once beyond the final tensors: buffers, values that wait to be copied, what
    is kept to undo, and what a `ModuleTransform` says that it takes. At most what the plan says, and the buffers of
    files that are read past the page cache."""
    verified_bytes: int = 0
    """Bytes that were compared with their checksums."""
    references_lost: tuple[str, ...] = ()
    """Names, ties, views and places in optimizers that have another object now, or another partner: what the model's
    own code has replaced. Empty where every reference was kept."""
    left_behind: tuple[str, ...] = ()
    """Optimizers that were not passed to a conversion, and whose state is now of another dtype or on another device
    than the parameters. Pass them: `convert(..., optimizers=[...])`."""
    action: str = ""
    """What was done, where it was no load: "converted to bfloat16"."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that were loaded, those of mapped tensors included."""
        return sum(step.nbytes for step in self.steps)

    @property
    def coverage(self) -> float:
        """The part of the model's slots that was filled, from 0 to 1."""
        return len(self.steps) / self.slots if self.slots else 1.0

    def __repr__(self) -> str:
        """The first line of what `print` shows."""
        first, *_ = self._conversion() if self.action else self._load()
        notes = f", {len(self.notes)} notes" if self.notes else ""
        lost = f", {len(self.references_lost)} references lost" if self.references_lost else ""
        return f"<{type(self).__name__}: {first}, {size(self.bytes)} in {self.seconds:.3f} s{notes}{lost}>"

    def __str__(self) -> str:
        lines = self._conversion() if self.action else self._load()
        lines += [f"  {line}" for line in placements(self.steps)]
        lines += [f"  note: {note}" for note in self.notes]
        if self.verified_bytes:
            lines.append(f"  {size(self.verified_bytes)} verified against their checksums")
        if self.references_lost:
            lines.append(f"  references lost: {'; '.join(self.references_lost[:8])}")
        elif not self.left_behind:
            lines.append("  all references kept")
        if self.left_behind:
            lines.append(f"  left behind: {'; '.join(self.left_behind[:8])}; pass them with optimizers=[...]")
        return "\n".join(lines)

    def _conversion(self) -> list[str]:
        return [
            f"{self.target} {self.action}: {len(self.steps)} of {self.slots} tensors changed",
            f"  {size(self.bytes)} in {self.seconds:.3f} s, "
            f"at most {size(self.peak_memory_bytes)} of memory beyond what the module had",
        ]

    def _load(self) -> list[str]:
        mapped = sum(step.nbytes for step in self.steps if step.mapped)
        read = self.bytes - mapped
        return [
            f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled",
            f"  {size(read)} read, {size(mapped)} mapped in {self.seconds:.3f} s, "
            f"at most {size(self.peak_memory_bytes)} of memory beyond the final tensors",
        ]

    def to_json(self) -> str:
        """All of it, machine-readable."""
        return json.dumps(
            {
                "target": self.target,
                "source": self.source,
                "seconds": self.seconds,
                "bytes": self.bytes,
                "peak_memory_bytes": self.peak_memory_bytes,
                "verified_bytes": self.verified_bytes,
                "references_lost": list(self.references_lost),
                "left_behind": list(self.left_behind),
                "action": self.action or "loaded",
                "slots": self.slots,
                "coverage": self.coverage,
                "notes": list(self.notes),
                "steps": [{**step.as_dict(), "seconds": step.seconds} for step in self.steps],
            },
            indent=1,
        )


_PATIENCE_SECONDS = 0.5


@contextmanager
def progress_bar(wanted: bool | None, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes bytes as they are done.

    With None a bar appears on a terminal after half a second; True shows it at once, False never.
    """
    bar = _Bar(wanted, total_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    def __init__(self, wanted: bool | None, total_bytes: int) -> None:
        self._allowed = sys.stderr.isatty() if wanted is None else wanted
        self._patience = _PATIENCE_SECONDS if wanted is None else 0.0
        self._total, self._done = total_bytes, 0
        self._started = time.monotonic()
        self._shown: Any = None
        if wanted:
            self.advance(0)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if not self._allowed:
            return
        if self._shown is None and time.monotonic() - self._started >= self._patience:
            self._shown = self._show()
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=self._done)

    def _show(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        bar = Progress(
            TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)
        )
        bar.add_task("loading", total=self._total)
        bar.start()
        return bar

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
