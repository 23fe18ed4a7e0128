"""The checkpoint as the model sees it, once the rules are applied: mapped tensors by the model's names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.mapped import Maps
from modelstate.errors import CodecError
from modelstate.io.own import same_bytes
from modelstate.planning.initialise import Initialiser, Initialisers
from modelstate.planning.matching import wrapper_rule
from modelstate.rules.expression import Derived, Source, to_be_computed, values_of
from modelstate.rules.rule import Entries, Entry, Rule, Value, Wanted
from modelstate.rules.schema import Applied, apply_rules, renamed_by, way_back
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


class MappedState:
    """A checkpoint as the rules make it fit a model: what the model's loading protocol is run against.

    Tensors are mapped. Those that rules compute get their values when somebody looks at them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: Sequence[Rule],
        slots: Slots,
        initialisers: Initialisers,
        transaction: Transaction,
        applied: Applied | None = None,
    ) -> None:
        """`applied` is what the rules make of the checkpoint, where that is known already."""
        self._checkpoint, self._rules, self._transaction = checkpoint, rules, transaction
        self.maps = checkpoint.maps()
        self._late: dict[int, DeferredValue] = {}
        self._late_of: dict[int, DeferredValue] = {}
        self.applied = self._apply_rules(ModelSchemaView(slots, initialisers)) if applied is None else applied
        self.before_wrappers: dict[str, str] = {}
        """From names of the model to what the rules of a user see in their place, where a wrapper's name differs."""
        self.wrapper_note = self._rewrap(slots)
        self.quantized: list[str] = []
        """Names of tensors that are quantized by a wrapper subclass."""
        self.state = self._state_dict()
        """By the names of the model: tensors, and values that are none."""
        self.versions = self._renamed_versions()
        """The versions of modules, by their paths in the model; None where the checkpoint has none."""

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
        entry = self.applied.entries.get(name)
        return (name, ()) if entry is None else (", ".join(entry.sources), entry.rules)

    def _renamed_versions(self) -> dict[str, dict[str, Any]] | None:
        """The versions of the checkpoint's modules by the names that the rules make of them."""
        versions = self._checkpoint.versions
        if versions is None:
            return None
        return renamed_versions(versions, self.applied, self._rules)

    def _apply_rules(self, places: ModelSchemaView) -> Applied:
        """The checkpoint by the names, and in the pieces, of the model."""
        entries = entries_of(self._checkpoint)
        if not self._rules:
            return Applied(entries)
        return apply_rules(self._rules, entries, self._checkpoint.read, places.before)

    def _rewrap(self, slots: Slots) -> str:
        """Applies the rule for wrappers after the others, where there is one. Returns a note on it, or nothing."""
        entries = self.applied.entries
        if entries.keys() <= slots.by_name.keys():
            return ""
        given = [name for name, entry in entries.items() if entry.sources]
        wanted = {*slots.by_name, *slots.extra, *slots.lazy}
        rule = wrapper_rule(given, wanted, self._transaction.root, made=entries.keys() - given)
        if rule is None:
            return ""
        renamed: dict[str, Entry] = {}
        for name, entry in entries.items():
            changed = rule.rename(name) if entry.sources else None
            if changed is None:
                renamed[name] = entry
            else:
                renamed[changed] = entry._replace(rules=(*entry.rules, repr(rule)))
                self.before_wrappers[changed] = name
        self.applied, self._rules = replace(self.applied, entries=renamed), (*self._rules, rule)
        return rule.note(len(self.before_wrappers))

    def name_for_rules(self, name: str) -> str:
        """What a further rule of a user's sees in the place of a name of the model; empty where that is no name."""
        return self.before_wrappers.get(name, name) if name in self.applied.entries else ""

    def _state_dict(self) -> dict[str, Any]:
        """The part of the checkpoint as the protocol wants it: by the names of the model, tensors mapped."""
        state: dict[str, Any] = {}
        handed_out: list[torch.Tensor] = []
        self._origins: dict[int, tuple[str, Source | None]] = {}
        """By the ids of what was handed out."""
        for name, entry in self.applied.entries.items():
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
        self.applied.entries[name] = Entry(stored, (), (initialiser.how,))
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
