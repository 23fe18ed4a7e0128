"""`LoadPlan` and `LoadReport`: the steps of a load, before and after it. Both can be printed and saved as JSON.

A plan has problems, and can be executed. A report says what has been done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import asdict

from modelstate.html.page import Page, Shown
from modelstate.planning.matching import MatchedCheckpoint
from modelstate.planning.options import LoadOptions
from modelstate.planning.transfer import Way
from modelstate.problems import Problem, explain
from modelstate.process import cached_attribute
from modelstate.text_format import count, listed, printable, seconds, size
from modelstate.torch_compat.dtypes import short
from modelstate.transaction.slots import SlotSignatures


class Step(NamedTuple):
    """A step of a plan or a report: the source of one slot, its way into the slot, and the reason for the way."""

    name: str
    """The name in the model."""
    kind: str
    """"parameter", "buffer", "non-persistent buffer" or "extra state"."""
    source: str
    """The name in the checkpoint; several names where a rule joins tensors; empty where a rule or the model's code
    computes the value."""
    way: Way
    """How the value gets into the slot."""
    why: str
    """The reason for the way."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """After the load; None for extra state."""
    stored_dtype: torch.dtype | None = None
    """The dtype in the checkpoint; for a conversion, the dtype before it."""
    device: torch.device | None = None
    """After the load; None for extra state."""
    nbytes: int = 0
    """Bytes that are read."""
    ties: tuple[str, ...] = ()
    """Other names of the same tensor in the model."""
    rules: tuple[str, ...] = ()
    """The rules that lead from the source to the name; with `init_missing=`, the methods that initialise the tensor."""
    shard: str = ""
    """The part of a DTensor that this rank loads: "[2:4, 0:8]"; several parts where they do not adjoin."""

    @property
    def decision(self) -> tuple[object, ...]:
        """What a plan decides. Whether bytes are mapped, or read at the commit, depends on other processes too."""
        way = {Way.MAP: Way.NEW, Way.INTO: Way.STAGED}.get(self.way, self.way)
        return (*self[:3], way, *self[5:])

    @property
    def mapped(self) -> bool:
        """Whether the value is a map of the file, so that nothing is copied."""
        return self.way is Way.MAP

    @property
    def cast(self) -> str:
        """The cast, such as "float16 to float32"; empty if the checkpoint has the same dtype."""
        if self.dtype is None or self.stored_dtype is None or self.stored_dtype == self.dtype:
            return ""
        return f"{short(self.stored_dtype)} to {short(self.dtype)}"

    def as_dict(self) -> dict[str, object]:
        """Returns the step as a dictionary of JSON values."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in self._asdict().items()}
        del values["stored_dtype"]
        values["dtype"] = "" if self.dtype is None else short(self.dtype)
        values["device"] = "" if self.device is None else str(self.device)
        values |= {"mapped": self.mapped, "cast": self.cast, "bytes": values.pop("nbytes")}
        return values


