"""`match`: selects the part of a checkpoint that is loaded, by the names of the model, and applies the rules.

Names prove two kinds of differences. A wrapper (DataParallel, `torch.compile`, FSDP) adds its name to the names of all
tensors below it: `wrapper_rule` removes or adds such names without a rule of the user. Other prefixes that all names
of one side have are only proposed, by `one_prefix`. All other differences are left to `modelstate.suggest`, which
compares more than names and reports its confidence.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import AmbiguousCheckpointError, CodecError, keep_interrupt
from modelstate.formats.tree import leaves, nodes_of, refused_in
from modelstate.planning.options import LoadOptions
from modelstate.planning.recorder import loads_names_itself, outermost, own_state
from modelstate.problems import Problem, ProblemKind, one_line, option, wrong_shape
from modelstate.rules.expression import Derived, to_be_computed
from modelstate.rules.known import WRAPPERS
from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import Entries, Entry, ModelTensor, ModelTensors, Rule, Value, as_code
from modelstate.rules.schema import Applied, Schema, apply_rules, renaming, way_back
from modelstate.spec import Stored, StoredTensor, StoredTensors
from modelstate.text_format import count
from modelstate.torch_compat.modules import named_modules_of, overrides
from modelstate.transaction.slots import HIDDEN, Slot, Slots

if TYPE_CHECKING:
    from modelstate.planning.initialise import Copies, Initialiser

Shapes = Mapping[str, tuple[int, ...] | None]
_MOST_HEADS = 12
_MOST_CANDIDATES = 4
"""A name that is the end of more names than this is not evidence of a prefix."""
LORA_MATRIX = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_A|embedding_B|A|B|magnitude_vector|down|up)"
    r"(?:\.(?P<adapter>.+?))??(?:\.(?P<last>weight|bias))?$"
)
"""The names that peft, diffusers (A and B) and the tools of kohya (down and up) give to the matrices of LoRA."""
KOHYA_PREFIXES = ("lora_", "lycoris_")
"""The beginnings of the names of modules in files of kohya's tools, where each dot of the path is an underscore."""
PEFT_PREFIX = "base_model.model."
"""The prefix of the names of an adapter of peft."""


class ModelSchemaView(msgspec.Struct, eq=False):
    """The slots of a model, what initialises them, and both as rules see them."""

    model: nn.Module
    slots: Slots
    copies: dict[str, Copies] = {}
    """Copies of modules that initialise tensors, by the prefixes of the names."""

    def names(self) -> set[str]:
        """Returns the names of the slots; of a module that saves and loads its state itself those that it saves."""
        names = {*self.slots.by_name, *self.slots.extra, *self.slots.lazy}
        for prefix, module in outermost(self.model):
            saves_itself = overrides(module, "load_state_dict", "state_dict")
            if saves_itself and (own := [name for name, _ in leaves(own_state(module)) if name]):
                names = {name for name in names if not name.startswith(prefix)}.union(prefix + name for name in own)
        return names

    def initialiser_of(self, slot: Slot) -> Initialiser | None:
        """What initialises a tensor; None if no method of the model does."""
        from modelstate.planning.initialise import initialiser_of

        return next(filter(None, (initialiser_of(self.model, name, self.copies) for name in slot.names)), None)

    def before(self, rules: Iterable[Rule]) -> ModelTensors:
        """Returns the slots by the names that they have before these rules."""
        renamed_back = renaming(way_back(rules))
        wanted = [slot for slot in self.slots.tensors if slot.kind != HIDDEN]
        return {renamed_back(slot.name): ModelTensor(slot.tensor, partial(self._make, slot)) for slot in wanted}

    def _make(self, slot: Slot) -> Callable[[], torch.Tensor] | None:
        initialiser = self.initialiser_of(slot)
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

    @property
    def is_mapped_by_transformers(self) -> bool:
        """Whether transformers' conversion mapping was applied, as more names of the model match with it."""
        return bool(self.rules) and not self.options.rules

    @property
    def given(self) -> dict[str, str]:
        """The lists among the arguments, by their names, as the code by which a longer list begins."""
        names = ("allow_missing", "allow_unexpected", "rules")
        given = {name: f"*{name}" for name in names if getattr(self.options, name)}
        return given | {"rules": "*ms.rules.from_transformers(model)"} if self.is_mapped_by_transformers else given


