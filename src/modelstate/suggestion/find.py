"""Finds which tensors of a checkpoint and a model belong together: renamed, fused, split or transposed."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from modelstate.planning.differences import prefixes, without_wrappers
from modelstate.suggestion.certainty import guesses
from modelstate.suggestion.pairing import Orientation, Pairing, Unit, buckets, match, order_is_clear, orientation, units
from modelstate.suggestion.skeletons import Leaf, Level, Shape, Skeleton, by_convention, in_context
from modelstate.suggestion.words import INTERLEAVED, PARTS, contradict, of_path, shared
from modelstate.text_format import folded
from modelstate.transaction.slots import Slots

_MARGIN = 0.25
"""The least lead of the score of a tensor over those of the others that could be fused of the same parts."""
_TAKEN = {INTERLEAVED, "out", "up", "down", "q", "k", "v", *PARTS}
"""Concepts of tensors that are not fused, or otherwise than is searched for."""
LONGEST_NAME = 1000
"""The most characters of a name that is compared with similar ones, which takes time with the square of its length.
Its numbers are short enough for Python, which converts none of over 4,300 digits."""
_ORDINARY = re.compile(rf"[^*#\n]{{1,{LONGEST_NAME}}}")
_NUMBER = re.compile(r"(\d+)")
_LONGEST_ROW = 10_000


class Ambiguous(msgspec.Struct, frozen=True):
    """Tensors of the same shape and dtype that their names do not tell apart."""

    names: tuple[str, ...]
    """Names of the model."""
    candidates: tuple[str, ...]
    """Names of the checkpoint."""


class Fusion(msgspec.Struct, frozen=True):
    """A tensor and its parts, in order, for each combination of the numbers in the names."""

    whole: Skeleton
    parts: tuple[Skeleton, ...]
    dim: int = 0
    """The dimension along which the parts are joined."""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes of the parts along that dimension; None if they are equal."""
        sizes = tuple(next(iter(part.leaves.values())).shape[0] for part in self.parts)
        return sizes if len(set(sizes)) > 1 else None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The name of the whole, followed by those of its parts."""
        return [
            (leaf.name, *(part.leaves[ranks].name for part in self.parts)) for ranks, leaf in self.whole.leaves.items()
        ]


class Findings(msgspec.Struct):
    """The matches between the tensors of a checkpoint and those of a model."""

    sources: Sequence[Leaf]
    targets: Sequence[Leaf]
    pairs: dict[str, str] = msgspec.field(default_factory=dict)
    by_shape: set[str] = msgspec.field(default_factory=set)
    """Names of the model that were matched by shape alone."""
    conventional: tuple[set[str], set[str]] = msgspec.field(default_factory=lambda: (set(), set()))
    """Names of the checkpoint and of the model whose meaning only a convention determines."""
    splits: list[Fusion] = msgspec.field(default_factory=list)
    """Tensors of the checkpoint that are split."""
    joins: list[Fusion] = msgspec.field(default_factory=list)
    """Tensors of the model that are joined from tensors of the checkpoint."""
    transposed: set[str] = msgspec.field(default_factory=set)
    """Names of the checkpoint that certainly are transposed."""
    reshaped: dict[tuple[Shape, Shape], list[str]] = msgspec.field(default_factory=dict)
    """Names of the checkpoint of 1x1 convolutions that are linear layers in the model, or the other way, by shapes."""
    inferred: set[str] = msgspec.field(default_factory=set)
    """Names of square tensors that are transposed because their neighbours are."""
    guesses: set[str] = msgspec.field(default_factory=set)
    """Names of the model whose match, or whose transposition, is a guess."""
    ambiguous: list[Ambiguous] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def expected(self) -> dict[str, tuple[str, ...]]:
        """For each name of the model with a match, the names in the checkpoint that it is made of."""
        expected: dict[str, tuple[str, ...]] = {target: (source,) for source, target in self.pairs.items()}
        for fusion in self.splits:
            for whole, *parts in fusion.rows:
                expected |= dict.fromkeys(parts, (whole,))
        for fusion in self.joins:
            expected |= {whole: tuple(parts) for whole, *parts in fusion.rows}
        return expected


def find(sources: Sequence[Leaf], targets: Sequence[Leaf], slots: Slots) -> Findings:
    """Matches both sides: first equal names, then similar names, then tensors with a unique shape."""
    findings, pairing = Findings(sources, targets), Pairing()
    by_name = {leaf.name: leaf for leaf in sources}
    for leaf in targets:
        if by_name.get(leaf.name) == leaf:
            pairing.add(leaf.name, leaf.name)
    # Names that contain the wildcards of patterns cannot be matched by a pattern, and long ones are of no model.
    sources, targets = ([leaf for leaf in side if _ORDINARY.fullmatch(leaf.name)] for side in (sources, targets))
    _pair_by_name(sources, targets, pairing, without_wrappers)  # DataParallel, torch.compile and others
    _pair_by_prefix(sources, targets, pairing)
    sources, targets = in_context(sources), in_context(targets)
    first, second = orientation(sources), orientation(targets)
    straight_sources, straight_targets = first.straight(sources), second.straight(targets)
    _find_fusions(findings, straight_sources, straight_targets, pairing, (first, second), named=True)
    match(straight_sources, straight_targets, pairing, first.transposed_layers, second.transposed_layers)
    _find_fusions(findings, straight_sources, straight_targets, pairing, (first, second), named=False)
    if pairing.open_sources(sources) and pairing.open_targets(targets):  # a convolution with a kernel of 1 is linear
        match(_without_kernels(straight_sources), _without_kernels(straight_targets), pairing)
    findings.pairs = {leaf.name: pairing.pairs[leaf.name] for leaf in findings.sources if leaf.name in pairing.pairs}
    findings.ambiguous = _take_shifted(findings)
    findings.by_shape = pairing.by_shape
    findings.conventional = by_convention(sources), by_convention(targets)
    open_sources, open_targets = pairing.open_sources(straight_sources), pairing.open_targets(straight_targets)
    tied = {name for slot in slots.tensors if pairing.targets.intersection(slot.names) for name in slot.names}
    open_targets = [leaf for leaf in open_targets if leaf.name not in tied]
    findings.ambiguous += _ambiguous(open_sources, open_targets)
    interleaved = [leaf.name for leaf in open_sources if INTERLEAVED in of_path(leaf.name.split("."))]
    if interleaved and open_targets:
        names = ", ".join(folded(interleaved))
        findings.notes.append(f"{names}: query, key and value may take turns in it, head by head; it is not cut")
    _find_transposed(findings, first, second)
    matches = [(name, target) for target, names in findings.expected.items() for name in names]
    is_whole = not (open_sources or open_targets or findings.ambiguous)
    sure, conventional = ({*names} for names in findings.conventional)
    findings.guesses |= {target for name, target in matches if (name in sure) != (target in conventional)}
    findings.guesses |= guesses(straight_sources, straight_targets, matches, is_whole=is_whole)
    return findings


def _without_kernels(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Returns the tensors, with the weights of convolutions with a kernel of 1 as those of linear layers."""
    return [
        replace(leaf, shape=leaf.shape[:2]) if len(leaf.shape) > 2 and set(leaf.shape[2:]) == {1} else leaf
        for leaf in leaves
    ]


