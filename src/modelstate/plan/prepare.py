"""How a plan comes about: the model's loading protocol, run against tensors that are mapped and not read.

What is left at the end is either a list of problems and a model that is as it was, or writes that wait for their
bytes, with everything known that could keep them from being carried out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from modelstate.errors import CodecError, ExtraStateError
from modelstate.plan.account import Accounts
from modelstate.plan.derived import Derived, Source, to_be_computed, values_of
from modelstate.plan.dtypes import cast_between, device_name, short
from modelstate.plan.explain import model_errors, one_line, plan_error
from modelstate.plan.journal import Journal, Write
from modelstate.plan.matching import matching_part
from modelstate.plan.overlap import Addresses, clash, overlap, same_values
from modelstate.plan.placement import Placement, choose, is_plain
from modelstate.plan.plan import Options, Plan, Step, cast_text
from modelstate.plan.problems import (
    BadExtraState,
    NotATensor,
    NoValues,
    Problem,
    TieConflict,
    WrongDtype,
    WrongShape,
)
from modelstate.plan.recorder import Outcome, walk
from modelstate.plan.rules.chain import Applied, apply_rules, renamed_by
from modelstate.plan.rules.rule import Entry, Value
from modelstate.plan.slots import BUFFER, EXTRA, HIDDEN, PARAMETER, Slot, slots_of
from modelstate.plan.torch_private import payload_of, storage_id
from modelstate.plan.transforms import Transform, Transforms, bound
from modelstate.plan.wanted import Places
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.mapped import Maps
from modelstate.spec import ByteRange, Stored, StoredComposite, StoredTensor, overlapping

SCRATCH_BYTES = 64 << 20
"""What is read at once to be cast or moved, unless a single tensor is larger."""


_CPU = torch.device("cpu")
CHECK_EXTRA_STATE = "_modelstate_check_extra_state"
"""The method of modules that can say what is wrong with an extra state without taking it."""


@dataclass(slots=True, eq=False)
class Assignment:
    """A value on its way into a slot."""

    name: str
    """The name in the model."""
    kind: str
    param: torch.Tensor
    """The tensor that is there now."""
    value: torch.Tensor
    """What goes there, as the checkpoint has it: a view of the file, whose bytes have not been read."""
    source: str
    """The name in the checkpoint; empty where code of the model computed the value."""
    stored: Source | None
    """Where the value lies; None where it was computed, or in the hands of the model's code."""
    placement: Placement
    dtype: torch.dtype
    """After the load."""
    device: torch.device
    """After the load."""
    given: str = ""
    """The name under which the value was handed to the model; empty where code of the model computed it."""
    transform: Transform | None = None
    """Called with the value as the checkpoint has it; what it returns is asked for."""
    remake: Transform | None = None
    """Called with the value as it would be loaded: cast, and on its device."""
    remake_bytes: int = 0
    """Bytes of memory that it takes beside that value and what it returns."""
    freezes: bool = False
    """Whether the slot gets no gradient any more, as the remade value says."""
    final: torch.Tensor | None = None
    """The value as it will be, once it has been read, cast and transformed."""
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes to read: those of the parts, where the value is made of several tensors."""
        if isinstance(self.stored, (StoredTensor, StoredComposite, Derived)):
            return self.stored.nbytes
        return sum(part.numel() * part.itemsize for part in payload_of(self.value)) or (
            self.value.numel() * self.value.itemsize
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory beside its own that the value passes through."""
        if isinstance(self.stored, Derived):
            return self.value.numel() * self.value.itemsize + self.stored.scratch_bytes
        return self.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the value takes until it is copied into its slot."""
        waits = self.placement.staged and not isinstance(self.stored, torch.Tensor)
        return self.value.numel() * self.dtype.itemsize if waits else 0

    @property
    def is_run_of_bytes(self) -> bool:
        """Whether the bytes of the file are, in their order, those of the value."""
        return isinstance(self.stored, StoredTensor) and self.stored.nbytes > 0 and self.stored.is_contiguous

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def needs_buffer(self) -> bool:
        """Whether the value is read, or put together, in other memory than it ends in."""
        if self.placement.mapped or isinstance(self.stored, torch.Tensor):
            return False
        changes = self.value.dtype != self.dtype or self.remake is not None
        return changes or not self.on_cpu or not self.is_run_of_bytes

    @property
    def passing_bytes(self) -> int:
        """Bytes of memory that a transform takes for this value, as far as anybody knows beforehand."""
        if self.transform is not None:
            return 0 if self.placement.mapped else self.nbytes  # what it is given
        if self.remake is None:
            return 0
        ordered = all(one.is_contiguous() for one in (self.value, self.param) if is_plain(one))
        straight = self.value.dtype == self.dtype and ordered and not isinstance(self.stored, Derived)
        copied = 0 if straight or not self.on_cpu else self.value.numel() * self.dtype.itemsize
        return self.remake_bytes + copied + (self.nbytes if isinstance(self.stored, torch.Tensor) else 0)

    @property
    def reads_plainly(self) -> bool:
        """Whether nothing but a read, and perhaps a cast, stands between the file and the slot."""
        return self.transform is None and not self.placement.mapped and not self.placement.by_handler

    @property
    def reads_unchanged(self) -> bool:
        """Whether what is read is what is wanted, where it is wanted."""
        return self.value.dtype == self.dtype and self.on_cpu and self.remake is None


class Late(Write):
    """The values of a tensor that rules compute, for when code of the model looks at them during the walk."""

    __slots__ = ("maps", "stored")

    def __init__(self, value: torch.Tensor, stored: Derived, maps: Maps) -> None:
        super().__init__(value, value)
        self.stored, self.maps = stored, maps

    def run(self, journal: Journal | None) -> None:
        with torch.no_grad():
            self.target.copy_(values_of(self.stored, self.maps.tensor))


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A value of the checkpoint that cannot be decoded here, which is no matter where nobody takes it."""

    error: CodecError