def renamed_versions(
    versions: Mapping[str, dict[str, object]], applied: Applied, rules: Sequence[Rule]
) -> dict[str, dict[str, object]]:
    """Returns the versions of modules by their names after the rules."""
    # A module gets the new path of its tensors.
    moved: dict[str, set[str]] = {}
    for name, entry in applied.entries.items():
        if entry.rules and len(entry.sources) == 1:
            moved.setdefault(entry.sources[0].rpartition(".")[0], set()).add(name.rpartition(".")[0])
    renamed, rename = dict[str, dict[str, object]](), renaming(rules)
    for path, saved in versions.items():
        paths = moved.get(path) or set[str]()
        by_rules = rename(f"{path}.x" if path else "x").rpartition(".")[0]
        renamed[next(iter(paths)) if len(paths) == 1 else by_rules] = saved
    return renamed


def select_part(
    checkpoint: Checkpoint, options: LoadOptions, names: Callable[[], Collection[str]]
) -> tuple[Checkpoint, tuple[Rule, ...]]:
    """Selects the part of a checkpoint that has these names after the rules. Returns the part and its rules.

    Raises `AmbiguousCheckpointError`, `KeyNotFoundError` and the errors of schemas.
    """
    part, rules, flat = checkpoint, options.rules, checkpoint.flat
    if options.key:
        part = checkpoint.select(options.key)
    elif options.key is None and (flat.containers != [""] or (flat.values and not flat.tensors)):
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
    applied, names = Applied(entries_of(part)), slots.by_name.keys()
    if rules:
        applied = apply_rules(rules, applied.entries, part.read, view.before)
    elif "transformers" in sys.modules and not applied.entries.keys() <= names:
        applied, rules = _applied_mapping(part, applied, view, notes)
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
            before_wrappers = {new: name for name in given if (new := wrappers.rename(name)) is not None}
            text, new_names = repr(wrappers), {name: new for new, name in before_wrappers.items()}
            renamed = {
                new_names.get(name, name): entry._replace(rules=(*entry.rules, text)) if name in new_names else entry
                for name, entry in entries.items()
            }
            applied, all_rules = replace(applied, entries=renamed), (*rules, wrappers)
            notes.append(wrappers.note(len(before_wrappers)))
    versions = part.versions
    if versions is not None and all_rules:
        versions = renamed_versions(versions, applied, all_rules)
    return MatchedCheckpoint(options, part, rules, applied, before_wrappers, versions, tuple(notes))


def _applied_mapping(
    part: Checkpoint, own: Applied, view: ModelSchemaView, notes: list[str]
) -> tuple[Applied, tuple[Rule, ...]]:
    """Applies the conversion mapping of transformers to its models, where more names of the model then match.

    Returns the entries and their rules. Adds a note where the mapping cannot be used.
    """
    from modelstate.rules.transformers_mapping import from_transformers, is_transformers_model

    names = view.slots.by_name.keys()
    if is_transformers_model(view.model) and wrapper_rule(list(own.entries), names, view.model) is None:
        try:
            rules = from_transformers(view.model)
            mapped = apply_rules(rules, own.entries, part.read)
            if not mapped.problems and len(mapped.entries.keys() & names) > len(own.entries.keys() & names):
                return mapped, rules
        except Exception as error:  # the mapping differs between versions of transformers
            keep_interrupt(error)
            notes.append(f"transformers' conversion mapping cannot be used: {one_line(error)}")
    return own, ()