# Names.


def _pair_by_name(
    sources: Sequence[Leaf], targets: Sequence[Leaf], pairing: Pairing, short: Callable[[str], str]
) -> None:
    """Matches tensors whose shortened names are equal and unique."""
    by_short: tuple[dict[str, list[Leaf]], dict[str, list[Leaf]]] = defaultdict(list), defaultdict(list)
    for side, leaves in zip(by_short, (pairing.open_sources(sources), pairing.open_targets(targets)), strict=True):
        for leaf in leaves:
            side[short(leaf.name)].append(leaf)
    for key, (source, *rivals) in by_short[0].items():
        matching = by_short[1].get(key, [])
        if rivals or len(matching) != 1:
            continue
        if (source.shape, source.kind) == (matching[0].shape, matching[0].kind):
            pairing.add(source.name, matching[0].name)


def _pair_by_prefix(sources: Sequence[Leaf], targets: Sequence[Leaf], pairing: Pairing) -> None:
    """Matches names that differ by a prefix, if no other prefix fits as well."""
    for target_is_longer in (False, True):
        for _ in range(4):
            open_sources, open_targets = pairing.open_sources(sources), pairing.open_targets(targets)
            pairs = _prefixed(open_targets, open_sources) if target_is_longer else _prefixed(open_sources, open_targets)
            for long, short in pairs:
                pairing.add(*((short, long) if target_is_longer else (long, short)))
            if not pairs:
                break


