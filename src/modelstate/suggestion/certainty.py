"""Says which matches are sure, and which are guesses.

A match is sure where names or structure leave no other one: the words and numbers that both names share are together in
no other open name of a tensor of this size, or all other tensors of this size have a sure match. Everything else is a
guess, however high its score is.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from modelstate.suggestion.skeletons import Leaf, Level, skeletons
from modelstate.suggestion.words import GENERIC, PARTS, role_of

_NUMBER = re.compile(r"\d+")
Match = tuple[str, str]
"""A name of the checkpoint, and a name of the model that gets its values or a part of them."""


class Owner(NamedTuple):
    """What the names of a module and of its counterpart share, once one pair of their tensors is sure."""

    path: str


class Role(NamedTuple):
    """The role of a tensor in its module: "weight", "bias", ..."""

    name: str


class _Side:
    """The open names of one side: what each of them says, and which ones have tensors of the same size.

    Sets of names are the bits of a number, so that names are compared in time that hardly grows with their count.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.words: dict[str, frozenset[str]] = {}
        """The words of a name that say which tensor it is."""
        self.own: dict[str, frozenset[str]] = {}
        """Those of the last part of the name that has any."""
        self.tokens: dict[str, set[Hashable]] = defaultdict(set)
        """The words of a name with those of its parts, the role of its tensor, and the places of its numbers."""
        self.fused: set[str] = set()
        """Open names of tensors that may be fused."""
        self._places: dict[str, list[tuple[str, int]]] = {}
        """The numbers of layers in a name, each after the text before it."""
        self._numbers: dict[str, set[int]] = defaultdict(set)
        """All numbers in each place."""
        self.by_owner: dict[str, list[str]] = defaultdict(list)
        self._group: dict[str, Hashable] = {leaf.name: _size(leaf) for leaf in leaves}
        self._bit = {leaf.name: 1 << at for at, leaf in enumerate(leaves)}
        self._members: dict[Hashable, int] = defaultdict(int)
        self._having: dict[tuple[Hashable, Hashable], int] = defaultdict(int)
        for name, group in self._group.items():
            self._members[group] |= self._bit[name]
            self.by_owner[owner_path(name)].append(name)
        for level in (Level.WHOLE, Level.ALL):
            for skeleton in skeletons(leaves, level):
                for ranks, leaf in skeleton.leaves.items():
                    places = {(level, at, rank) for at, rank in enumerate(ranks)}
                    words = skeleton.means - GENERIC
                    self.add(leaf.name, {*_with_parts(words), *places, Role(skeleton.role)})
                    self.words[leaf.name] = frozenset(word for word in words if not word.startswith("#"))
                    if words & PARTS.keys():
                        self.fused.add(leaf.name)
                    if level is Level.WHOLE:
                        self._places[leaf.name] = _places(skeleton.text, leaf.name)
                        for place, number in self._places[leaf.name]:
                            self._numbers[place].add(number)
                    parts = [leaf.words(at) - GENERIC for at in range(skeleton.owner.count(".") + 1)]
                    self.own[leaf.name] = next((part for part in reversed(parts) if part), frozenset())

    def __contains__(self, name: object) -> bool:
        return name in self._group

    def add(self, name: str, tokens: Iterable[Hashable]) -> None:
        """Adds what is known about a name."""
        for token in tokens:
            self.tokens[name].add(token)
            self._having[self._group[name], token] |= self._bit[name]

    def settle(self, name: str) -> None:
        """Records that a name has a sure match, so that no other match can be with it."""
        self._members[self._group[name]] &= ~self._bit[name]
        self.fused.discard(name)

    def ranks(self, name: str) -> list[int]:
        """Returns the rank of each number of a layer among those in its place, where there are others."""
        places = [(self._numbers[place], number) for place, number in self._places[name]]
        return [sum(other < number for other in numbers) for numbers, number in places if len(numbers) > 1]

    def is_unique(self, name: str) -> bool:
        """Whether no other name, be it open or not, has a tensor of this size and role."""
        group = self._group[name]
        roles = [token for token in self.tokens[name] if type(token) is Role]
        return all(self._having[group, role] == self._bit[name] for role in roles)

    def is_only(self, name: str, tokens: Iterable[Hashable]) -> bool:
        """Whether no other open name of this size has all these tokens."""
        group = self._group[name]
        others = self._members[group] & ~self._bit[name]
        for token in tokens:
            others &= self._having[group, token]
        return not others

    def has_rival(self, name: str, words: Iterable[str]) -> bool:
        """Whether another open name of this size has one of these words."""
        group = self._group[name]
        others = self._members[group] & ~self._bit[name]
        return any(others & self._having[group, word] for word in words)


