"""Turns pairs of names into few general rename rules.

Candidates are built from the differences between names, and the rule with the highest gain is taken until all names
are right. A budget bounds the search.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import accumulate

from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import Rule, Template

Names = tuple[str, ...]
_MOST_LOOKS = 3_000_000
"""The budget of the search: how often a rule is tried on a name. It takes a second at most."""
_MANY = 48
"""With more kinds of names, stepwise rules are preferred: one rule for each kind would be too many to read."""
_FEW = 8
"""With so few rules, shorter lists are not searched for."""


@dataclass(slots=True)
class Family:
    """Names that differ only in numbers, with what they become: patterns with * for these numbers."""

    patterns: Names
    """The pattern of the name, followed by those of the names that are made of it."""
    members: list[Names] = field(default_factory=list)


def families(rows: Iterable[Names]) -> list[Family]:
    """Groups rows of related names; a number becomes * if it is equal in all names of each row."""
    alike: dict[Names, list[Names]] = defaultdict(list)
    for row in rows:
        alike[tuple(_without_numbers(name) for name in row)].append(row)
    found: dict[Names, Family] = {}
    for members in alike.values():
        numbers = [[_numbers(name) for name in row] for row in members]
        linked = _linked(numbers)
        for row in members:
            patterns = tuple(_pattern(name, {one[side] for one in linked}) for side, name in enumerate(row))
            found.setdefault(patterns, Family(patterns)).members.append(row)
    return list(found.values())


def _numbers(name: str) -> list[tuple[int, str]]:
    return [(at, part) for at, part in enumerate(name.split(".")) if part.isdecimal()]


def _without_numbers(name: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def _pattern(name: str, stars: Collection[int]) -> str:
    return ".".join("*" if at in stars else part for at, part in enumerate(name.split(".")))


def _linked(rows: Sequence[Sequence[Sequence[tuple[int, str]]]]) -> list[tuple[int, ...]]:
    """Returns the places of numbers that are equal in all names of every row: for each name the index of the part."""
    found: list[tuple[int, ...]] = []
    first = rows[0]
    start = [0] * len(first)
    for at in range(len(first[0])):
        column = [row[0][at][1] for row in rows]
        places = []
        for side in range(1, len(first)):
            equal = (j for j in range(start[side], len(first[side])) if [row[side][j][1] for row in rows] == column)
            places.append(next(equal, None))
        if all(place is not None for place in places):
            chosen = [at, *(place for place in places if place is not None)]
            start = [place + 1 for place in chosen]
            found.append(tuple(first[side][place][0] for side, place in enumerate(chosen)))
    return found


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
    keep = set(fixed) | {name for name, goal in pairs.items() if name == goal}
    bounds = _Bounds(_Lines(list(keep)), list(loose), set(barred))
    kinds = families(open_pairs.items())
    many = len(kinds) > _MANY
    stepwise, left_over = _greedy(open_pairs, bounds, _nearer) if many else ([], True)
    if many and not left_over:
        return stepwise
    direct, left = _greedy(open_pairs, bounds, _completed)
    if left:
        done = {name for name, goal in open_pairs.items() if _made(direct, name) == goal}
        rest = [one for one in kinds if not done.issuperset(name for name, _ in one.members)]
        direct += [Rename(*one.patterns) for one in rest]
    if many or (not left and len(direct) <= _FEW):
        return direct
    stepwise, left_over = _greedy(open_pairs, bounds, _nearer)
    if left_over or (not left and len(direct) <= len(stepwise)):
        return direct
    return stepwise


def _made(rules: Sequence[Rule], name: str) -> str:
    for rule in rules:
        name = rule.rename(name) or name
    return name


Gain = Callable[[str, str, str], int]
"""Returns how much a change moves a name towards its goal, from the name before, after, and the goal; or -1."""


@dataclass(slots=True)
class _Class:
    """Names that differ only in numbers, as the rules so far have changed them."""

    goal: list[str]
    now: list[str]

    @property
    def ends(self) -> range:
        """The indices of the first and the last name, which are enough to rank changes."""
        return range(0, len(self.now), max(len(self.now) - 1, 1))


@dataclass(slots=True)
class _Bounds:
    """What rules must not do, and the remaining budget of the search."""

    fixed: "_Lines"
    loose: list[str]
    barred: set[str]
    left: int = _MOST_LOOKS
    """How often a rule may still be tried on a name."""


def _greedy(pairs: Mapping[str, str], bounds: _Bounds, gain: Gain) -> tuple[list[Rule], bool]:
    """Takes the rule with the highest gain until all names are right; returns the rules, and whether names are left."""
    classes = [
        _Class([goal for _, goal in one.members], [name for name, _ in one.members]) for one in families(pairs.items())
    ]
    loose = _Lines(bounds.loose)
    rules: list[Rule] = []
    while bounds.left > 0:
        waiting = [one for one in classes if one.now != one.goal]
        if not waiting:
            return rules, False
        chosen = _best_change(waiting, classes, gain, bounds, loose)
        if chosen is None:
            return rules, True
        rules.append(chosen.rule)
        for one in classes:
            one.now = [chosen(name) for name in one.now]
        loose = _Lines([chosen(name) for name in loose.names])
    return rules, True


def _best_change(
    waiting: Sequence[_Class], classes: Sequence[_Class], gain: Gain, bounds: _Bounds, loose: "_Lines"
) -> "_Change | None":
    candidates: dict[_Change, None] = {}
    for one in waiting:
        for pair in families(zip(one.now, one.goal, strict=True)):
            candidates.update(dict.fromkeys(_changes_of(*pair.patterns)))
    places = [(one, at) for one in classes for at in one.ends]
    lines = _Lines([one.now[at] for one, at in places])
    worth = []
    bounds.left -= len(candidates) * len(places)
    for change in candidates:
        total = _worth(change, places, lines, gain)
        if total > 0:
            rank = (total, change.is_prefix, -change.text[0].count("*"), len(change.text[0]), change.text)
            worth.append((rank, change))
    for _, change in sorted(worth, key=lambda one: one[0], reverse=True):
        if _keeps(bounds, loose, change) and _is_right(change, classes, gain):
            return change
    return None


def _keeps(bounds: _Bounds, loose: "_Lines", change: "_Change") -> bool:
    """Whether it keeps the fixed names, and makes no barred name."""
    if any(name != after for name, after in bounds.fixed.changed(change)):
        return False
    return not any(name != after and after in bounds.barred for name, after in loose.changed(change))


class _Change:
    """The effect of a rule, without the checks of its constructor."""

    def __init__(self, pattern: str, replacement: str) -> None:
        self.text = (pattern, replacement)
        self._pieces = replacement.split("*")
        # Matches many names at once, in a text with one name a line.
        wild = "([^\n]*?)".join(map(re.escape, pattern.split("*")))
        self.is_prefix = pattern == "*" or (replacement == "*" and pattern[:-1].count("*") == 0)
        self.expression = re.compile(f"^{wild}$", re.MULTILINE)

    def filled(self, found: re.Match[str]) -> str:
        return "".join(piece + part for piece, part in zip(self._pieces, (*found.groups(), ""), strict=True))

    def __call__(self, name: str) -> str:
        found = self.expression.fullmatch(name)
        return name if found is None else self.filled(found)

    @property
    def rule(self) -> Rule:
        pattern, replacement = self.text
        if self.is_prefix:
            return Prefix(add=replacement[:-1]) if pattern == "*" else Prefix(strip=pattern[:-1])
        return Rename(pattern, replacement)


class _Lines:
    """Names as one text, in which a pattern finds all names that match it at once."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._text = "\n".join(names)
        starts = [0, *accumulate(len(name) + 1 for name in names)]
        self._at = {start: at for at, start in enumerate(starts[: len(names)])}

    def places(self, change: _Change) -> Iterator[tuple[int, str]]:
        """Yields the index of each name that the change applies to, with the new name."""
        for found in change.expression.finditer(self._text):
            at = self._at.get(found.start())
            if at is not None:
                yield at, change.filled(found)

    def changed(self, change: _Change) -> Iterator[tuple[str, str]]:
        return ((self.names[at], after) for at, after in self.places(change))


