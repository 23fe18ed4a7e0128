"""Turns pairs of names into few general rename rules.

Candidates are built from the differences between names, and the rule with the highest gain is taken until all names
are right. A budget bounds the search.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

import msgspec

from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import Rule, template
from modelstate.rules.schema import renaming
from modelstate.text_format import folded, without_numbers

Names = tuple[str, ...]
_MOST_LOOKS = 3_000_000
"""The budget of the search: how often a rule is tried on a name. It takes a second at most."""
_MANY = 48
"""With more kinds of names, stepwise rules are preferred: one rule for each kind would be too many to read."""
_FEW = 8
"""With so few rules, shorter lists are not searched for."""


class Family(msgspec.Struct):
    """Names that differ only in numbers, with what they become: patterns with * for these numbers."""

    patterns: Names
    """The pattern of the name, followed by those of the names that are made of it."""
    members: list[Names] = msgspec.field(default_factory=list)


def families(rows: Iterable[Names]) -> list[Family]:
    """Groups rows of related names; a number becomes * if it is equal in all names of each row."""
    alike: dict[Names, list[Names]] = defaultdict(list)
    for row in rows:
        alike[tuple(map(without_numbers, row))].append(row)
    by_patterns: dict[Names, Family] = {}
    for members in alike.values():
        linked = _linked(members)
        for row in members:
            patterns = tuple(
                ".".join("*" if at in places else part for at, part in enumerate(name.split(".")))
                for name, places in zip(row, linked, strict=True)
            )
            by_patterns.setdefault(patterns, Family(patterns)).members.append(row)
    return list(by_patterns.values())


def _linked(rows: Sequence[Names]) -> list[set[int]]:
    """Returns, for each name of a row, the indices of the numbers that are equal in all names of every row."""
    numbers = [
        [{at: part for at, part in enumerate(name.split(".")) if part.isdecimal()} for name in row] for row in rows
    ]
    linked: list[list[int]] = [[] for _ in rows[0]]  # in ascending order
    for at in numbers[0][0]:
        column = [row[0][at] for row in numbers]
        places = [at]
        for side in range(1, len(linked)):
            last = linked[side][-1] if linked[side] else -1
            later = (place for place in numbers[0][side] if place > last)
            place = next((place for place in later if [row[side][place] for row in numbers] == column), None)
            if place is None:
                break
            places.append(place)
        else:
            for of_side, place in zip(linked, places, strict=True):
                of_side.append(place)
    return [set(side) for side in linked]


def rename_rules(
    pairs: Mapping[str, str], fixed: Collection[str], loose: Collection[str] = (), barred: Collection[str] = ()
) -> list[Rule]:
    """Returns rules that rename each name to its goal and keep the fixed names.

    Two ways are tried: rules that rename names in one step, and rules that change parts of names one after the other.
    The shorter list is returned.

    Args:
        pairs: names with their goals.
        fixed: names that no rule may change.
        loose: names without a goal, which may become anything except a barred name.
        barred: names that a loose name must not become.
    """
    open_pairs = {name: goal for name, goal in pairs.items() if name != goal}
    fixed = {*fixed, *(name for name, goal in pairs.items() if name == goal)}
    search = _Search(fixed, list(loose), set(barred))
    kinds = families(open_pairs.items())
    many = len(kinds) > _MANY
    stepwise, is_stepwise_right = search.rules(open_pairs, _nearer) if many else ([], False)
    if is_stepwise_right:
        return stepwise
    # In one step, only the goal counts.
    direct, is_direct_right = search.rules(open_pairs, lambda before, after, goal: 1 if after == goal else -1)
    if not is_direct_right:
        renamed = renaming(direct)
        right = {name for name, goal in open_pairs.items() if renamed(name) == goal}
        direct += [Rename(*kind.patterns) for kind in kinds if not right.issuperset(name for name, _ in kind.members)]
    if many or (is_direct_right and len(direct) <= _FEW):
        return direct
    stepwise, is_stepwise_right = search.rules(open_pairs, _nearer)
    if not is_stepwise_right or (is_direct_right and len(direct) <= len(stepwise)):
        return direct
    return stepwise


Gain = Callable[[str, str, str], int]
"""Returns how much a change moves a name towards its goal, from the name before, after, and the goal; or -1."""


def _nearer(before: str, after: str, goal: str) -> int:
    """The gain of stepwise rules: how many parts become right; -1 if a part is added that the goal does not have."""
    if Counter(after.split(".")) - Counter(before.split(".")) - Counter(goal.split(".")):
        return -1
    return (_distance(before, goal) - _distance(after, goal)) or -1


Row = tuple[str, str]
"""A name, as the rules so far have changed it, and its goal."""


class _Search(msgspec.Struct):
    """What rules must not do, and the remaining budget of the search."""

    fixed: Collection[str]
    loose: Sequence[str]
    barred: Collection[str]
    looks: int = _MOST_LOOKS
    """How often a rule may still be tried on a name."""

    def rules(self, pairs: Mapping[str, str], gain: Gain) -> tuple[list[Rule], bool]:
        """Takes the change with the highest gain until all names are right; returns whether they are."""
        kinds: list[list[Row]] = [[(name, goal) for name, goal in kind.members] for kind in families(pairs.items())]
        loose, rules = self.loose, list[Rule]()
        while open_kinds := [rows for rows in kinds if any(name != goal for name, goal in rows)]:
            change = self._best(open_kinds, kinds, loose, gain) if self.looks > 0 else None
            if change is None:
                return rules, False
            rules.append(change.rule)
            kinds = [[(change(name), goal) for name, goal in rows] for rows in kinds]
            loose = [change(name) for name in loose]
        return rules, True

    def _best(
        self, open_kinds: Sequence[Sequence[Row]], kinds: Sequence[Sequence[Row]], loose: Sequence[str], gain: Gain
    ) -> "_Change | None":
        candidates: dict[_Change, None] = {}
        for rows in open_kinds:
            for family in families(rows):
                candidates |= dict.fromkeys(_changes_of(*family.patterns))
        # The first and the last name of a kind are enough to rank the candidates.
        samples = [(name, goal, len(rows)) for rows in kinds for name, goal in dict.fromkeys((rows[0], rows[-1]))]
        self.looks -= len(candidates) * len(samples)
        ranked = []
        for change in candidates:
            gains = [
                (gain(name, after, goal), count) for name, goal, count in samples if (after := change(name)) != name
            ]
            total = sum(each * count for each, count in gains)
            if total > 0 and all(each > 0 for each, _ in gains):
                stars, length = change.pattern.count("*"), len(change.pattern)
                ranked.append(((total, change.is_prefix, -stars, length, change.pattern, change.replacement), change))
        for _, change in sorted(ranked, key=lambda entry: entry[0], reverse=True):
            effects = [(name, change(name), goal) for rows in kinds for name, goal in rows]
            if (
                all(change(name) == name for name in self.fixed)
                and not any((after := change(name)) != name and after in self.barred for name in loose)
                and all(gain(name, after, goal) > 0 for name, after, goal in effects if after != name)
            ):
                return change
        return None


class _Change:
    """The effect of a rule, without the checks of its constructor."""

    def __init__(self, pattern: str, replacement: str) -> None:
        self.pattern, self.replacement = pattern, replacement
        self.is_prefix = pattern == "*" or (replacement == "*" and "*" not in pattern[:-1])
        self._before, self._after = template(pattern), template(replacement)

    def __call__(self, name: str) -> str:
        parts = self._before.match(name)
        return name if parts is None else self._after.fill(parts)

    @property
    def rule(self) -> Rule:
        if self.is_prefix:
            is_added = self.pattern == "*"
            return Prefix(add=self.replacement[:-1]) if is_added else Prefix(strip=self.pattern[:-1])
        return Rename(self.pattern, self.replacement)


@lru_cache(maxsize=65536)
def _distance(name: str, goal: str) -> int:
    if name == goal:
        return 0
    old, new = name.split("."), goal.split(".")
    same = sum(block.size for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks())
    return len(old) + len(new) - 2 * same


@lru_cache(maxsize=4096)
def _changes_of(name: str, goal: str) -> "tuple[_Change, ...]":
    """Returns possible changes for a pattern and its goal."""
    texts = dict.fromkeys(_candidates(name, goal))
    return tuple(_change(*text) for text in texts if text[0].count("*") == text[1].count("*"))


_change = lru_cache(maxsize=65536)(_Change)


def _candidates(name: str, goal: str) -> Iterator[tuple[str, str]]:
    """Yields possible renames, from the general to the special."""
    old, new = name.split("."), goal.split(".")
    shorter = min(len(old), len(new))
    start = next((at for at in range(shorter - 1) if old[at] != new[at]), shorter - 1)
    end = next((at for at in range(shorter - start) if old[-1 - at] != new[-1 - at]), shorter - start)
    yield from _around(old, new, (start, len(old) - end), (start, len(new) - end))
    for at, (old_range, new_range) in enumerate(_differences(old, new)):
        if not at:
            yield from _around(old, new, old_range, new_range, cut=True)
        tail = ["*"] if old_range[1] < len(old) else []
        if old_range[0]:
            yield ".".join(["*", *old[slice(*old_range)], *tail]), ".".join(["*", *new[slice(*new_range)], *tail])


def _differences(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields where two names differ: a range of parts in each of them."""
    for code, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if code != "equal" and i2 - i1 == j2 - j1:
            yield from (((i, i + 1), (j, j + 1)) for i, j in zip(range(i1, i2), range(j1, j2), strict=True))
        elif code != "equal":
            yield (i1, i2), (j1, j2)


