"""Matches tensors of a checkpoint with those of a model, and finds which weights are transposed."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import msgspec

from modelstate.suggestion.skeletons import Leaf, Level, Profile, Skeleton, skeletons
from modelstate.suggestion.words import (
    concepts,
    contradict,
    lacked,
    role_of,
    shared,
    without_digits,
)
from modelstate.text_format import without_numbers


class Orientation(msgspec.Struct, frozen=True):
    """The orientation of the weights of one side."""

    transposed: frozenset[str]
    """Names of the weights that certainly have their inputs first, as in a Conv1D."""
    families: Mapping[str, frozenset[bool]]
    """Whether weights of a layer are certainly transposed or not, by the path of the layer."""

    def of_square(self, name: str) -> bool | None:
        """Whether a square weight is transposed, as its neighbours are; None if they do not agree."""
        known = self.families.get(family(name), frozenset())
        return next(iter(known)) if len(known) == 1 else None

    def is_transposed(self, leaf: Leaf) -> bool:
        """Whether a weight certainly is transposed, or is square and its neighbours are."""
        return leaf.name in self.transposed or (leaf.is_square and self.of_square(leaf.name) is True)

    @property
    def transposed_layers(self) -> set[str]:
        """Layers in which all weights of known orientation are transposed."""
        return {layer for layer, known in self.families.items() if known == {True}}

    def straight(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Returns the tensors with the shapes that they have in a Linear."""
        return [replace(leaf, shape=leaf.shape[::-1]) if leaf.name in self.transposed else leaf for leaf in leaves]


def family(name: str) -> str:
    """Returns the path of the layer of a tensor, with # for numbers."""
    text = without_numbers(name)
    return text[: text.rfind("#") + 1]