class LoadSummary(Shown, msgspec.Struct, frozen=True, kw_only=True, dict=True, eq=False):
    """What a plan and a report say of a load."""

    target: str
    """The class of the model."""
    source: str
    """The path of the checkpoint, and the key of the part that is loaded."""
    notes: tuple[str, ...]
    """Names that are skipped, and further remarks."""
    slots: int
    """The number of tensors and extra states of the model. A tied tensor counts once; buffers that only the constructor
    fills do not count."""
    make_steps: Callable[[], tuple[Step, ...]]
    """Returns the steps, which are made when they are used: there may be tens of thousands."""

    @cached_attribute
    def steps(self) -> tuple[Step, ...]:
        """The steps, one for each slot that is filled."""
        return self.make_steps()

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("make_steps", "binding")}
        steps = [step.as_dict() for step in self.steps]
        values |= {**self._own_values(), "bytes": self.bytes, "coverage": self.coverage, "steps": steps}
        return json.dumps(values, indent=1)

    def _own_values(self) -> dict[str, object]:
        """The JSON values that are not those of the fields."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if type(other) is type(self) else NotImplemented

    def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return partial(type(self), **{**fields, "make_steps": partial(tuple, self.steps)}), ()

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are loaded. Mapped tensors are read when they are first used."""
        return sum(step.nbytes for step in self.steps)

    @property
    def coverage(self) -> float:
        """The fraction of the model's slots that is filled, from 0 to 1."""
        return len(self.steps) / self.slots if self.slots else 1.0

    def _title(self) -> str:
        return f"{self.source} into {self.target}"

    def _first_line(self) -> str:
        return f"{self._title()}: {len(self.steps)} of {self.slots} slots filled"

    def _page_with(self, facts: tuple[tuple[str, str], ...], notes: tuple[str, ...], text: str = "") -> Page:
        """Returns the page with these facts, notes and details."""
        columns = ("Name", "Kind", "From", "Shape", "Dtype", "Cast", "Bytes", "Way", "Reason")
        rows = []
        for step in self.steps:
            of_slot = step.name, step.kind, step.source, str(list(step.shape)), short(step.dtype) if step.dtype else ""
            rows.append((*of_slot, step.cast, step.nbytes, step.way, step.why))
        return Page(self._title(), facts, columns, rows, table="Steps", text=text, notes=(*ways(self.steps), *notes))


class Binding(msgspec.Struct, frozen=True):
    """Binds a plan to models: the decisions that are not repeated, and the slots that a model must have."""

    matched: MatchedCheckpoint
    slots: SlotSignatures
    """The slots of the model that the plan was made for."""
    runs_code: bool
    """Whether code of the model ran. It runs again when the plan is executed, because its effects were undone."""
    mapped: int
    """The number of tensors that are maps of a file."""


class LoadPlan(LoadSummary, frozen=True, kw_only=True, dict=True, eq=False):
    """The steps of a load. Created by `modelstate.plan`, and executed by `modelstate.load(model, plan)`.

    A plan can be executed any number of times while the files are unchanged, and into every model with the same slots:
    the same names, ties, classes, shapes, dtypes and devices. `print` shows a summary and the problems.

    Examples:
        >>> plan = modelstate.plan(model, "model.safetensors")
        >>> if plan.ok:
        ...     report = modelstate.load(model, plan)
        ... else:
        ...     print(plan)
    """

    problems: tuple[Problem, ...]
    """Everything that keeps the load from being executed."""
    peak_memory_bytes: int
    """The most memory that the load needs in addition to the final tensors, in bytes."""
    binding: Binding
    """The data that executes the plan without planning again."""

    @property
    def options(self) -> LoadOptions:
        """The arguments of `modelstate.plan`."""
        return self.binding.matched.options

    @property
    def ok(self) -> bool:
        """Whether the plan can be executed."""
        return not self.problems

    def __repr__(self) -> str:
        """A summary in one line."""
        problems = count(len(self.problems), "problem") if self.problems else "ok"
        return f"<{type(self).__name__}: {self._first_line()}, {size(self.bytes)} to read, {problems}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, command_line: bool = False) -> str:
        """Returns the plan as text, with remedies for Python or for the command line."""
        lines = [
            self._first_line(),
            f"  {size(self.bytes)} to read, {size(self.peak_memory_bytes)} of memory beyond the final tensors",
            *(f"  {line}" for line in ways(self.steps)),
            *(f"  note: {printable(note)}" for note in self.notes),
        ]
        if self.problems:
            lines += [f"problems ({len(self.problems)}):", self._explanation(command_line)]
        return "\n".join(lines)

    def _explanation(self, command_line: bool = False) -> str:
        return explain(self.problems, given=self.binding.matched.given, command_line=command_line)

    def _page(self) -> Page:
        facts = (
            ("Result", "can be loaded" if self.ok else count(len(self.problems), "problem")),
            ("Slots", f"{len(self.steps):,} of {self.slots:,} filled"),
            ("To read", size(self.bytes)),
            ("Memory beyond the final tensors", size(self.peak_memory_bytes)),
        )
        return self._page_with(facts, self.notes, self._explanation())

    def _own_values(self) -> dict[str, object]:
        return {"ok": self.ok, "problems": [problem.as_dict() for problem in self.problems]}


