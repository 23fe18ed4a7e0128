"""`modelstate.suggest`: works rules out, tries them on names and shapes, and reports what fits."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import argument_order, is_module, is_source
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import AmbiguousKeyError, OptionError
from modelstate.planning.matching import matching_part
from modelstate.rules.names import Rename
from modelstate.rules.rule import Entry, Rule, Template, Value
from modelstate.rules.schema import Applied, apply_rules
from modelstate.rules.tensors import Concat, Split, Transpose
from modelstate.spec import Stored
from modelstate.suggestion.find import Found, Fusion, find
from modelstate.suggestion.generalise import covering, families, rename_rules
from modelstate.suggestion.pairing import without_numbers
from modelstate.suggestion.skeletons import Leaf, kind_of
from modelstate.suggestion.suggestion import Ambiguous, Suggestion
from modelstate.torch_compat.private import unwrapped
from modelstate.transaction.slots import HIDDEN, Slots, slots_of

_INFERRED = "square, so its shape does not show it: transposed because the weights beside it are"
_BY_SHAPE = "by shape alone: the names have nothing in common"
_BY_CONVENTION = "gate (w1) and up (w3) told apart by Llama's convention alone"


@dataclass(frozen=True, slots=True)
class _Made:
    """A rule, and what has to be said of it."""

    rule: Rule
    comment: str = ""


def verified(found: Found, checkpoint: Checkpoint, slots: Slots) -> Suggestion:
    """The suggestion that comes of it."""
    entries = {name: Entry(checkpoint.stored(name), (name,)) for name in checkpoint}
    entries |= {name: Entry(Value(value), (name,)) for name, value in checkpoint.extra.items()}
    for build in (_general, _special):
        made = build(found, entries)
        applied = apply_rules([one.rule for one in made], entries, _unread)
        wrong = _wrong(found, applied) + _by_chance(found, applied)
        if not wrong and not applied.problems:
            break
    while made and (wrong or applied.problems or applied.idle):
        # What does not come out right is not suggested.
        bad = {*applied.idle, *(getattr(problem, "rule", "") for problem in applied.problems)}
        bad |= {rule for name in wrong for rule in _blamed(name, made, applied)}
        kept = [one for one in made if repr(one.rule) not in bad]
        made = kept if len(kept) < len(made) else made[:-1]
        applied = apply_rules([one.rule for one in made], entries, _unread)
        wrong = _broken(found, applied) + _by_chance(found, applied)
    return _reported(found, made, applied, checkpoint, slots)


def _blamed(name: str, made: Sequence[_Made], applied: Applied) -> set[str]:
    """The rules that led to a name, or away from it."""
    entry = applied.entries.get(name)
    led = set() if entry is None else set(entry.rules)
    return led | {repr(one.rule) for one in made if one.rule.rename(name) not in (None, name)}


def _broken(found: Found, applied: Applied) -> list[str]:
    """Names of the model that have something else than they should, or fitted without rules and no longer do."""
    fitted = {name for name, goal in found.pairs.items() if name == goal}
    return [name for name in _wrong(found, applied) if name in applied.entries or name in fitted]


def _by_chance(found: Found, applied: Applied) -> list[str]:
    """Names of the model that nothing was found for, and that rules for others gave a value that would fit."""
    expected, filled = _expected(found), []
    for leaf in found.targets:
        entry = applied.entries.get(leaf.name)
        tensor = entry.tensor if entry is not None and entry.rules and leaf.name not in expected else None
        if tensor is not None and tuple(tensor.shape) == leaf.shape:
            filled.append(leaf.name)
    return filled


def _unread(stored: Stored) -> torch.Tensor:
    raise AssertionError("no rule that is suggested looks at values")


def _expected(found: Found) -> dict[str, tuple[str, ...]]:
    """For each name of the model that was found, the names in the checkpoint of what it is made of."""
    wanted: dict[str, tuple[str, ...]] = {goal: (name,) for name, goal in found.pairs.items()}
    for fusion, _ in found.splits:
        for ranks, leaf in fusion.whole.leaves.items():
            wanted |= {part.leaves[ranks].name: (leaf.name,) for part in fusion.parts}
    for fusion, _ in found.joins:
        for ranks, leaf in fusion.whole.leaves.items():
            wanted[leaf.name] = tuple(part.leaves[ranks].name for part in fusion.parts)
    return wanted


def _right(found: Found, applied: Applied) -> set[str]:
    """Names of the model that are made of what they should be, in the right shape."""
    shapes = {leaf.name: leaf.shape for leaf in found.targets}
    right = set()
    for name, sources in _expected(found).items():
        entry = applied.entries.get(name)
        tensor = entry.tensor if entry is not None else None
        if entry is not None and tensor is not None and entry.sources == sources:
            right |= {name} if tuple(tensor.shape) == shapes[name] else set()
    return right


def _wrong(found: Found, applied: Applied) -> list[str]:
    right = _right(found, applied)
    return [name for name in _expected(found) if name not in right]


def _general(found: Found, entries: Collection[str]) -> list[_Made]:
    """Few rules, with patterns that fit what they should and nothing else."""
    made = [_Made(Transpose(pattern)) for pattern in _patterns(found.transposed, entries)]
    made += [_Made(Transpose(pattern), _INFERRED) for pattern in _patterns(found.inferred, entries)]
    made += _fused(found, entries)
    fixed = set(_expected(found)) - set(found.pairs.values())
    claimed = {name for sources in _expected(found).values() for name in sources}
    loose = [name for name in entries if name not in claimed]
    rules = rename_rules(found.pairs, fixed, loose, _barred(found, fixed, claimed))
    made += [_Made(rule, _comment(rule, found)) for rule in rules]
    return made


def _barred(found: Found, made: Collection[str], claimed: Collection[str]) -> list[str]:
    """Names of the model that stay open, and that a rule for others would give a value by chance."""
    settled = {*made, *found.pairs.values()}
    over = {leaf.shape for leaf in found.sources if leaf.name not in claimed}
    return [leaf.name for leaf in found.targets if leaf.name not in settled and leaf.shape in over]


def _special(found: Found, entries: Collection[str]) -> list[_Made]:
    """A rule for each kind of name, where general ones get in each other's way."""
    made = [_Made(Transpose(pattern)) for pattern in _patterns(found.transposed, entries)]
    made += [_Made(Transpose(pattern), _INFERRED) for pattern in _patterns(found.inferred, entries)]
    made += _fused(found, entries)
    pairs = [(name, goal) for name, goal in found.pairs.items() if name != goal]
    rules = [Rename(*family.patterns) for family in families(pairs)]
    return made + [_Made(rule, _comment(rule, found)) for rule in rules]