def _with_parts(words: Iterable[str]) -> set[str]:
    """Returns the words, and beside that of a fused tensor those of its parts."""
    return {*words, *(part for word in words for part in PARTS.get(word, ()))}


def _is_place(token: Hashable) -> bool:
    """Whether a token says which layer it is, or which member of a module by number."""
    return type(token) is tuple or (isinstance(token, str) and token.startswith("#"))


def _places(text: str, name: str) -> list[tuple[str, int]]:
    """Returns each number that is # in the text of a skeleton, after the text before it."""
    parts = text.split(".")
    return [
        (".".join(parts[:at]), int(number))
        for at, (part, number) in enumerate(zip(parts, name.split("."), strict=True))
        if part == "#"
    ]


def owner_path(name: str) -> str:
    """Returns the path of the module that owns the tensor."""
    path, _, last = name.rpartition(".")
    return f"{path}.{role_of(last)[0]}"


def _size(leaf: Leaf) -> Hashable:
    """Returns what is equal for tensors that could take each other's place, transposed or reshaped too."""
    return tuple(sorted(size for size in leaf.shape if size != 1)), leaf.kind


def guesses(
    sources: Sequence[Leaf], targets: Sequence[Leaf], matches: Collection[Match], *, is_whole: bool
) -> set[str]:
    """Returns the names of the model whose match is a guess.

    Args:
        sources: the tensors of the checkpoint.
        targets: the tensors of the model.
        matches: the matches, also those of the parts of fused tensors.
        is_whole: whether every tensor of both sides has a match, so that what is left over belongs together.
    """
    first, second = _Side(sources), _Side(targets)

    def is_sure(match: Match) -> bool:
        source, target = match
        if source == target:
            return True
        if source not in first or target not in second:
            return False
        common = first.tokens[source] & second.tokens[target]
        # Numbers that differ may stand for the same layers only where no layer lacks a match.
        of_source, of_target = (first.ranks(source), second.ranks(target)) if is_whole else map(_NUMBER.findall, match)
        if of_source != of_target and len(of_source) == len(of_target):
            return False
        words = first.own[source] & second.own[target] & common
        is_part = any(words & {*parts} for parts in PARTS.values()) and not (
            source in first.fused or target in second.fused
        )
        if is_part and (first.fused or second.fused):
            return False
        here, there = first.words[source] - second.tokens[target], second.words[target] - first.tokens[source]
        if here and there and not is_whole:
            return False
        is_named = bool(first.own[source] & common and second.own[target] & common)
        is_prefixed = source.endswith(f".{target}") or target.endswith(f".{source}")
        is_placed = any(type(token) is Owner or (is_whole and _is_place(token)) for token in common)
        is_unique = is_whole and first.is_unique(source) and second.is_unique(target)
        return (
            (is_named or is_prefixed or is_placed or is_unique)
            and first.is_only(source, common)
            and second.is_only(target, common)
            and not second.has_rival(target, here)
            and not first.has_rival(source, there)
        )

    left = list(matches)
    while sure := {match for match in left if is_sure(match)}:
        left = [match for match in left if match not in sure]
        open_names = tuple({match[side] for match in left} for side in (0, 1))
        for match in sure:
            owner = Owner(owner_path(match[1]))
            for side, name, names in zip((first, second), match, open_names, strict=True):
                if name not in side:
                    continue
                if name not in names:
                    side.settle(name)
                for sibling in side.by_owner[owner_path(name)]:
                    side.add(sibling, (owner,))
    return {target for _, target in left}
