"""Says which matches are sure, and which are guesses.

A match is sure where names or structure leave no other one: the words and numbers that both names share are together in
no other open name of a tensor of this size, or all other tensors of this size have a sure match. Everything else is a
guess, however high its score is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence

from modelstate.suggestion.match import Leaf, kinds_of
from modelstate.suggestion.words import GENERIC, PARTS, role_of

_NUMBER = re.compile(r"\d+")
Match = tuple[str, str]
"""A name of the checkpoint, and a name of the model that gets its values or a part of them."""


Token = str | tuple[str, *tuple[str | int, ...]]
"""A fact that a name states: a word, or a tuple that begins with its kind.

- `("role", name)`: the role of the tensor in its module: "weight", "bias", ...
- `("place", within_words, at, rank)`: which layer it is, by the rank of its number among those in this place.
- `("owner", path)`: the module of the counterpart, once one pair of tensors of both modules is sure.
"""


class _Side:
    """The names of one side: what each of them says, and which open ones have tensors of the same size."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.tokens: dict[str, set[Token]] = defaultdict(set)
        """The words of a name with those of its parts, the role of its tensor, and the places of its numbers."""
        self.words: dict[str, frozenset[str]] = {}
        """The words of a name that say which tensor it is."""
        self.own: dict[str, frozenset[str]] = {}
        """The words of the last part of the name that has any."""
        self.ranks: dict[str, tuple[int, ...]] = {}
        """The ranks of the numbers of layers in a name."""
        self.siblings: dict[str, list[str]] = defaultdict(list)
        # What is equal for tensors that could take each other's place, transposed or reshaped too.
        self._size = {
            leaf.name: (tuple(sorted(size for size in leaf.shape if size != 1)), leaf.dtype_kind) for leaf in leaves
        }
        self._open: dict[Hashable, set[str]] = defaultdict(set)
        self._having: dict[tuple[Hashable, Token], set[str]] = defaultdict(set)
        for name, size in self._size.items():
            self._open[size].add(name)
            self.siblings[_owner_path(name)].append(name)
        for within_words in (False, True):
            for kind in kinds_of(leaves, within_words=within_words):
                words = kind.means - GENERIC
                for ranks, leaf in kind.leaves.items():
                    places = {("place", within_words, at, rank) for at, rank in enumerate(ranks)}
                    self.add(leaf.name, {*_with_parts(words), *places, ("role", kind.role)})
                    parts = [leaf.words(at) - GENERIC for at in range(kind.owner.count(".") + 1)]
                    self.own[leaf.name] = next((part for part in reversed(parts) if part), frozenset())
                    self.words[leaf.name] = frozenset(word for word in words if not word.startswith("#"))
                    if not within_words:
                        self.ranks[leaf.name] = kind.places[leaf.name]

    def __contains__(self, name: object) -> bool:
        return name in self._size

    def add(self, name: str, tokens: Iterable[Token]) -> None:
        """Adds what is known about a name."""
        for token in tokens:
            self.tokens[name].add(token)
            self._having[self._size[name], token].add(name)

    def settle(self, name: str) -> None:
        """Records that a name has a sure match, so that no other match can be with it."""
        self._open[self._size[name]].discard(name)

    def is_unique(self, name: str) -> bool:
        """Whether no other name, be it open or not, has a tensor of this size and role."""
        roles = [token for token in self.tokens[name] if token[:1] == ("role",)]
        return all(self._having[self._size[name], role] == {name} for role in roles)

    def is_only(self, name: str, tokens: Iterable[Token]) -> bool:
        """Whether no other open name of this size has all these tokens."""
        size = self._size[name]
        return self._open[size].intersection(*(self._having[size, token] for token in tokens)) <= {name}

    def has_rival(self, name: str, words: Iterable[str]) -> bool:
        """Whether another open name of this size has one of these words."""
        size = self._size[name]
        return any(self._open[size] & self._having[size, word] - {name} for word in words)


def _with_parts(words: Iterable[str]) -> set[str]:
    """Returns the words, and beside that of a fused tensor those of its parts."""
    return {*words, *(part for word in words for part in PARTS.get(word, ()))}


def _owner_path(name: str) -> str:
    path, _, last = name.rpartition(".")
    return f"{path}.{role_of(last)[0]}"


def guesses(
    sources: Sequence[Leaf], targets: Sequence[Leaf], matches: Collection[Match], *, is_whole: bool
) -> set[str]:
    """Returns the names of the model whose match is a guess.

    Args:
        sources: The tensors of the checkpoint.
        targets: The tensors of the model.
        matches: The matches, also those of the parts of fused tensors.
        is_whole: Whether every tensor of both sides has a match, so that what is left over belongs together.
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
        of_source, of_target = (first.ranks[source], second.ranks[target]) if is_whole else map(_NUMBER.findall, match)
        if of_source != of_target and len(of_source) == len(of_target):
            return False
        here, there = first.words[source] - second.tokens[target], second.words[target] - first.tokens[source]
        if here and there and not is_whole:
            return False
        return (
            (
                bool(first.own[source] & common and second.own[target] & common)
                or source.endswith(f".{target}")
                or target.endswith(f".{source}")
                or any(token[0] == "owner" for token in common)
                or (is_whole and any(token[0] in ("place", "#") for token in common))
                or (is_whole and first.is_unique(source) and second.is_unique(target))
            )
            and first.is_only(source, common)
            and second.is_only(target, common)
            and not second.has_rival(target, here)
            and not first.has_rival(source, there)
        )

    left, sure = list(matches), {*matches}
    while sure:
        sure = {match for match in left if is_sure(match)}
        left = [match for match in left if match not in sure]
        still_open = tuple({match[side] for match in left} for side in (0, 1))
        for match in sure:
            owner = ("owner", _owner_path(match[1]))
            for side, name, names in zip((first, second), match, still_open, strict=True):
                if name not in side:
                    continue
                if name not in names:
                    side.settle(name)
                for sibling in side.siblings[_owner_path(name)]:
                    side.add(sibling, (owner,))
    return {target for _, target in left}
