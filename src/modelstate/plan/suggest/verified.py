"""The rules of what was found, tried on the names and shapes of the checkpoint. Only what then fits is claimed."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from modelstate.plan.rules.chain import Applied, apply_rules
from modelstate.plan.rules.names import Rename
from modelstate.plan.rules.pieces import Concat, Split
from modelstate.plan.rules.rule import Entry, Rule, Value
from modelstate.plan.rules.template import Template
from modelstate.plan.rules.tensors import Transpose
from modelstate.plan.slots import HIDDEN, Slots
from modelstate.plan.suggest.found import Found
from modelstate.plan.suggest.fused import Fusion
from modelstate.plan.suggest.generalise import covering, families, rename_rules
from modelstate.plan.suggest.orientation import without_numbers
from modelstate.plan.suggest.suggestion import Ambiguous, Suggestion
from modelstate.read.checkpoint import Checkpoint
from modelstate.spec import Stored

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
