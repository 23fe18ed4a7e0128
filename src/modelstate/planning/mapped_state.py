"""`match` and `MappedState`: the part of a checkpoint that is loaded, by the names of the model, as mapped tensors."""

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
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, Source, to_be_computed, values_of
from modelstate.rules.rule import Entries, Entry, Rule, Value, Wanted, describe
from modelstate.rules.schema import Applied, apply_rules, renamed_by, way_back
from modelstate.rules.transformers_mapping import from_transformers, is_transformers_model, notes_of
from modelstate.spec import Stored, StoredTensor
from modelstate.torch_compat.plain import is_quantized, same_place
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.slots import HIDDEN, Slots, same_values, slots_of
from modelstate.transaction.transaction import Transaction, Write


class ModelSchemaView:
    """The slots of a model, what initialises them, and both as rules see them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.slots = model, slots_of(model)

    @cached_attribute
    def initialisers(self) -> Initialisers:
        """What initialises the tensors of the model."""
        return Initialisers(self.model)

    def before(self, rules: Iterable[Rule]) -> Wanted:
        """Returns the slots by the names that they have before these rules."""
        back = way_back(rules)
        wanted = [slot.name for slot in self.slots.tensors if slot.kind != HIDDEN]
        return _Before(self, {renamed_by(back, name): name for name in wanted})


class _Before:
    def __init__(self, view: ModelSchemaView, names: dict[str, str]) -> None:
        self._view, self._names = view, names

    def lacking(self, entries: Entries) -> Iterator[str]:
        return (name for name in self._names if name not in entries)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        slot = self._view.slots.by_name.get(self._names.get(name, ""))
        if slot is None or torch.nn.parameter.is_lazy(slot.tensor):
            return None
        return tuple(slot.tensor.shape), slot.tensor.dtype

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        initialiser = self._view.initialisers.find(self._names.get(name, ""))
        return None if initialiser is None else initialiser.make


class DeferredValue(Write):
    """Computes the values of a rule's result when code of the model uses the tensor during the walk."""

    __slots__ = ("maps", "stored")

    def __init__(self, value: torch.Tensor, stored: Derived, maps: Maps) -> None:
        super().__init__(value, value)
        self.stored, self.maps = stored, maps

    def run(self, transaction: Transaction | None) -> None:
        with torch.no_grad():
            self.target.copy_(values_of(self.stored, self.maps.read))


@dataclass(frozen=True, slots=True)
class DecodeFailure:
    """A value of the checkpoint that cannot be decoded. The error is raised only if the model needs the value."""

    error: CodecError


_NO_ORIGIN: tuple[str, Source | None] = ("", None)


