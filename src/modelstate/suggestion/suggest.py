"""`modelstate.suggest`: finds rules by which a checkpoint fits a model.

It matches names and shapes (`match`), turns the matches into few rules (`generalise`), and applies these rules to the
names and shapes: a rule with a wrong result is not suggested. `Suggestion` is the result: the rules, what each of them
explains, and what stays open.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import torch
from torch import nn

from modelstate.arguments import checked_call
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import AmbiguousCheckpointError
from modelstate.html.page import Page, Shown
from modelstate.planning.differences import prefixes
from modelstate.planning.matching import matching_part
from modelstate.planning.options import check_model
from modelstate.problems import option
from modelstate.process import gc_paused
from modelstate.rules.joining import Concat, Split
from modelstate.rules.rule import Entries, Entry, Guess, Rule, Value, as_code
from modelstate.rules.schema import Applied, apply_rules
from modelstate.rules.tensors import Transpose
from modelstate.spec import Stored
from modelstate.suggestion.certainty import guesses
from modelstate.suggestion.generalise import fused_patterns, patterns_of, rename_rules
from modelstate.suggestion.match import (
    LONGEST_NAME,
    Leaf,
    Matches,
    Orientation,
    by_signature,
    dtype_kind,
    in_context,
    kinds_of,
    match,
)
from modelstate.suggestion.words import contradict, is_conventional, of_path
from modelstate.text_format import folded, listed, printable
from modelstate.transaction.slots import HIDDEN, Slots, slots_of

_INFERRED = "square, so its shape does not show it: transposed because the weights beside it are"
_BY_SHAPE = "by shape alone: the names have nothing in common"
_BY_CONVENTION = "gate (w1) and up (w3) told apart by Llama's convention alone"
_LONGEST_ROW = 10_000
_LISTED = 12
"""The number of names of a list that are printed."""


class Ambiguous(msgspec.Struct, frozen=True):
    """Tensors of the same shape and dtype that their names do not tell apart."""

    names: tuple[str, ...]
    """Names of the model."""
    candidates: tuple[str, ...]
    """Names of the checkpoint."""


class Suggestion(list[Rule], Shown):
    """A list of suggested rules. Printing it shows the Python code that makes them, and what stays open.

    A rule is in the list as it is where names or structure leave one match. Any other rule is a
    `modelstate.rules.Guess`, and a load with it is refused until the guesses are accepted.

    Examples:
        >>> suggestion = ms.suggest(model, path)
        >>> if suggestion.complete:
        ...     ms.load(model, path, rules=suggestion)
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        counts: Sequence[int] = (),
        comments: Sequence[str] = (),
        explained: int = 0,
        total: int = 0,
        guesses: Iterable[str] = (),
        missing: Iterable[str] = (),
        unused: Iterable[str] = (),
        ambiguous: Iterable[Ambiguous] = (),
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(rules)
        self.counts = tuple(counts)
        """For each rule, the number of names of the model that it leads to."""
        self.comments = tuple(comments)
        """For each rule, what the user should know about it; empty for most."""
        self.explained = explained
        """The number of names of the model that get a value, with the rules or without."""
        self.total = total
        """The number of names of the model that need a value. A tied tensor needs one under one of its names."""
        self.guesses = tuple(guesses)
        """Names of the model whose match, or whose transposition, is a guess."""
        self.missing = tuple(missing)
        """Names of the model without a match."""
        self.unused = tuple(unused)
        """Names of the checkpoint without a match."""
        self.ambiguous = tuple(ambiguous)
        self.notes = tuple(notes)

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
        return "\n".join(
            [*self._code(), f"# {self.explained} of {self.total} names of the model explained", *self._open()]
        )

    def _code(self) -> list[str]:
        if not self:
            return ["rules = []"]
        lines = []
        for rule, count, comment in zip(self, self.counts, self.comments, strict=True):
            names = f"{count} {'name' if count == 1 else 'names'}"
            lines.append(f"    {as_code(rule)},  # {names}" + (f"; {comment}" if comment else ""))
        return ["rules = [", *lines, "]"]

    def _open(self) -> list[str]:
        lines = [f"# note: {printable(note)}" for note in self.notes]
        for title, names in (
            ("names of the model whose source is a guess", self.guesses),
            ("names of the model without a source", self.missing),
            ("names of the checkpoint that are not used", self.unused),
        ):
            if names:
                groups = _grouped(names)
                more = [f"#   ... and {len(groups) - _LISTED} more"] if len(groups) > _LISTED else []
                lines += [f"# {title} ({len(names)}):", *(f"#   {printable(name)}" for name in groups[:_LISTED]), *more]
        if self.guesses:
            lines.append(
                "# a load with a Guess is refused: compare both models, then use rules=suggestion.accept_guesses()"
            )
        if self.ambiguous:
            lines.append("# alike, and the names do not say which is which:")
        for group in self.ambiguous:
            sides = (printable(listed(_grouped(side), _LISTED)) for side in (group.names, group.candidates))
            lines.append(f"#   {'  from one of  '.join(sides)}")
        return lines

    def to_json(self) -> str:
        """Returns everything as JSON."""
        rules = [
            {
                "rule": as_code(rule.rule if isinstance(rule, Guess) else rule),
                "guess": isinstance(rule, Guess),
                "names": count,
                "comment": comment,
            }
            for rule, count, comment in zip(self, self.counts, self.comments, strict=True)
        ]
        fields = ("complete", "explained", "total", "guesses", "missing", "unused", "ambiguous", "notes")
        values = msgspec.to_builtins({"rules": rules} | {field: getattr(self, field) for field in fields})
        return json.dumps(values, indent=1)


