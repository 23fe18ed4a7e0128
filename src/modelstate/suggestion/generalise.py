"""Turns pairs of names into few general rename rules, and names into few patterns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec

from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import Rule, template
from modelstate.text_format import without_numbers

Names = tuple[str, ...]
_MOST_TRIALS = 500_000
"""The most trials of a rule on a name; above, each family of names gets a rule of its own. They take a second."""


class Family(msgspec.Struct):
    """Names that differ only in numbers, with what they become: patterns with * for these numbers."""

    patterns: Names
    """The pattern of the name, followed by those of the names that are made of it."""
    members: list[Names]


def families(rows: Iterable[Names]) -> list[Family]:
    """Groups rows of related names; a number becomes * if it is equal in all names of each row."""
    alike: dict[Names, list[Names]] = defaultdict(list)
    for row in rows:
        alike[tuple(map(without_numbers, row))].append(row)
    by_patterns: dict[Names, Family] = {}
    for members in alike.values():
        linked = _linked([[name.split(".") for name in row] for row in members])
        for row in members:
            patterns = tuple(
                ".".join("*" if at in places else part for at, part in enumerate(name.split(".")))
                for name, places in zip(row, linked, strict=True)
            )
            by_patterns.setdefault(patterns, Family(patterns, [])).members.append(row)
    return list(by_patterns.values())


def _linked(rows: Sequence[Sequence[Sequence[str]]]) -> list[list[int]]:
    """Returns, for each name of a row, the indices of the numbers that vary and are equal in all names of every row."""
    linked: list[list[int]] = [[] for _ in rows[0]]  # in ascending order
    for at, part in enumerate(rows[0][0]):
        column = [row[0][at] for row in rows]
        if not part.isdecimal() or len({*column}) == 1:
            continue
        places = [at]
        for side in range(1, len(linked)):
            after = range(linked[side][-1] + 1 if linked[side] else 0, len(rows[0][side]))
            place = next((place for place in after if [row[side][place] for row in rows] == column), None)
            if place is None:
                break
            places.append(place)
        else:
            for of_side, place in zip(linked, places, strict=True):
                of_side.append(place)
    return linked


def rename_rules(pairs: Mapping[str, str], loose: Collection[str], barred: Collection[str]) -> list[Rule]:
    """Returns rules that rename each name to its goal, one after the other; each is the most general one that is right.

    Args:
        pairs: Names with their goals. A name that is its own goal is not changed.
        loose: Names without a goal, which may become anything except a barred name.
        barred: Names that a loose name must not become.
    """
    goals: dict[str, str | None] = {**dict.fromkeys(loose), **pairs}
    blocked = families((name, goal) for name, goal in pairs.items() if name != goal)
    is_small = len(blocked) * len(goals) <= _MOST_TRIALS
    rules: list[Rule] = []
    is_changing = True
    while is_changing:  # a rule is blocked while another name has its result
        is_changing = False
        waiting, blocked = blocked, []
        for family in waiting:
            if all(goals.get(name) != goal for name, goal in family.members):
                continue  # a rule for another family has renamed these, too
            candidates = list(_candidates(*family.patterns)) if is_small else [Rename(*family.patterns)]
            rule = next((rule for rule in candidates if _is_right(rule, goals, barred)), None)
            if rule is None:
                blocked.append(family)
                continue
            rules.append(rule)
            goals = {_renamed(rule, name): goal for name, goal in goals.items()}
            is_changing = True
    return rules


def _is_right(rule: Rule, goals: Mapping[str, str | None], barred: Collection[str]) -> bool:
    """Whether a rule changes names to their goals only, and to no name that there is."""
    changes = [(after, goal) for name, goal in goals.items() if (after := _renamed(rule, name)) != name]
    return all(
        after not in goals and (after == goal if goal is not None else after not in barred) for after, goal in changes
    )


def _renamed(rule: Rule, name: str) -> str:
    after = rule.rename(name)
    return name if after is None else after


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


def patterns_of(names: Collection[str], others: Collection[str]) -> list[str]:
    """Returns patterns that match these names and none of the others."""
    patterns: list[str] = []
    for family in families((name,) for name in names):
        (pattern,) = family.patterns
        is_alone = all(template(pattern).match(name) is None for name in others)
        patterns += [pattern] if is_alone else [name for (name,) in family.members]
    return patterns


def fused_patterns(rows: Iterable[Names], entries: Collection[str], *, is_split: bool) -> list[Names]:
    """Returns the patterns of wholes and their parts; one for weights and biases if it matches nothing else.

    Args:
        rows: The name of each whole, followed by those of its parts.
        entries: The names of the checkpoint.
        is_split: Whether the checkpoint has the wholes, and not the parts.
    """
    by_owner: dict[Names, list[Family]] = defaultdict(list)
    for family in families(rows):
        owners, _, ends = zip(*(pattern.rpartition(".") for pattern in family.patterns), strict=True)
        is_one_end = len({*ends}) == 1 and "*" not in ends
        by_owner[tuple(f"{owner}.*" for owner in owners) if is_one_end else family.patterns].append(family)
    result: list[Names] = []
    for patterns, members in by_owner.items():
        sources = patterns[:1] if is_split else patterns[1:]
        known = {name for family in members for row in family.members for name in row}
        fits = all(
            name in known for name in entries if any(template(source).match(name) is not None for source in sources)
        )
        result += [patterns] if fits and len(members) > 1 else [family.patterns for family in members]
    return result