def orientation(leaves: Iterable[Leaf]) -> Orientation:
    """Returns the orientation that the shapes of weights and their biases show."""
    owners: dict[str, dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        path, _, last = leaf.name.rpartition(".")
        rest, role = role_of(last)
        owners[f"{path}.{rest}"][role] = leaf
    transposed: set[str] = set()
    families: dict[str, set[bool]] = defaultdict(set)
    for roles in owners.values():
        weight, bias = roles.get("weight"), roles.get("bias")
        if weight is None or bias is None or len(weight.shape) != 2 or len(bias.shape) != 1:
            continue
        first, second = (size == bias.shape[0] for size in weight.shape)
        if first != second:
            families[family(weight.name)].add(second)
            if second:
                transposed.add(weight.name)
    return Orientation(frozenset(transposed), {path: frozenset(known) for path, known in families.items()})


IsTransposed = Callable[[Leaf, Leaf], bool]
"""Whether a tensor of the checkpoint certainly is transposed, compared with one of the model."""


def _certainly_transposed(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    pairing: "Pairing",
    source_layers: Collection[str],
    target_layers: Collection[str],
) -> IsTransposed:
    """Returns what the shapes show: the weights that fit in no other way, and their neighbours in a layer.

    `source_layers` and `target_layers` are the layers with weights of a Conv1D.
    """
    all_contents = {(leaf.shape, leaf.kind) for leaf in targets}
    open_contents = {(leaf.shape, leaf.kind) for leaf in pairing.open_targets(targets)}
    names = {
        leaf.name
        for leaf in pairing.open_sources(sources)
        if len(leaf.shape) == 2
        and (leaf.shape, leaf.kind) not in all_contents
        and (leaf.shape[::-1], leaf.kind) in open_contents
    }
    source_layers, target_layers = {*source_layers, *map(family, names)} - {""}, {*target_layers} - {""}

    def is_transposed(source: Leaf, target: Leaf) -> bool:
        return source.name in names or (family(source.name) in source_layers) != (family(target.name) in target_layers)

    return is_transposed


_SAME_WORD, _SAME_KIND = 0.5, 0.5
_MARGIN = 0.25


def order_is_clear(source: Skeleton, target: Skeleton) -> bool:
    """Whether numbers whose exchange would change nothing can be told apart by the words before them."""
    if len(source.varied) != len(target.varied):
        return True
    content = {ranks: (leaf.shape, leaf.kind) for ranks, leaf in source.leaves.items()}
    for i, j in combinations(range(len(source.varied)), 2):
        order = [*range(len(source.varied))]
        order[i], order[j] = j, i
        if all(content.get(tuple(ranks[at] for at in order)) == what for ranks, what in content.items()):
            straight = _alike(source, i, target, i) + _alike(source, j, target, j)
            crossed = _alike(source, i, target, j) + _alike(source, j, target, i)
            if straight - crossed < _MARGIN:
                return False
    return True


def _alike(source: Skeleton, i: int, target: Skeleton, j: int) -> float:
    """Returns how similar the text before a varying number is to the text before one of the other side."""
    words, concept_sets, are_whole = [], [], []
    for skeleton, number in ((source, i), (target, j)):
        texts, at = skeleton.text.split("#"), skeleton.varied[number]
        parts = [part for part in texts[at].lower().split(".") if part]
        words.append(parts[-1:])
        concept_sets.append(frozenset[str]().union(*map(concepts, parts)))
        are_whole.append(texts[at][-1:] in ("", ".") and texts[at + 1][:1] in ("", "."))
    score = shared(*concept_sets)
    if words[0] and words[0] == words[1]:
        score += _SAME_WORD
    return score + (_SAME_KIND if are_whole[0] == are_whole[1] else 0.0)


_EVIDENT = 0.2
"""The least score for a pair that is not the only possible one."""
_SAME_OWNER, _SAME_PARENT, _SAME_LAYER, _OTHER_LAYER = 2.0, 0.75, 0.25, -0.5
_MOST_CANDIDATES = 20_000

Signature = tuple[tuple[str, Profile], ...]


class Unit(msgspec.Struct):
    """What is matched together: the tensors of an owner, such as weight and bias, or a single tensor."""

    roles: dict[str, Skeleton]
    means: frozenset[str]
    owner: str
    parent: str
    layer: str

    @property
    def skeleton(self) -> Skeleton:
        """The skeleton of a single tensor, or the first one."""
        return next(iter(self.roles.values()))

    @property
    def sample(self) -> Leaf:
        """One of the tensors."""
        return next(iter(self.skeleton.leaves.values()))

    def signature(self, flipped: bool = False) -> Signature:
        return tuple(sorted((role, skeleton.profile(flipped)) for role, skeleton in self.roles.items()))


class Pairing(msgspec.Struct):
    """The matches so far."""

    pairs: dict[str, str] = msgspec.field(default_factory=dict)
    """From names of the checkpoint to names of the model."""
    by_shape: set[str] = msgspec.field(default_factory=set)
    """Names of the model that were matched by shape alone."""
    sources: set[str] = msgspec.field(default_factory=set)
    """Names of the checkpoint that are settled: matched, or part of a fusion."""
    targets: set[str] = msgspec.field(default_factory=set)
    """Names of the model that are settled."""
    crossed: set[tuple[str, str]] = msgspec.field(default_factory=set)
    """Pairs of names without digits whose numbers cannot be told apart."""
    _owners: dict[str, str] = msgspec.field(default_factory=dict)
    _parents: set[tuple[str, str]] = msgspec.field(default_factory=set)
    _layers: dict[str, set[str]] = msgspec.field(default_factory=lambda: defaultdict(set))
    _layers_back: dict[str, set[str]] = msgspec.field(default_factory=lambda: defaultdict(set))

    def add(self, source: str, target: str, by_shape: bool = False) -> None:
        """Records that two tensors match."""
        self.pairs[source] = target
        if by_shape:
            self.by_shape.add(target)
        self._owners[owner_of(source)] = owner_of(target)
        self.take(source, target)

    def open_sources(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        return [leaf for leaf in leaves if leaf.name not in self.sources]

    def open_targets(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        return [leaf for leaf in leaves if leaf.name not in self.targets]

    def take(self, source: str, target: str) -> None:
        """Records that one of two tensors is a part of the other, or matches it."""
        self.sources.add(source)
        self.targets.add(target)
        self._parents.add((owner_of(source).rpartition(".")[0], owner_of(target).rpartition(".")[0]))
        self._layers[family(source)].add(family(target))
        self._layers_back[family(target)].add(family(source))

    def are_apart(self, source: Unit, target: Unit) -> bool:
        """Whether the two are in layers that are known to match other layers."""
        known = self._layers.get(source.layer, set()), self._layers_back.get(target.layer, set())
        return bool(source.layer and target.layer and all(known)) and target.layer not in known[0]

    def context(self, source: Unit, target: Unit) -> float:
        """Returns the score that the matches of owners, parents and layers give to a pair."""
        score = 0.0
        if source.owner in self._owners and "" not in source.roles:
            score += _SAME_OWNER if self._owners[source.owner] == target.owner else -_SAME_OWNER
        if (source.parent, target.parent) in self._parents:
            score += _SAME_PARENT
        if target.layer in self._layers.get(source.layer, ()):
            score += _SAME_LAYER
        elif source.layer in self._layers or target.layer in self._layers_back:
            score += _OTHER_LAYER
        return score


def _can_be(source: Unit, target: Unit, pairing: Pairing) -> bool:
    """Whether two units can match at all, whatever their score."""
    if contradict(source.means, target.means) or pairing.are_apart(source, target):
        return False
    sides = [(skeleton, target.roles[role]) for role, skeleton in source.roles.items()]
    for first, second in sides:
        # If both names have the same count of numbers, the same ones must vary: a layer is not a part of a layer.
        if first.taken == second.taken and first.varied != second.varied:
            return False
        if first.constant and second.constant and first.constant != second.constant:
            return False
    if _counts_otherwise(source, target) or _counts_otherwise(target, source):
        return False
    # A pair that is ambiguous for all layers together is ambiguous for each of them.
    names = without_digits(source.owner), without_digits(target.owner)
    if names not in pairing.crossed and not all(order_is_clear(*pair) for pair in sides):
        pairing.crossed.add(names)
    return names not in pairing.crossed


def _counts_otherwise(numbered: Unit, named: Unit) -> bool:
    """Whether one is a numbered norm and the other is a norm with another ordinal: norm1 and second."""
    numbers = {number for skeleton in numbered.roles.values() for number in skeleton.constant}
    ordinals = {number for word, number in _ORDINALS.items() if word in named.means}
    return "norm" in numbered.means and bool(numbers) and bool(ordinals) and not numbers & ordinals


_ORDINALS = {"first": "1", "second": "2"}


def owner_of(name: str) -> str:
    """Returns the path of the module that owns the tensor, with # for numbers."""
    path, _, last = name.rpartition(".")
    return without_numbers(".".join(filter(None, (path, role_of(last)[0]))))


def match(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    pairing: Pairing,
    source_layers: Collection[str] = (),
    target_layers: Collection[str] = (),
) -> None:
    """Matches tensors with a single good answer, level by level with more detail.

    `source_layers` and `target_layers` are the layers whose weights certainly are transposed.
    """
    for level in Level:
        for owners in (True, False):
            _match_level(sources, targets, pairing, level, owners=owners)
    is_transposed = _certainly_transposed(sources, targets, pairing, source_layers, target_layers)
    for level in (Level.WHOLE, Level.NONE):
        _match_level(sources, targets, pairing, level, owners=False, is_transposed=is_transposed)


def _match_level(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    pairing: Pairing,
    level: Level,
    *,
    owners: bool,
    is_transposed: IsTransposed | None = None,
) -> None:
    """Matches tensors until nothing changes; with `is_transposed`, the shapes of the checkpoint are reversed."""
    # The meaning of numbers depends on all names, including settled ones.
    first = buckets(units(sources, level, owners, pairing.sources), is_transposed is not None)
    second = buckets(units(targets, level, owners, pairing.targets), False)
    counts: dict[Signature, tuple[int, int]] = {}
    for signature, left in first.items():
        if is_transposed is not None:
            has_matrix = any(len(shape) == 2 and shape[0] != shape[1] for _, p in signature for _, shape, _ in p)
            # A tensor that fits a target as it is shows nothing.
            left = first[signature] = [
                unit
                for unit in left
                if has_matrix and all(contradict(unit.means, other.means) for other in second.get(unit.signature(), ()))
            ]
        if len(left) * len(second.get(signature, ())) > _MOST_CANDIDATES:
            first[signature] = []
        if signature in second:
            counts[signature] = len(first[signature]), len(second[signature])
    is_changing = True
    while is_changing:
        is_changing = False
        for signature, (source_count, target_count) in counts.items():
            balanced = source_count == target_count and is_transposed is None
            left, right = first[signature], second[signature]
            for source, target, is_evident in _sure(left, right, pairing, is_transposed, balanced=balanced):
                for role, skeleton in source.roles.items():
                    for ranks, leaf in skeleton.leaves.items():
                        pairing.add(leaf.name, target.roles[role].leaves[ranks].name, by_shape=not is_evident)
                left.remove(source)
                right.remove(target)
                is_changing = True


def _all_transposed(source: Unit, target: Unit, is_transposed: IsTransposed) -> bool:
    return all(
        is_transposed(leaf, target.roles[role].leaves[ranks])
        for role, skeleton in source.roles.items()
        for ranks, leaf in skeleton.leaves.items()
    )


def _sure(
    sources: list[Unit], targets: list[Unit], pairing: Pairing, is_transposed: IsTransposed | None, *, balanced: bool
) -> list[tuple[Unit, Unit, bool]]:
    """Returns pairs that clearly are each other's best match, and whether their names support it."""
    rows: dict[int, list[_Score]] = defaultdict(list)
    columns: dict[int, list[_Score]] = defaultdict(list)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            if _can_be(source, target, pairing) and (
                is_transposed is None or _all_transposed(source, target, is_transposed)
            ):
                support = shared(source.means, target.means) + pairing.context(source, target)
                total = support - lacked(source.means, target.means)
                rows[i].append((total, support, j))
                columns[j].append((total, support, i))
    pairs = []
    for i, candidates in rows.items():
        best = _clearly_best(candidates)
        if best is not None and _clearly_best(columns[best]) == i:
            source, target = sources[i], targets[best]
            is_evident = shared(source.means, target.means) + max(pairing.context(source, target), 0) >= _EVIDENT
            if balanced or is_evident:
                pairs.append((source, target, is_evident))
    return pairs


_Score = tuple[float, float, int]
"""The total score of a candidate, the positive part of it, and its index."""


def _clearly_best(candidates: list[_Score]) -> int | None:
    """Returns the candidate with the best total by a margin; its positive score must be the best, too."""
    (best, support, index), *others = sorted(candidates, reverse=True)
    clear = all(best - total >= _MARGIN and support > rival for total, rival, _ in others)
    return index if clear else None


def buckets(units: Iterable[Unit], flipped: bool) -> dict[Signature, list[Unit]]:
    """Groups units that cannot be told apart without their names."""
    groups: dict[Signature, list[Unit]] = defaultdict(list)
    for unit in units:
        groups[unit.signature(flipped)].append(unit)
    return groups


def units(leaves: Iterable[Leaf], level: Level, owners: bool, settled: Collection[str] = ()) -> list[Unit]:
    """Groups tensors by their owners, or returns single tensors."""
    groups: dict[object, list[Skeleton]] = defaultdict(list)
    for skeleton in skeletons(leaves, level):
        skeleton.leaves = {ranks: leaf for ranks, leaf in skeleton.leaves.items() if leaf.name not in settled}
        if skeleton.leaves:
            alone = not owners or not skeleton.role
            groups[skeleton.text if alone else (skeleton.owner, "")].append(skeleton)
    result = []
    for members in groups.values():
        sample = next(iter(members[0].leaves.values())).name
        owner = owner_of(sample)
        roles = {skeleton.role: skeleton for skeleton in members}
        result.append(Unit(roles, members[0].means, owner, owner.rpartition(".")[0], family(sample)))
    return result
