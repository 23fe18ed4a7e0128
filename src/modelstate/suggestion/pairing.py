"""Matches tensors of a checkpoint with those of a model, and finds which weights are transposed."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from modelstate.suggestion.skeletons import Leaf, Level, Profile, Skeleton, skeletons
from modelstate.suggestion.words import concepts, contradict, lacked, role_of, shared

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Orientation:
    """The orientation of the weights of one side."""

    transposed: frozenset[str]
    """Names of the weights that certainly have their inputs first, as in a Conv1D."""
    families: Mapping[str, frozenset[bool]]
    """Whether weights of a layer are certainly transposed or not, by the path of the layer."""

    def of_square(self, name: str) -> bool | None:
        """Whether a square weight is transposed, as its neighbours are; None if they do not agree."""
        known = self.families.get(family(name), frozenset())
        return next(iter(known)) if len(known) == 1 else None

    @property
    def turned_layers(self) -> set[str]:
        """Layers in which all weights of known orientation are transposed."""
        return {layer for layer, known in self.families.items() if known == {True}}

    def straight(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Returns the tensors with the shapes that they have in a Linear."""
        return [replace(leaf, shape=leaf.shape[::-1]) if leaf.name in self.transposed else leaf for leaf in leaves]


def family(name: str) -> str:
    """Returns the path of the layer of a tensor, with # for numbers."""
    text = _NUMBER.sub("#", name)
    return text[: text.rfind("#") + 1]


def without_numbers(name: str) -> str:
    """Returns the name with # for the parts that are numbers."""
    return _NUMBER.sub("#", name)


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


@dataclass(frozen=True, slots=True)
class Turns:
    """The weights that certainly are transposed between the two sides."""

    names: Collection[str] = ()
    """Names of the checkpoint that fit only if they are transposed."""
    layers: Collection[str] = ()
    """Layers of the checkpoint with such weights, or with weights of a Conv1D."""
    places: Collection[str] = ()
    """Layers of the model with weights of a Conv1D."""

    def certain(self, leaf: Leaf, goal: Leaf) -> bool:
        layer, place = family(leaf.name), family(goal.name)
        beside = (bool(layer) and layer in self.layers) != (bool(place) and place in self.places)
        return leaf.name in self.names or beside


def turns(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    done: Collection[str],
    filled: Collection[str],
    layers: Collection[str],
    places: Collection[str],
) -> Turns:
    """Returns what the shapes show. `done` and `filled` are matched names; `layers` and `places` have a Conv1D."""
    there = {(leaf.shape, leaf.kind) for leaf in targets}
    lacking = {(leaf.shape, leaf.kind) for leaf in targets if leaf.name not in filled}
    names = {
        leaf.name
        for leaf in sources
        if leaf.name not in done
        and len(leaf.shape) == 2
        and (leaf.shape, leaf.kind) not in there
        and (leaf.shape[::-1], leaf.kind) in lacking
    }
    return Turns(names, {*layers, *map(family, names)}, places)


_SAME_WORD, _SAME_KIND = 0.5, 0.5
_MARGIN = 0.25


def order_is_told(source: Skeleton, target: Skeleton) -> bool:
    """Whether numbers whose exchange would change nothing can be told apart by the words before them."""
    if len(source.varied) != len(target.varied):
        return True
    return all(_is_told(source, target, pair) for pair in _exchangeable(source))


def _exchangeable(skeleton: Skeleton) -> Iterator[tuple[int, int]]:
    """Yields pairs of varying numbers whose exchange leaves all shapes the same."""
    content = {ranks: (leaf.shape, leaf.kind) for ranks, leaf in skeleton.leaves.items()}
    for one, other in combinations(range(len(skeleton.varied)), 2):
        if all(content.get(_exchanged(ranks, one, other)) == what for ranks, what in content.items()):
            yield one, other