def _prefixed(longer: Sequence[Leaf], shorter: Sequence[Leaf]) -> list[tuple[str, str]]:
    """Returns the pairs of names that differ by the prefix that explains most of them."""
    wanted = {leaf.name: (leaf.shape, leaf.kind) for leaf in shorter}
    pairs_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for leaf in longer:
        for prefix in prefixes(leaf.name):
            rest = leaf.name[len(prefix) :]
            if wanted.get(rest) == (leaf.shape, leaf.kind):
                pairs_of[prefix].append((leaf.name, rest))
    if not pairs_of:
        return []
    best = max(pairs_of.values(), key=len)
    claims = Counter(name for pairs in pairs_of.values() for pair in pairs for name in pair)
    return best if all(claims[name] == 1 and claims[rest] == 1 for name, rest in best) else []


def _take_shifted(findings: Findings) -> list[Ambiguous]:
    """Removes pairs that could as well be the ends of a row in which every name is shifted by one.

    If layers 0 to 2 match layers 1 to 3, only 0 and 3 are left, but it is more likely that every number is one higher.
    The same holds if "a.a.w" and "a.w" match "a.w" and "w".
    """
    shifted: list[Ambiguous] = []
    for source, target in list(findings.pairs.items()):
        between = _between(source, target)
        if between and all(findings.pairs.get(name) == name for name in between):
            del findings.pairs[source]
            shifted.append(Ambiguous((target,), (source,)))
            if len(shifted) == 1:
                findings.notes.append(
                    f"names that fit as they are may each have moved by one, as from {source} to {between[0]}; then "
                    "only a Rename that is written by hand says so"
                )
    return shifted


def _between(source: str, target: str) -> list[str]:
    """Returns the names between two names that differ in one number, or in repetitions of a prefix."""
    shorter, longer = sorted((source, target), key=len)
    if longer.endswith(f".{shorter}"):
        between = [longer[len(part) :] for part in prefixes(longer) if len(longer) - len(part) > len(shorter)]
        return between if longer == source else between[::-1]
    first, second = _NUMBER.split(source), _NUMBER.split(target)
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
    groups = []
    first, second = (buckets(units(side, Level.WHOLE, owners=False), False) for side in (sources, targets))
    for signature, left in first.items():
        right = second.get(signature, [])
        right = [unit for unit in right if not all(contradict(unit.means, other.means) for other in left)]
        left = [unit for unit in left if not all(contradict(unit.means, other.means) for other in right)]
        if left and right:
            names, candidates = (
                tuple(
                    leaf.name for unit in side for skeleton in unit.roles.values() for leaf in skeleton.leaves.values()
                )
                for side in (right, left)
            )
            groups.append(Ambiguous(names, candidates))
    return groups


# Shapes.


def _find_transposed(findings: Findings, first: Orientation, second: Orientation) -> None:
    """Finds the pairs in which one tensor is the transpose of the other."""
    sources, targets = ({leaf.name: leaf for leaf in side} for side in (findings.sources, findings.targets))
    doubtful = []
    for name, goal in findings.pairs.items():
        before, after = sources[name].shape, targets[goal].shape
        if len(before) != len(after):
            findings.reshaped.setdefault((before, after), []).append(name)
        elif before != after:
            findings.transposed.add(name)
    is_mixed = bool(findings.transposed or first.transposed or second.transposed)
    for name, goal in findings.pairs.items():
        source = sources[name]
        if name in findings.transposed:
            continue
        if source.is_square and source.shape[0] > 1 and name.endswith("weight"):
            here, there = first.of_square(name), second.of_square(goal)
            if None not in (here, there):
                findings.inferred |= {name} if here != there else set()
            elif here is True or there is True or (is_mixed and None in (here, there)):
                doubtful.append(name)
    findings.guesses.update(findings.pairs[name] for name in (*findings.inferred, *doubtful))
    if doubtful:
        names = ", ".join(folded(doubtful))
        findings.notes.append(f"square, and nothing shows whether to transpose: {names}; left as they are")


class _Parts(msgspec.Struct, frozen=True):
    """Siblings that could be the parts of one tensor, in order."""

    kind: str
    units: tuple[Unit, ...]
    means: frozenset[str]
    """The concepts of the names, without those of the single parts."""

    @property
    def skeletons(self) -> tuple[Skeleton, ...]:
        return tuple(unit.skeleton for unit in self.units)


