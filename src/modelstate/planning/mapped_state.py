"""The checkpoint by the names of the model: which part of it, after which rules, as mapped tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.mapped import Maps
from modelstate.errors import CodecError
from modelstate.io.tensors import same_bytes
from modelstate.planning.initialise import Initialiser, Initialisers
from modelstate.planning.matching import Rewrapped, fits, matching_part, wrapper_rule
from modelstate.planning.plan import MatchedCheckpoint, Options
from modelstate.rules.expression import Derived, Source, to_be_computed, values_of
from modelstate.rules.rule import Entries, Entry, Rule, Value, Wanted, describe
from modelstate.rules.schema import Applied, apply_rules, renamed_by, way_back
from modelstate.rules.transformers_mapping import from_transformers, is_transformers_model, notes_of
from modelstate.spec import Stored, StoredTensor
from modelstate.torch_compat.plain import is_quantized, same_place
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.slots import HIDDEN, Slots, same_values
from modelstate.transaction.transaction import Transaction, Write


class ModelSchemaView:
    """What a model has places for."""

    def __init__(self, slots: Slots, initialisers: Initialisers) -> None:
        self._slots, self._initialisers = slots, initialisers

    def before(self, rules: Iterable[Rule]) -> Wanted:
        """The places by the names that they would have before these rules."""
        back = way_back(rules)
        wanted = [slot.name for slot in self._slots.tensors if slot.kind != HIDDEN]
        return _Before(self._slots, self._initialisers, {renamed_by(back, name): name for name in wanted})


class _Before:
    def __init__(self, slots: Slots, initialisers: Initialisers, names: dict[str, str]) -> None:
        self._slots, self._initialisers, self._names = slots, initialisers, names

    def lacking(self, entries: Entries) -> Iterator[str]:
        return (name for name in self._names if name not in entries)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        slot = self._slots.by_name.get(self._names.get(name, ""))
        if slot is None or torch.nn.parameter.is_lazy(slot.tensor):
            return None
        return tuple(slot.tensor.shape), slot.tensor.dtype

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        found = self._initialisers.find(self._names.get(name, ""))
        return None if found is None else found.make


class DeferredValue(Write):
    """The values of a tensor that rules compute, for when code of the model looks at them during the walk."""

    __slots__ = ("maps", "stored")

    def __init__(self, value: torch.Tensor, stored: Derived, maps: Maps) -> None:
        super().__init__(value, value)
        self.stored, self.maps = stored, maps

    def run(self, transaction: Transaction | None) -> None:
        with torch.no_grad():
            self.target.copy_(values_of(self.stored, self.maps.read))


@dataclass(frozen=True, slots=True)
class DecodeFailure:
    """A value of the checkpoint that cannot be decoded here, which is no matter where nobody takes it."""

    error: CodecError


_NO_ORIGIN: tuple[str, Source | None] = ("", None)


def _decoded(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return checkpoint.extra[name]
    except CodecError as error:
        return DecodeFailure(error)


def entries_of(checkpoint: Checkpoint) -> Entries:
    """What a checkpoint has, by its names, for rules to be applied to."""
    computed: dict[Stored, Derived] = {}
    entries = {
        name: Entry(to_be_computed(stored, computed), (name,)) for name, stored in checkpoint.flat.tensors.items()
    }
    return entries | {name: Entry(Value(_decoded(checkpoint, name)), (name,)) for name in checkpoint.extra}


def renamed_versions(
    versions: Mapping[str, dict[str, Any]], applied: Applied, rules: Sequence[Rule]
) -> dict[str, dict[str, Any]]:
    """The versions of modules by the names that the rules make of them."""
    # A module is renamed as its tensors are.
    moved: dict[str, set[str]] = {}
    for name, entry in applied.entries.items():
        if entry.rules and len(entry.sources) == 1:
            moved.setdefault(entry.sources[0].rpartition(".")[0], set()).add(name.rpartition(".")[0])
    found: dict[str, dict[str, Any]] = {}
    for path, saved in versions.items():
        (only,) = moved[path] if len(moved.get(path, ())) == 1 else (None,)
        by_rules = renamed_by(rules, f"{path}.x" if path else "x").rpartition(".")[0]
        found[by_rules if only is None else only] = saved
    return found


def match(
    checkpoint: Checkpoint, options: Options, slots: Slots, model: nn.Module, initialisers: Initialisers
) -> MatchedCheckpoint:
    """Finds the part of a checkpoint that is meant, and applies rules to it until its names are the model's.

    Reads no tensor bytes but for rules that look at values. Raises `AmbiguousCheckpointError`, `KeyNotFoundError` and
    the errors of rules.
    """
    part, options = _selected(checkpoint, options, slots)
    applied, options, note, fits_in_part = _applied_mapping(part, options, slots, model)
    rest = len(checkpoint) - len(part) if options.key is None else 0
    notes = [f"{rest} tensors of other parts of the checkpoint are not loaded"] if rest else []
    notes += [note] if note else []
    if applied is None:
        entries = entries_of(part)
        wanted = ModelSchemaView(slots, initialisers).before
        applied = apply_rules(options.rules, entries, part.read, wanted) if options.rules else Applied(entries)
    notes += notes_of(options.rules, applied)
    rules, before_wrappers = options.rules, dict[str, str]()
    if wrappers := _wrapper_rule(applied.entries, slots, model):
        applied, before_wrappers = _rewrapped(applied, wrappers)
        rules = (*rules, wrappers)
        notes.append(wrappers.note(len(before_wrappers)))
    versions = None if part.versions is None else renamed_versions(part.versions, applied, rules)
    return MatchedCheckpoint(part, options, applied, before_wrappers, versions, tuple(notes), fits_in_part)


def _selected(checkpoint: Checkpoint, options: Options, slots: Slots) -> tuple[Checkpoint, Options]:
    """The part of the checkpoint that is loaded, and the options with the rules of a schema for that part."""
    if options.key is not None:
        part = checkpoint.select(options.key)
    else:
        schema = options.schema
        renamings = [partial(renamed_by, options.rules)] if schema is None else schema.renamings(checkpoint)
        part = matching_part(checkpoint, [*slots.by_name, *slots.extra, *slots.lazy], renamings)
    if options.schema is None:
        return part, options
    # The version is that of the part, whatever else is in the file.
    return part, replace(options, rules=options.schema.rules_for(part), schema=None)


def _applied_mapping(
    part: Checkpoint, options: Options, slots: Slots, model: nn.Module
) -> tuple[Applied | None, Options, str, bool]:
    """Applies transformers' conversion mapping to a checkpoint whose own names fit a model of transformers worse.

    Returns the entries, the options with the rules that led to them, a note, and whether the names fit only in part.
    The entries are None where the model is not of transformers, or rules are given.
    """
    if options.rules or not is_transformers_model(model):
        return None, options, "", False
    own = Applied(entries_of(part))
    if fits(slots, own.entries, options):
        return own, options, "", False
    try:
        rules = from_transformers(model)
        mapped = apply_rules(rules, own.entries, part.read)
    except Exception as error:  # a version of transformers whose mapping works in another way
        return own, options, f"transformers' conversion mapping cannot be used: {describe(error)}", False
    names = slots.by_name.keys()
    if mapped.problems or len(mapped.entries.keys() & names) <= len(own.entries.keys() & names):
        return own, options, "", False
    fits_in_part = not fits(slots, mapped.entries, options)
    if fits_in_part and wrapper_rule(list(own.entries), slots.by_name, model) is not None:
        return own, options, "", False
    return mapped, replace(options, rules=rules), "", fits_in_part


def _wrapper_rule(entries: Entries, slots: Slots, model: nn.Module) -> Rewrapped | None:
    if entries.keys() <= slots.by_name.keys():
        return None
    given = [name for name, entry in entries.items() if entry.sources]
    wanted = {*slots.by_name, *slots.extra, *slots.lazy}
    return wrapper_rule(given, wanted, model, made=entries.keys() - given)


def _rewrapped(applied: Applied, rule: Rewrapped) -> tuple[Applied, dict[str, str]]:
    """The entries by the names that a rule for wrappers makes, and from these names to those before."""
    renamed: dict[str, Entry] = {}
    before: dict[str, str] = {}
    for name, entry in applied.entries.items():
        changed = rule.rename(name) if entry.sources else None
        if changed is None:
            renamed[name] = entry
        else:
            renamed[changed] = entry._replace(rules=(*entry.rules, repr(rule)))
            before[changed] = name
    return replace(applied, entries=renamed), before


class MappedState:
    """A matched checkpoint as the model's loading protocol takes it: a state dict of mapped tensors.

    Tensors that rules compute get their values when code of the model uses them.
    """

    def __init__(self, matched: MatchedCheckpoint, transaction: Transaction) -> None:
        self._checkpoint, self._transaction = matched.part, transaction
        self.maps = matched.part.maps()
        self._late: dict[int, DeferredValue] = {}
        self._late_of: dict[int, DeferredValue] = {}
        self.entries = dict(matched.applied.entries)
        """By the names of the model: what the rules made, and what the model's own code initialises."""
        self.quantized: list[str] = []
        """Names of tensors that are quantized by a wrapper subclass."""
        self.state = self._state_dict()
        """By the names of the model: tensors, and values that are none."""

    def settle(self) -> None:
        """Nobody looks at values any more before they are wanted in their slots."""
        for late in self._late.values():
            late.done = True

    def origin_of(self, value: torch.Tensor) -> tuple[str, Source | None]:
        """Under which name a tensor was handed out, and where it lies; neither for what code of the model has made.

        What that code has had in its hands may have been changed there, so that it lies nowhere else.
        """
        origin, used = self._origins.get(id(value), _NO_ORIGIN), self._transaction.used_storages
        return (origin[0], None) if used and storage_id(value) in used else origin

    def source_of(self, name: str) -> str:
        """What the checkpoint calls the value that the model calls `name`; all names, where it is made of several."""
        return self.way_of(name)[0]

    def way_of(self, name: str) -> tuple[str, tuple[str, ...]]:
        """What the checkpoint calls the value that the model calls `name`, and the rules that led from there."""
        entry = self.entries.get(name)
        return (name, ()) if entry is None else (", ".join(entry.sources), entry.rules)

    def _state_dict(self) -> dict[str, Any]:
        """The part of the checkpoint as the protocol wants it: by the names of the model, tensors mapped."""
        state: dict[str, Any] = {}
        handed_out: list[torch.Tensor] = []
        self._origins: dict[int, tuple[str, Source | None]] = {}
        """By the ids of what was handed out."""
        for name, entry in self.entries.items():
            content = entry.content
            if isinstance(content, Value):
                state[name] = content.value
                continue
            value = self._late_value(content) if isinstance(content, Derived) else self.maps.tensor(content)
            state[name] = value
            if type(value) is not torch.Tensor and is_quantized(value):
                self.quantized.append(name)
            handed_out.append(value)
            self._origins[id(value)] = name, content
        self._transaction.protect(handed_out)
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
            self._late_of[id(stored)] = late = DeferredValue(value, stored, self.maps)
            self._transaction.add(late)
        self._late[id(value)] = late
        return value

    def initialised(self, name: str, param: torch.Tensor, initialiser: Initialiser) -> torch.Tensor:
        """A first value for a tensor that nothing comes in for, made by the model's own code when it is wanted."""
        stored = Derived(param.dtype, tuple(param.shape), (), initialiser.make, is_certain=False)
        self.entries[name] = Entry(stored, (), (initialiser.how,))
        value = self._late_value(stored)
        self._origins[id(value)] = name, stored
        return value

    def seen(self, value: torch.Tensor) -> torch.Tensor:
        """The value with its values, for our own eyes."""
        late = self._late.get(id(value))
        if late is not None and not late.done:
            late.run(None)
            late.done = True
        stored = self.origin_of(value)[1]
        return self._checkpoint.read(stored) if isinstance(stored, StoredTensor) else value

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        late = self._late.get(id(one))
        if late is not None and late is self._late.get(id(other)):
            return True  # nothing has to be computed to know
        if same_place(one, other):
            return same_values(one, other)  # nothing has to be read
        a, b = self.origin_of(one)[1], self.origin_of(other)[1]
        if isinstance(a, StoredTensor) and isinstance(b, StoredTensor) and a.is_contiguous and b.is_contiguous:
            same_kind = a.dtype == b.dtype and a.shape == b.shape
            return same_kind and same_bytes(a.extent, b.extent, self._checkpoint.read_all)
        return same_values(self.seen(one), self.seen(other))
