"""`match`: selects the part of a checkpoint that is loaded, by the names of the model, and applies the rules.

`differences.py` says how the names of both sides differ.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import AmbiguousCheckpointError, CodecError, keep_interrupt
from modelstate.formats.tree import refused_in
from modelstate.planning.differences import Rewrapped, prefixes, without_wrappers, wrapper_rule
from modelstate.planning.options import LoadOptions
from modelstate.planning.recorder import outermost, own_names
from modelstate.problems import Problem, ProblemKind, option
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, to_be_computed
from modelstate.rules.rule import Entries, Entry, ModelTensors, Rule, Value, describe
from modelstate.rules.schema import Applied, Schema, apply_rules, renaming, way_back
from modelstate.spec import Stored, StoredTensor, StoredTensors
from modelstate.text_format import count
from modelstate.torch_compat.modules import has_own_load, has_own_state_dict
from modelstate.transaction.slots import HIDDEN, Slot, Slots

if TYPE_CHECKING:
    from modelstate.planning.initialise import Initialiser, Initialisers


class ModelSchemaView(msgspec.Struct, eq=False, dict=True):
    """The slots of a model, what initialises them, and both as rules see them."""

    model: nn.Module
    slots: Slots

    def names(self) -> set[str]:
        """Returns the names of the slots; of a module that saves and loads its state itself those that it saves."""
        names = {*self.slots.by_name, *self.slots.extra, *self.slots.lazy}
        for prefix, module in outermost(self.model):
            if has_own_load(module) and has_own_state_dict(module) and (own := own_names(module)):
                names = {name for name in names if not name.startswith(prefix)}.union(prefix + name for name in own)
        return names

    @cached_attribute
    def initialisers(self) -> Initialisers:
        """What initialises the tensors of the model."""
        from modelstate.planning.initialise import Initialisers

        return Initialisers(self.model)

    def initialiser_of(self, slot: Slot) -> Initialiser | None:
        """What initialises a tensor; None if no method of the model does."""
        return next(filter(None, map(self.initialisers.find, slot.names)), None)

    def before(self, rules: Iterable[Rule]) -> ModelTensors:
        """Returns the slots by the names that they have before these rules."""
        renamed_back = renaming(way_back(rules))
        wanted = [slot.name for slot in self.slots.tensors if slot.kind != HIDDEN]
        return _Before(self, {renamed_back(name): name for name in wanted})


class _Before:
    def __init__(self, view: ModelSchemaView, names: dict[str, str]) -> None:
        self._view, self._names = view, names

    def lacking(self, entries: Entries) -> Iterator[str]:
        return (name for name in self._names if name not in entries)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        slot = self._view.slots.by_name.get(self._names.get(name, ""))
        if slot is None or torch.nn.parameter.is_lazy(slot.tensor):
            return None
        return tuple(slot.tensor.shape), slot.tensor.dtype

    def initialiser(self, name: str) -> Callable[[], torch.Tensor] | None:
        initialiser = self._view.initialisers.find(self._names.get(name, ""))
        return None if initialiser is None else initialiser.make


class StoredEntries(Mapping[str, Entry]):
    """The entries of tensors in files, before rules. An entry is created when it is accessed."""

    def __init__(self, tensors: StoredTensors) -> None:
        self.tensors = tensors

    def keys(self) -> KeysView[str]:
        """The names."""
        return self.tensors.rows.keys()

    def __getitem__(self, name: str) -> Entry:
        return Entry(self.tensors[name], (name,))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def entries_of(checkpoint: Checkpoint) -> Entries:
    """Returns the entries of a checkpoint by their names, before rules."""
    tensors = checkpoint.flat.tensors
    if not checkpoint.flat.values:
        table = tensors if isinstance(tensors, StoredTensors) else StoredTensors.of(tensors)
        if table is not None:
            return StoredEntries(table)
    computed: dict[Stored, Derived] = {}
    entries = {
        name: Entry(stored if type(stored) is StoredTensor else to_be_computed(stored, computed), (name,))
        for name, stored in checkpoint.flat.tensors.items()
    }
    for name in checkpoint.flat.values:
        try:
            value = Value(checkpoint.extra[name])
            if found := refused_in(value.value, f"{checkpoint.key}.{name}" if checkpoint.key else name):
                from modelstate.formats.construct import refusal

                value = replace(value, error=refusal(found, checkpoint.source))
        except CodecError as error:
            value = Value(None, error)
        entries[name] = Entry(value, (name,))
    return entries


class MatchedCheckpoint(msgspec.Struct, frozen=True):
    """The part of a checkpoint that is loaded, by the names of the model. Created by `match`."""

    options: LoadOptions
    part: Checkpoint
    rules: tuple[Rule, ...]
    """The rules that were applied: those of the options, of their schema, or of transformers' mapping for the model."""
    applied: Applied
    """The entries after all rules, including the rule for wrappers."""
    before_wrappers: Mapping[str, str]
    """From names of the model to the names that a user's rules see, where the rule for wrappers changes the name."""
    versions: Mapping[str, dict[str, object]] | None
    """The versions of modules, by their paths in the model; None where the checkpoint has no versions."""
    notes: tuple[str, ...]
    fits_in_part: bool
    """Whether transformers' conversion mapping makes only some names fit."""

    @property
    def given(self) -> dict[str, str]:
        """The lists among the arguments, by their names, as the code by which a longer list begins."""
        options = self.options
        lists = (("allow_missing", options.allow_missing), ("allow_unexpected", options.allow_unexpected))
        given = {option: f"*{option}" for option, patterns in lists if patterns}
        if options.rules:
            given["rules"] = "*rules"
        elif self.rules:
            given["rules"] = "*ms.rules.from_transformers(model)"
        return given

    def name_for_rules(self, name: str) -> str:
        """Returns the name that a user's further rules see for a name of the model; empty for an unknown name."""
        return self.before_wrappers.get(name, name) if name in self.applied.entries else ""


