"""Turns pairs of names into few general rename rules, and names into few patterns."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

import msgspec

from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import Rule, template
from modelstate.text_format import folded, without_numbers

Names = tuple[str, ...]
_MOST_TRIALS = 3_000_000
"""The budget of the search: how often a rule is tried on a name. It takes a second at most."""


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
    """Returns, for each name of a row, the indices of the numbers that are equal in all names of every row."""
    linked: list[list[int]] = [[] for _ in rows[0]]  # in ascending order
    for at, part in enumerate(rows[0][0]):
        if not part.isdecimal():
            continue
        column = [row[0][at] for row in rows]
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


def rename_rules(
    pairs: Mapping[str, str], fixed: Collection[str], loose: Collection[str] = (), barred: Collection[str] = ()
) -> list[Rule]:
    """Returns rules that rename each name to its goal, one after the other, and keep the fixed names.

    The change that brings names nearest to their goals is taken until all names are right. A name for which no change
    is found has a rule of its own.

    Args:
        pairs: Names with their goals.
        fixed: Names that no rule may change.
        loose: Names without a goal, which may become anything except a barred name.
        barred: Names that a loose name must not become.
    """
    fixed = {*fixed, *(name for name, goal in pairs.items() if name == goal)}
    by_pattern = families((name, goal) for name, goal in pairs.items() if name != goal)
    kinds = [family.members for family in by_pattern]
    rules: list[Rule] = []
    trials = 0
    while open_kinds := [rows for rows in kinds if any(name != goal for name, goal in rows)]:
        candidates = dict.fromkeys(
            change for rows in open_kinds for family in families(rows) for change in _changes(*family.patterns)
        )
        trials += len(candidates) * len(kinds)
        change = _best_change(candidates, kinds, fixed, loose, barred) if trials < _MOST_TRIALS else None
        if change is None:
            left = [row for rows in open_kinds for row in rows if row[0] != row[1]]
            rules += [Rename(*family.patterns) for family in families(left)]
            break
        rules.append(change.rule)
        kinds = [[(change.renamed(name), goal) for name, goal in rows] for rows in kinds]
        loose = [change.renamed(name) for name in loose]
    return rules if len(rules) <= len(by_pattern) else [Rename(*family.patterns) for family in by_pattern]


def _best_change(
    candidates: Iterable["_Change"],
    kinds: Sequence[Sequence[Names]],
    fixed: Collection[str],
    loose: Collection[str],
    barred: Collection[str],
) -> "_Change | None":
    # The first and the last name of a kind are enough to rank the candidates.
    samples = [(name, goal, len(rows)) for rows in kinds for name, goal in dict.fromkeys((rows[0], rows[-1]))]
    ranked = []
    for change in candidates:
        gains = [
            (_gain(name, after, goal), count)
            for name, goal, count in samples
            if (after := change.renamed(name)) != name
        ]
        if gains and all(gain > 0 for gain, _ in gains):
            total = sum(gain * count for gain, count in gains)
            texts = change.pattern, change.replacement
            ranked.append(((total, change.is_prefix, -texts[0].count("*"), len(texts[0]), *texts), change))
    taken = {*barred, *fixed, *(name for rows in kinds for name, _ in rows)}
    for _, change in sorted(ranked, key=lambda entry: entry[0], reverse=True):
        if (
            all(change.renamed(name) == name for name in fixed)
            and not any((after := change.renamed(name)) != name and after in barred for name in loose)
            and all(
                (after := change.renamed(name)) == name or (after not in taken and _gain(name, after, goal) > 0)
                for rows in kinds
                for name, goal in rows
            )
        ):
            return change
    return None


class _Change:
    """The effect of a rule, without the checks of its constructor."""

    def __init__(self, pattern: str, replacement: str) -> None:
        self.pattern, self.replacement = pattern, replacement
        self.is_prefix = pattern == "*" or (replacement == "*" and "*" not in pattern[:-1])
        self._before, self._after = template(pattern), template(replacement)

    def renamed(self, name: str) -> str:
        parts = self._before.match(name)
        return name if parts is None else self._after.fill(parts)

    @property
    def rule(self) -> Rule:
        if not self.is_prefix:
            return Rename(self.pattern, self.replacement)
        return Prefix(add=self.replacement[:-1]) if self.pattern == "*" else Prefix(strip=self.pattern[:-1])


def _gain(before: str, after: str, goal: str) -> int:
    """Returns how many parts of a name become right; -1 if a part is added that the goal does not have."""
    if Counter(after.split(".")) - Counter(before.split(".")) - Counter(goal.split(".")):
        return -1
    return (_distance(before, goal) - _distance(after, goal)) or -1


@lru_cache(maxsize=65536)
def _distance(name: str, goal: str) -> int:
    old, new = name.split("."), goal.split(".")
    same = sum(block.size for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks())
    return len(old) + len(new) - 2 * same


_change = lru_cache(maxsize=65536)(_Change)


@lru_cache(maxsize=4096)
def _changes(name: str, goal: str) -> "tuple[_Change, ...]":
    """Returns possible changes for a pattern and its goal."""
    return tuple(_change(*texts) for texts in dict.fromkeys(_candidates(name.split("."), goal.split("."))))


def _candidates(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields possible renames: the change of each range of parts, with more or fewer of the parts around it."""
    changed = []
    for code, start, end, new_start, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if code == "replace" and end - start == new_end - new_start:
            changed += [(start + at, start + at + 1, new_start + at, new_start + at + 1) for at in range(end - start)]
        elif code != "equal":
            changed.append((start, end, new_start, new_end))
    whole = changed[0][0], changed[-1][1], changed[0][2], changed[-1][3]
    for start, end, new_start, new_end in dict.fromkeys((whole, *changed)):
        for begin in {0, max(start - 1, 0), start}:
            left = [*(["*"] if begin else []), *old[begin:start]]
            for finish in {end, min(end + 1, len(old)), len(old)}:
                right = [*old[end:finish], *(["*"] if finish < len(old) else [])]
                pattern, replacement = [*left, *old[start:end], *right], [*left, *new[new_start:new_end], *right]
                if pattern.count("*") == replacement.count("*") and pattern and replacement:
                    yield ".".join(pattern), ".".join(replacement)


def covering(names: Collection[str], others: Collection[str]) -> list[str]:
    """Returns patterns that match these names and none of the others."""
    left, patterns = list(dict.fromkeys(names)), list[str]()
    while left:
        candidates: dict[str, int] = {}
        for pattern in folded(left):
            parts = pattern.split(".")
            for text in [*(f"*.{'.'.join(parts[at:])}" for at in range(len(parts) - 2, 0, -1)), pattern]:
                if text not in candidates and not any(template(text).match(name) is not None for name in others):
                    candidates[text] = sum(template(text).match(name) is not None for name in left)
        # Of patterns that match equally many names, the last one is the most special.
        chosen = max(reversed(candidates), key=lambda text: candidates[text], default=left[0])
        patterns.append(chosen)
        left = [name for name in left if template(chosen).match(name) is None]
    return patterns
