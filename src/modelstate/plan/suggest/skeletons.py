"""Names with their numbers taken out: what the layers of a model have in common."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from modelstate.plan.suggest.concepts import concepts, of_path, role_of

Shape = tuple[int, ...]
Ranks = tuple[int, ...]
Profile = tuple[tuple[Ranks, Shape, str], ...]
"""What a skeleton is like, whatever its name: shape and kind of dtype, at each combination of its numbers."""

Told = tuple[int, frozenset[str]]
"""What a part of a name means where it stands, and which part."""

NUMBERED = frozenset({"linear"})
"""What is told of weights that come one after the other: their numbers count."""
_ALIKE = 0.5


class Level(Enum):
    """Which numbers are taken out."""

    ALL = "all"
    WHOLE = "whole"
    """Only those that are a whole part of a name."""
    SAME = "same"
    """Only those of these that tell apart parts of the same shapes: layers, and not the members of an MLP."""
    NONE = "none"


_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, by what is known without its values."""

    name: str
    shape: Shape
    kind: str
    """The kind of its dtype: "float", "int", "bool" or "complex"."""
    told: tuple[Told, ...] = field(default=(), compare=False)
    """What parts of the name mean beside those of its neighbours, where that is not what they mean alone."""

    def words(self, at: int) -> frozenset[str]:
        """What one part of the name means."""
        return dict(self.told)[at] if at in dict(self.told) else concepts(self.name.split(".")[at])


def kind_of(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"


@dataclass(slots=True)
class Skeleton:
    """Tensors whose names differ in numbers only."""

    text: str
    """The name, with # for the numbers that were taken out."""
    leaves: dict[Ranks, Leaf]
    """By what place each number has among all that stand there; numbers that are always the same are left out."""
    role: str
    owner: str
    """The text without what says the role."""
    means: frozenset[str]
    taken: int = 0
    """How many numbers were taken out."""
    varied: tuple[int, ...] = ()
    """Which of them are not always the same."""
    constant: tuple[str, ...] = ()
    """Those within words that are: norm1 alone is not ln_2 alone."""

    def profile(self, flipped: bool = False) -> Profile:
        return tuple(
            sorted(
                (ranks, leaf.shape[::-1] if flipped else leaf.shape, leaf.kind) for ranks, leaf in self.leaves.items()
            )
        )


@dataclass(slots=True)
class _Name:
    leaf: Leaf
    texts: list[str]
    numbers: list[str]
    text: str = ""
    taken: list[tuple[str, str]] = field(default_factory=list)
    """Numbers that were taken out, each with the text before it."""
    ordinals: list[tuple[str, str]] = field(default_factory=list)
    """Numbers that were left, each with the text before it."""


def skeletons(leaves: Iterable[Leaf], level: Level) -> list[Skeleton]:
    """The skeletons of names, in their order.

    A number is taken out where the parts that it tells apart are alike, as the layers of an encoder are; not where
    they differ, as the members of most `nn.Sequential` do.
    """
    names = []
    for leaf in leaves:
        pieces = _pieces(leaf)
        names.append(_Name(leaf, pieces[::2], pieces[1::2], pieces[0]))
    places: dict[str, set[str]] = defaultdict(set)
    for depth in range(max((len(name.numbers) for name in names), default=0)):
        _take_out(names, depth, places, level)
    return _collected(names, places)


def _pieces(leaf: Leaf) -> list[str]:
    """The name, cut at its numbers; those that say nothing certain of the order, as in w1, are none."""
    kept = {at for at, words in leaf.told if words != NUMBERED}
    if not kept:
        return _NUMBER.split(leaf.name)
    pieces = [""]
    for at, segment in enumerate(leaf.name.split(".")):
        first, *others = [segment] if at in kept else _NUMBER.split(segment)
        pieces[-1] += f".{first}" if at else first
        pieces += others
    return pieces


def _take_out(names: list[_Name], depth: int, places: dict[str, set[str]], level: Level) -> None:
    """Decides about the number at this depth of every name."""
    below: dict[str, dict[str, set[tuple[str, int | Shape]]]] = defaultdict(lambda: defaultdict(set))
    deep = [name for name in names if depth < len(name.numbers)]
    for name in deep:
        rest = "#".join(name.texts[depth + 1 :])
        shape = name.leaf.shape
        below[name.text][name.numbers[depth]].add((rest, shape if level is Level.SAME else len(shape)))
    lists = {text: _are_alike(list(values.values())) for text, values in below.items()}
    for text, values in below.items():
        places[text] |= values.keys()
    for name in deep:
        number, text = name.numbers[depth], name.text
        after = name.texts[depth + 1]
        is_whole = (not text or text[-1] == ".") and (not after or after[0] == ".")
        taken = lists[text] and (level is Level.ALL or (level is not Level.NONE and is_whole))
        (name.taken if taken else name.ordinals).append((text, number))
        name.text += ("#" if taken else number) + after


def _are_alike(contents: list[set[tuple[str, int | Shape]]]) -> bool:
    most = max(contents, key=len)
    return all(len(one & most) >= _ALIKE * len(one | most) for one in contents)


def _collected(names: list[_Name], places: Mapping[str, set[str]]) -> list[Skeleton]:
    rank = {
        (text, number): (at, len(numbers))
        for text, numbers in places.items()
        for at, number in enumerate(sorted(numbers, key=_in_order))
    }
    groups: dict[str, list[_Name]] = defaultdict(list)
    for name in names:
        groups[name.text].append(name)
    found = []
    for text, members in groups.items():
        columns = list(zip(*(name.taken for name in members), strict=True))
        varied = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        leaves = {tuple(rank[name.taken[at]][0] for at in varied): name.leaf for name in members}
        ordinals = [(before[-1:] in ("", "."), *rank[before, number]) for before, number in members[0].ordinals]
        skeleton = _skeleton(text, leaves, ordinals)
        skeleton.taken, skeleton.varied = len(columns), tuple(varied)
        within = (at for at, column in enumerate(columns) if at not in varied and column[0][0][-1:] not in ("", "."))
        skeleton.constant = tuple(columns[at][0][1] for at in within)
        found.append(skeleton)
    return found


def _in_order(number: str) -> tuple[int, str, str]:
    """By size, however long it is."""
    bare = number.lstrip("0")
    return len(bare), bare, number


def _skeleton(text: str, leaves: dict[Ranks, Leaf], ordinals: list[tuple[bool, int, int]]) -> Skeleton:
    """`ordinals` are the numbers that were left: whether each is a part of its own, its place, and of how many."""
    owner, _, last = text.rpartition(".")
    rest, role = role_of(last)
    owner = ".".join(filter(None, (owner, rest)))
    means = set(of_path(owner.split("."), dict(next(iter(leaves.values())).told)))
    for is_whole in (True, False):
        # The last number of a kind has to do with the last one of the other side.
        places = [(at, count) for whole, at, count in reversed(ordinals) if whole is is_whole]
        means |= {f"#{is_whole}{back}:{at}/{count}" for back, (at, count) in enumerate(places) if count > 1}
    if ordinals and "norm" in means and "#" in owner and owner[-1].isdecimal():
        is_whole, at, count = ordinals[-1]
        if count == 2 and not is_whole:
            # Of two norms in a layer the first goes with attention, the second with what follows.
            means.add("second" if at else "first")
    return Skeleton(text, leaves, role, owner, frozenset(means))