def matching_part(
    checkpoint: Checkpoint, wanted: Collection[str], renamings: Sequence[Callable[[str], str]]
) -> Checkpoint:
    """Returns the state dict of the checkpoint whose names, renamed in one of these ways, are the model's names.

    A state dict with more than twice as many names as any other is selected. Otherwise raises
    `AmbiguousCheckpointError`, which lists the state dicts.
    """
    given: Collection[str] = checkpoint
    containers = {"", *checkpoint.containers}
    if not checkpoint:  # NumPy arrays cannot be loaded; the problems name those of the part
        nodes = [node for name, value in checkpoint.flat.values.items() for node in nodes_of(value, name)]
        given = [path for path, node in nodes if isinstance(node, np.ndarray)]
        containers = {"", *(path for path, node in nodes if isinstance(node, Mapping))}
    if len(containers) == 1:
        return checkpoint
    exact: Counter[str] = Counter()
    for rename in renamings:
        exact |= _matches(given, containers, set(wanted), rename)
    # Either side may have the prefix of a wrapper.
    counts = exact | _matches(given, containers, {without_wrappers(name) for name in wanted}, without_wrappers)
    if not counts:
        ends = {name[len(prefix) :] for name in wanted for prefix in prefixes(name)}
        counts = _matches(given, containers, ends, without_wrappers)
    if not counts:
        # A file of Lightning has the states of optimizers beside such names: the problems propose the rule.
        counts = _matches(given, containers, set(wanted), lambda name: _behind_prefix(name, wanted))
        innermost = [key for key in counts if key and not any(other.startswith(f"{key}.") for other in counts)]
        return checkpoint.select(innermost[0]) if len(innermost) == 1 else checkpoint
    best, most = max(counts.items(), key=lambda item: (item[1], exact[item[0]], len(item[0])))
    rivals = {
        key: count
        for key, count in counts.items()
        if count * 2 >= most and not (not exact[key] and best.startswith(f"{key}." if key else ""))
    }
    rivals[best] = most
    if len(rivals) > 1:
        raise several_parts(checkpoint, best, rivals, f"of {len(wanted)} names match")
    return checkpoint.select(best) if best else checkpoint


def several_parts(checkpoint: Checkpoint, best: str, counts: Mapping[str, int], unit: str) -> AmbiguousCheckpointError:
    """Returns the error for parts of a checkpoint that all fit the model, with the count of what fits in each."""
    return AmbiguousCheckpointError(
        "the checkpoint holds several state dicts that fit the model",
        where=checkpoint.source,
        found=", ".join(f"{key or '(the whole)'!r} ({count} {unit})" for key, count in counts.items()),
        remedy=f"say which one is meant, for example key={best!r}; without key=, give ms.open(source).select({best!r})",
        options=option("--key", best or next(key for key in counts if key)),
        candidates=tuple(counts.items()),
    )


def _behind_prefix(name: str, wanted: Collection[str]) -> str:
    """Returns what follows the first prefix behind which a name is one of the model; the name itself without one."""
    return next((name[len(prefix) :] for prefix in prefixes(name) if name[len(prefix) :] in wanted), name)


def _matches(
    names: Iterable[str], containers: Collection[str], wanted: Collection[str], rename: Callable[[str], str]
) -> Counter[str]:
    """Counts for each container the names below it that the model has."""
    counts: Counter[str] = Counter()
    for name in names:
        head = name
        while head:
            head = head.rpartition(".")[0]
            if head in containers and rename(name[len(head) + 1 :] if head else name) in wanted:
                counts[head] += 1
    return counts


# Wrappers.