def renamed_versions(
    versions: Mapping[str, dict[str, object]], applied: Applied, rules: Sequence[Rule]
) -> dict[str, dict[str, object]]:
    """Returns the versions of modules by their names after the rules."""
    # A module gets the new path of its tensors.
    moved: dict[str, set[str]] = {}
    for name, entry in applied.entries.items():
        if entry.rules and len(entry.sources) == 1:
            moved.setdefault(entry.sources[0].rpartition(".")[0], set()).add(name.rpartition(".")[0])
    renamed: dict[str, dict[str, object]] = {}
    rename = renaming(rules)
    for path, saved in versions.items():
        (only,) = moved[path] if len(moved.get(path, ())) == 1 else (None,)
        by_rules = rename(f"{path}.x" if path else "x").rpartition(".")[0]
        renamed[by_rules if only is None else only] = saved
    return renamed


def select_part(
    checkpoint: Checkpoint, options: LoadOptions, names: Callable[[], Collection[str]]
) -> tuple[Checkpoint, tuple[Rule, ...]]:
    """Selects the part of a checkpoint that has these names after the rules. Returns the part and its rules.

    Raises `AmbiguousCheckpointError`, `KeyNotFoundError` and the errors of schemas.
    """
    part, rules = checkpoint, options.rules
    if options.key is not None:
        part = checkpoint.select(options.key)
    elif checkpoint.flat.containers != [""] or (checkpoint.flat.values and not checkpoint.flat.tensors):
        renamings = rules.renamings(checkpoint) if isinstance(rules, Schema) else [renaming(rules)]
        part = matching_part(checkpoint, names(), renamings)
    # The rules follow from the version of the selected part, not from other parts of the file.
    return part, rules.rules_for(part) if isinstance(rules, Schema) else rules