def _patterns(names: Collection[str], entries: Collection[str]) -> list[str]:
    ordered = [name for name in entries if name in names]
    return covering(ordered, [name for name in entries if name not in names]) if names else []


def _comment(rule: Rule, found: Found) -> str:
    renamed = [(name, goal) for name, goal in found.pairs.items() if rule.rename(name) == goal]
    unsaid = sum(1 for _, goal in renamed if goal in found.by_shape)
    said = [_BY_SHAPE if unsaid == len(renamed) else f"{unsaid} {_BY_SHAPE}"] if unsaid else []
    here, there = found.conventional
    said += [_BY_CONVENTION] if any((name in here) != (goal in there) for name, goal in renamed) else []
    return "; ".join(said)


def _fused(found: Found, entries: Collection[str]) -> list[_Made]:
    made = []
    for fused, split in ((found.splits, True), (found.joins, False)):
        rows: dict[tuple[int, tuple[int, ...] | None], list[tuple[str, ...]]] = {}
        for fusion, dim in fused:
            turn = dim if _has_two(fusion) else 0
            rows.setdefault((turn, fusion.sizes), []).extend(_rows(fusion))
        for (dim, sizes), members in rows.items():
            for patterns in _merged([family.patterns for family in families(members)], entries, split):
                whole, parts = patterns[0], patterns[1:]
                rule = Split(whole, parts, dim, sizes) if split else Concat(parts, whole, dim, sizes)
                made.append(_Made(rule, _of_parts(parts, found.conventional[split])))
    return made


def _of_parts(parts: Sequence[str], conventional: Collection[str]) -> str:
    return _BY_CONVENTION if any(_fitting(part, conventional) for part in parts) else ""


def _has_two(fusion: Fusion) -> bool:
    return all(len(leaf.shape) == 2 for leaf in fusion.whole.leaves.values())


def _rows(fusion: Fusion) -> list[tuple[str, ...]]:
    return [
        (leaf.name, *(part.leaves[ranks].name for part in fusion.parts)) for ranks, leaf in fusion.whole.leaves.items()
    ]


def _merged(rows: Sequence[tuple[str, ...]], entries: Collection[str], split: bool) -> list[tuple[str, ...]]:
    """Weights and biases in one rule, where the pattern for both fits nothing else."""
    by_owner: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        ends = {name.rpartition(".")[2] for name in row}
        short = tuple(f"{name.rpartition('.')[0]}.*" for name in row) if len(ends) == 1 and "*" not in ends else row
        by_owner.setdefault(short, []).append(row)
    found: list[tuple[str, ...]] = []
    for short, members in by_owner.items():
        sides = (0,) if split else tuple(range(1, len(short)))
        fits = all(
            _fitting(short[side], entries) == {name for row in members for name in _fitting(row[side], entries)}
            for side in sides
        )
        found += [short] if len(members) > 1 and fits else members
    return found


