"""`modelstate.suggest`: finds rules by which a checkpoint fits a model.

It matches names and shapes (`find`), turns the matches into few rules (`generalise`), and applies these rules to the
names and shapes: a rule with a wrong result is not suggested. `Suggestion` is the result: the rules, what each of them
explains, and what stays open.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import checked_call, is_module, is_source
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import AmbiguousCheckpointError, OptionError
from modelstate.html.page import Page, Shown
from modelstate.planning.matching import matching_part
from modelstate.problems import option
from modelstate.process import gc_paused
from modelstate.rules.joining import Concat, Split
from modelstate.rules.names import Rename
from modelstate.rules.rule import Entries, Entry, Guess, Rule, Template, Value, as_code
from modelstate.rules.schema import Applied, apply_rules
from modelstate.rules.tensors import Reshape, Transpose
from modelstate.spec import Stored
from modelstate.suggestion.find import LONGEST_NAME, Ambiguous, Findings, find
from modelstate.suggestion.folding import fold_rules
from modelstate.suggestion.generalise import covering, families, rename_rules
from modelstate.suggestion.skeletons import Leaf, kind_of
from modelstate.text_format import folded, listed, printable
from modelstate.torch_compat.modules import unwrapped
from modelstate.transaction.slots import HIDDEN, Slots, slots_of

_INFERRED = "square, so its shape does not show it: transposed because the weights beside it are"
_BY_SHAPE = "by shape alone: the names have nothing in common"
_BY_CONVENTION = "gate (w1) and up (w3) told apart by Llama's convention alone"
_SHOWN = 12
"""The number of names of a list that are printed."""


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
        if self.guesses:
            lines += [
                f"# names of the model whose source is a guess ({len(self.guesses)}):",
                *_listed(self.guesses),
                "# a load with a Guess is refused: compare both models, then use rules=suggestion.accept_guesses()",
            ]
        if self.missing:
            lines += [f"# names of the model without a source ({len(self.missing)}):", *_listed(self.missing)]
        if self.unused:
            lines += [f"# names of the checkpoint that are not used ({len(self.unused)}):", *_listed(self.unused)]
        if self.ambiguous:
            lines.append("# alike, and the names do not say which is which:")
        for group in self.ambiguous:
            names, candidates = (listed(_grouped(side), _SHOWN) for side in (group.names, group.candidates))
            lines.append(f"#   {printable(names)}  from one of  {printable(candidates)}")
        return lines

    def to_json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps(
            {
                "rules": [
                    {
                        "rule": as_code(rule.rule if isinstance(rule, Guess) else rule),
                        "guess": isinstance(rule, Guess),
                        "names": count,
                        "comment": comment,
                    }
                    for rule, count, comment in zip(self, self.counts, self.comments, strict=True)
                ],
                "complete": self.complete,
                "explained": self.explained,
                "total": self.total,
                "guesses": list(self.guesses),
                "missing": list(self.missing),
                "unused": list(self.unused),
                "ambiguous": [
                    {"names": list(group.names), "candidates": list(group.candidates)} for group in self.ambiguous
                ],
                "notes": list(self.notes),
            },
            indent=1,
        )


def _listed(names: Sequence[str]) -> list[str]:
    lines = _grouped(names)
    more = [f"#   ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*(f"#   {printable(name)}" for name in lines[:_SHOWN]), *more]


def _grouped(names: Sequence[str]) -> list[str]:
    """Returns the names, with one line for names that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(folded([name])[0], []).append(name)
    return [group[0] if len(group) == 1 else f"{text} ({len(group)})" for text, group in groups.items()]


@checked_call("ms.suggest", is_module, is_source)
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
    if not isinstance(model, nn.Module):
        raise OptionError("not a model", expected="a torch.nn.Module", found=type(model).__name__)
    checkpoint = open_checkpoint(source)
    slots = slots_of(unwrapped(model))
    checkpoint = _part(checkpoint, slots) if key is None else checkpoint.select(key)
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN and not torch.nn.parameter.is_lazy(slot.tensor)]
    targets = [
        Leaf(name, tuple(slot.tensor.shape), kind_of(slot.tensor.dtype)) for slot in wanted for name in slot.names
    ]
    named = {leaf.name for leaf in targets}
    entries = {
        name: Entry(checkpoint.stored(name) if name in checkpoint else Value(None), (name,))  # values are not needed
        for name in (*checkpoint, *checkpoint.extra)
        if len(name) <= LONGEST_NAME or name in named
    }
    folds, notes = fold_rules({name: spec.shape for name, spec in checkpoint.items() if name in entries}, named)
    folded_entries = apply_rules(folds, entries, _unread).entries if folds else entries
    leaves = [
        Leaf(name, tuple(entry.tensor.shape), kind_of(entry.tensor.dtype))
        for name, entry in folded_entries.items()
        if entry.tensor is not None
    ]
    findings = find(leaves, targets, slots)
    findings.notes += notes
    return _verified(findings, folds, folded_entries, checkpoint, slots)


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


