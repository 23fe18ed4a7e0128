"""`modelstate.suggest`: finds rules by which a checkpoint fits a model.

It matches names and shapes (`match`), turns the matches into few rules, and applies these rules to the names and
shapes. `Suggestion` is the result: the rules, what each of them explains, and what stays open.

A rule is general only where it is right for every name of the checkpoint, also for those without a match.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.arguments import checked_call
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.html.page import Page, Shown
from modelstate.planning.matching import matching_part, several_parts
from modelstate.planning.options import check_model
from modelstate.process import gc_paused
from modelstate.rules.joining import Concat, Split
from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import Entries, Entry, Guess, Rule, Value, as_code, template
from modelstate.rules.schema import Applied, apply_rules
from modelstate.rules.tensors import Transpose
from modelstate.spec import Stored
from modelstate.suggestion.match import LONGEST_NAME, PASSES, Leaf, Matches, by_signature, exclude, match
from modelstate.suggestion.words import Shape, concepts
from modelstate.text_format import count as text_count, folded, folded_label, listed, printable, without_numbers
from modelstate.transaction.slots import HIDDEN, Slots, slots_of

Names = tuple[str, ...]


class Ambiguous(msgspec.Struct, frozen=True):
    """Tensors of the same shape and dtype that their names do not tell apart."""

    names: tuple[str, ...]
    """Names of the model."""
    candidates: tuple[str, ...]
    """Names of the checkpoint."""


class Suggestion(Shown, msgspec.Struct, frozen=True):
    """Suggested rules, for `rules=`. Printing it shows the Python code that makes them, and what stays open.

    A rule is there as it is where names or structure leave one match. Other rules are a `modelstate.rules.Guess`, and
    a load with one is refused until the guesses are accepted.

    Examples:
        >>> suggestion = ms.suggest(model, path)
        >>> if suggestion.complete:
        ...     ms.load(model, path, rules=suggestion)
    """

    rules: tuple[Rule, ...]
    counts: tuple[int, ...]
    """For each rule, the number of names of the model that it leads to."""
    explained: int
    """The number of names of the model that get a value, with the rules or without."""
    total: int
    """The number of names of the model that need a value. A tied tensor needs one under one of its names."""
    guesses: Names
    """Names of the model whose match, or whose transposition, is a guess."""
    missing: Names
    """Names of the model without a match."""
    unused: Names
    """Names of the checkpoint without a match."""
    ambiguous: tuple[Ambiguous, ...]
    notes: Names

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __getitem__(self, index: int) -> Rule:
        return self.rules[index]

    @property
    def complete(self) -> bool:
        """Whether nothing stays open, and nothing is a guess."""
        return not (self.guesses or self.missing or self.unused or self.ambiguous)

    def accept_guesses(self) -> list[Rule]:
        """Returns the rules, with those that are guesses as any other rule.

        Returns:
            The rules for a load, once the guesses have been checked.

        Examples:
            >>> suggestion = ms.suggest(model, path)
            >>> ms.load(model, path, rules=suggestion.accept_guesses())
        """
        return [rule.rule if isinstance(rule, Guess) else rule for rule in self]

    def __repr__(self) -> str:
        """Returns how much of the model the rules explain; `print` shows the rules."""
        lists = ("guesses", "missing", "unused", "ambiguous", "notes")
        lengths = [f"{len(getattr(self, name))} {name}" for name in lists if getattr(self, name)]
        explained = f"{self.explained} of {self.total} names of the model explained"
        return f"<{type(self).__name__}: {len(self)} rules, {', '.join([explained, *lengths])}>"

    def _page(self) -> Page:
        return Page("Suggested rules", (("Explained", f"{self.explained:,} of {self.total:,} names"),), text=str(self))

    def __str__(self) -> str:
        lines = [
            f"    {as_code(rule)},  # {text_count(names, 'name')}"
            for rule, names in zip(self, self.counts, strict=True)
        ]
        code = ["rules = [", *lines, "]"] if lines else ["rules = []"]
        return "\n".join([*code, f"# {self.explained} of {self.total} names of the model explained", *self._open()])

    def _open(self) -> list[str]:
        lines = [f"# note: {printable(note)}" for note in self.notes]
        for title, names in (
            ("names of the model whose source is a guess", self.guesses),
            ("names of the model without a source", self.missing),
            ("names of the checkpoint that are not used", self.unused),
        ):
            if names:
                lines += [f"# {title} ({len(names)}):", *(f"#   {line}" for line in _grouped(names).split("\n"))]
        if self.guesses:
            lines.append(
                "# a load with a Guess is refused: compare both models, then use rules=suggestion.accept_guesses()"
            )
        if self.ambiguous:
            lines.append("# alike, and the names do not say which is which:")
        for group in self.ambiguous:
            lines.append(f"#   {_grouped(group.names, ', ')}  from one of  {_grouped(group.candidates, ', ')}")
        return lines

    def to_json(self) -> str:
        """Returns everything as JSON."""
        rules = [
            {"rule": as_code(rule), "guess": isinstance(own, Guess), "names": names}
            for own, rule, names in zip(self, self.accept_guesses(), self.counts, strict=True)
        ]
        fields = ("complete", "explained", "total", "guesses", "missing", "unused", "ambiguous", "notes")
        values = msgspec.to_builtins({"rules": rules} | {field: getattr(self, field) for field in fields})
        return json.dumps(values, indent=1)


def _grouped(names: Sequence[str], between: str = "\n") -> str:
    """Returns the first names, with one for names that differ only in numbers."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[without_numbers(name)].append(name)
    return listed([printable(folded_label(group)) for group in groups.values()], most=12, between=between)