def prefixes(name: str) -> Iterator[str]:
    """Yields all prefixes of a dotted name that end with a dot."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1]
        at = name.find(".", at + 1)


def without_wrappers(name: str) -> str:
    """Returns a name without the parts that wrappers add."""
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last])


class Rewrapped(msgspec.Struct, frozen=True):
    """Removes or adds the names of wrappers at certain modules."""

    modules: Mapping[str, str]
    """From prefixes of the checkpoint's names to prefixes of the model's names, such as "module." to ""."""

    def __repr__(self) -> str:
        are_few = len(self.modules) <= 2
        return f"Rewrapped({dict(self.modules)!r})" if are_few else f"Rewrapped({len(self.modules)} modules)"

    def rename(self, name: str) -> str | None:
        for prefix in (*reversed([*prefixes(name)]), ""):
            put = self.modules.get(prefix)
            if put is not None:
                return put + name[len(prefix) :]
        return None

    def reverse(self) -> Rewrapped:
        return Rewrapped({put: prefix for prefix, put in self.modules.items()})

    def note(self, names: int) -> str:
        """Returns a note for the report, for the number of names that the rule has changed."""
        sides = self.modules.keys(), self.modules.values()
        taken, put = ({part for prefix in side for part in prefix.split(".")} & {*WRAPPERS} for side in sides)
        what = [f"without {', '.join(sorted(taken - put))}"] if taken - put else []
        what += [f"with {', '.join(sorted(put - taken))}"] if put - taken else []
        are_read = f"{count(names, 'name')} of the checkpoint {'is' if names == 1 else 'are'} read"
        return f"{are_read} {' and '.join(what) or 'with wrappers in other places'}"


def wrapper_rule(
    given: Collection[str], wanted: Collection[str], model: nn.Module | None = None, kept_names: Collection[str] = ()
) -> Rewrapped | None:
    """Returns the rule for names that differ from the model's names only in wrappers.

    Returns None where all names fit without a rule, or where the rule would be uncertain: two names of one side are
    equal without wrappers; some names below a module go through a wrapper and others do not; or code of the model loads
    the names at such a module.

    Args:
        given: The names of the checkpoint.
        wanted: The names of the model.
        model: The model, whose loading code is examined.
        kept_names: Further names, which the rule does not change.
    """
    if all(name in wanted for name in given) or not any(map(_has_wrapper, (*given, *wanted))):
        return None
    sources = {without_wrappers(name): name for name in (*kept_names, *given)}
    targets = {without_wrappers(name): name for name in wanted}
    if len(sources) < len(given) + len(kept_names) or len(targets) < len(wanted):
        return None
    kept = set(kept_names)
    pairs = {name: targets[bare] for bare, name in sources.items() if bare in targets and name not in kept}
    modules: dict[str, str] = {}
    chains: tuple[dict[str, str], dict[str, str]] = {}, {}
    for source, target in pairs.items():
        for (bare, before, chain), (_, put_before, put_chain) in zip(_places(source), _places(target), strict=True):
            if chains[0].setdefault(bare, chain) != chain or chains[1].setdefault(bare, put_chain) != put_chain:
                return None
            if chain != put_chain:
                modules[before + chain] = put_before + put_chain
    left, lacking = set(given).difference(pairs), set(wanted).difference(pairs.values())
    # A wrapper of the model has all names of its place below it: a module with other names beside it is none.
    for side, names in zip(chains, (filter(_has_wrapper, left), lacking), strict=True):
        if any(side.get(bare, chain) != chain for name in names for bare, _, chain in _places(name)):
            return None  # a name without a counterpart goes through a wrapper, and the others do not, or vice versa
    if left and lacking and any(map(_has_wrapper, (*modules.values(), *lacking))):
        return None  # a name that fits by chance would become one of a module that the checkpoint has elsewhere
    rule = Rewrapped(modules)
    if not modules or any((rule.rename(source) or source) != target for source, target in pairs.items()):
        return None
    if model is not None:
        of_model = named_modules_of(model)
        above = {prefix[:-1] for place in modules.values() for prefix in prefixes(place)} | {""}
        is_wrapped = any(map(_has_wrapper, modules.values()))
        for module in (of_model[path] for path in above if path in of_model):
            if loads_names_itself(module) or (is_wrapped and overrides(module, "load_state_dict")):
                return None  # a module at or above a wrapper may change the meaning of names while it loads
    return rule


def _has_wrapper(name: str) -> bool:
    return any(wrapper in name for wrapper in WRAPPERS)


def _places(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields for each module on the path of a name: its path without wrappers, its prefix, and its wrappers."""
    bare = before = chain = ""
    *path, _ = name.split(".")
    for part in path:
        if part in WRAPPERS:
            chain += f"{part}."
            continue
        yield bare, before, chain
        bare, before, chain = f"{bare}{part}.", f"{before}{chain}{part}.", ""
    yield bare, before, chain


# One prefix.


