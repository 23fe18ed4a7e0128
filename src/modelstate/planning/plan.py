"""The Plan: frozen steps, and the problems that stand in their way. It can be printed and saved, and applied once."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.planning.placement import Placement
from modelstate.planning.transforms import ModuleTransform, Pairs, Transform
from modelstate.problems import Problem, explain
from modelstate.rules.expression import Source
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Applied, Schema
from modelstate.text_format import size
from modelstate.torch_compat.dtypes import device_name, short
from modelstate.transaction.slots import SlotSignature


@dataclass(frozen=True, slots=True)
class Options:
    """How a checkpoint is to be loaded: the arguments of `modelstate.load` that decide about the plan."""

    key: str | None = None
    rules: tuple[Rule, ...] = ()
    schema: Schema | None = None
    """Gives the rules, once the checkpoint is known."""
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    transform: Transform | ModuleTransform | Pairs | None = None
    map: bool | None = None
    in_place: bool = False
    init_missing: bool = False
    of_use: frozenset[str] = frozenset()
    """Patterns of the two that are of use elsewhere, so that they may match nothing here."""


@dataclass(frozen=True, slots=True)
class MatchedCheckpoint:
    """The part of a checkpoint that a model takes, by the names of the model. Made by `match`."""

    part: Checkpoint
    options: Options
    """The options of the load, with the rules that a schema or the model gives."""
    applied: Applied
    """What all rules make of the part, that for wrappers included."""
    before_wrappers: Mapping[str, str]
    """From names of the model to what the rules of a user see in their place, where a wrapper's name differs."""
    versions: Mapping[str, dict[str, Any]] | None
    """The versions of modules, by their paths in the model; None where the checkpoint has none."""
    notes: tuple[str, ...]
    fits_in_part: bool
    """Whether only a part of the names is the model's, so that the load cannot be right by names alone."""

    def name_for_rules(self, name: str) -> str:
        """What a further rule of a user's sees in the place of a name of the model; empty where that is no name."""
        return self.before_wrappers.get(name, name) if name in self.applied.entries else ""


