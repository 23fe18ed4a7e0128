"""`Options`: the checked arguments of a load that decide about its plan. `LoadPlan`: its frozen steps and its problems.

A plan can be printed, saved as JSON, and executed.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import patterns_of
from modelstate.errors import OptionError
from modelstate.html.page import Kind, Page, Shown, area_chart
from modelstate.planning.assignment import Placement, ReadRoute
from modelstate.planning.transforms import ModuleTransform, Pairs, Transform
from modelstate.problems import Problem, explain
from modelstate.rules.expression import Source
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Applied, Schema, check_rules
from modelstate.spec import StoredTensor, TensorColumns
from modelstate.text_format import count, printable, short_repr, size
from modelstate.torch_compat.dtypes import floating_dtype, short
from modelstate.torch_compat.modules import unwrapped
from modelstate.transaction.slots import SlotSignatures

AnyTransform = Transform | ModuleTransform


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `modelstate.load` that decide about the plan."""

    key: str | None = None
    rules: tuple[Rule, ...] = ()
    schema: Schema | None = None
    """The schema that gives the rules when the checkpoint is known."""
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    device_of_meta: Callable[[torch.Tensor], torch.device] | None = None
    """Gives the device of each tensor on meta, after a load without `device`; without it that is the CPU."""
    transform: AnyTransform | Pairs | None = None
    map: bool | None = None
    in_place: bool | None = None
    init_missing: bool = False
    read_once: bool = False
    of_use: frozenset[str] = frozenset()
    """Patterns of `allow_missing` and `allow_unexpected` that match elsewhere, and may match nothing in this load."""

    def device_after(self, tensor: torch.Tensor) -> torch.device:
        """Returns the device of a tensor of the model after the load."""
        if self.device is not None or not tensor.is_meta:
            return self.device or tensor.device
        return _CPU if self.device_of_meta is None else self.device_of_meta(tensor)


def device_of(device: Any) -> torch.device | None:
    """Returns the device with its index. Raises `OptionError` for an invalid device, or a device that is missing."""
    try:
        # An empty tensor resolves "cuda" to the current device, and fails where there is none.
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise OptionError(
            "this machine has no such device",
            found=f"{short_repr(device)}: {error}",
            remedy="device='cpu', or leave it out",
        ) from error