def _fitting(pattern: str, entries: Collection[str]) -> set[str]:
    template = Template(pattern)
    return {name for name in entries if template.match(name) is not None}


def _reported(
    found: Found, made: Sequence[_Made], applied: Applied, checkpoint: Checkpoint, slots: Slots
) -> Suggestion:
    right = _right(found, applied)
    counts = Counter(rule for name in right for rule in applied.entries[name].rules)
    filled = {id(slots.by_name[name].tensor) for name in right}
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN]
    extra = {name for name in slots.extra if name in applied.entries}
    open_names = [slot.name for slot in wanted if id(slot.tensor) not in filled]
    open_names += [name for name in slots.extra if name not in extra]
    used = {source for name in {*right, *extra} for source in applied.entries[name].sources}
    hidden = {name for slot in slots.tensors if slot.kind == HIDDEN for name in slot.names}
    lazy = {slot.name for slot in wanted if torch.nn.parameter.is_lazy(slot.tensor)} & applied.entries.keys()
    unused = [name for name in (*checkpoint, *checkpoint.extra) if name not in used and name not in hidden | lazy]
    open_names = [name for name in open_names if name not in lazy]
    ambiguous = _still_open(found.ambiguous, open_names, unused)
    doubted = {name for group in ambiguous for name in (*group.names, *group.candidates)}
    total = len(wanted) + len(slots.extra)
    notes = list(found.notes)
    if found.doubtful:
        names = dict.fromkeys(without_numbers(name).replace("#", "*") for name in found.doubtful)
        notes.append(f"square, and nothing shows whether to transpose: {', '.join(names)}; left as they are")
    return Suggestion(
        [one.rule for one in made],
        counts=[counts[repr(one.rule)] for one in made],
        comments=[one.comment for one in made],
        explained=total - len(open_names),
        total=total,
        missing=[name for name in open_names if name not in doubted],
        unused=[name for name in unused if name not in doubted],
        ambiguous=ambiguous,
        notes=notes,
    )


def _still_open(groups: Sequence[Ambiguous], names: Collection[str], unused: Collection[str]) -> list[Ambiguous]:
    left, over = set(names), set(unused)
    found = []
    for group in groups:
        here = tuple(name for name in group.names if name in left)
        there = tuple(name for name in group.candidates if name in over)
        if here and there:
            found.append(Ambiguous(here, there))
    return found


@argument_order("ms.suggest", is_module, is_source)
def suggest(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any] | Checkpoint,
    *,
    key: str | None = None,
) -> Suggestion:
    """Works out rules by which a checkpoint fits a model, from names, shapes, dtypes and the order of numbers.

    Nothing is loaded, no tensor's bytes are read, and the model is not changed. The result is a list of rules, for
    `rules=` of `modelstate.load`, if they are what is meant: print it first. Where several answers are equally good
    none is given; they are listed as ambiguous. A suggestion cannot see what a tensor means: parts or elements in
    another order, of the same shape, look the same.

    Raises what opening raises, `AmbiguousKeyError`, `KeyNotFoundError` and `OptionError`; what it cannot work out
    stays open, and does not raise.
    """
    if not isinstance(model, nn.Module):
        raise OptionError("not a model", expected="a torch.nn.Module", found=type(model).__name__)
    checkpoint = open_checkpoint(source)
    slots = slots_of(unwrapped(model))
    checkpoint = _part(checkpoint, slots) if key is None else checkpoint.select(key)
    sources = [Leaf(name, spec.shape, kind_of(spec.dtype)) for name, spec in checkpoint.items()]
    wanted = [slot for slot in slots.tensors if slot.kind != HIDDEN and not torch.nn.parameter.is_lazy(slot.tensor)]
    targets = [
        Leaf(name, tuple(slot.tensor.shape), kind_of(slot.tensor.dtype)) for slot in wanted for name in slot.names
    ]
    return verified(find(sources, targets, slots), checkpoint, slots)


def _part(checkpoint: Checkpoint, slots: Slots) -> Checkpoint:
    """The part of the checkpoint that is meant: by the model's names, or by its shapes."""
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
        one
        for one, score in scores.items()
        if score[:2] == scores[best][:2] and not (best.startswith(f"{one}.") or one == best or not one)
    ]
    if rivals:
        raise AmbiguousKeyError(
            "the checkpoint holds several parts with tensors like the model's",
            where=checkpoint.source,
            found=", ".join(map(repr, [best, *rivals])),
            remedy=f"say which: key={best!r}",
            candidates=tuple((one, scores[one][0]) for one in [best, *rivals]),
        )
    return checkpoint.select(best) if best else checkpoint