def _worth(change: _Change, places: Sequence[tuple[_Class, int]], lines: _Lines, gain: Gain) -> int:
    """Returns how many names, or parts of them, become right; -1 if one becomes wrong."""
    total = 0
    for at, after in lines.places(change):
        one, member = places[at]
        before = one.now[member]
        if after == before:
            continue
        each = gain(before, after, one.goal[member])
        if each < 0:
            return -1
        total += each * len(one.now)
    return total


def _is_right(change: _Change, classes: Sequence[_Class], gain: Gain) -> bool:
    for one in classes:
        changed = [
            (before, after, goal)
            for before, after, goal in zip(one.now, map(change, one.now), one.goal, strict=True)
            if before != after
        ]
        if any(gain(before, after, goal) < 0 for before, after, goal in changed):
            return False
    return True


def _completed(before: str, after: str, goal: str) -> int:
    """The gain of rules that rename in one step: only the goal counts."""
    return 1 if after == goal else -1


def _nearer(before: str, after: str, goal: str) -> int:
    """The gain of stepwise rules: how many parts become right; -1 if a part is added that the goal does not have."""
    if Counter(after.split(".")) - Counter(before.split(".")) - Counter(goal.split(".")):
        return -1
    return (_distance(before, goal) - _distance(after, goal)) or -1