def _grouped(names: Sequence[str]) -> list[str]:
    """Returns the names, with one line for names that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(folded([name])[0], []).append(name)
    return [group[0] if len(group) == 1 else f"{text} ({len(group)})" for text, group in groups.items()]


@checked_call("ms.suggest")
@gc_paused()
def suggest(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, object] | Checkpoint,
    *,
    key: str | None = None,
) -> Suggestion:
    """Suggests rules by which a checkpoint fits a model, from names, shapes, dtypes and the order of numbers.

    Nothing is loaded, no tensor's bytes are read, and the model is not changed. The result is a list of rules for
    `rules=` of `modelstate.load`. Print it and check it first: a suggestion cannot see what a tensor means, so parts
    or elements in another order, of the same shape, look the same. Where names or structure do not leave one match, the
    rule is a `modelstate.rules.Guess`, which a load refuses until `accept_guesses`. If several answers are equally
    good, none is given, and they are listed as ambiguous.

    Args:
        model: the model, with memory or on the meta device.
        source: what `modelstate.open` opens, or a `Checkpoint`.
        key: the part of the source to use ("model_state"); by default the part that fits the model.

    Returns:
        A list of rules, with what they explain and what stays open: names without an answer do not raise.

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
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN and not torch.nn.parameter.is_lazy(slot.tensor)]
    targets = [
        Leaf(name, tuple(slot.tensor.shape), dtype_kind(slot.tensor.dtype)) for slot in wanted for name in slot.names
    ]
    named = {leaf.name for leaf in targets}
    entries = {
        name: Entry(checkpoint.stored(name) if name in checkpoint else Value(None), (name,))  # values are not needed
        for name in (*checkpoint, *checkpoint.extra)
        if len(name) <= LONGEST_NAME or name in named
    }
    leaves = [
        Leaf(name, tuple(entry.tensor.shape), dtype_kind(entry.tensor.dtype))
        for name, entry in entries.items()
        if entry.tensor is not None
    ]
    findings = _find(leaves, targets, slots)
    return _reported(findings, *_verified(findings, entries), checkpoint, slots)


def _part(checkpoint: Checkpoint, slots: Slots) -> Checkpoint:
    """Returns the part of the checkpoint that fits the model, by its names or else by its shapes."""
    names = [name for slot in slots.tensors for name in slot.names]
    part = matching_part(checkpoint, names, [str])
    if part.key or len(checkpoint.containers) < 2 or any(name in checkpoint for name in names):
        return part
    wanted = Counter(tuple(slot.tensor.shape) for slot in slots.tensors if not torch.nn.parameter.is_lazy(slot.tensor))
    scores = {}
    for key in dict.fromkeys(["", *checkpoint.containers]):
        shapes = Counter(spec.shape for name, spec in checkpoint.items() if not key or name.startswith(f"{key}."))
        scores[key] = (shapes & wanted).total(), -shapes.total(), len(key)
    best = max(scores, key=scores.__getitem__)
    rivals = [
        other
        for other, score in scores.items()
        if score[:2] == scores[best][:2] and not (best.startswith(f"{other}.") or other == best or not other)
    ]
    if rivals:
        raise AmbiguousCheckpointError(
            "the checkpoint holds several parts with tensors like the model's",
            where=checkpoint.source,
            found=", ".join(map(repr, [best, *rivals])),
            remedy=f"say which one is meant, for example key={best!r}",
            options=option("--key", best or next(key for key in rivals if key)),
            candidates=tuple((candidate, scores[candidate][0]) for candidate in [best, *rivals]),
        )
    return checkpoint.select(best) if best else checkpoint