class _CommentedRule(msgspec.Struct, frozen=True):
    """A rule, with what the user should know about it."""

    rule: Rule
    comment: str = ""


def _verified(
    findings: Findings, folds: Sequence[Rule], folded_entries: Entries, checkpoint: Checkpoint, slots: Slots
) -> Suggestion:
    """Turns findings into rules, applies these to names and shapes, and drops rules that lead to wrong results."""
    entries = {name: Entry(entry.content, (name,)) for name, entry in folded_entries.items()}
    for general in (True, False):
        rules = _rules(findings, entries, general=general)
        applied = apply_rules([commented.rule for commented in rules], entries, _unread)
        wrong = _wrong(findings, applied)
        if not wrong and not applied.problems:
            break
    fitted = {name for name, goal in findings.pairs.items() if name == goal}
    while rules and (wrong or applied.problems or applied.idle):
        bad = {*applied.idle, *(getattr(problem, "rule", "") for problem in applied.problems)}
        for name in wrong:  # all rules that led to this name, or away from it
            if name in applied.entries:
                bad.update(applied.entries[name].rules)
            bad |= {repr(commented.rule) for commented in rules if commented.rule.rename(name) not in (None, name)}
        kept = [commented for commented in rules if repr(commented.rule) not in bad]
        rules = kept if len(kept) < len(rules) else rules[:-1]
        applied = apply_rules([commented.rule for commented in rules], entries, _unread)
        # A name without a value is only missing; a wrong value, or one that was right without rules, is an error.
        wrong = [name for name in _wrong(findings, applied) if name in applied.entries or name in fitted]
    used = {name for target in _right(findings, applied) for name in findings.expected[target]}
    needed = {rule for name in used for rule in folded_entries[name].rules}
    rules = [*(_CommentedRule(rule) for rule in folds if repr(rule) in needed), *rules]
    return _reported(findings, rules, applied, folded_entries, checkpoint, slots)


def _unread(stored: Stored) -> torch.Tensor:
    raise AssertionError("suggested rules do not read values")


def _right(findings: Findings, applied: Applied) -> set[str]:
    """Returns names of the model that are made of the expected names, in the right shape."""
    shapes = {leaf.name: leaf.shape for leaf in findings.targets}
    return {
        name
        for name, sources in findings.expected.items()
        if (entry := applied.entries.get(name)) is not None
        and entry.tensor is not None
        and entry.sources == sources
        and tuple(entry.tensor.shape) == shapes[name]
    }


def _wrong(findings: Findings, applied: Applied) -> list[str]:
    """Returns names of the model that have not got their match, and others that rules filled by chance."""
    right, expected = _right(findings, applied), findings.expected
    wrong = [name for name in expected if name not in right]
    for leaf in findings.targets:
        entry = applied.entries.get(leaf.name)
        tensor = entry.tensor if entry is not None and entry.rules and leaf.name not in expected else None
        if tensor is not None and tuple(tensor.shape) == leaf.shape:
            wrong.append(leaf.name)
    return wrong


def _rules(findings: Findings, entries: Collection[str], *, general: bool) -> list[_CommentedRule]:
    """Returns the rules that reshape and transpose, then those that split and join, then those that rename.

    With `general`, few renames; otherwise one for each kind of name, in case general ones interfere with each other.
    """
    rules = [
        _CommentedRule(Reshape(pattern, after, before))
        for (before, after), names in findings.reshaped.items()
        for pattern in _patterns(names, entries)
    ]
    rules += [_CommentedRule(Transpose(pattern)) for pattern in _patterns(findings.transposed, entries)]
    rules += [_CommentedRule(Transpose(pattern), _INFERRED) for pattern in _patterns(findings.inferred, entries)]
    rules += _fusion_rules(findings, entries)
    if general:
        expected = findings.expected
        computed = set(expected) - set(findings.pairs.values())
        used = {name for sources in expected.values() for name in sources}
        unused = [name for name in entries if name not in used]
        # Names of the model without a match, to which a rule for others could give an unused value by chance.
        unused_shapes = {leaf.shape for leaf in findings.sources if leaf.name not in used}
        barred = [leaf.name for leaf in findings.targets if leaf.name not in expected and leaf.shape in unused_shapes]
        renames = rename_rules(findings.pairs, computed, unused, barred)
    else:
        pairs = [(name, goal) for name, goal in findings.pairs.items() if name != goal]
        renames = [Rename(*family.patterns) for family in families(pairs)]
    return [*rules, *(_CommentedRule(rule, _comment(rule, findings)) for rule in renames)]


def _patterns(names: Collection[str], entries: Collection[str]) -> list[str]:
    """Returns patterns that match these names and no other entry."""
    ordered = [name for name in entries if name in names]
    return covering(ordered, [name for name in entries if name not in names]) if names else []