@checked_call("ms.suggest")
@gc_paused()
def suggest(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, object] | Checkpoint,
    *,
    key: str | None = None,
) -> Suggestion:
    """Suggests rules by which a checkpoint fits a model, from names, shapes, dtypes and the order of numbers.

    Nothing is loaded, no tensor's bytes are read, and the model is not changed. The result holds rules for `rules=` of
    `modelstate.load`. Print it and check it first: a suggestion cannot see what a tensor means, so parts
    or elements in another order, of the same shape, look the same. Where names or structure do not leave one match, the
    rule is a `modelstate.rules.Guess`, which a load refuses until `accept_guesses`. If several answers are equally
    good, none is given, and they are listed as ambiguous.

    Args:
        model: the model, with memory or on the meta device.
        source: what `modelstate.open` opens, or a `Checkpoint`.
        key: the part of the source to use ("model_state"); by default the part that fits the model.

    Returns:
        The rules, with what they explain and what stays open: names without an answer do not raise.

    Raises:
        OpenError: The source cannot be opened as a checkpoint; a subclass says why.
        AmbiguousCheckpointError: Several parts of the source fit the model.
        KeyNotFoundError: The source has no part `key`.
        OptionError: `model` is not a module.

    Examples:
        >>> suggestion = ms.suggest(model, "other_names.safetensors")
        >>> print(suggestion)
        >>> if suggestion.complete:
        ...     ms.load(model, "other_names.safetensors", rules=suggestion)
    """
    slots = slots_of(check_model(model))
    checkpoint = open_checkpoint(source)
    checkpoint = _part(checkpoint, slots) if key is None else checkpoint.select(key)
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN and not is_lazy(slot.tensor)]
    targets = [Leaf.of(name, slot.tensor) for slot in wanted for name in slot.names]
    named = {leaf.name for leaf in targets}
    entries = {
        name: Entry(checkpoint.stored(name) if name in checkpoint else Value(None), (name,))  # values are not needed
        for name in (*checkpoint, *checkpoint.extra)
        if len(name) <= LONGEST_NAME or name in named
    }
    leaves = [Leaf.of(name, entry.tensor) for name, entry in entries.items() if entry.tensor is not None]
    shapes = {leaf.name: leaf.shape for leaf in targets}
    matches = match(leaves, targets, {name: slot.names for slot in wanted for name in slot.names})
    rules = _rules(matches, entries, shapes)
    return _reported(matches, rules, apply_rules(rules, entries, _unread), checkpoint, slots)


def _part(checkpoint: Checkpoint, slots: Slots) -> Checkpoint:
    """Returns the part of the checkpoint that fits the model, by its names or else by its shapes."""
    names = [name for slot in slots.tensors for name in slot.names]
    part = matching_part(checkpoint, names, [str])
    if part.key or len(checkpoint.containers) < 2 or any(name in checkpoint for name in names):
        return part
    wanted = Counter(tuple(slot.tensor.shape) for slot in slots.tensors if not is_lazy(slot.tensor))
    scores = {}
    for key in dict.fromkeys(["", *checkpoint.containers]):
        shapes = Counter(spec.shape for name, spec in checkpoint.items() if not key or name.startswith(f"{key}."))
        scores[key] = (shapes & wanted).total(), -shapes.total()
    # Of containers in each other with the same tensors, the innermost.
    best = max(scores, key=lambda key: (scores[key], len(key)))
    rivals = [key for key in scores if key and scores[key] == scores[best] and not f"{best}.".startswith(f"{key}.")]
    if rivals:
        counts = {key: scores[key][0] for key in (best, *rivals)}
        raise several_parts(checkpoint, best, counts, f"of {wanted.total()} tensors have shapes of the model")
    return checkpoint.select(best) if best else checkpoint


def _unread(stored: Stored) -> torch.Tensor:
    raise AssertionError("suggested rules do not read values")