@lru_cache(maxsize=65536)
def _distance(name: str, goal: str) -> int:
    if name == goal:
        return 0
    one, other = name.split("."), goal.split(".")
    same = sum(block.size for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks())
    return len(one) + len(other) - 2 * same


@lru_cache(maxsize=4096)
def _changes_of(name: str, goal: str) -> "tuple[_Change, ...]":
    """Returns possible changes for a pattern and its goal."""
    texts = dict.fromkeys(_candidates(name, goal))
    return tuple(_change(one) for one in texts if one[0].count("*") == one[1].count("*"))


@lru_cache(maxsize=65536)
def _change(texts: tuple[str, str]) -> "_Change":
    return _Change(*texts)


def _candidates(name: str, goal: str) -> Iterator[tuple[str, str]]:
    """Yields possible renames, from the general to the special."""
    one, other = name.split("."), goal.split(".")
    start = 0
    while start < min(len(one), len(other)) - 1 and one[start] == other[start]:
        start += 1
    end = 0
    while end < min(len(one), len(other)) - start and one[-1 - end] == other[-1 - end]:
        end += 1
    yield from _around(one, other, (start, len(one) - end), (start, len(other) - end))
    for at, (here, there) in enumerate(_changes(one, other)):
        if not at:
            yield from _around(one, other, here, there, cut=True)
        tail = ["*"] if here[1] < len(one) else []
        if here[0]:
            yield ".".join(["*", *one[slice(*here)], *tail]), ".".join(["*", *other[slice(*there)], *tail])


def _changes(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields where two names differ: a range of parts in each of them."""
    for code, i1, i2, j1, j2 in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if code != "equal" and i2 - i1 == j2 - j1:
            yield from (((i, i + 1), (j, j + 1)) for i, j in zip(range(i1, i2), range(j1, j2), strict=True))
        elif code != "equal":
            yield (i1, i2), (j1, j2)


def _around(
    one: Sequence[str], other: Sequence[str], here: tuple[int, int], there: tuple[int, int], cut: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields the change of a range of parts, with more or fewer of the parts around it."""
    (i1, i2), (j1, j2) = here, there
    for begin in sorted({0} if cut else {0, max(i1 - 1, 0), i1}):
        left = [*(["*"] if begin else []), *one[begin:i1]]
        for finish in sorted({i2} if cut else {i2, min(i2 + 1, len(one)), len(one)}):
            right = [*one[i2:finish], *(["*"] if finish < len(one) else [])]
            pattern, replacement = [*left, *one[i1:i2], *right], [*left, *other[j1:j2], *right]
            if pattern.count("*") == replacement.count("*") and pattern and replacement and pattern != replacement:
                yield ".".join(pattern), ".".join(replacement)


def covering(names: Collection[str], others: Collection[str]) -> list[str]:
    """Returns patterns that match these names and none of the others."""
    left, found = dict.fromkeys(names), []
    while left:
        rows = families([(name,) for name in left])
        candidates: dict[str, None] = {}
        for one in rows:
            pattern = _without_numbers(one.members[0][0]).replace("#", "*")
            parts = pattern.split(".")
            candidates.update(dict.fromkeys([f"*.{'.'.join(parts[at:])}" for at in range(len(parts) - 2, 0, -1)]))
            candidates[pattern] = None
        best = ("", -1)
        for text in candidates:
            template = Template(text)
            if any(template.match(name) is not None for name in others):
                continue
            count = sum(1 for name in left if template.match(name) is not None)
            if count >= best[1]:
                best = (text, count)
        chosen = best[0] or next(iter(left))
        found.append(chosen)
        fitting = Template(chosen)
        left = {name: None for name in left if fitting.match(name) is None}
    return found