def match(checkpoint: Checkpoint, options: LoadOptions, view: ModelSchemaView) -> MatchedCheckpoint:
    """Selects the part of a checkpoint, and applies rules to it that lead to the names of the model.

    Reads no tensor bytes but for rules that look at values. Raises `AmbiguousCheckpointError`, `KeyNotFoundError` and
    the errors of rules.
    """
    slots = view.slots
    part, rules = select_part(checkpoint, options, view.names)
    rest = 0 if part is checkpoint or options.key is not None else len(checkpoint) - len(part)
    notes = [f"not loaded: {count(rest, 'tensor')} of other parts of the checkpoint"] if rest else []
    applied, names, fits_in_part = Applied(entries_of(part)), slots.by_name.keys(), False
    if rules:
        applied = apply_rules(rules, applied.entries, part.read, view.before)
    elif applied.entries.keys() == names:
        return MatchedCheckpoint(options, part, (), applied, {}, part.versions, tuple(notes), fits_in_part)
    elif "transformers" in sys.modules:
        applied, rules, note, fits_in_part = _applied_mapping(part, applied, options, view)
        notes += [note] if note else []
    if rules:
        from modelstate.rules.transformers_mapping import notes_of

        notes += notes_of(rules, applied)
    all_rules: tuple[Rule, ...] = rules
    before_wrappers: dict[str, str] = {}
    if not applied.entries.keys() <= names:
        entries, saved = applied.entries, view.names()
        given = list(entries) if isinstance(entries, StoredEntries) else [n for n, e in entries.items() if e.sources]
        kept = entries.keys() - given
        wrappers = wrapper_rule(given, saved, view.model, kept_names=kept)
        if wrappers is None and saved != (own := {*names, *slots.extra, *slots.lazy}):
            wrappers = wrapper_rule(given, own, view.model, kept_names=kept)
        if wrappers is not None:
            applied, before_wrappers = _rewrapped(applied, wrappers)
            all_rules = (*rules, wrappers)
            notes.append(wrappers.note(len(before_wrappers)))
    versions = part.versions
    if versions is not None and all_rules:
        versions = renamed_versions(versions, applied, all_rules)
    return MatchedCheckpoint(options, part, rules, applied, before_wrappers, versions, tuple(notes), fits_in_part)


def _applied_mapping(
    part: Checkpoint, own: Applied, options: LoadOptions, view: ModelSchemaView
) -> tuple[Applied, tuple[Rule, ...], str, bool]:
    """Applies the conversion mapping of transformers to its models, where more names of the model then match.

    Returns the entries, their rules, a note, and whether the names fit only in part.
    """
    from modelstate.rules.transformers_mapping import from_transformers, is_transformers_model

    slots = view.slots
    if not is_transformers_model(view.model) or fits(slots, own.entries, options):
        return own, (), "", False
    try:
        rules = from_transformers(view.model)
        mapped = apply_rules(rules, own.entries, part.read)
    except Exception as error:  # the mapping differs between versions of transformers
        keep_interrupt(error)
        return own, (), f"transformers' conversion mapping cannot be used: {describe(error)}", False
    names = slots.by_name.keys()
    if mapped.problems or len(mapped.entries.keys() & names) <= len(own.entries.keys() & names):
        return own, (), "", False
    fits_in_part = not fits(slots, mapped.entries, options)
    if fits_in_part and wrapper_rule(list(own.entries), slots.by_name, view.model) is not None:
        return own, (), "", False
    return mapped, rules, "", fits_in_part


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


def fits(slots: Slots, entries: Entries, options: LoadOptions) -> bool:
    """Whether the names and shapes of a checkpoint are those of a model, except for names that the options allow."""
    may_miss = Patterns("allow_missing", options.allow_missing)
    may_exceed = Patterns("allow_unexpected", options.allow_unexpected)
    for name, entry in entries.items():
        slot = slots.by_name.get(name)
        if slot is None:
            if name not in slots.extra and not any(map(may_exceed.allow, (name, ", ".join(entry.sources)))):
                return False
        elif entry.tensor is None or is_lazy(slot.tensor) or tuple(entry.tensor.shape) != tuple(slot.tensor.shape):
            return False
    return options.init_missing or all(
        slot.kind == HIDDEN or not entries.keys().isdisjoint(slot.names) or any(map(may_miss.allow, slot.names))
        for slot in slots.tensors
    )