def _unread(stored: Stored) -> torch.Tensor:
    raise AssertionError("suggested rules do not read values")


class _Findings(msgspec.Struct):
    """What has been found about the tensors of a checkpoint and those of a model."""

    sources: dict[str, Leaf]
    targets: dict[str, Leaf]
    matches: Matches
    expected: dict[str, tuple[str, ...]]
    """For each name of the model with a match, the names in the checkpoint that it is made of."""
    transposed: set[str] = set()
    """Names of the checkpoint that certainly are transposed."""
    inferred: set[str] = set()
    """Names of square tensors that are transposed because their neighbours are."""
    conventional: set[str] = set()
    """Names of the model whose match only Llama's convention determines."""
    guesses: set[str] = set()
    """Names of the model whose match, or whose transposition, is a guess."""
    ambiguous: list[Ambiguous] = []
    notes: list[str] = []


def _find(sources: Sequence[Leaf], targets: Sequence[Leaf], slots: Slots) -> _Findings:
    matches, first, second = match(sources, targets)
    shifted = _take_shifted(matches)
    findings = _Findings(
        {leaf.name: leaf for leaf in sources}, {leaf.name: leaf for leaf in targets}, matches, matches.expected
    )
    straight = first.straight(in_context(sources)), second.straight(in_context(targets))
    tied = {name for slot in slots.tensors if matches.settled[1].intersection(slot.names) for name in slot.names}
    open_sources = matches.open(0, straight[0])
    open_targets = [leaf for leaf in matches.open(1, straight[1]) if leaf.name not in tied]
    findings.ambiguous = shifted + _ambiguous(
        [leaf for leaf in open_sources if all(leaf.name not in group.candidates for group in shifted)],
        [leaf for leaf in open_targets if all(leaf.name not in group.names for group in shifted)],
    )
    if shifted:
        name, other = shifted[0].candidates[0], _between(shifted[0].candidates[0], shifted[0].names[0])[0]
        findings.notes.append(
            f"names that fit as they are may each have moved by one, as from {name} to {other}; then only a Rename "
            "that is written by hand says so"
        )
    interleaved = [leaf.name for leaf in open_sources if "interleaved" in of_path(leaf.name.split("."))]
    if interleaved and open_targets:
        names = ", ".join(folded(interleaved))
        findings.notes.append(f"{names}: query, key and value may take turns in it, head by head; it is not cut")
    _find_transposed(findings, first, second)
    rows = [(name, target) for target, names in findings.expected.items() for name in names]
    conventional = [
        {
            leaf.name
            for leaf in side
            for at, words in leaf.context.items()
            if is_conventional(leaf.name.split(".")[at], words)
        }
        for side in straight
    ]
    findings.conventional = {
        target for name, target in rows if (name in conventional[0]) != (target in conventional[1])
    }
    is_whole = not (open_sources or open_targets)
    findings.guesses |= findings.conventional | guesses(*straight, rows, is_whole=is_whole)
    return findings


def _take_shifted(matches: Matches) -> list[Ambiguous]:
    """Removes pairs that could as well be the ends of a row in which every name is shifted by one, and returns them.

    If layers 0 to 2 match layers 1 to 3, only 0 and 3 are left, but it is more likely that every number is one higher.
    The same holds if "a.a.w" and "a.w" match "a.w" and "w".
    """
    shifted = []
    for source, target in list(matches.pairs.items()):
        between = _between(source, target)
        if between and all(matches.pairs.get(name) == name for name in between):
            del matches.pairs[source]
            matches.settled[0].discard(source)
            matches.settled[1].discard(target)
            shifted.append(Ambiguous((target,), (source,)))
    return shifted