def _comment(rule: Rule, findings: Findings) -> str:
    renamed = [(name, goal) for name, goal in findings.pairs.items() if rule.rename(name) == goal]
    unnamed = sum(1 for _, goal in renamed if goal in findings.by_shape)
    comments = [_BY_SHAPE if unnamed == len(renamed) else f"{unnamed} {_BY_SHAPE}"] if unnamed else []
    sources, targets = findings.conventional
    if any((name in sources) != (goal in targets) for name, goal in renamed):
        comments.append(_BY_CONVENTION)
    return "; ".join(comments)


def _fusion_rules(findings: Findings, entries: Collection[str]) -> list[_CommentedRule]:
    """Returns the rules that split and join tensors."""
    rules = []
    for fusions, split in ((findings.splits, True), (findings.joins, False)):
        rows: dict[tuple[int, tuple[int, ...] | None], list[tuple[str, ...]]] = {}
        for fusion in fusions:
            rows.setdefault((fusion.dim, fusion.sizes), []).extend(fusion.rows)
        for (dim, sizes), members in rows.items():
            for patterns in _merged([family.patterns for family in families(members)], entries, split):
                whole, parts = patterns[0], patterns[1:]
                rule = Split(whole, parts, dim, sizes) if split else Concat(parts, whole, dim, sizes)
                is_conventional = any(_fitting(part, findings.conventional[split]) for part in parts)
                rules.append(_CommentedRule(rule, _BY_CONVENTION if is_conventional else ""))
    return rules


def _merged(rows: Sequence[tuple[str, ...]], entries: Collection[str], split: bool) -> list[tuple[str, ...]]:
    """Merges the patterns of weights and biases into one if that matches nothing else."""
    by_owner: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        ends = {name.rpartition(".")[2] for name in row}
        short = tuple(f"{name.rpartition('.')[0]}.*" for name in row) if len(ends) == 1 and "*" not in ends else row
        by_owner.setdefault(short, []).append(row)
    merged: list[tuple[str, ...]] = []
    for short, members in by_owner.items():
        sides = (0,) if split else tuple(range(1, len(short)))
        fits = all(
            _fitting(short[side], entries) == {name for row in members for name in _fitting(row[side], entries)}
            for side in sides
        )
        merged += [short] if len(members) > 1 and fits else members
    return merged


def _fitting(pattern: str, entries: Collection[str]) -> set[str]:
    template = Template(pattern)
    return {name for name in entries if template.match(name) is not None}


def _reported(
    findings: Findings,
    rules: Sequence[_CommentedRule],
    applied: Applied,
    folded_entries: Entries,
    checkpoint: Checkpoint,
    slots: Slots,
) -> Suggestion:
    right = _right(findings, applied)
    counts = Counter(rule for name in right for rule in applied.entries[name].rules)
    counts.update(rule for name in right for source in findings.expected[name] for rule in folded_entries[source].rules)
    guesses = [name for name in findings.expected if name in right & findings.guesses]
    guessed = {rule for name in guesses for rule in applied.entries[name].rules}
    filled = {id(slots.by_name[name].tensor) for name in right}
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN]
    extra = {name for name in slots.extra if name in applied.entries}
    open_names = [slot.name for slot in wanted if id(slot.tensor) not in filled]
    open_names += [name for name in slots.extra if name not in extra]
    used = {
        origin
        for name in {*right, *extra}
        for source in applied.entries[name].sources
        for origin in folded_entries[source].sources
    }
    hidden = {name for slot in slots.tensors if slot.kind == HIDDEN for name in slot.names}
    lazy = {slot.name for slot in wanted if torch.nn.parameter.is_lazy(slot.tensor)} & applied.entries.keys()
    unused = [name for name in (*checkpoint, *checkpoint.extra) if name not in used and name not in hidden | lazy]
    open_names = [name for name in open_names if name not in lazy]
    ambiguous = _still_open(findings.ambiguous, open_names, unused)
    doubted = {name for group in ambiguous for name in (*group.names, *group.candidates)}
    total = len(wanted) + len(slots.extra)
    return Suggestion(
        [Guess(commented.rule) if repr(commented.rule) in guessed else commented.rule for commented in rules],
        counts=[counts[repr(commented.rule)] for commented in rules],
        comments=[commented.comment for commented in rules],
        explained=total - len(open_names),
        total=total,
        guesses=guesses,
        missing=[name for name in open_names if name not in doubted],
        unused=[name for name in unused if name not in doubted],
        ambiguous=ambiguous,
        notes=findings.notes,
    )


def _still_open(groups: Sequence[Ambiguous], names: Collection[str], unused: Collection[str]) -> list[Ambiguous]:
    """Returns the ambiguous groups, without names that have got a value and candidates that are used."""
    open_names, unused_names = set(names), set(unused)
    still_open = []
    for group in groups:
        left = tuple(name for name in group.names if name in open_names)
        candidates = tuple(name for name in group.candidates if name in unused_names)
        if left and candidates:
            still_open.append(Ambiguous(left, candidates))
    return still_open