def _decoded(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return checkpoint.extra[name]
    except CodecError as error:
        return DecodeFailure(error)


def entries_of(checkpoint: Checkpoint) -> Entries:
    """Returns the entries of a checkpoint by their names, before rules."""
    computed: dict[Stored, Derived] = {}
    entries = {
        name: Entry(stored if type(stored) is StoredTensor else to_be_computed(stored, computed), (name,))
        for name, stored in checkpoint.flat.tensors.items()
    }
    return entries | {name: Entry(Value(_decoded(checkpoint, name)), (name,)) for name in checkpoint.extra}


def renamed_versions(
    versions: Mapping[str, dict[str, Any]], applied: Applied, rules: Sequence[Rule]
) -> dict[str, dict[str, Any]]:
    """Returns the versions of modules by their names after the rules."""
    if not rules:
        return dict(versions)
    # A module gets the new path of its tensors.
    moved: dict[str, set[str]] = {}
    for name, entry in applied.entries.items():
        if entry.rules and len(entry.sources) == 1:
            moved.setdefault(entry.sources[0].rpartition(".")[0], set()).add(name.rpartition(".")[0])
    renamed: dict[str, dict[str, Any]] = {}
    for path, saved in versions.items():
        (only,) = moved[path] if len(moved.get(path, ())) == 1 else (None,)
        by_rules = renamed_by(rules, f"{path}.x" if path else "x").rpartition(".")[0]
        renamed[by_rules if only is None else only] = saved
    return renamed


def match(checkpoint: Checkpoint, asked: Options, view: ModelSchemaView) -> MatchedCheckpoint:
    """Selects the part of a checkpoint, and applies rules to it that lead to the names of the model.

    Reads no tensor bytes but for rules that look at values. Raises `AmbiguousCheckpointError`, `KeyNotFoundError` and
    the errors of rules.
    """
    slots, model = view.slots, view.model
    part, options = _selected(checkpoint, asked, slots)
    applied, options, note, fits_in_part = _applied_mapping(part, options, slots, model)
    rest = len(checkpoint) - len(part) if options.key is None else 0
    notes = [f"{rest} tensors of other parts of the checkpoint are not loaded"] if rest else []
    notes += [note] if note else []
    if applied is None:
        entries = entries_of(part)
        applied = apply_rules(options.rules, entries, part.read, view.before) if options.rules else Applied(entries)
    if options.rules:
        notes += notes_of(options.rules, applied)
    rules, before_wrappers = options.rules, dict[str, str]()
    if wrappers := _wrapper_rule(applied.entries, slots, model):
        applied, before_wrappers = _rewrapped(applied, wrappers)
        rules = (*rules, wrappers)
        notes.append(wrappers.note(len(before_wrappers)))
    versions = None if part.versions is None else renamed_versions(part.versions, applied, rules)
    return MatchedCheckpoint(asked, part, options, applied, before_wrappers, versions, tuple(notes), fits_in_part)


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
    # The rules follow from the version of the selected part, not from other parts of the file.
    return part, replace(options, rules=options.schema.rules_for(part), schema=None)


def _applied_mapping(
    part: Checkpoint, options: Options, slots: Slots, model: nn.Module
) -> tuple[Applied | None, Options, str, bool]:
    """Applies transformers' conversion mapping where more names of the model then match.

    Returns the entries, the options with the rules of the entries, a note, and whether the names fit only in part. The
    entries are None where the model is not a model of transformers, or the user passes rules.
    """
    if options.rules or not is_transformers_model(model):
        return None, options, "", False
    own = Applied(entries_of(part))
    if fits(slots, own.entries, options):
        return own, options, "", False
    try:
        rules = from_transformers(model)
        mapped = apply_rules(rules, own.entries, part.read)
    except Exception as error:  # the mapping differs between versions of transformers
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
    return wrapper_rule(given, wanted, model, kept_names=entries.keys() - given)


def _rewrapped(applied: Applied, rule: Rewrapped) -> tuple[Applied, dict[str, str]]:
    """Returns the entries by their names after the rule for wrappers, and a map from these names to the old names."""
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
    """A matched checkpoint as a state dict of mapped tensors, for the model's loading protocol.

    Results of rules get their values when code of the model uses them.
    """

    def __init__(self, matched: MatchedCheckpoint, transaction: Transaction) -> None:
        self._checkpoint, self._transaction = matched.part, transaction
        self.maps = matched.part.maps()
        self._deferred: dict[int, DeferredValue] = {}
        self._deferred_by_source: dict[int, DeferredValue] = {}
        self.entries = dict(matched.applied.entries)
        """Entries by the names of the model: results of rules, and tensors that the model's own code initialises."""
        self.quantized: list[str] = []
        """Names of tensors that are quantized by a wrapper subclass."""
        self.state = self._state_dict()
        """Tensors and other values, by the names of the model."""

    def settle(self) -> None:
        """Ends the walk: from now on, deferred values are computed only for their slots."""
        for deferred in self._deferred.values():
            deferred.done = True

    def origin_of(self, value: torch.Tensor) -> tuple[str, Source | None]:
        """Returns the name and the source of a tensor of the state dict; neither for a tensor of the model's code.

        The source is None where the model's code has used the tensor, because the code may have changed the values.
        """
        origin, used = self._origins.get(id(value), _NO_ORIGIN), self._transaction.used_storages
        return (origin[0], None) if used and storage_id(value) in used else origin

    def source_of(self, name: str) -> str:
        """Returns the name in the checkpoint for a name of the model; several names for a result of several tensors."""
        return self.source_and_rules(name)[0]

    def source_and_rules(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns the name in the checkpoint for a name of the model, and the rules that lead to the latter."""
        entry = self.entries.get(name)
        return (name, ()) if entry is None else (", ".join(entry.sources), entry.rules)

    def _state_dict(self) -> dict[str, Any]:
        """Returns the state dict, by the names of the model, with mapped tensors."""
        state: dict[str, Any] = {}
        handed_out: list[torch.Tensor] = []
        self._origins: dict[int, tuple[str, Source | None]] = {}
        """Names and sources by the ids of the tensors of the state dict."""
        for name, entry in self.entries.items():
            content = entry.content
            if isinstance(content, Value):
                state[name] = content.value
                continue
            value = self._deferred_value(content) if isinstance(content, Derived) else self.maps.tensor(content)
            state[name] = value
            if type(value) is not torch.Tensor and is_quantized(value):
                self.quantized.append(name)
            handed_out.append(value)
            self._origins[id(value)] = name, content
        self._transaction.protect(handed_out)
        return state

    def _deferred_value(self, stored: Derived) -> torch.Tensor:
        """Returns a tensor that gets its values when code uses them. Its pages are not allocated before."""
        if stored.lacks_values:
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        deferred = self._deferred_by_source.get(id(stored))
        if deferred is not None:  # another name of a tied tensor
            value = deferred.target.detach()
        else:
            value = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
            self._deferred_by_source[id(stored)] = deferred = DeferredValue(value, stored, self.maps)
            self._transaction.add(deferred)
        self._deferred[id(value)] = deferred
        return value

    def initialised(self, name: str, param: torch.Tensor, initialiser: Initialiser) -> torch.Tensor:
        """Returns a deferred initial value for a missing tensor, which the model's own code computes."""
        stored = Derived(param.dtype, tuple(param.shape), (), initialiser.make, is_certain=False)
        self.entries[name] = Entry(stored, (), (initialiser.how,))
        value = self._deferred_value(stored)
        self._origins[id(value)] = name, stored
        return value

    def with_values(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the state dict with its values, computed or read."""
        deferred = self._deferred.get(id(value))
        if deferred is not None and not deferred.done:
            deferred.run(None)
            deferred.done = True
        stored = self.origin_of(value)[1]
        return self._checkpoint.read(stored) if isinstance(stored, StoredTensor) else value

    def are_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        deferred = self._deferred.get(id(first))
        if deferred is not None and deferred is self._deferred.get(id(second)):
            return True  # the results of one computation
        if same_place(first, second):
            return same_values(first, second)  # compared by their metadata, without a read
        first_source, second_source = self.origin_of(first)[1], self.origin_of(second)[1]
        if (
            isinstance(first_source, StoredTensor)
            and isinstance(second_source, StoredTensor)
            and first_source.is_contiguous
            and second_source.is_contiguous
        ):
            same_kind = first_source.dtype == second_source.dtype and first_source.shape == second_source.shape
            return same_kind and same_bytes(first_source.extent, second_source.extent, self._checkpoint.read_all)
        return same_values(self.with_values(first), self.with_values(second))