def is_device(text: str) -> bool:
    """Whether a text names a kind of device that torch knows, such as "cuda:0", whether or not this machine has it."""
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def check_model(model: object) -> nn.Module:
    """Returns the model without wrappers of `torch.compile` and data parallelism. Raises `OptionError`."""
    if isinstance(model, nn.Module):
        return unwrapped(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(
            "this is a class, not a model",
            expected=f"an instance: {model.__name__}(...)",
            found=f"the class {model.__qualname__}",
            remedy=f"with ms.skeleton(): model = {model.__name__}(...), with its arguments; then pass the model",
        )
    raise OptionError("not a model", expected="torch.nn.Module", found=type(model).__name__)


_NOTHING_GIVEN = (None, (), (), (), None, None, None, None, None, False, False)
"""The defaults of the arguments of `options_of`, in their order."""


def options_of(
    key: str | None = None,
    rules: Rule | Iterable[Rule] | Schema = (),
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None = None,
    map: bool | None = None,
    in_place: bool | None = None,
    init_missing: bool = False,
    read_once: bool = False,
) -> Options:
    """Returns the checked options of a load. Raises `OptionError`."""
    names = key, rules, allow_missing, allow_unexpected
    given = (*names, dtype, device, transform, map, in_place, init_missing, read_once)
    if all(value is default for value, default in zip(given, _NOTHING_GIVEN, strict=True)):
        return Options()
    if not (key is None or isinstance(key, str)):
        raise OptionError("key= must be a path", expected="a string such as 'model.encoder'", found=short_repr(key))
    target = device_of(device)
    if target is not None and target.type == "meta":
        raise OptionError("a load cannot put tensors on the meta device", remedy="device='cpu', or leave it out")
    return Options(
        key=key,
        rules=() if isinstance(rules, Schema) else check_rules(rules),
        schema=rules if isinstance(rules, Schema) else None,
        allow_missing=patterns_of("allow_missing", allow_missing),
        allow_unexpected=patterns_of("allow_unexpected", allow_unexpected),
        dtype=floating_dtype(dtype),
        device=target,
        transform=_transforms(transform),
        map=map,
        in_place=in_place,
        init_missing=init_missing,
        read_once=read_once,
    )


def _transforms(given: Any) -> AnyTransform | Pairs | None:
    if isinstance(given, Mapping):
        pairs = tuple(given.items())
        for pattern, transform in pairs:
            if not isinstance(pattern, str):
                raise OptionError(
                    "the keys of transform= must be glob patterns",
                    expected="a string such as '*.mlp.*'",
                    found=short_repr(pattern),
                )
            if transform is not None and not callable(transform):
                raise OptionError(
                    "the values of transform= must be functions",
                    where=repr(pattern),
                    expected="a function of name and tensor, or None",
                    found=short_repr(transform),
                )
        return pairs or None
    if given is not None and not callable(given):
        expected = "a function of name and tensor, or a mapping from patterns to such functions"
        raise OptionError("transform= must be a function", expected=expected, found=short_repr(given))
    transform_function: AnyTransform | None = given
    return transform_function


@dataclass(frozen=True, slots=True)
class MatchedCheckpoint:
    """The part of a checkpoint that is loaded, by the names of the model. Created by `match`."""

    asked: Options
    """The options of the load, as they were given."""
    part: Checkpoint
    options: Options
    """The options of the load, with the rules that a schema or the model gives."""
    applied: Applied
    """The entries after all rules, including the rule for wrappers."""
    before_wrappers: Mapping[str, str]
    """From names of the model to the names that a user's rules see, where the rule for wrappers changes the name."""
    versions: Mapping[str, dict[str, Any]] | None
    """The versions of modules, by their paths in the model; None where the checkpoint has no versions."""
    notes: tuple[str, ...]
    fits_in_part: bool
    """Whether transformers' conversion mapping makes only some names fit."""

    def name_for_rules(self, name: str) -> str:
        """Returns the name that a user's further rules see for a name of the model; empty for an unknown name."""
        return self.before_wrappers.get(name, name) if name in self.applied.entries else ""


class Step(NamedTuple):
    """A step of a plan or a report: the source of one slot, its placement, and the reason for the placement.

    Comparisons ignore `expression` and `seconds`.
    """

    name: str
    """The name in the model."""
    kind: str
    """"parameter", "buffer", "non-persistent buffer" or "extra state"."""
    source: str
    """The name in the checkpoint; several names where a rule joins tensors; empty where a rule or the model's code
    computes the value."""
    how: Placement
    """The placement in the slot."""
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
    route: ReadRoute | None = None
    """How the bytes get to the slot; None for extra state."""
    shard: str = ""
    """The part of a DTensor that this rank loads: "[2:4, 0:8]"; several parts where they do not adjoin."""
    expression: Source | None = None
    """The source: a stored tensor, or the result of rules over several tensors. None in a report, which holds no
    tensor, and where the model's code computes the value."""
    seconds: float = 0.0
    """In a report: the time for reading, casting and transforming. Tensors that are read together share the time in
    proportion to their bytes."""

    @property
    def placement(self) -> str:
        """The kind of placement.

        "copy" copies into the existing memory. "data" gives the tensor other memory. "swap" gives memory to a tensor on
        meta, or changes the class of the tensor, which stays the same object. "call" calls `set_extra_state`.
        """
        return self.how.name

    @property
    def why(self) -> str:
        """The reason for the placement."""
        return self.how.why

    @property
    def mapped(self) -> bool:
        """Whether the memory of the tensor is a map of the file, so that nothing is copied."""
        return self.how.mapped

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

    def as_dict(self) -> dict[str, Any]:
        """Returns the step as a dictionary of JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "source": self.source,
            "placement": self.placement,
            "why": self.why,
            "shape": list(self.shape),
            "dtype": short(self.dtype) if self.dtype is not None else "",
            "cast": self.cast,
            "device": str(self.device) if self.device is not None else "",
            "bytes": self.nbytes,
            "mapped": self.mapped,
            "ties": list(self.ties),
            "rules": list(self.rules),
            "route": self.route or "",
            "shard": self.shard,
        }


_COMPARED = Step._fields.index("expression")


@dataclass(frozen=True, slots=True)
class StepTable:
    """Steps of plain values that get into their slots in the same way, as rows. It holds no tensor."""

    slots: list[tuple[str, str]]
    """The name and the kind of each slot. The checkpoint, after the rules, has the value under the same name."""
    columns: TensorColumns
    """Where the values are, in the order of the slots."""
    dtypes: list[torch.dtype]
    """After the load."""
    placement: Placement
    route: ReadRoute
    device: torch.device
    """After the load."""
    seconds: float = 0.0

    def steps(self, tensors: Mapping[str, StoredTensor]) -> list[Step]:
        """Returns the step of each row, with its part of the time and its source in `tensors`."""
        columns, placement, route, device = self.columns, self.placement, self.route, self.device
        rows = zip(self.slots, self.dtypes, columns.rows(), strict=True)
        seconds = self.seconds / sum(columns.nbytes)
        return [
            Step(
                *(name, kind, name, placement, torch.Size(shape), dtype, stored_dtype, device, nbytes, (), (), route),
                expression=tensors.get(name),
                seconds=seconds * nbytes,
            )
            for (name, kind), dtype, (stored_dtype, shape, _, _, nbytes) in rows
        ]


class LazySteps:
    """Creates the field `steps` when it is first used: a model may have tens of thousands of slots.

    The class has the fields `steps`, without a value, and `make_steps`, the function that returns the steps, which is
    None afterwards.
    """

    __slots__ = ()
    make_steps: Callable[[], tuple[Step, ...]] | None

    def __getattr__(self, name: str) -> Any:
        """Creates `steps`. Called for a slot that is not set."""
        if name != "steps":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        make_steps = self.make_steps
        if make_steps is not None:
            object.__setattr__(self, "steps", make_steps())
            object.__setattr__(self, "make_steps", None)
        return object.__getattribute__(self, "steps")


@dataclass(frozen=True, slots=True)
class Binding:
    """Binds a plan to models: the decisions that are not repeated, and the slots that a model must have."""

    matched: MatchedCheckpoint
    slots: SlotSignatures
    """The slots of the model that the plan was made for."""
    runs_code: bool
    """Whether code of the model ran. It runs again when the plan is executed, because its effects were undone."""
    tables: tuple[StepTable, ...]
    steps: tuple[Step, ...]
    """The steps of tensors that are rows of no table."""
    moved: tuple[str, ...]
    """Names of tensors that get no value, and only move to another device."""
    compared: tuple[str, ...]
    """Names of non-persistent buffers that equal the checkpoint's values. They are compared again."""


@dataclass(frozen=True, slots=True, repr=False)
class LoadPlan(LazySteps, Shown):
    """The steps of a load. Created by `modelstate.plan`, and executed by `modelstate.load(model, plan)`.

    A plan can be executed any number of times while the files are unchanged, and into every model with the same slots:
    the same names, ties, classes, shapes, dtypes and devices. `print` shows a summary and the problems.

    Args:
        target: The class of the model.
        source: The path of the checkpoint, and the key of the part that is loaded.
        problems: Everything that keeps the load from being executed.
        notes: Names that are skipped, and further remarks.
        slots: The number of slots.
        peak_memory_bytes: The most memory that the load needs in addition to the final tensors.
        binding: The matched checkpoint, and the slots that a model must have.
        make_steps: Returns the steps, one for each slot that is filled; called once, when they are first used.

    Examples:
        >>> plan = modelstate.plan(model, "model.safetensors")
        >>> if plan.ok:
        ...     report = modelstate.load(model, plan)
        ... else:
        ...     print(plan)
    """

    target: str
    """The class of the model."""
    source: str
    """The path of the checkpoint, and the key of the part that is loaded."""
    steps: tuple[Step, ...] = field(init=False)
    """The steps, one for each slot that is filled."""
    problems: tuple[Problem, ...]
    """Everything that keeps the load from being executed."""
    notes: tuple[str, ...]
    """Names that are skipped, and further remarks."""
    slots: int
    """The number of tensors and extra states of the model. A tied tensor counts once; buffers that only the constructor
    fills do not count."""
    peak_memory_bytes: int
    """The most memory that the load needs in addition to the final tensors, in bytes."""
    binding: Binding = field(repr=False, compare=False)
    """The data that executes the plan without planning again."""
    make_steps: Callable[[], tuple[Step, ...]] | None = field(kw_only=True, compare=False)
    """Returns the steps, which are created when they are first used. None afterwards."""

    @property
    def options(self) -> Options:
        """The arguments of `modelstate.plan`."""
        return self.binding.matched.asked

    @property
    def ok(self) -> bool:
        """Whether the plan can be executed."""
        return not self.problems

    @property
    def bytes(self) -> int:
        """Bytes that are read. Mapped tensors are read when they are first used."""
        return sum(step.nbytes for step in self.steps)

    @property
    def coverage(self) -> float:
        """The fraction of the model's slots that is filled, from 0 to 1."""
        return len(self.steps) / self.slots if self.slots else 1.0

    def __repr__(self) -> str:
        """A summary in one line."""
        problems = count(len(self.problems), "problem") if self.problems else "ok"
        filled = f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled"
        return f"<{type(self).__name__}: {filled}, {size(self.bytes)} to read, {problems}>"

    def __str__(self) -> str:
        lines = [
            f"{self.source} into {self.target}: {len(self.steps)} of {self.slots} slots filled",
            f"  {size(self.bytes)} to read, {size(self.peak_memory_bytes)} of memory beyond the final tensors",
            *(f"  {line}" for line in placements(self.steps)),
            *(f"  note: {printable(note)}" for note in self.notes),
        ]
        if self.problems:
            lines += [f"problems ({len(self.problems)}):", explain(self.problems)]
        return "\n".join(lines)

    def _page(self) -> Page:
        facts = (
            ("Result", "can be loaded" if self.ok else count(len(self.problems), "problem")),
            ("Slots", f"{len(self.steps):,} of {self.slots:,} filled"),
            ("To read", size(self.bytes)),
            ("Memory beyond the final tensors", size(self.peak_memory_bytes)),
        )
        page = steps_page(f"{self.source} into {self.target}", facts, self.steps, self.notes)
        return replace(page, text=explain(self.problems)) if self.problems else page

    def to_json(self) -> str:
        """Returns the whole plan as JSON."""
        return json.dumps(
            {
                "target": self.target,
                "source": self.source,
                "ok": self.ok,
                "bytes": self.bytes,
                "peak_memory_bytes": self.peak_memory_bytes,
                "slots": self.slots,
                "coverage": self.coverage,
                "notes": list(self.notes),
                "problems": [problem.as_dict() for problem in self.problems],
                "steps": [step.as_dict() for step in self.steps],
            },
            indent=1,
        )


def steps_page(title: str, facts: tuple[tuple[str, str], ...], steps: tuple[Step, ...], notes: tuple[str, ...]) -> Page:
    """Returns the page of a plan or a report."""
    columns = ("Name", "Kind", "From", "Shape", "Dtype", "Cast", "Bytes", "Placement", "Reason", "Route", "Time in ms")
    kinds = {"Bytes": Kind.BYTES, "Time in ms": Kind.MEASURE}
    is_timed = any(step.seconds for step in steps)
    return Page(
        title,
        facts,
        tuple((name, kinds.get(name, Kind.TEXT)) for name in columns[: None if is_timed else -1]),
        [
            (step.name, step.kind, step.source, str(list(step.shape)), short(step.dtype) if step.dtype else "")
            + (step.cast, step.nbytes, step.placement, step.why, step.route or "")
            + ((step.seconds * 1000,) if is_timed else ())
            for step in steps
        ],
        table="Steps",
        notes=(*placements(steps), *notes),
        charts=(area_chart([(step.name, step.nbytes) for step in steps]),),
    )


def placements(steps: tuple[Step, ...]) -> list[str]:
    """Returns a line for each kind of placement, and for each cast."""
    ways: Counter[tuple[str, str]] = Counter()
    casts: Counter[str] = Counter()
    read: Counter[str | None] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for step in steps:
        ways[step.placement, step.why] += 1
        sizes[step.placement, step.why] += step.nbytes
        if step.cast:
            casts[step.cast] += 1
        if step.route not in (None, ReadRoute.IN_MEMORY):
            read[step.route] += step.nbytes
    lines = [
        f"{placement}: {count(number, 'tensor')}, {size(sizes[placement, why])}: {why}"
        if placement != "call"
        else f"{placement}: {count(number, 'extra state')}: {why}"
        for (placement, why), number in ways.most_common()
    ]
    if read:
        lines.append("bytes: " + ", ".join(f"{size(nbytes)} {route}" for route, nbytes in read.most_common()))
    return lines + [f"cast: {count(number, 'tensor')} from {cast}" for cast, number in casts.most_common()]