class RankReport(msgspec.Struct, frozen=True):
    """What one rank of a load into a sharded model did."""

    rank: int
    read_bytes: int
    """Bytes that the plan of the rank reads from files; without those of mapped tensors, which are read when used."""
    planning_seconds: float
    reading_seconds: float
    """The time of reading, casting and staging, without the time that the rank waited for others."""
    commit_seconds: float


class LoadReport(LoadSummary, frozen=True, kw_only=True, dict=True, eq=False):
    """The report of a load or a conversion. Created by `modelstate.load` and `modelstate.convert`.

    `print` shows a summary.

    Examples:
        >>> report = modelstate.load(model, "model.safetensors")
        >>> report.coverage, report.references_lost
        (1.0, ())
    """

    seconds: float
    """The time from the call to the return."""
    peak_memory_bytes: int
    """The most memory that the load took at once in addition to the final tensors, as `LoadPlan.peak_memory_bytes`
    says it: with the blocks and threads of this load, and with the values that had to be staged after all."""
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
        notes = f", {count(len(self.notes), 'note')}" if self.notes else ""
        lost = f", {len(self.references_lost)} references lost" if self.references_lost else ""
        return f"<{type(self).__name__}: {self._first_line()}, {size(self.bytes)} in {self.seconds:.3f} s{notes}{lost}>"

    def __str__(self) -> str:
        mapped = sum(step.nbytes for step in self.steps if step.mapped)
        what = size(self.bytes) if self.action else f"{size(self.bytes - mapped)} read, {size(mapped)} mapped"
        beyond = f"of memory beyond {'what the module had' if self.action else 'the final tensors'}"
        lines = [
            self._first_line(),
            f"  {what} in {self.seconds:.3f} s, at most {size(self.peak_memory_bytes)} {beyond}",
        ]
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

    def _title(self) -> str:
        return f"{self.target} {self.action}" if self.action else super()._title()

    def _first_line(self) -> str:
        what = "tensors changed" if self.action else "slots filled"
        return f"{self._title()}: {len(self.steps)} of {self.slots} {what}"

    def _of_ranks(self) -> list[str]:
        if not self.ranks:
            return []
        read = [rank.read_bytes for rank in self.ranks]
        phases = "planning", "reading", "commit"
        slowest = [f"{name} {max(getattr(rank, f'{name}_seconds') for rank in self.ranks):.3f} s" for name in phases]
        of_phases = f"slowest rank of each phase: {', '.join(slowest)}"
        each = f"{size(min(read))} to {size(max(read))} each, {size(self.reread_bytes)} more than once"
        return [f"{len(self.ranks)} ranks: {size(sum(read))} read, {each}", of_phases]

    def _page(self) -> Page:
        facts = (
            ("Slots", f"{len(self.steps):,} of {self.slots:,} {'changed' if self.action else 'filled'}"),
            ("Bytes", size(self.bytes)),
            ("Time", seconds(self.seconds)),
            ("Memory beyond the final tensors", size(self.peak_memory_bytes)),
            ("References lost", ", ".join(self.references_lost) or "none"),
        )
        return self._page_with(facts, (*self._of_ranks(), *self.notes))

    def _own_values(self) -> dict[str, object]:
        return {"action": self.action or "loaded", "ranks": [asdict(rank) for rank in self.ranks]}


def ways(steps: tuple[Step, ...]) -> list[str]:
    """Returns a line for each way with its reason, and for each cast."""
    lines, sizes = list[str](), dict[tuple[Way, str, bool], list[int]]()
    for step in steps:
        sizes.setdefault((step.way, step.why, step.dtype is None), []).append(step.nbytes)
    for (way, why, is_extra), group in sorted(sizes.items(), key=lambda item: -len(item[1])):
        what = count(len(group), "extra state") if is_extra else f"{count(len(group), 'tensor')}, {size(sum(group))}"
        lines.append(f"{way}: {what}: {why}")
    casts = Counter(step.cast for step in steps if step.cast)
    return lines + [f"cast: {count(number, 'tensor')} from {cast}" for cast, number in casts.most_common()]