def matching_part(
    checkpoint: Checkpoint, wanted: Collection[str], renamings: Sequence[Callable[[str], str]]
) -> Checkpoint:
    """Returns the state dict of the checkpoint whose names, renamed in one of these ways, are the model's names.

    A state dict with more than twice as many names as any other is selected. Otherwise raises
    `AmbiguousCheckpointError`, which lists the state dicts.
    """
    if not checkpoint:
        return _part_of_arrays(checkpoint, wanted)
    containers = {"", *checkpoint.containers}
    if len(containers) == 1:
        return checkpoint
    exact: Counter[str] = Counter()
    for rename in renamings:
        exact |= _matches(checkpoint, containers, set(wanted), rename)
    # Either side may have the prefix of a wrapper.
    bare = _matches(checkpoint, containers, {without_wrappers(name) for name in wanted}, without_wrappers)
    counts = exact | bare
    if not counts:
        ends = {name[len(prefix) :] for name in wanted for prefix in prefixes(name)}
        counts = _matches(checkpoint, containers, ends, without_wrappers)
    if not counts:
        part = _part_behind_prefix(checkpoint, containers, set(wanted))
        return checkpoint.select(part) if part else checkpoint
    best, most = max(counts.items(), key=lambda item: (item[1], exact[item[0]], len(item[0])))
    rivals = {
        key: count
        for key, count in counts.items()
        if count * 2 >= most and not (not exact[key] and best.startswith(f"{key}." if key else ""))
    }
    rivals[best] = most
    if len(rivals) > 1:
        listed = ", ".join(
            f"{key or '(the whole)'!r} ({count} of {len(wanted)} names match)" for key, count in rivals.items()
        )
        raise AmbiguousCheckpointError(
            "the checkpoint holds several state dicts that fit the model",
            where=checkpoint.source,
            found=listed,
            remedy=f"say which one is meant, for example key={best!r}; without key=, give "
            f"ms.open(source).select({best!r})",
            options=option("--key", best or next(key for key in rivals if key)),
            candidates=tuple(rivals.items()),
        )
    return checkpoint.select(best) if best else checkpoint


def _part_behind_prefix(checkpoint: Checkpoint, containers: Collection[str], wanted: set[str]) -> str:
    """Returns the one container whose names are all a prefix and a name of the model; empty for none and for several.

    A file of Lightning has such names: `model.` and a name, beside the states of optimizers. The part is selected so
    that the problems propose the rule for the prefix.
    """
    names: dict[str, list[str]] = {}
    for name in checkpoint:
        for head in prefixes(name):
            if head[:-1] in containers:
                names.setdefault(head[:-1], []).append(name[len(head) :])
    found = [
        container
        for container, inner in names.items()
        if 2 * len(inner) > len(wanted)
        and any(
            all(name.startswith(prefix) and name[len(prefix) :] in wanted for name in inner)
            for prefix in prefixes(inner[0])
        )
    ]
    innermost = [key for key in found if not any(other.startswith(f"{key}.") for other in found)]
    return innermost[0] if len(innermost) == 1 else ""


def _part_of_arrays(checkpoint: Checkpoint, wanted: Collection[str]) -> Checkpoint:
    """Returns the mapping whose NumPy arrays have the most names of the model, for a checkpoint without tensors.

    Arrays cannot be loaded. The part is selected so that the problems name its arrays, as for a flat mapping.
    """
    values = checkpoint.flat.values
    bare = {without_wrappers(name) for name in wanted}
    counts: Counter[str] = Counter()
    waiting = [(path, value) for path, value in values.items() if isinstance(value, Mapping)]
    if any(name in values for name in wanted):
        return checkpoint
    while waiting:
        path, value = waiting.pop()
        for key, item in value.items():
            if isinstance(item, Mapping):
                waiting.append((f"{path}.{key}", item))
            elif isinstance(item, np.ndarray) and isinstance(key, str) and without_wrappers(key) in bare:
                counts[path] += 1
    return checkpoint.select(counts.most_common(1)[0][0]) if counts else checkpoint


def _matches(
    checkpoint: Checkpoint, containers: Collection[str], wanted: Collection[str], rename: Callable[[str], str]
) -> Counter[str]:
    """Counts for each container the names below it that the model has."""
    counts: Counter[str] = Counter()
    for name in checkpoint:
        head = name
        while head:
            head = head.rpartition(".")[0]
            if head in containers and rename(name[len(head) + 1 :] if head else name) in wanted:
                counts[head] += 1
    return counts


class Patterns:
    """Glob patterns that allow names, and the patterns that have matched."""

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        self.option, self.patterns = option, tuple(patterns)
        self.used: set[str] = set()
        self._globs = [pattern for pattern in self.patterns if any(map(pattern.__contains__, "*?["))]
        self._names = {*self.patterns}.difference(self._globs)  # found by hash: there may be as many as tensors

    def allow(self, name: str) -> bool:
        if not self.patterns:
            return False
        hits = [pattern for pattern in self._globs if fnmatchcase(name, pattern)]
        if name in self._names:
            hits.append(name)
        self.used.update(hits)
        return bool(hits)

    def idle(self) -> list[Problem]:
        return [
            Problem(ProblemKind.IDLE_PATTERN, pattern, found=self.option)
            for pattern in self.patterns
            if pattern not in self.used
        ]