def _between(source: str, target: str) -> list[str]:
    """Returns the names between two names that differ in one number, or in repetitions of a prefix."""
    shorter, longer = sorted((source, target), key=len)
    if longer.endswith(f".{shorter}"):
        between = [longer[len(part) :] for part in prefixes(longer) if len(longer) - len(part) > len(shorter)]
        return between if longer == source else between[::-1]
    first, second = re.split(r"(\d+)", source), re.split(r"(\d+)", target)
    differing = [at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if len(first) != len(second) or len(differing) != 1 or differing[0] % 2 == 0:
        return []
    at = differing[0]
    low, high = sorted((int(first[at]), int(second[at])))
    if high - low > _LONGEST_ROW:
        return []
    between = ["".join([*first[:at], str(number), *first[at + 1 :]]) for number in range(low + 1, high)]
    return between if int(first[at]) == low else between[::-1]


def _ambiguous(sources: Iterable[Leaf], targets: Iterable[Leaf]) -> list[Ambiguous]:
    """Returns groups of unmatched tensors on both sides that could match each other."""
    groups = []
    first, second = (by_signature(kinds_of(side, within_words=False)) for side in (sources, targets))
    for signature, left in first.items():
        right = [
            kind for kind in second.get(signature, []) if not all(contradict(kind.means, other.means) for other in left)
        ]
        left = [kind for kind in left if not all(contradict(kind.means, other.means) for other in right)]
        if left and right:
            names, candidates = (
                tuple(leaf.name for kind in side for leaf in kind.leaves.values()) for side in (right, left)
            )
            groups.append(Ambiguous(names, candidates))
    return groups


def _find_transposed(findings: _Findings, first: Orientation, second: Orientation) -> None:
    """Finds the tensors that are the transpose of the other one of their pair."""
    pairs = findings.matches.pairs
    doubtful = []
    for name, goal in pairs.items():
        if findings.sources[name].shape != findings.targets[goal].shape:
            findings.transposed.add(name)
    fused = [(row[:1], fusion) for fusion in findings.matches.splits for row in fusion.rows]
    fused += [(row[1:], fusion) for fusion in findings.matches.joins for row in fusion.rows]
    findings.transposed |= {name for names, fusion in fused if fusion.is_transposed for name in names}
    is_mixed = bool(findings.transposed or first.transposed or second.transposed)
    for name, goal in pairs.items():
        leaf = findings.sources[name]
        if name in findings.transposed or not leaf.is_square or leaf.shape[0] == 1 or not name.endswith("weight"):
            continue
        here, there = first.of_square(name), second.of_square(goal)
        if None not in (here, there):
            findings.inferred |= {name} if here != there else set()
        elif here or there or (is_mixed and None in (here, there)):
            doubtful.append(name)
    findings.guesses.update(pairs[name] for name in (*findings.inferred, *doubtful))
    if doubtful:
        left = ", ".join(folded(doubtful))
        findings.notes.append(f"square, and nothing shows whether to transpose: {left}; left as they are")


# From matches to rules.


def _verified(findings: _Findings, entries: Entries) -> tuple[list[Rule], Applied]:
    """Returns rules, and their result on names and shapes. Rules that lead to wrong results are left out."""
    rules = _rules(findings, entries)
    while True:
        applied = apply_rules(rules, entries, _unread)
        bad = {*applied.idle, *(getattr(problem, "rule", "") for problem in applied.problems)}
        for name in _wrong(findings, applied):
            bad.update(applied.entries[name].rules)
        kept = [rule for rule in rules if repr(rule) not in bad]
        if len(kept) == len(rules):
            return rules, applied
        rules = kept


def _right(findings: _Findings, applied: Applied) -> set[str]:
    """Returns names of the model that are made of the expected names, in the right shape."""
    return {
        name
        for name, sources in findings.expected.items()
        if (entry := applied.entries.get(name)) is not None
        and entry.tensor is not None
        and entry.sources == sources
        and tuple(entry.tensor.shape) == findings.targets[name].shape
    }


def _wrong(findings: _Findings, applied: Applied) -> list[str]:
    """Returns names of the model that rules have given something else than their match."""
    right = _right(findings, applied)
    wrong = []
    for name, leaf in findings.targets.items():
        entry = applied.entries.get(name)
        if entry is None or name in right or entry.tensor is None:
            continue
        if name in findings.expected or (entry.rules and tuple(entry.tensor.shape) == leaf.shape):
            wrong.append(name)
    return wrong


def _rules(findings: _Findings, entries: Collection[str]) -> list[Rule]:
    """Returns the rules that transpose, then those that split and join, then those that rename."""
    rules: list[Rule] = []
    for transposed in (findings.transposed, findings.inferred):
        names = [name for name in entries if name in transposed]
        others = [name for name in entries if name not in transposed]
        rules += [Transpose(pattern) for pattern in patterns_of(names, others)]
    for fusions, is_split in ((findings.matches.splits, True), (findings.matches.joins, False)):
        rows: dict[tuple[int, tuple[int, ...] | None], list[tuple[str, ...]]] = {}
        for fusion in fusions:
            rows.setdefault((fusion.dim, fusion.sizes), []).extend(fusion.rows)
        for (dim, sizes), members in rows.items():
            for patterns in fused_patterns(members, entries, is_split=is_split):
                whole, parts = patterns[0], patterns[1:]
                rules.append(Split(whole, parts, dim, sizes) if is_split else Concat(parts, whole, dim, sizes))
    expected = findings.expected
    fused = {name: name for name in expected.keys() - {*findings.matches.pairs.values()}}
    used = {name for sources in expected.values() for name in sources}
    # Names of the model without a match, to which a rule for others could give an unused value by chance.
    unused_shapes = {leaf.shape for name, leaf in findings.sources.items() if name not in used}
    barred = [name for name, leaf in findings.targets.items() if name not in expected and leaf.shape in unused_shapes]
    unused = [name for name in entries if name not in used]
    return [*rules, *rename_rules(findings.matches.pairs | fused, unused, barred)]


# The report.


def _reported(
    findings: _Findings,
    rules: Sequence[Rule],
    applied: Applied,
    checkpoint: Checkpoint,
    slots: Slots,
) -> Suggestion:
    right = _right(findings, applied)
    rules_of = {name: applied.entries[name].rules for name in findings.expected if name in right}
    guessed = {rule for name in right & findings.guesses for rule in applied.entries[name].rules}
    filled = {id(slots.by_name[name].tensor) for name in right}
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN]
    lazy = {slot.name for slot in wanted if torch.nn.parameter.is_lazy(slot.tensor)} & applied.entries.keys()
    open_names = [slot.name for slot in wanted if id(slot.tensor) not in filled and slot.name not in lazy]
    extra = {name for name in slots.extra if name in applied.entries}
    open_names += [name for name in slots.extra if name not in extra]
    used = {source for name in {*right, *extra} for source in applied.entries[name].sources}
    used |= lazy | {name for slot in slots.tensors if slot.kind == HIDDEN for name in slot.names}
    unused = [name for name in (*checkpoint, *checkpoint.extra) if name not in used]
    ambiguous = []
    for group in findings.ambiguous:  # a rule may have filled some of the names
        names, candidates = {*group.names} & {*open_names}, {*group.candidates} & {*unused}
        if names and candidates:
            ambiguous.append(
                Ambiguous(
                    tuple(name for name in group.names if name in names),
                    tuple(name for name in group.candidates if name in candidates),
                )
            )
    doubted = {name for group in ambiguous for name in (*group.names, *group.candidates)}
    total = len(wanted) + len(slots.extra)
    explained: dict[str, list[str]] = {repr(rule): [] for rule in rules}
    for name, texts in rules_of.items():
        for text in {*texts}:
            explained[text].append(name)
    return Suggestion(
        [Guess(rule) if repr(rule) in guessed else rule for rule in rules],
        counts=[len(explained[repr(rule)]) for rule in rules],
        comments=[_comment(rule, explained[repr(rule)], findings) for rule in rules],
        explained=total - len(open_names),
        total=total,
        guesses=[name for name in rules_of if name in findings.guesses],
        missing=[name for name in open_names if name not in doubted],
        unused=[name for name in unused if name not in doubted],
        ambiguous=ambiguous,
        notes=findings.notes,
    )


def _comment(rule: Rule, names: Sequence[str], findings: _Findings) -> str:
    """Returns what a user should know about a rule that leads to these names of the model."""
    if isinstance(rule, Transpose):
        sources = {source for name in names for source in findings.expected[name]}
        return _INFERRED if names and sources <= findings.inferred else ""
    by_shape = findings.matches.by_shape.intersection(names) if hasattr(rule, "to") else set()
    comments = [_BY_SHAPE if len(by_shape) == len(names) else f"{len(by_shape)} {_BY_SHAPE}"] if by_shape else []
    return "; ".join(comments + ([_BY_CONVENTION] if findings.conventional.intersection(names) else []))