def _exchanged(ranks: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    changed = list(ranks)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def _is_told(source: Skeleton, target: Skeleton, pair: tuple[int, int]) -> bool:
    (one, other), (first, second) = (tuple(side.varied[at] for at in pair) for side in (source, target))
    before, after = source.text.split("#"), target.text.split("#")
    straight = _alike(before, one, after, first) + _alike(before, other, after, second)
    crossed = _alike(before, one, after, second) + _alike(before, other, after, first)
    return straight - crossed >= _MARGIN


def _alike(before: list[str], one: int, after: list[str], other: int) -> float:
    """Returns how similar the text before a number is to the text before another number."""
    here, there = _words(before[one]), _words(after[other])
    score = shared(frozenset().union(*map(concepts, here)), frozenset().union(*map(concepts, there)))
    if here and there and here[-1] == there[-1]:
        score += _SAME_WORD
    return score + (_SAME_KIND if _is_whole(before, one) == _is_whole(after, other) else 0.0)


def _words(text: str) -> list[str]:
    return [part for part in text.lower().split(".") if part]


def _is_whole(texts: list[str], at: int) -> bool:
    return texts[at][-1:] in ("", ".") and texts[at + 1][:1] in ("", ".")


_EVIDENT = 0.2
"""The least score for a pair that is not the only possible one."""
_SAME_OWNER, _SAME_PARENT, _SAME_LAYER, _OTHER_LAYER = 2.0, 0.75, 0.25, -0.5
_MOST_CANDIDATES = 20_000

Signature = tuple[tuple[str, Profile], ...]


@dataclass(slots=True)
class Unit:
    """What is matched together: the tensors of an owner, such as weight and bias, or a single tensor."""

    roles: dict[str, Skeleton]
    means: frozenset[str]
    owner: str
    parent: str
    layer: str

    def signature(self, flipped: bool = False) -> Signature:
        return tuple(sorted((role, one.profile(flipped)) for role, one in self.roles.items()))


@dataclass(slots=True)
class Pairing:
    """The matches so far."""

    pairs: dict[str, str] = field(default_factory=dict)
    """From names of the checkpoint to names of the model."""
    by_shape: set[str] = field(default_factory=set)
    """Names of the model that were matched by shape alone."""
    sources: set[str] = field(default_factory=set)
    """Names of the checkpoint that are settled: matched, or part of a fusion."""
    targets: set[str] = field(default_factory=set)
    """Names of the model that are settled."""
    crossed: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of names without digits whose numbers cannot be told apart."""
    _owners: dict[str, str] = field(default_factory=dict)
    _parents: set[tuple[str, str]] = field(default_factory=set)
    _layers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _layers_back: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

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
        self.relate(source, target)

    def relate(self, source: str, target: str) -> None:
        """Records that two tensors are related, and so are their parents and layers."""
        own, other = owner_of(source), owner_of(target)
        self._parents.add((own.rpartition(".")[0], other.rpartition(".")[0]))
        first, second = family(source), family(target)
        self._layers[first].add(second)
        self._layers_back[second].add(first)

    def are_apart(self, source: Unit, target: Unit) -> bool:
        """Whether the two are in layers that are known to match other layers."""
        known = self._layers.get(source.layer, set()), self._layers_back.get(target.layer, set())
        return bool(source.layer and target.layer and all(known)) and target.layer not in known[0]

    def context(self, source: Unit, target: Unit) -> float:
        """Returns the score that the matches of owners, parents and layers give to a pair."""
        score = 0.0
        if source.owner in self._owners and not any(one.role == "" for one in source.roles.values()):
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
    # If both names have the same count of numbers, the same ones must vary: a layer is not a part of a layer.
    sides = [(one, target.roles[role]) for role, one in source.roles.items()]
    if not all(one.taken != other.taken or one.varied == other.varied for one, other in sides):
        return False
    if any(one.constant and other.constant and one.constant != other.constant for one, other in sides):
        return False
    if _counts_otherwise(source, target) or _counts_otherwise(target, source):
        return False
    # A pair that is ambiguous for all layers together is ambiguous for each of them.
    names = _without_digits(source.owner), _without_digits(target.owner)
    if names not in pairing.crossed and not all(order_is_told(one, other) for one, other in sides):
        pairing.crossed.add(names)
    return names not in pairing.crossed


def _counts_otherwise(numbered: Unit, said: Unit) -> bool:
    """Whether one is a numbered norm and the other is a norm with another ordinal: norm1 and second."""
    numbers = {number for one in numbered.roles.values() for number in one.constant}
    ordinals = {number for word, number in _ORDINALS.items() if word in said.means}
    return "norm" in numbered.means and bool(numbers) and bool(ordinals) and not numbers & ordinals


_ORDINALS = {"first": "1", "second": "2"}


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def owner_of(name: str) -> str:
    """Returns the path of the module that owns the tensor, with # for numbers."""
    path, _, last = name.rpartition(".")
    return without_numbers(".".join(filter(None, (path, role_of(last)[0]))))


def match(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    pairing: Pairing,
    layers: Collection[str] = (),
    places: Collection[str] = (),
) -> None:
    """Matches tensors with a single good answer, level by level with more detail.

    `layers` and `places` are the layers of the checkpoint and of the model whose weights certainly are transposed.
    """
    for level in Level:
        for owners in (True, False):
            one_level(sources, targets, pairing, level, owners=owners)
    certain = turns(sources, targets, pairing.sources, pairing.targets, layers, places)
    for level in (Level.WHOLE, Level.NONE):
        one_level(sources, targets, pairing, level, owners=False, flipped=certain)


def one_level(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    pairing: Pairing,
    level: Level,
    *,
    owners: bool,
    flipped: Turns | None = None,
) -> None:
    """Matches what is left until nothing changes; with `flipped`, the shapes of the checkpoint are reversed."""
    # The meaning of numbers depends on all names, including settled ones.
    first = buckets(units(sources, level, owners, pairing.sources), flipped is not None)
    second = buckets(units(targets, level, owners, pairing.targets), False)
    for signature, left in first.items():
        turning = any(len(shape) == 2 and shape[0] != shape[1] for _, profile in signature for _, shape, _ in profile)
        if flipped is not None:
            left = first[signature] = [one for one in left if turning and not _fits_straight(one, second)]
        if len(left) * len(second.get(signature, ())) > _MOST_CANDIDATES:
            first[signature] = []
    started = {
        signature: (len(left), len(second[signature])) for signature, left in first.items() if signature in second
    }
    going = True
    while going:
        going = False
        for signature, (had, wanted) in started.items():
            for source, target, evident in _sure(
                first[signature], second[signature], pairing, flipped, balanced=had == wanted and flipped is None
            ):
                _accept(source, target, pairing, evident)
                first[signature].remove(source)
                second[signature].remove(target)
                going = True


def _fits_straight(source: Unit, targets: Mapping[Signature, Sequence[Unit]]) -> bool:
    """Whether it fits a target without a transposition, so that nothing shows that it is transposed."""
    return any(not contradict(source.means, one.means) for one in targets.get(source.signature(), ()))


def _turned(source: Unit, target: Unit, certain: Turns) -> bool:
    return all(
        certain.certain(leaf, target.roles[role].leaves[ranks])
        for role, skeleton in source.roles.items()
        for ranks, leaf in skeleton.leaves.items()
    )


def _accept(source: Unit, target: Unit, pairing: Pairing, evident: bool) -> None:
    for role, skeleton in source.roles.items():
        for ranks, leaf in skeleton.leaves.items():
            pairing.add(leaf.name, target.roles[role].leaves[ranks].name, by_shape=not evident)


def _sure(
    sources: list[Unit], targets: list[Unit], pairing: Pairing, flipped: Turns | None, *, balanced: bool
) -> list[tuple[Unit, Unit, bool]]:
    """Returns pairs that clearly are each other's best match, and whether their names support it."""
    if not sources or not targets:
        return []
    rows: dict[int, list[_Score]] = defaultdict(list)
    columns: dict[int, list[_Score]] = defaultdict(list)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            if _can_be(source, target, pairing) and (flipped is None or _turned(source, target, flipped)):
                speaks = shared(source.means, target.means) + pairing.context(source, target)
                total = speaks - lacked(source.means, target.means)
                rows[i].append((total, speaks, j))
                columns[j].append((total, speaks, i))
    found = []
    for i, candidates in rows.items():
        best = _clearly_best(candidates)
        if best is not None and _clearly_best(columns[best]) == i:
            source, target = sources[i], targets[best]
            evident = shared(source.means, target.means) + max(pairing.context(source, target), 0) >= _EVIDENT
            if balanced or evident:
                found.append((source, target, evident))
    return found


_Score = tuple[float, float, int]
"""The total score of a candidate, the positive part of it, and its index."""


def _clearly_best(candidates: list[_Score]) -> int | None:
    """Returns the candidate with the best total by a margin; its positive score must be the best, too."""
    (best, speaks, which), *others = sorted(candidates, reverse=True)
    clear = all(best - total >= _MARGIN and speaks > other for total, other, _ in others)
    return which if clear else None


def buckets(units: Iterable[Unit], flipped: bool) -> dict[Signature, list[Unit]]:
    """Groups units that cannot be told apart without their names."""
    found: dict[Signature, list[Unit]] = defaultdict(list)
    for unit in units:
        found[unit.signature(flipped)].append(unit)
    return found


def units(leaves: Iterable[Leaf], level: Level, owners: bool, settled: Collection[str] = ()) -> list[Unit]:
    """Groups tensors by their owners, or returns single tensors."""
    groups: dict[object, list[Skeleton]] = defaultdict(list)
    for skeleton in skeletons(leaves, level):
        skeleton.leaves = {ranks: leaf for ranks, leaf in skeleton.leaves.items() if leaf.name not in settled}
        if skeleton.leaves:
            alone = not owners or not skeleton.role
            groups[skeleton.text if alone else (skeleton.owner, "")].append(skeleton)
    found = []
    for members in groups.values():
        sample = next(iter(members[0].leaves.values())).name
        owner = owner_of(sample)
        roles = {skeleton.role: skeleton for skeleton in members}
        found.append(Unit(roles, members[0].means, owner, owner.rpartition(".")[0], family(sample)))
    return found