def _find_fusions(
    findings: Findings,
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    pairing: Pairing,
    orientations: tuple[Orientation, Orientation],
    *,
    named: bool,
) -> None:
    """Finds tensors of one side that unambiguously consist of tensors of the other side.

    With `named`, only tensors whose names say that they are fused; otherwise those whose names do not contradict it.
    """
    for split in (True, False):
        left, lacking = pairing.open_sources(sources), pairing.open_targets(targets)
        wholes, parts = (left, lacking) if split else (lacking, left)
        for whole, group in list(_fused(wholes, parts, pairing, split, named)):
            fusion = Fusion(whole.skeleton, group.skeletons)
            first, second = (whole, group.units[0]) if split else (group.units[0], whole)
            is_transposed = orientations[0].is_transposed(first.sample)
            is_straight = not orientations[1].is_transposed(second.sample)
            if not is_transposed and not is_straight:
                continue  # the result would have to be transposed, after the split or join
            if is_transposed and is_straight:
                findings.transposed |= {name for row in fusion.rows for name in (row[:1] if split else row[1:])}
            are_matrices = all(len(leaf.shape) == 2 for leaf in fusion.whole.leaves.values())
            dim = 0 if is_straight or not are_matrices else 1
            (findings.splits if split else findings.joins).append(Fusion(fusion.whole, fusion.parts, dim))
            for name, *names in fusion.rows:
                for part in names:
                    pairing.take(*((name, part) if split else (part, name)))


def _fused(
    wholes: Iterable[Leaf], parts: Iterable[Leaf], pairing: Pairing, split: bool, named: bool
) -> Iterator[tuple[Unit, _Parts]]:
    """Yields tensors with the parts that they consist of."""
    single = units(wholes, Level.WHOLE, owners=False)
    for group in _siblings(units(parts, Level.WHOLE, owners=False)):
        whole = _best_whole(single, group, pairing, split, named)
        if whole is not None:
            single.remove(whole)
            yield whole, group


def _siblings(single: Iterable[Unit]) -> list[_Parts]:
    """Groups siblings that are named query, key and value, or like the parts of another fused tensor."""
    kinds = {part: kind for kind, names in PARTS.items() for part in names if kind != "kv"}
    stems: dict[tuple[str, str, str], dict[str, Unit]] = defaultdict(dict)
    for unit in single:
        segments = unit.owner.split(".")
        for at in range(len(segments) - 1, max(len(segments) - 3, -1), -1):
            (part, *others) = [word for word in unit.sample.words(at) if word in kinds] or [""]
            if part and not others:
                stem = ".".join([*segments[:at], "?", *segments[at + 1 :]])
                stems[stem, unit.skeleton.role, kinds[part]][part] = unit
                break
    return [
        _Parts(kind, tuple(members[name] for name in PARTS[kind]), of_path(stem.split(".")))
        for (stem, _, kind), members in stems.items()
        if members.keys() >= set(PARTS[kind])
    ]


def _best_whole(single: Sequence[Unit], group: _Parts, pairing: Pairing, split: bool, named: bool) -> Unit | None:
    """Returns the tensor that the parts clearly belong to."""
    scored = []
    for at, unit in enumerate(single):
        words = unit.sample.words(unit.owner.count("."))
        is_named = group.kind in words if named else not words & _TAKEN
        if is_named and _adds_up(unit, group) and not contradict(unit.means - frozenset(PARTS), group.means):
            pair = (unit, group.units[0]) if split else (group.units[0], unit)
            scored.append((shared(unit.means, group.means) + pairing.context(*pair), at))
    scored.sort(reverse=True)
    if not scored or (len(scored) > 1 and scored[0][0] - scored[1][0] < _MARGIN):
        return None
    return single[scored[0][1]]


def _adds_up(unit: Unit, group: _Parts) -> bool:
    """Whether the sizes of the parts add up to the size of the tensor, in every layer."""
    whole, parts = unit.skeleton, group.skeletons
    if whole.role != parts[0].role or any(part.leaves.keys() != whole.leaves.keys() for part in parts):
        return False
    if not order_is_clear(whole, parts[0]):
        return False
    sizes = set()
    for ranks, leaf in whole.leaves.items():
        pieces = [part.leaves[ranks] for part in parts]
        if not leaf.shape or any(
            not piece.shape or piece.kind != leaf.kind or piece.shape[1:] != leaf.shape[1:] for piece in pieces
        ):
            return False
        if leaf.shape[0] != sum(piece.shape[0] for piece in pieces):
            return False
        sizes.add(tuple(piece.shape[0] for piece in pieces))
    return len(sizes) == 1
