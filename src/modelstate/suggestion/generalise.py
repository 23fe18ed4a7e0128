"""Few and general rules out of single pairs of names."""

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
"""How often a rule is tried on a name, before each kind of name gets a rule of its own. A second, at most."""
_MANY = 48
"""So many kinds of names are taken in steps, if that is possible at all: a rule for each would be too much to read."""
_FEW = 8
"""So few rules need not become fewer."""


@dataclass(slots=True)
class Family:
    """Names that differ in numbers only, and what becomes of them: patterns with * for these numbers."""

    patterns: Names
    """First that of the name, then those of what is made of it."""
    members: list[Names] = field(default_factory=list)


def families(rows: Iterable[Names]) -> list[Family]:
    """Rows of names that belong together; a number becomes * where it is the same on all sides."""
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
    """Places of numbers that are equal on all sides in every row, in order: for each side the place in the name."""
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
    """Rules that make each name what it is to be, and leave the fixed ones alone.

    Loose names, of which nothing is known, may become anything but those that are `barred`.

    Two ways are tried: each name in one step, and the parts of names one after the other. The shorter list counts.
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
"""How much nearer a name comes to its goal, from what it is before and after. Negative where it does not."""


@dataclass(slots=True)
class _Class:
    """Names that differ in numbers only, as they are in the course of the rules."""

    goal: list[str]
    now: list[str]

    @property
    def ends(self) -> range:
        """The first and the last, which say enough to choose by."""
        return range(0, len(self.now), max(len(self.now) - 1, 1))


@dataclass(slots=True)
class _Bounds:
    """What rules may not do, and how long to look for better ones."""

    fixed: "_Lines"
    loose: list[str]
    barred: set[str]
    left: int = _MOST_LOOKS
    """How often a rule may still be tried on a name."""


def _greedy(pairs: Mapping[str, str], bounds: _Bounds, gain: Gain) -> tuple[list[Rule], bool]:
    """The rule that gains most, then the next, until nothing is left; and whether something is."""
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
    """Whether it leaves alone what is fixed, and makes nothing that is barred."""
    if any(name != after for name, after in bounds.fixed.changed(change)):
        return False
    return not any(name != after and after in bounds.barred for name, after in loose.changed(change))


class _Change:
    """What a rule does, without the rule's own checks."""

    def __init__(self, pattern: str, replacement: str) -> None:
        self.text = (pattern, replacement)
        self._pieces = replacement.split("*")
        # Many names are looked at as one text, a name a line.
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
    """Names as one text, in which a pattern finds those that are like it at once."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._text = "\n".join(names)
        starts = [0, *accumulate(len(name) + 1 for name in names)]
        self._at = {start: at for at, start in enumerate(starts[: len(names)])}

    def places(self, change: _Change) -> Iterator[tuple[int, str]]:
        """Which names the change applies to, and what it makes of them."""
        for found in change.expression.finditer(self._text):
            at = self._at.get(found.start())
            if at is not None:
                yield at, change.filled(found)

    def changed(self, change: _Change) -> Iterator[tuple[str, str]]:
        return ((self.names[at], after) for at, after in self.places(change))


def _worth(change: _Change, places: Sequence[tuple[_Class, int]], lines: _Lines, gain: Gain) -> int:
    """How many names, or parts of them, become right; negative where something becomes wrong."""
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
    """Only a final name counts."""
    return 1 if after == goal else -1


def _nearer(before: str, after: str, goal: str) -> int:
    """How many parts of the name become right, where nothing is put in that does not belong there."""
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
    """Changes that could be meant, for a pattern and what it is to become."""
    texts = dict.fromkeys(_candidates(name, goal))
    return tuple(_change(one) for one in texts if one[0].count("*") == one[1].count("*"))


@lru_cache(maxsize=65536)
def _change(texts: tuple[str, str]) -> "_Change":
    return _Change(*texts)


def _candidates(name: str, goal: str) -> Iterator[tuple[str, str]]:
    """Renames that could be meant, from the general to the special."""
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
    """Where two names differ: the parts of the one that become parts of the other."""
    for code, i1, i2, j1, j2 in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if code != "equal" and i2 - i1 == j2 - j1:
            yield from (((i, i + 1), (j, j + 1)) for i, j in zip(range(i1, i2), range(j1, j2), strict=True))
        elif code != "equal":
            yield (i1, i2), (j1, j2)


def _around(
    one: Sequence[str], other: Sequence[str], here: tuple[int, int], there: tuple[int, int], cut: bool = False
) -> Iterator[tuple[str, str]]:
    """The change of a middle part, with more or less of what is around it."""
    (i1, i2), (j1, j2) = here, there
    for begin in sorted({0} if cut else {0, max(i1 - 1, 0), i1}):
        left = [*(["*"] if begin else []), *one[begin:i1]]
        for finish in sorted({i2} if cut else {i2, min(i2 + 1, len(one)), len(one)}):
            right = [*one[i2:finish], *(["*"] if finish < len(one) else [])]
            pattern, replacement = [*left, *one[i1:i2], *right], [*left, *other[j1:j2], *right]
            if pattern.count("*") == replacement.count("*") and pattern and replacement and pattern != replacement:
                yield ".".join(pattern), ".".join(replacement)


def covering(names: Collection[str], others: Collection[str]) -> list[str]:
    """Patterns that fit these names and none of the others."""
    left, found = dict.fromkeys(names), []
    while left:
        rows = families([(name,) for name in left])
        candidates: dict[str, None] = {}
        for one in rows:
            pattern = _with_all_stars(one.members)
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


def _with_all_stars(members: Sequence[Names]) -> str:
    return _without_numbers(members[0][0]).replace("#", "*")