# From matches to rules.


def _rules(matches: Matches, entries: Entries, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Returns the rules that transpose, then those that split and join, then those that rename."""
    rules: list[Rule] = []
    for turned in (matches.transposed, matches.inferred):
        single = [(name,) for name in entries if name in turned]
        rules += [Transpose(pattern) for (pattern,) in _patterns(single, entries, slice(1))]
    for (is_split, sizes), rows in matches.fusions.items():
        for whole, *parts in _patterns(rows, entries, slice(1) if is_split else slice(1, None)):
            names = tuple(parts)
            rules.append(Split(whole, names, sizes=sizes) if is_split else Concat(names, whole, sizes=sizes))
    goals = {name: name for name in matches.expected.keys() - {*matches.pairs.values()}} | matches.pairs
    # Names of the model without a match, to which a rule for others could give an unused value by chance.
    used = matches.sources.names.keys() - matches.sources.open.keys()
    unused = [name for name in entries if name not in used]
    unused_shapes = {tuple(tensor.shape) for name in unused if (tensor := entries[name].tensor) is not None}
    barred = [name for name, shape in shapes.items() if name not in matches.expected and shape in unused_shapes]
    return [*rules, *_rename_rules(goals, unused, barred)]


def _families(rows: Iterable[Names]) -> dict[Names, list[Names]]:
    """Groups rows of related names by their patterns.

    A number becomes * if it varies, and all names of each row have it, in the same order.
    """
    alike: dict[Names, list[list[list[str]]]] = defaultdict(list)
    for row in rows:
        alike[tuple(map(without_numbers, row))].append([name.split(".") for name in row])
    families: dict[Names, list[Names]] = defaultdict(list)
    for members in alike.values():
        columns = [list(zip(*side, strict=True)) for side in zip(*members, strict=True)]
        common = {column for column in columns[0] if column[0].isdecimal() and len({*column}) > 1}
        common = common.intersection(*columns)
        if len({tuple(column for column in side if column in common) for side in columns}) > 1:
            common = set()
        stars = [[column in common for column in side] for side in columns]
        for names in members:
            patterns = [
                ".".join("*" if is_star else part for is_star, part in zip(side, name, strict=True))
                for side, name in zip(stars, names, strict=True)
            ]
            families[tuple(patterns)].append(tuple(map(".".join, names)))
    return families


def _rename_rules(pairs: Mapping[str, str], loose: Collection[str], barred: Collection[str]) -> list[Rule]:
    """Returns rules that rename each name to its goal, one after the other; each is the most general one that is right.

    Args:
        pairs: Names with their goals. A name that is its own goal is not changed.
        loose: Names without a goal, which may become anything except a barred name and the goal of another.
        barred: Names that a loose name must not become.
    """
    goals: dict[str, str | None] = {**dict.fromkeys(loose), **pairs}
    barred = {*barred, *pairs.values()}
    families = _families((name, goal) for name, goal in pairs.items() if name != goal)
    rules: list[Rule] = []
    is_changing = True
    while is_changing:  # a rule has to wait while another name has its result
        is_changing = False
        for patterns, members in families.items():
            for rule in _candidates(*patterns):
                is_open = any(goals.get(name) == goal for name, goal in members)
                if is_open and (renamed := _renamed(rule, goals, barred)) is not None:
                    rules.append(rule)
                    goals, is_changing = renamed, True
    return rules


def _renamed(rule: Rule, goals: dict[str, str | None], barred: Collection[str]) -> dict[str, str | None] | None:
    """Returns the goals by the names after a rule; None where a name gets another than its goal, or a taken one."""
    result: dict[str, str | None] = {}
    for name, goal in goals.items():
        after = rule.rename(name)
        if after is None or after == name:
            result[name] = goal
        elif after in goals or (after in barred if goal is None else after != goal):
            return None
        else:
            result[after] = goal
    return result


def _candidates(pattern: str, goal: str) -> Iterator[Rule]:
    """Yields rules for the parts that differ, from the most general one: with any parts around them to all parts."""
    old, new = pattern.split("."), goal.split(".")
    shortest = min(len(old), len(new))
    start = next((at for at in range(shortest) if old[at] != new[at]), shortest)
    same = next((at for at in range(shortest - start) if old[-1 - at] != new[-1 - at]), shortest - start)
    end, new_end = len(old) - same, len(new) - same
    for begin, finish in product(dict.fromkeys((start, 0)), range(end, len(old) + 1)):
        left = [*(["*"] if begin else []), *old[begin:start]]
        right = [*old[end:finish], *(["*"] if finish < len(old) else [])]
        before, after = ([*left, *parts, *right] for parts in (old[start:end], new[start:new_end]))
        if before == ["*"]:
            yield Prefix(add=".".join(after[:-1]) + ".")
        elif after == ["*"]:
            yield Prefix(strip=".".join(before[:-1]) + ".")
        elif before and after:
            yield Rename(".".join(before), ".".join(after))


def _patterns(rows: Iterable[Names], entries: Collection[str], sources: slice) -> list[Names]:
    """Returns the patterns of rows of related names, the most general ones that match nothing else.

    Args:
        rows: The names to which one rule applies: a whole, followed by its parts.
        entries: The names of the checkpoint.
        sources: The names of each row that are in the checkpoint.
    """
    by_owner: dict[Names, dict[Names, list[Names]]] = defaultdict(dict)
    for patterns, members in _families(rows).items():
        owners, _, ends = zip(*(pattern.rpartition(".") for pattern in patterns), strict=True)
        is_one_end = len({*ends}) == 1 and "*" not in ends
        by_owner[tuple(f"{owner}.*" for owner in owners) if is_one_end else patterns][patterns] = members
    result: list[Names] = []
    for general, families in by_owner.items():
        known = [row for members in families.values() for row in members]
        names = {name for row in known for name in row[sources]}
        for choice in ([general] if len(families) > 1 else [], [*families], known):
            sought = [template(pattern) for row in choice for pattern in row[sources]]
            if names == {name for name in entries if any(pattern.match(name) is not None for pattern in sought)}:
                result += choice
                break
    return result


# The report.


def _reported(
    matches: Matches, rules: Sequence[Rule], applied: Applied, checkpoint: Checkpoint, slots: Slots
) -> Suggestion:
    right = [
        name
        for name, sources in matches.expected.items()
        if (entry := applied.entries.get(name)) is not None
        and entry.tensor is not None
        and (entry.sources, entry.tensor.shape) == (sources, slots.by_name[name].tensor.shape)
    ]
    rules_of = {name: {*applied.entries[name].rules} for name in right}
    guesses = tuple(name for name in right if name in matches.guesses)
    guessed = {rule for name in guesses for rule in rules_of[name]}
    filled = {id(slots.by_name[name].tensor) for name in right}
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN]
    given = applied.entries.keys() & {*slots.extra, *(slot.name for slot in wanted if is_lazy(slot.tensor))}
    missing = [slot.name for slot in wanted if id(slot.tensor) not in filled and slot.name not in given]
    missing += [name for name in slots.extra if name not in given]
    used = {source for name in {*right, *given} for source in applied.entries[name].sources}
    used |= {name for slot in slots.tensors if slot.kind == HIDDEN for name in slot.names}
    unused = [name for name in (*checkpoint, *checkpoint.extra) if name not in used]
    notes = list(matches.notes)
    interleaved = [name for name in unused if any("interleaved" in concepts(part) for part in name.split("."))]
    if interleaved and missing:
        names = ", ".join(folded(interleaved))
        notes.append(f"{names}: query, key and value may take turns in it, head by head; it is not cut")
    ambiguous = _ambiguous(matches, missing, unused)
    doubted = {name for group in ambiguous for name in group.names}
    candidates = {name for group in ambiguous for name in group.candidates}
    total = len(wanted) + len(slots.extra)
    counts = Counter(rule for of_name in rules_of.values() for rule in of_name)
    return Suggestion(
        rules=tuple(Guess(rule) if repr(rule) in guessed else rule for rule in rules),
        counts=tuple(counts[repr(rule)] for rule in rules),
        explained=total - len(missing),
        total=total,
        guesses=guesses,
        missing=tuple(name for name in missing if name not in doubted),
        unused=tuple(name for name in unused if name not in candidates),
        ambiguous=tuple(ambiguous),
        notes=tuple(notes),
    )


def _ambiguous(matches: Matches, missing: Sequence[str], unused: Sequence[str]) -> list[Ambiguous]:
    """Returns groups of unmatched tensors on both sides that could match each other."""
    groups: list[Ambiguous] = []
    sides = (matches.targets, missing), (matches.sources, unused)
    for side, of_side in sides:
        side.open = {name: side.names[name] for name in of_side if name in side.names}
    for varying in PASSES:
        first, second = (by_signature(side.kinds(varying)) for side, _ in sides)
        for signature, left in first.items():
            possible = [pair for pair in product(left, second.get(signature, [])) if not exclude(*pair)]
            if possible:
                kinds = [dict.fromkeys(side) for side in zip(*possible, strict=True)]
                names = [tuple(leaf.name for kind in side for leaf in kind.leaves.values()) for side in kinds]
                groups.append(Ambiguous(*names))
                for (side, _), of_group in zip(sides, names, strict=True):
                    side.open = {name: leaf for name, leaf in side.open.items() if name not in of_group}
    return groups
