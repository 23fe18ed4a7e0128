"""Finds which tensors of a checkpoint and a model belong together: renamed, fused, split or transposed."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelstate.planning.matching import prefixes, without_wrappers
from modelstate.suggestion.pairing import (
    Orientation,
    Pairing,
    Unit,
    buckets,
    match,
    order_is_told,
    orientation,
    units,
    without_numbers,
)
from modelstate.suggestion.skeletons import Leaf, Level, Skeleton, by_convention, in_place
from modelstate.suggestion.suggestion import Ambiguous
from modelstate.suggestion.words import INTERLEAVED, PARTS, contradict, of_path, shared
from modelstate.transaction.slots import Slots


@dataclass(frozen=True, slots=True)
class Fusion:
    """A tensor and its parts, in order, for each combination of the numbers in the names."""

    whole: Skeleton
    parts: tuple[Skeleton, ...]
    sizes: tuple[int, ...] | None
    """The sizes along the first dimension; None if they are equal."""


@dataclass(frozen=True, slots=True)
class _Parts:
    kind: str
    units: tuple[Unit, ...]
    means: frozenset[str]
    """The concepts of the names, without those of the single parts."""

    @property
    def skeletons(self) -> tuple[Skeleton, ...]:
        return tuple(next(iter(unit.roles.values())) for unit in self.units)


def fusions(
    wholes: Iterable[Leaf], parts: Iterable[Leaf], pairing: Pairing, *, named: bool, turned: bool = False
) -> list[Fusion]:
    """Returns the unambiguous fusions between whole tensors on one side and parts on the other.

    Args:
        wholes: the tensors that may be fused.
        parts: the tensors that may be their parts.
        pairing: the matches so far.
        named: takes wholes whose names say that they are fused; otherwise those whose names do not say anything else.
        turned: whether the parts are those of the checkpoint.
    """
    single = units(wholes, Level.WHOLE, owners=False)
    found = []
    for group in _groups(units(parts, Level.WHOLE, owners=False)):
        fitting = [unit for unit in single if _fits(unit, group)]
        fitting = [unit for unit in fitting if (group.kind in _words(unit) if named else not _words(unit) & _TAKEN)]
        best = _best(fitting, group, pairing, turned)
        if best is not None:
            single.remove(best)
            skeleton = next(iter(best.roles.values()))
            found.append(Fusion(skeleton, group.skeletons, _sizes(group)))
    return found


_MARGIN = 0.25
_TAKEN = {INTERLEAVED, "out", "up", "down", "q", "k", "v", *PARTS}


def _words(unit: Unit) -> frozenset[str]:
    return _sample(unit).words(unit.owner.count("."))


def _sample(unit: Unit) -> Leaf:
    return next(iter(next(iter(unit.roles.values())).leaves.values()))


def _groups(single: Iterable[Unit]) -> list[_Parts]:
    """Groups siblings that are named query, key and value, or like the parts of another fused tensor."""
    kinds = {part: kind for kind, names in PARTS.items() for part in names if kind != "kv"}
    stems: dict[tuple[str, str, str], dict[str, Unit]] = defaultdict(dict)
    for unit in single:
        segments = unit.owner.split(".")
        for at in range(len(segments) - 1, max(len(segments) - 3, -1), -1):
            (part, *others) = [word for word in _sample(unit).words(at) if word in kinds] or [""]
            if part and not others:
                stem = ".".join([*segments[:at], "?", *segments[at + 1 :]])
                stems[stem, next(iter(unit.roles)), kinds[part]][part] = unit
                break
    found = []
    for (stem, _, kind), members in stems.items():
        names = PARTS[kind]
        if members.keys() >= set(names):
            found.append(_Parts(kind, tuple(members[name] for name in names), of_path(stem.split("."))))
    return found


def _sizes(group: _Parts) -> tuple[int, ...] | None:
    sizes = tuple(next(iter(one.leaves.values())).shape[0] for one in group.skeletons)
    return sizes if len(set(sizes)) > 1 else None


def _fits(unit: Unit, group: _Parts) -> bool:
    """Whether the sizes of the parts add up to the size of the tensor, in every layer."""
    ((role, whole),) = unit.roles.items()
    first, *others = group.skeletons
    if role != first.role or any(one.leaves.keys() != whole.leaves.keys() for one in (first, *others)):
        return False
    if not order_is_told(whole, first):
        return False
    sizes = set()
    for ranks, leaf in whole.leaves.items():
        parts = [one.leaves[ranks] for one in (first, *others)]
        if not leaf.shape or any(not part.shape or part.kind != leaf.kind for part in parts):
            return False
        added = sum(part.shape[0] for part in parts)
        if leaf.shape[0] != added or any(part.shape[1:] != leaf.shape[1:] for part in parts):
            return False
        sizes.add(tuple(part.shape[0] for part in parts))
    return len(sizes) == 1


def _best(fitting: Sequence[Unit], group: _Parts, pairing: Pairing, turned: bool) -> Unit | None:
    scored = []
    for at, one in enumerate(fitting):
        if not contradict(one.means - frozenset(PARTS), group.means):
            pair = (group.units[0], one) if turned else (one, group.units[0])
            scored.append((shared(one.means, group.means) + pairing.context(*pair), at))
    scored.sort(reverse=True)
    if not scored or (len(scored) > 1 and scored[0][0] - scored[1][0] < _MARGIN):
        return None
    return fitting[scored[0][1]]


_ORDINARY = re.compile(r"[^*#\n]+")
_NUMBER = re.compile(r"(\d+)")
_LONGEST_ROW = 10_000


@dataclass(slots=True)
class Findings:
    """The matches between the tensors of a checkpoint and those of a model."""

    sources: Sequence[Leaf]
    targets: Sequence[Leaf]
    pairs: dict[str, str] = field(default_factory=dict)
    by_shape: set[str] = field(default_factory=set)
    conventional: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    """Names of the checkpoint and of the model whose meaning only a convention determines."""
    splits: list[tuple[Fusion, int]] = field(default_factory=list)
    """Tensors of the checkpoint that are split, each with the dimension."""
    joins: list[tuple[Fusion, int]] = field(default_factory=list)
    transposed: set[str] = field(default_factory=set)
    """Names of the checkpoint that certainly are transposed."""
    inferred: set[str] = field(default_factory=set)
    """Names of square tensors that are transposed because their neighbours are."""
    doubtful: list[str] = field(default_factory=list)
    """Names of square tensors that may be transposed or not."""
    ambiguous: list[Ambiguous] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find(sources: Sequence[Leaf], targets: Sequence[Leaf], slots: Slots) -> Findings:
    """Matches both sides: first equal names, then similar names, then tensors with a unique shape."""
    found, pairing = Findings(sources, targets), Pairing()
    by_name = {leaf.name: leaf for leaf in sources}
    for leaf in targets:
        if by_name.get(leaf.name) == leaf:
            pairing.add(leaf.name, leaf.name)
    # Names that contain the wildcards of patterns cannot be matched by a pattern.
    sources, targets = ([leaf for leaf in side if _ORDINARY.fullmatch(leaf.name)] for side in (sources, targets))
    _pair_by(pairing, sources, targets, without_wrappers)  # DataParallel, torch.compile and others
    _one_prefix(sources, targets, pairing)
    sources, targets = in_place(sources), in_place(targets)
    lying, wanted = orientation(sources), orientation(targets)
    straight, places = lying.straight(sources), wanted.straight(targets)
    fused = _Fused(found, pairing, lying, wanted)
    fused.look(straight, places, named=True)
    match(straight, places, pairing, lying.turned_layers, wanted.turned_layers)
    fused.look(straight, places, named=False)
    found.pairs = {leaf.name: pairing.pairs[leaf.name] for leaf in found.sources if leaf.name in pairing.pairs}
    shifted = _take_shifted(found)
    found.by_shape = pairing.by_shape
    found.conventional = by_convention(sources), by_convention(targets)
    _turned(found, lying, wanted)
    left, lacking = pairing.open_sources(straight), pairing.open_targets(places)
    tied = {name for slot in slots.tensors if pairing.targets.intersection(slot.names) for name in slot.names}
    lacking = [leaf for leaf in lacking if leaf.name not in tied]
    found.ambiguous = [*shifted, *_ambiguous(left, lacking)]
    mixed = [leaf for leaf in left if INTERLEAVED in of_path(leaf.name.split("."))]
    if mixed and lacking:
        found.notes.append(f"{_folded(mixed)}: query, key and value may take turns in it, head by head; it is not cut")
    return found


def _folded(leaves: Iterable[Leaf]) -> str:
    return ", ".join(dict.fromkeys(without_numbers(leaf.name).replace("#", "*") for leaf in leaves))


def _pair_by(pairing: Pairing, sources: Sequence[Leaf], targets: Sequence[Leaf], short: Callable[[str], str]) -> None:
    """Matches tensors whose shortened names are equal and unique."""
    first = _by_key(pairing.open_sources(sources), short)
    second = _by_key(pairing.open_targets(targets), short)
    for key, (one, *rivals) in first.items():
        others = second.get(key, [])
        if not rivals and len(others) == 1 and (one.shape, one.kind) == (others[0].shape, others[0].kind):
            pairing.add(one.name, others[0].name)


def _by_key(leaves: Iterable[Leaf], short: Callable[[str], str]) -> Mapping[str, list[Leaf]]:
    found: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        found[short(leaf.name)].append(leaf)
    return found


def _one_prefix(sources: Sequence[Leaf], targets: Sequence[Leaf], pairing: Pairing) -> None:
    """Matches names that differ by a prefix, if no other prefix fits as well."""
    for turn in (False, True):
        for _ in range(4):
            longer, shorter = pairing.open_sources(sources), pairing.open_targets(targets)
            if turn:
                longer, shorter = shorter, longer
            pairs = _prefixed(longer, shorter)
            for long, short in pairs:
                pairing.add(*((short, long) if turn else (long, short)))
            if not pairs:
                break


def _prefixed(longer: Sequence[Leaf], shorter: Sequence[Leaf]) -> list[tuple[str, str]]:
    wanted = {leaf.name: (leaf.shape, leaf.kind) for leaf in shorter}
    hits: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for leaf in longer:
        for prefix in prefixes(leaf.name):
            rest = leaf.name[len(prefix) :]
            if wanted.get(rest) == (leaf.shape, leaf.kind):
                hits[prefix].append((leaf.name, rest))
    if not hits:
        return []
    best = max(hits, key=lambda prefix: len(hits[prefix]))
    claims = Counter(rest for pairs in hits.values() for _, rest in pairs)
    claims.update(name for pairs in hits.values() for name, _ in pairs)
    return hits[best] if all(claims[name] == 1 and claims[rest] == 1 for name, rest in hits[best]) else []


class _Fused:
    """Searches for tensors that are parts of others."""

    def __init__(self, found: Findings, pairing: Pairing, lying: Orientation, wanted: Orientation) -> None:
        self.found, self.pairing, self.lying, self.wanted = found, pairing, lying, wanted

    def look(self, sources: Sequence[Leaf], targets: Sequence[Leaf], named: bool) -> None:
        left, lacking = self.pairing.open_sources(sources), self.pairing.open_targets(targets)
        for fusion in fusions(left, lacking, self.pairing, named=named):
            self._take(fusion, split=True)
        left, lacking = self.pairing.open_sources(sources), self.pairing.open_targets(targets)
        for fusion in fusions(lacking, left, self.pairing, named=named, turned=True):
            self._take(fusion, split=False)

    def _take(self, fusion: Fusion, split: bool) -> None:
        whole = list(fusion.whole.leaves.values())
        parts = [list(one.leaves.values()) for one in fusion.parts]
        of_source, of_target = (whole, parts[0]) if split else (parts[0], whole)
        turned = self._is_turned(self.lying, of_source[0])
        straight = not self._is_turned(self.wanted, of_target[0])
        if not turned and not straight:
            return  # the result would have to be transposed, after the split or join
        if turned and straight:
            self.found.transposed |= {
                leaf.name for leaf in (whole if split else [one for part in parts for one in part])
            }
        dim = 0 if straight else 1
        (self.found.splits if split else self.found.joins).append((fusion, dim))
        for ranks, leaf in fusion.whole.leaves.items():
            for part in fusion.parts:
                pair = (leaf.name, part.leaves[ranks].name)
                self.pairing.take(*(pair if split else pair[::-1]))

    @staticmethod
    def _is_turned(side: Orientation, leaf: Leaf) -> bool:
        return leaf.name in side.transposed or (
            len(leaf.shape) == 2 and leaf.shape[0] == leaf.shape[1] and side.of_square(leaf.name) is True
        )


def _turned(found: Findings, lying: Orientation, wanted: Orientation) -> None:
    """Finds the pairs of which one side is transposed."""
    sources, targets = ({leaf.name: leaf for leaf in side} for side in (found.sources, found.targets))
    for name, goal in found.pairs.items():
        source, target = sources[name], targets[goal]
        if source.shape != target.shape:
            found.transposed.add(name)
        elif len(source.shape) == 2 and source.shape[0] == source.shape[1] > 1 and name.endswith("weight"):
            here, there = lying.of_square(name), wanted.of_square(goal)
            if None not in (here, there):
                found.inferred |= {name} if here != there else set()
            elif here is True or there is True:
                found.doubtful.append(name)


def _take_shifted(found: Findings) -> list[Ambiguous]:
    """Removes pairs that could as well be the ends of a row in which every name is shifted by one.

    If layers 0 to 2 match layers 1 to 3, only 0 and 3 are left, but it is more likely that every number is one higher.
    The same holds if "a.a.w" and "a.w" match "a.w" and "w".
    """
    shifted: list[Ambiguous] = []
    for source, target in list(found.pairs.items()):
        between = _between(source, target)
        if between and all(found.pairs.get(name) == name for name in between):
            del found.pairs[source]
            shifted.append(Ambiguous((target,), (source,)))
            if len(shifted) == 1:
                found.notes.append(
                    f"names that fit as they are may each have moved by one, as from {source} to {between[0]}; then "
                    "only a Rename that is written by hand says so"
                )
    return shifted


def _between(one: str, other: str) -> list[str]:
    """Returns the names between two names that differ in one number, or in repetitions of a prefix."""
    shorter, longer = sorted((one, other), key=len)
    if longer.endswith(f".{shorter}"):
        between = [longer[len(part) :] for part in prefixes(longer) if len(longer) - len(part) > len(shorter)]
        return between if longer == one else between[::-1]
    first, second = _NUMBER.split(one), _NUMBER.split(other)
    differing = [at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if len(first) != len(second) or len(differing) != 1 or differing[0] % 2 == 0:
        return []
    at = differing[0]
    low, high = sorted((int(first[at]), int(second[at])))
    if high - low > _LONGEST_ROW:
        return []
    between = ["".join([*first[:at], str(number), *first[at + 1 :]]) for number in range(low + 1, high)]
    return between if int(first[at]) == low else between[::-1]


def _ambiguous(sources: Iterable[Leaf], targets: Iterable[Leaf]) -> list[Ambiguous]:
    """Returns groups of unmatched tensors on both sides that could match each other."""
    found = []
    first, second = (buckets(units(side, Level.WHOLE, owners=False), False) for side in (sources, targets))
    for signature, left in first.items():
        right = [
            one for one in second.get(signature, []) if any(not contradict(one.means, other.means) for other in left)
        ]
        left = [one for one in left if any(not contradict(one.means, other.means) for other in right)]
        if left and right:
            names, candidates = (
                tuple(
                    leaf.name for unit in side for skeleton in unit.roles.values() for leaf in skeleton.leaves.values()
                )
                for side in (right, left)
            )
            found.append(Ambiguous(names, candidates))
    return found