class Step(NamedTuple):
    """What happens to one slot: what is read, how it gets into the slot, and why.

    Steps are equal where they do the same: `expression` and `seconds` are not compared.
    """

    name: str
    """The name in the model."""
    kind: str
    """"parameter", "buffer", "non-persistent buffer" or "extra state"."""
    source: str
    """The name in the checkpoint, or all of them, where a rule joins tensors; empty where a rule or code of the model
    makes the value."""
    how: Placement
    """The way into the slot."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """After the load; None for extra state."""
    stored_dtype: torch.dtype | None = None
    """In the checkpoint; for a conversion, before it."""
    device: torch.device | None = None
    """After the load; None for extra state."""
    nbytes: int = 0
    """Bytes that are read."""
    ties: tuple[str, ...] = ()
    """Other names of the same tensor in the model."""
    rules: tuple[str, ...] = ()
    """The rules that led from the source to the name; the methods that initialise it, with `init_missing=`."""
    way: str = ""
    """How its bytes are read: "mapped"; "direct", read into the memory where they stay; "streamed", cast, moved or
    quantized in blocks while they are read; "whole", read into a buffer first; "in memory", where they are already."""
    expression: Source | None = None
    """What is read: a stored tensor, or the result of rules over several. None in a report, which holds no tensor, and
    where code of the model computes the value."""
    seconds: float = 0.0
    """In a report: the time for reading, casting and transforming it. Tensors that are read together share the time by
    their bytes."""

    @property
    def placement(self) -> str:
        """ "copy" into the memory that is there, "data" for other memory under the same tensor, "swap" for other memory
        under the identity of a tensor that has none yet or changes its class, "call" for `set_extra_state`."""
        return self.how.name

    @property
    def why(self) -> str:
        """Why it is placed in this way."""
        return self.how.why

    @property
    def mapped(self) -> bool:
        """Whether the tensor shows the file itself, so that nothing is copied."""
        return self.how.mapped

    @property
    def cast(self) -> str:
        """ "float16 to float32", where the checkpoint has another dtype; empty where it has the same."""
        if self.dtype is None or self.stored_dtype is None or self.stored_dtype == self.dtype:
            return ""
        return f"{short(self.stored_dtype)} to {short(self.dtype)}"

    def __eq__(self, other: object) -> bool:
        return self[:_COMPARED] == other[:_COMPARED] if isinstance(other, Step) else NotImplemented

    def __ne__(self, other: object) -> bool:  # tuples have their own
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:_COMPARED])

    def as_dict(self) -> dict[str, Any]:
        """The step in values that JSON has."""
        return {
            "name": self.name,
            "kind": self.kind,
            "source": self.source,
            "placement": self.placement,
            "why": self.why,
            "shape": list(self.shape),
            "dtype": short(self.dtype) if self.dtype is not None else "",
            "cast": self.cast,
            "device": device_name(self.device) if self.device is not None else "",
            "nbytes": self.nbytes,
            "mapped": self.mapped,
            "ties": list(self.ties),
            "rules": list(self.rules),
            "way": self.way,
        }


_COMPARED = Step._fields.index("expression")


@dataclass(frozen=True, slots=True)
class Binding:
    """What binds the steps of a plan to a model: what was decided once, and what the model has to be like."""

    matched: MatchedCheckpoint
    slots: Mapping[str, SlotSignature]
    """The slots of the model that the plan was made for."""
    runs_code: bool
    """Whether code of the model ran, so that it has to run again, with all its effects, when the plan is executed."""
    moved: tuple[str, ...]
    """Names of tensors that get no value, and only move to another device."""
    compared: tuple[str, ...]
    """Names of non-persistent buffers that hold what the checkpoint has, which is compared again."""


@dataclass(frozen=True, slots=True, repr=False)
class LoadPlan:
    """What a load does, step by step. Made by `modelstate.plan`, executed by `modelstate.load(model, plan)`.

    It can be executed again and again, as long as the files are the same, and into any model whose slots are those of
    the model that it was made for: the same names, ties, classes, shapes, dtypes and devices.
    """

    target: str
    """The class of the model."""
    source: str
    """The path of the checkpoint, and the part of it that is meant."""
    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    """What was passed over, and what else is worth knowing."""
    slots: int = 0
    """Tensors of the model and extra states: a tied tensor once, and no buffers that only the constructor fills."""
    extra_bytes: int = 0
    """The most memory that the load needs beyond the final tensors, in bytes."""
    options: Options = field(default_factory=Options, repr=False)
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)
    """What was opened, of which it reads the part that the options say."""
    binding: Binding | None = field(default=None, repr=False, compare=False)
    """What executes it without planning again."""

    @property
    def ok(self) -> bool:
        """Whether it can be carried out."""
        return not self.problems

    @property
    def bytes(self) -> int:
        """Bytes that are read, those of mapped tensors when they are first used."""
        return sum(step.nbytes for step in self.steps)

    @property
    def coverage(self) -> float:
        """The part of the model's slots that is filled, from 0 to 1."""
        return len(self.steps) / self.slots if self.slots else 1.0

    def __repr__(self) -> str:
        """The first line of what `print` shows."""
        problems = f"{len(self.problems)} problems" if self.problems else "ok"
        filled = f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled"
        return f"<{type(self).__name__}: {filled}, {size(self.bytes)} to read, {problems}>"

    def __str__(self) -> str:
        lines = [
            f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled",
            f"  {size(self.bytes)} to read, {size(self.extra_bytes)} of memory beyond the final tensors",
            *(f"  {line}" for line in placements(self.steps)),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.problems:
            lines += [f"problems ({len(self.problems)}):", explain(self.problems)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it, machine-readable."""
        return json.dumps(
            {
                "target": self.target,
                "source": self.source,
                "ok": self.ok,
                "bytes": self.bytes,
                "extra_bytes": self.extra_bytes,
                "slots": self.slots,
                "coverage": self.coverage,
                "notes": list(self.notes),
                "problems": [problem_as_dict(problem) for problem in self.problems],
                "steps": [step.as_dict() for step in self.steps],
            },
            indent=1,
        )


def problem_as_dict(problem: Problem) -> dict[str, Any]:
    """A problem with the name of its class and its remedy."""
    return {"problem": type(problem).__name__, **asdict(problem), "remedy": type(problem).remedy_for([problem])}


def placements(steps: tuple[Step, ...]) -> list[str]:
    """A line for each way in which tensors are placed, and one for each cast."""
    ways: Counter[tuple[str, str]] = Counter()
    casts: Counter[str] = Counter()
    read: Counter[str] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for step in steps:
        ways[step.placement, step.why] += 1
        sizes[step.placement, step.why] += step.nbytes
        if step.cast:
            casts[step.cast] += 1
        if step.way and step.way != "in memory":
            read[step.way] += step.nbytes
    lines = [
        f"{placement}: {count} tensors, {size(sizes[placement, why])}: {why}"
        if placement != "call"
        else f"{placement}: {count} extra states: {why}"
        for (placement, why), count in ways.most_common()
    ]
    if read:
        lines.append("bytes: " + ", ".join(f"{size(nbytes)} {way}" for way, nbytes in read.most_common()))
    return lines + [f"cast: {count} tensors from {cast}" for cast, count in casts.most_common()]