def one_prefix(
    missing: Shapes, unexpected: Shapes, *, fitting: Collection[str] = (), optional: Collection[str] = ()
) -> list[Problem]:
    """Returns a problem with the rule for the one prefix by which all missing and unexpected names differ, if any.

    The rule is certain. Every unexpected name is the prefix and a missing name, or every missing name is the prefix and
    an unexpected name; no name is left on either side, except for missing names that are `optional`. There is no rule
    where most shapes differ, and none where a part of the prefix leads to a `fitting` name, as from "a.a.w" to "a.w":
    all names may then have an additional "a.". The rule does not change `fitting` names. Problems of shapes that differ
    follow.
    """
    required, proved = missing.keys() - set(optional), []
    for strips, names, others in ((True, required, unexpected), (False, unexpected, missing)):
        last = max(names, key=len, default="")
        longer = [other for other in others if last and other.endswith(f".{last}")]
        for prefix in [other[: -len(last)] for other in longer] if len(longer) <= _MOST_CANDIDATES else ():
            sources = {name: prefix + name if strips else name.removeprefix(prefix) for name in missing}
            pairs = {name: source for name, source in sources.items() if source in unexpected}
            if len(pairs) == len(unexpected) and required <= pairs.keys():
                proved.append((prefix, strips, pairs))
    if len(proved) != 1:
        return []
    ((prefix, strips, pairs),) = proved
    whole_names = pairs.values() if strips else pairs.keys()
    if any(name[len(part) :] in fitting for name in whole_names for part in prefixes(name) if len(part) < len(prefix)):
        return []
    if 2 * sum(missing[name] == unexpected[source] for name, source in pairs.items()) <= len(pairs):
        return []
    start, put = (rf"^{re.escape(prefix)}", "") if strips else ("^", prefix.replace("\\", r"\\"))
    whole = Prefix(strip=prefix) if strips else Prefix(add=prefix)
    rules: list[tuple[Prefix | Rename, str]] = [(whole, option(f"--{'strip' if strips else 'add'}-prefix", prefix))]
    # Rules for only the names that continue as these do, which leave more names alone.
    rests = [name if strips else source for name, source in pairs.items()]
    for parts in ({rest.partition(".")[0] for rest in rests}, set(rests)):
        if len(parts) <= _MOST_HEADS:
            pattern = rf"{start}(?=(?:{'|'.join(sorted(map(re.escape, parts)))})(?:\.|$))"
            rules.append((Rename(re.compile(pattern), put), option("--rename-regex", f"{pattern}={put}")))
    why = f"{len(pairs)} names differ only by the prefix {prefix!r} of the {'checkpoint' if strips else 'model'}"
    for rule, options in rules:
        right = all(rule.rename(source) == name for name, source in pairs.items())
        if right and all(rule.rename(name) is None for name in fitting):
            code, first = (as_code(rule),), next(iter(pairs))
            problems = [Problem(ProblemKind.OTHER_NAMES, first, why=why, rules=code, options=options)]
            for name, source in pairs.items():
                own, other = missing[name], unexpected[source]
                if own is not None and other is not None and own != other:
                    problems.append(wrong_shape(name, own, other))
            return problems
    return []


# Other names.


def adapter_names(names: Iterable[str]) -> list[str]:
    """Returns the names that belong to a LoRA adapter; empty if no name is the name of a LoRA matrix."""
    given = list(names)
    matrices = {name for name in given if ".lora_" in name and LORA_MATRIX.match(name)}
    prefixes = (PEFT_PREFIX, *KOHYA_PREFIXES)
    return [name for name in given if name in matrices or name.startswith(prefixes)] if matrices else []


# Patterns.


class Patterns:
    """Glob patterns that allow names, and the patterns that have matched."""

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        self.option, self.patterns = option, tuple(patterns)
        self.used: set[str] = set()
        self._globs = [pattern for pattern in self.patterns if any(map(pattern.__contains__, "*?["))]
        self._names = {*self.patterns}.difference(self._globs)  # found by hash: there may be as many as tensors

    def allow(self, name: str) -> bool:
        hits = [pattern for pattern in self._globs if fnmatchcase(name, pattern)]
        if name in self._names:
            hits.append(name)
        self.used.update(hits)
        return bool(hits)

    def idle(self) -> list[Problem]:
        unused = [pattern for pattern in self.patterns if pattern not in self.used]
        return [Problem(ProblemKind.IDLE_PATTERN, pattern, found=self.option) for pattern in unused]
