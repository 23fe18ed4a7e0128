"""`LoadPlan`: the frozen steps of a load, and its problems. It can be printed, saved as JSON, and executed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from modelstate.html.page import ColumnKind, Page, Shown
from modelstate.planning.matching import MatchedCheckpoint
from modelstate.planning.options import LoadOptions
from modelstate.planning.transfer import Way
from modelstate.problems import Problem, explain
from modelstate.text_format import count, printable, size
from modelstate.torch_compat.dtypes import short
from modelstate.transaction.slots import SlotSignatures


class Step(NamedTuple):
    """A step of a plan or a report: the source of one slot, its way into the slot, and the reason for the way.

    Comparisons ignore `seconds`.
    """

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
    mapped: bool = False
    """Whether the value is a map of the file, so that nothing is copied."""
    shard: str = ""
    """The part of a DTensor that this rank loads: "[2:4, 0:8]"; several parts where they do not adjoin."""
    seconds: float = 0.0
    """In a report: the time for reading, casting and transforming. Tensors that are read together share the time in
    proportion to their bytes."""

    @property
    def decision(self) -> tuple[object, ...]:
        """What a plan decides. Whether bytes are mapped, or read at the commit, depends on other processes too."""
        way = {Way.MAP: Way.NEW, Way.INTO: Way.STAGED}.get(self.way, self.way)
        return (*self[:3], way, *self[5:12], self.shard)

    @property
    def cast(self) -> str:
        """The cast, such as "float16 to float32"; empty if the checkpoint has the same dtype."""
        if self.dtype is None or self.stored_dtype is None or self.stored_dtype == self.dtype:
            return ""
        return f"{short(self.stored_dtype)} to {short(self.dtype)}"

    def __eq__(self, other: object) -> bool:
        return self[:_COMPARED] == other[:_COMPARED] if isinstance(other, Step) else NotImplemented

    def __ne__(self, other: object) -> bool:  # tuple defines it
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:_COMPARED])

    def as_dict(self) -> dict[str, object]:
        """Returns the step as a dictionary of JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "source": self.source,
            "way": self.way,
            "why": self.why,
            "shape": list(self.shape),
            "dtype": short(self.dtype) if self.dtype is not None else "",
            "cast": self.cast,
            "device": str(self.device) if self.device is not None else "",
            "bytes": self.nbytes,
            "mapped": self.mapped,
            "ties": list(self.ties),
            "rules": list(self.rules),
            "shard": self.shard,
        }


_COMPARED = Step._fields.index("seconds")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class LoadSummary(Shown):
    """What a plan and a report say of a load. The steps, of up to tens of thousands of slots, are made when used."""

    target: str
    """The class of the model."""
    source: str
    """The path of the checkpoint, and the key of the part that is loaded."""
    steps: tuple[Step, ...] = field(init=False)
    """The steps, one for each slot that is filled; in a report with their times."""
    notes: tuple[str, ...]
    """Names that are skipped, and further remarks."""
    slots: int
    """The number of tensors and extra states of the model. A tied tensor counts once; buffers that only the constructor
    fills do not count."""
    make_steps: Callable[[], tuple[Step, ...]] | None = field(compare=False)
    """Returns the steps, when they are first used. None afterwards."""

    def __getattr__(self, name: str) -> Any:
        """Creates `steps`. Called for a slot that is not set."""
        if name != "steps":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        if self.make_steps is not None:
            object.__setattr__(self, "steps", self.make_steps())
            object.__setattr__(self, "make_steps", None)
        return object.__getattribute__(self, "steps")

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are loaded. Mapped tensors are read when they are first used."""
        return sum(step.nbytes for step in self.steps)

    @property
    def coverage(self) -> float:
        """The fraction of the model's slots that is filled, from 0 to 1."""
        return len(self.steps) / self.slots if self.slots else 1.0

    def _json(self, own: Mapping[str, object], step_dict: Callable[[Step], dict[str, object]]) -> str:
        return json.dumps(
            {
                "target": self.target,
                "source": self.source,
                **own,
                "bytes": self.bytes,
                "slots": self.slots,
                "coverage": self.coverage,
                "notes": list(self.notes),
                "steps": [step_dict(step) for step in self.steps],
            },
            indent=1,
        )


class Binding(msgspec.Struct, frozen=True):
    """Binds a plan to models: the decisions that are not repeated, and the slots that a model must have."""

    matched: MatchedCheckpoint
    slots: SlotSignatures
    """The slots of the model that the plan was made for."""
    runs_code: bool
    """Whether code of the model ran. It runs again when the plan is executed, because its effects were undone."""
    mapped: int
    """The number of tensors that are maps of a file."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class LoadPlan(LoadSummary):
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
    binding: Binding = field(repr=False, compare=False)
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
        filled = f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled"
        return f"<{type(self).__name__}: {filled}, {size(self.bytes)} to read, {problems}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, command_line: bool = False) -> str:
        """Returns the plan as text, with remedies for Python or for the command line."""
        lines = [
            f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled",
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
        text = self._explanation() if self.problems else ""
        return steps_page(f"{self.source} into {self.target}", facts, self.steps, self.notes, text)

    def to_json(self) -> str:
        """Returns the whole plan as JSON."""
        own = {
            "ok": self.ok,
            "peak_memory_bytes": self.peak_memory_bytes,
            "problems": [problem.as_dict() for problem in self.problems],
        }
        return self._json(own, Step.as_dict)


def steps_page(
    title: str,
    facts: tuple[tuple[str, str], ...],
    steps: tuple[Step, ...],
    notes: tuple[str, ...],
    text: str = "",
) -> Page:
    """Returns the page of a plan or a report."""
    columns = ("Name", "Kind", "From", "Shape", "Dtype", "Cast", "Bytes", "Way", "Reason", "Time in ms")
    kinds = {"Bytes": ColumnKind.BYTES, "Time in ms": ColumnKind.MEASURE}
    is_timed = any(step.seconds for step in steps)
    return Page(
        title,
        facts,
        tuple((name, kinds.get(name, ColumnKind.TEXT)) for name in columns[: None if is_timed else -1]),
        [
            (step.name, step.kind, step.source, str(list(step.shape)), short(step.dtype) if step.dtype else "")
            + (step.cast, step.nbytes, step.way, step.why)
            + ((step.seconds * 1000,) if is_timed else ())
            for step in steps
        ],
        table="Steps",
        text=text,
        notes=(*ways(steps), *notes),
    )


def ways(steps: tuple[Step, ...]) -> list[str]:
    """Returns a line for each way with its reason, and for each cast."""
    counts: Counter[tuple[Way, str]] = Counter()
    casts: Counter[str] = Counter()
    sizes: Counter[tuple[Way, str]] = Counter()
    for step in steps:
        counts[step.way, step.why] += 1
        sizes[step.way, step.why] += step.nbytes
        if step.cast:
            casts[step.cast] += 1
    extra = {(step.way, step.why) for step in steps if step.dtype is None}
    lines = [
        f"{way}: {count(number, 'extra state')}: {why}"
        if (way, why) in extra
        else f"{way}: {count(number, 'tensor')}, {size(sizes[way, why])}: {why}"
        for (way, why), number in counts.most_common()
    ]
    return lines + [f"cast: {count(number, 'tensor')} from {cast}" for cast, number in casts.most_common()]