def _around(
    old: Sequence[str],
    new: Sequence[str],
    old_range: tuple[int, int],
    new_range: tuple[int, int],
    cut: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yields the change of a range of parts, with more or fewer of the parts around it."""
    first, end = old_range
    for begin in sorted({0} if cut else {0, max(first - 1, 0), first}):
        left = [*(["*"] if begin else []), *old[begin:first]]
        for finish in sorted({end} if cut else {end, min(end + 1, len(old)), len(old)}):
            right = [*old[end:finish], *(["*"] if finish < len(old) else [])]
            pattern, replacement = [*left, *old[first:end], *right], [*left, *new[slice(*new_range)], *right]
            if pattern.count("*") == replacement.count("*") and pattern and replacement and pattern != replacement:
                yield ".".join(pattern), ".".join(replacement)


def covering(names: Collection[str], others: Collection[str]) -> list[str]:
    """Returns patterns that match these names and none of the others."""
    left, patterns = list(dict.fromkeys(names)), list[str]()
    while left:
        candidates: dict[str, int] = {}
        for family in families([(name,) for name in left]):
            (pattern,) = folded([family.members[0][0]])
            parts = pattern.split(".")
            for text in [*(f"*.{'.'.join(parts[at:])}" for at in range(len(parts) - 2, 0, -1)), pattern]:
                if text not in candidates and not any(template(text).match(name) is not None for name in others):
                    candidates[text] = sum(template(text).match(name) is not None for name in left)
        # Of patterns that match equally many names, the last one is the most special.
        chosen = max(reversed(candidates), key=lambda text: candidates[text], default=left[0])
        patterns.append(chosen)
        left = [name for name in left if template(chosen).match(name) is None]
    return patterns