def _decoded(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return checkpoint.extra[name]
    except CodecError as error:
        return Undecoded(error)


class Preparation:
    """A load that has been planned and not yet carried out.

    The constructor runs the model's loading protocol. `make_write` gives the write that carries an assignment out,
    which happens early where code of the model looks at the tensor. Raises `ModelCodeError` where that code raises.
    Whoever made the journal has to undo what that code has done, then and where there are problems.
    """

    def __init__(
        self,
        journal: Journal,
        checkpoint: Checkpoint,
        options: Options,
        make_write: Callable[["Preparation", Assignment], Write],
        call_extra_state: bool,
    ) -> None:
        if options.schema is not None:
            part = checkpoint if options.key is None else checkpoint.select(options.key)
            options = replace(options, rules=options.schema.rules_for(part), schema=None)
        self.journal, self.model, self.options = journal, journal.root, options
        self.slots = self.slots_before = slots_of(self.model)
        """What is there, from the end of the walk on: code of the model may have put in other tensors, or None."""
        wanted = [*self.slots.by_name, *self.slots.extra, *self.slots.lazy]
        self.transforms = Transforms(options.transform, self.model, self.slots)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        if options.key is not None:
            self.checkpoint = checkpoint.select(options.key)
        else:
            self.checkpoint = matching_part(checkpoint, wanted, partial(renamed_by, options.rules))
            if rest := len(checkpoint) - len(self.checkpoint):
                self.notes.append(f"{rest} tensors of other parts of the checkpoint are not loaded")
        self.maps = self.checkpoint.maps()
        self.assignments: list[Assignment] = []
        self.moves: list[Assignment] = []
        """Tensors that no value goes to, and that only go to another device."""
        self.used: set[str] = set()
        """Names, after the rules, whose values have come to a slot."""
        self.extra_states: list[str] = []
        self._make_write, self._call_extra_state = make_write, call_extra_state
        self._by_param: dict[int, Assignment] = {}
        self._by_storage: dict[int, list[Assignment]] = {}
        self._cause: Exception | None = None
        self._shown: dict[ByteRange, list[ByteRange]] = {}
        self._late: dict[int, Late] = {}
        self._late_of: dict[int, Late] = {}
        self.applied = self._apply_rules()
        self._state = self._state_dict()
        self.versions = self._renamed_versions()
        outcome = Outcome()
        self._walk(outcome)
        if journal.armed:
            self.slots = slots_of(self.model)
        Accounts(self, outcome).settle()
        for late in self._late.values():
            late.done = True  # nobody looks at the values any more before they are wanted in their slots

    def _renamed_versions(self) -> dict[str, dict[str, Any]] | None:
        """The versions of the checkpoint's modules by the names that the rules make of them."""
        versions = self.checkpoint.versions
        if versions is None:
            return None
        # A module is renamed as its tensors are.
        moved: dict[str, set[str]] = {}
        for name, entry in self.applied.entries.items():
            if entry.rules and len(entry.sources) == 1:
                moved.setdefault(entry.sources[0].rpartition(".")[0], set()).add(name.rpartition(".")[0])
        found: dict[str, dict[str, Any]] = {}
        for path, saved in versions.items():
            (only,) = moved[path] if len(moved.get(path, ())) == 1 else (None,)
            by_rules = renamed_by(self.options.rules, f"{path}.x" if path else "x").rpartition(".")[0]
            found[by_rules if only is None else only] = saved
        return found

    def _apply_rules(self) -> Applied:
        """The checkpoint by the names, and in the pieces, of the model."""
        checkpoint, rules = self.checkpoint, self.options.rules
        computed: dict[Stored, Derived] = {}
        entries = {name: Entry(to_be_computed(checkpoint.stored(name), computed), (name,)) for name in checkpoint}
        entries |= {name: Entry(Value(_decoded(checkpoint, name)), (name,)) for name in checkpoint.extra}
        if not rules:
            return Applied(entries)
        places = Places(self.model, self.slots)
        applied = apply_rules(rules, entries, self.maps.tensor, places.before)
        self.problems += applied.problems
        return applied

    def _state_dict(self) -> dict[str, Any]:
        """The part of the checkpoint as the protocol wants it: by the names of the model, tensors mapped."""
        state: dict[str, Any] = {}
        mapped: dict[str, torch.Tensor] = {}
        for name, entry in self.applied.entries.items():
            content = entry.content
            if isinstance(content, Value):
                state[name] = content.value
                continue
            value = self._late_value(content) if isinstance(content, Derived) else self.maps.tensor(content)
            state[name] = mapped[name] = value
        self._name_of = {id(value): name for name, value in mapped.items()}
        self.journal.protect(mapped.values())
        return state

    def _late_value(self, stored: Derived) -> torch.Tensor:
        """A tensor that gets its values when somebody looks at them: memory that takes none until then."""
        if stored.lacks_values:
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        late = self._late_of.get(id(stored))
        if late is not None:  # another name of a tied tensor
            value = late.target.detach()
        else:
            value = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
            self._late_of[id(stored)] = late = Late(value, stored, self.maps)
            self.journal.add(late)
        self._late[id(value)] = late
        return value

    def _seen(self, value: torch.Tensor) -> torch.Tensor:
        """The value with its values, for our own eyes."""
        late = self._late.get(id(value))
        if late is not None and not late.done:
            late.run(None)
            late.done = True
        return value

    def _walk(self, outcome: Outcome) -> None:
        with model_errors("the model's own loading code", self.model):
            walk(
                self.model,
                self._state,
                self.versions,
                assign=False,
                journal=self.journal,
                take=self,
                outcome=outcome,
            )

    # What the recorder hands over.

    def extra_state(self, module: nn.Module, key: str, value: Any) -> None:
        self.extra_states.append(key)
        # Who declares extra state can say what is wrong with a value without setting it. A load need not ask before
        # it sets: a value that cannot be set sets nothing, and all is undone where there are problems.
        take = module.set_extra_state if self._call_extra_state else getattr(module, CHECK_EXTRA_STATE, None)
        try:
            if isinstance(value, Undecoded):
                raise value.error
            if take is not None:
                take(value)
        except (ExtraStateError, CodecError) as error:
            self._cause = self._cause or error
            self.problems.append(BadExtraState(key, one_line(error), type(error).__name__))

    def device_after(self, param: torch.Tensor) -> torch.device:
        return self.options.device or (_CPU if param.is_meta else param.device)

    def tensor(
        self, module: nn.Module, name: str, key: str, param: torch.Tensor, value: Any, assign: bool, errors: list[str]
    ) -> None:
        if self.journal.armed:
            slot = self.slots.by_name.get(key)
            if slot is None or slot.tensor is not param:  # a module that loads a child by itself uses a shorter name
                key = self._names.get(id(param), key)
        if not isinstance(value, torch.Tensor):
            self.problems.append(NotATensor(key, type(value).__name__))
        elif param.size() != value.size() and self.transforms.of(key).first is None:
            self.problems.append(WrongShape(key, tuple(param.size()), tuple(value.size())))
        else:
            self.assign(key, PARAMETER if name in module._parameters else BUFFER, param, value)

    def assign(self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor) -> None:
        """Takes down that `value` goes to `param`, or what keeps it from going there."""
        given = self._name_of.get(id(value), "")
        self.used.add(given)
        first = self._by_param.get(id(param))
        if first is not None:
            if first.value is not value and not self._equal(first.value, value):
                self.problems.append(TieConflict(name, (first.name,)))
            return
        # What the model's code has had in its hands may have been changed there: the view counts, not the file.
        used = self.journal.used
        untouched = given and not (used and storage_id(value) in used)
        stored = self.applied.entries[given].tensor if untouched else None
        made = self._assignment(name, kind, param, value, given, stored)
        self._by_param[id(param)] = made
        self.assignments.append(made)
        if value.is_meta:
            self.problems.append(NoValues(name))
        elif is_plain(value):
            self._check_dtype(made)
        self._check_shared_memory(made)
        self.journal.add(self._make_write(self, made))

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        late = self._late.get(id(one))
        if late is not None and late is self._late.get(id(other)):
            return True  # nothing has to be computed to know
        return same_values(self._seen(one), self._seen(other))

    def move(self, slot: Slot, device: torch.device) -> None:
        """Takes down that a tensor that gets no value goes to a device."""
        value = slot.tensor.detach()
        placement = Placement("data", f"moves to {device}")
        made = Assignment(slot.name, slot.kind, slot.tensor, value, "", value, placement, value.dtype, device)
        self.moves.append(made)
        self.journal.add(self._make_write(self, made))

    def _check_shared_memory(self, made: Assignment) -> None:
        """Slots that show the same memory are tied as much as those that are the same tensor."""
        if made.param.is_meta or not is_plain(made.param):
            return
        others = self._by_storage.setdefault(storage_id(made.param), [])
        for other in others:
            if other.value.shape == other.param.shape and overlap(other.param, made.param):
                if made.placement.name != "copy":
                    self.notes.append(f"{other.name} and {made.name} share memory, and will no longer")
                elif clash(other.param, self._seen(other.value), made.param, self._seen(made.value)):
                    self.problems.append(TieConflict(made.name, (other.name,)))
        others.append(made)

    def _assignment(
        self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor, given: str, stored: Source | None
    ) -> Assignment:
        options = self.options
        casts = options.dtype is not None and param.is_floating_point() and value.is_floating_point()
        dtype = options.dtype if casts and options.dtype is not None else param.dtype
        device = self.device_after(param)
        choice = self.transforms.of(name)
        placement = choose(
            param,
            value,
            dtype,
            device,
            map=options.map and self._may_show(stored),
            in_place=options.in_place and self._can_be_read_straight(stored),
            transformed=choice.first is not None,
        )
        if choice.last is not None:
            placement = Placement("swap", f"made by {choice.last}")
        if placement.mapped and isinstance(stored, StoredTensor):
            self._shown.setdefault(stored.storage, []).append(stored.extent)
        made = Assignment(name, kind, param, value, self.source_of(given), stored, placement, dtype, device, given)
        made.transform, made.remake = choice.first, bound(choice)
        if choice.last is not None:
            made.remake_bytes = choice.last.extra_bytes(tuple(param.shape), dtype)
        return made

    @staticmethod
    def _can_be_read_straight(stored: Source | None) -> bool:
        """Whether a value can get into memory that is there with none for all of them on the way."""
        if isinstance(stored, Derived):
            return stored.is_certain and stored.of_files
        return isinstance(stored, torch.Tensor) or (isinstance(stored, StoredTensor) and stored.is_contiguous)

    def _may_show(self, stored: Source | None) -> bool:
        """Whether a slot may show these bytes of the file: no two slots that are not tied may show the same."""
        if not isinstance(stored, StoredTensor) or not stored.is_contiguous:
            return False
        shown = self._shown.get(stored.storage)
        return not shown or not any(overlapping(stored.extent, other) for other in shown)

    def _check_dtype(self, made: Assignment) -> None:
        if made.transform is not None:
            return  # what it returns is asked for
        how = cast_between(made.value.dtype, made.dtype)
        asked = self.options.dtype is not None and made.dtype == self.options.dtype
        if how == "kind" or (how == "lossy" and not asked):
            self.problems.append(WrongDtype(made.name, short(made.dtype), short(made.value.dtype), how))

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(slot.tensor): slot.name for slot in self.slots.tensors}

    @cached_property
    def own_memory(self) -> Addresses:
        """Where the tensors of the model lie."""
        return Addresses(slot.tensor for slot in self.slots.tensors)

    # What comes of it.

    def is_filled(self, param: torch.Tensor) -> bool:
        """Whether a value goes to this tensor, under whatever name."""
        return id(param) in self._by_param

    def value_of(self, name: str) -> Any:
        """What the checkpoint has under a name of the model's; None for nothing."""
        return self._state.get(name)

    def source_of(self, name: str) -> str:
        """What the checkpoint calls the value that the model calls `name`; all names, where it is made of several."""
        entry = self.applied.entries.get(name)
        return name if entry is None else ", ".join(entry.sources)

    @property
    def nbytes(self) -> int:
        """Bytes to read, or to show."""
        return sum(made.nbytes for made in self.assignments)

    @property
    def extra_bytes(self) -> int:
        """Memory that is needed beyond the final tensors: what is staged, and a buffer for what is cast or moved."""
        needing = [made for made in self.assignments if not made.placement.mapped]
        staged = sum(made.staged_bytes for made in needing)
        cast = [made for made in needing if made.needs_buffer and made.transform is None]
        read_together = sum(made.buffer_bytes for made in cast if made.is_run_of_bytes)
        scratch = max(max((made.buffer_bytes for made in cast), default=0), min(read_together, SCRATCH_BYTES))
        # The buffer is there while values are remade out of it, and gone when transforms get theirs one by one.
        remade = scratch + max((made.passing_bytes for made in needing if made.remake is not None), default=0)
        alone = max((made.passing_bytes for made in needing if made.transform is not None), default=0)
        return staged + max(remade, alone)

    @property
    def names(self) -> tuple[str, str]:
        """What is loaded into, and what from."""
        key = f" [{self.checkpoint.key}]" if self.checkpoint.key else ""
        return type(self.model).__name__, self.checkpoint.source + key

    def check(self) -> None:
        """Raises `PlanError` with all problems, where there are any."""
        if self.problems:
            raise plan_error(*self.names, self.problems) from self._cause

    def plan(self) -> Plan:
        """The frozen plan of it."""
        target, source = self.names
        return Plan(
            target=target,
            source=source,
            steps=(*map(step_of, self.rows()), *self.calls()),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            slots=self.slot_count,
            extra_bytes=self.extra_bytes,
            options=self.options,
            checkpoint=self.checkpoint,
        )

    @property
    def slot_count(self) -> int:
        """Slots that want a value."""
        tensors = sum(1 for slot in self.slots.tensors if slot.kind != HIDDEN or self.is_filled(slot.tensor))
        return tensors + len(self.slots.extra)

    def calls(self) -> list[Step]:
        """The steps of extra states."""
        return [
            Step(name, EXTRA, self.source_of(name), "call", "set_extra_state takes it") for name in self.extra_states
        ]

    def rows(self) -> "list[Row]":
        """What has to be known of each assignment to describe it. It holds no tensor."""
        return [
            (
                made.name,
                made.kind,
                made.source,
                made.placement,
                made.param.shape,
                made.dtype,
                made.value.dtype,
                made.device,
                made.nbytes,
                self._ties.get(made.name, ()),
                self._rules_of(made.given),
                made.seconds,
            )
            for made in self.assignments
        ]

    def _rules_of(self, given: str) -> tuple[str, ...]:
        entry = self.applied.entries.get(given)
        return () if entry is None else entry.rules

    @cached_property
    def _ties(self) -> dict[str, tuple[str, ...]]:
        tied = [slot.names for slot in self.slots.tensors if len(slot.names) > 1]
        return {name: tuple(other for other in names if other != name) for names in tied for name in names}


Row = tuple[
    str,
    str,
    str,
    Placement,
    torch.Size,
    torch.dtype,
    torch.dtype,
    torch.device,
    int,
    tuple[str, ...],
    tuple[str, ...],
    float,
]
"""Name, kind, source, placement, shape, dtype, dtype in the checkpoint, device, bytes, ties, rules and seconds."""


def step_of(row: Row) -> Step:
    """The step of an assignment."""
    name, kind, source, placement, shape, dtype, stored, device, nbytes, ties, rules, _ = row
    return Step(
        name,
        kind,
        source,
        placement.name,
        placement.why,
        tuple(shape),
        short(dtype),
        cast_text(stored, dtype),
        device_name(device),
        nbytes,
        placement.mapped,
        ties,
        rules,
    )
