"""Finds which tensors of a checkpoint and a model belong together, from their names and shapes.

Tensors whose names differ only in numbers, such as those of the layers of an encoder, are one `Kind`. Kinds that have
the same shapes at the same numbers can match. The words of their names, and the matches beside them, decide: a match
counts only if it is clearly the best one in both directions. A fused tensor matches the kinds of its parts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec
import torch
from msgspec.structs import replace

from modelstate.planning.differences import prefixes, without_wrappers
from modelstate.suggestion.words import (
    PARTS,
    SEQUENCE,
    concepts,
    contradict,
    depends_on_members,
    lacked,
    meanings_beside,
    of_path,
    role_of,
    shared,
)
from modelstate.text_format import without_numbers

Shape = tuple[int, ...]
Ranks = tuple[int, ...]

LONGEST_NAME = 1000
"""The most characters of a name that is compared with similar ones, which takes time with the square of its length.
Its numbers are short enough for Python, which converts none of over 4,300 digits."""
_ORDINARY = re.compile(rf"[^*#\n]{{1,{LONGEST_NAME}}}")
"""Names that contain the wildcards of patterns cannot be matched by a pattern, and long ones are of no model."""
_NUMBER = re.compile(r"(\d+)")
_ALIKE = 0.5
"""The share of equal names below two numbers from which on these number modules of one kind."""
_MARGIN = 0.25
"""The least lead of the best score over the others."""
_EVIDENT = 0.2
"""The least score for a pair that is not the only possible one."""
_SAME_OWNER, _SAME_PARENT, _SAME_LAYER, _OTHER_LAYER = 2.0, 0.75, 0.25, -0.5
_MOST_CANDIDATES = 20_000
_NOT_FUSED = {"interleaved", "out", "up", "down", "q", "k", "v", *PARTS}
"""Concepts of tensors that are not fused, or otherwise than is searched for."""


class Leaf(msgspec.Struct, frozen=True, eq=False):
    """A tensor without its values: name, shape and kind of dtype."""

    name: str
    shape: Shape
    dtype_kind: str
    """ "float", "int", "bool" or "complex"."""
    context: Mapping[int, frozenset[str]] = {}
    """The concepts of parts of the name, by their index, that differ beside the other members of their module."""

    @property
    def content(self) -> tuple[Shape, str]:
        return self.shape, self.dtype_kind

    @property
    def is_square(self) -> bool:
        return len(self.shape) == 2 and self.shape[0] == self.shape[1]

    def words(self, at: int) -> frozenset[str]:
        """Returns the concepts of one part of the name."""
        return self.context.get(at) or concepts(self.name.split(".")[at])


def dtype_kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"


def family(name: str) -> str:
    """Returns the path of the layer of a tensor, with # for numbers."""
    text = without_numbers(name)
    return text[: text.rfind("#") + 1]


def owner_of(name: str) -> str:
    """Returns the path of the module that owns the tensor, with # for numbers."""
    path, _, last = name.rpartition(".")
    return without_numbers(".".join(filter(None, (path, role_of(last)[0]))))


class Fusion(msgspec.Struct, frozen=True):
    """Tensors that consist of others, and how."""

    rows: tuple[tuple[str, ...], ...]
    """The name of each whole, followed by those of its parts."""
    dim: int
    """The dimension along which the parts are joined."""
    sizes: tuple[int, ...] | None
    """The sizes of the parts along that dimension; None if they are equal."""
    is_transposed: bool
    """Whether the tensors of the checkpoint are transposed first."""


class Matches(msgspec.Struct):
    """The matches between the tensors of a checkpoint and those of a model."""

    pairs: dict[str, str] = {}
    """From names of the checkpoint to names of the model."""
    by_shape: set[str] = set()
    """Names of the model that were matched by shape alone."""
    splits: list[Fusion] = []
    """Tensors of the checkpoint that are split."""
    joins: list[Fusion] = []
    """Tensors of the model that are joined from tensors of the checkpoint."""
    settled: tuple[set[str], set[str]] = msgspec.field(default_factory=lambda: (set(), set()))
    """Names of the checkpoint and of the model that have a match."""
    owners: dict[str, str] = {}
    parents: set[tuple[str, str]] = set()
    layers: dict[str, set[str]] = {}

    @property
    def expected(self) -> dict[str, tuple[str, ...]]:
        """For each name of the model with a match, the names in the checkpoint that it is made of."""
        expected: dict[str, tuple[str, ...]] = {target: (source,) for source, target in self.pairs.items()}
        for fusion in self.splits:
            expected |= {part: (whole,) for whole, *parts in fusion.rows for part in parts}
        for fusion in self.joins:
            expected |= {whole: tuple(parts) for whole, *parts in fusion.rows}
        return expected

    def open(self, side: int, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Returns the tensors of a side without a match."""
        return [leaf for leaf in leaves if leaf.name not in self.settled[side]]

    def add(self, source: str, target: str, *, is_part: bool = False) -> None:
        """Records that two tensors match, or that one is a part of the other."""
        if not is_part:
            self.pairs[source] = target
            self.owners[owner_of(source)] = owner_of(target)
        self.settled[0].add(source)
        self.settled[1].add(target)
        self.parents.add((owner_of(source).rpartition(".")[0], owner_of(target).rpartition(".")[0]))
        self.layers.setdefault(family(source), set()).add(family(target))

    def context(self, source: Kind, target: Kind) -> float:
        """Returns the score that the matches of owners, parents and layers give to a pair."""
        first, second = owner_of(source.sample.name), owner_of(target.sample.name)
        layer, other_layer = family(source.sample.name), family(target.sample.name)
        score = 0.0
        if source.role and first in self.owners:
            score += _SAME_OWNER if self.owners[first] == second else -_SAME_OWNER
        if (first.rpartition(".")[0], second.rpartition(".")[0]) in self.parents:
            score += _SAME_PARENT
        if other_layer in self.layers.get(layer, ()):
            return score + _SAME_LAYER
        is_known = layer in self.layers or any(other_layer in others for others in self.layers.values())
        return score + (_OTHER_LAYER if is_known else 0.0)


def match(sources: Sequence[Leaf], targets: Sequence[Leaf]) -> tuple[Matches, Orientation, Orientation]:
    """Matches both sides: equal names, names that differ in a prefix, fused tensors, and similar names."""
    matches = Matches()
    by_name = {leaf.name: leaf for leaf in sources}
    for leaf in targets:
        if leaf.name in by_name and by_name[leaf.name].content == leaf.content:
            matches.add(leaf.name, leaf.name)
    sources, targets = ([leaf for leaf in side if _ORDINARY.fullmatch(leaf.name)] for side in (sources, targets))
    _match_wrapped(sources, targets, matches)
    _match_prefixes(sources, targets, matches)
    sources, targets = in_context(sources), in_context(targets)
    first, second = orientation(sources), orientation(targets)
    straight = first.straight(sources), second.straight(targets)
    _match_fusions(*straight, matches, (first, second), named=True)
    for within_words in (True, False):
        _match_kinds(*straight, matches, within_words)
    _match_fusions(*straight, matches, (first, second), named=False)
    first = orientation(sources, _misfits(sources, targets, matches))
    for within_words in (True, False):
        _match_kinds(first.straight(sources), straight[1], matches, within_words)
    return matches, first, second


# Equal names.


def _match_wrapped(sources: Sequence[Leaf], targets: Sequence[Leaf], matches: Matches) -> None:
    """Matches names that are equal without what DataParallel, `torch.compile` and other wrappers add, and unique."""
    sides: list[dict[str, list[Leaf]]] = []
    for side, leaves in enumerate((sources, targets)):
        sides.append(defaultdict(list))
        for leaf in matches.open(side, leaves):
            sides[side][without_wrappers(leaf.name)].append(leaf)
    for key, found in sides[0].items():
        others = sides[1].get(key, [])
        if len(found) == len(others) == 1 and found[0].content == others[0].content:
            matches.add(found[0].name, others[0].name)


def _match_prefixes(sources: Sequence[Leaf], targets: Sequence[Leaf], matches: Matches) -> None:
    """Matches names that differ by a prefix, if no other prefix fits as well."""
    for side, longer, shorter in ((0, sources, targets), (1, targets, sources)):
        for _ in range(4):
            wanted = {leaf.name: leaf.content for leaf in matches.open(1 - side, shorter)}
            rests: dict[str, list[tuple[str, str]]] = defaultdict(list)
            for leaf in matches.open(side, longer):
                for prefix in prefixes(leaf.name):
                    rest = leaf.name[len(prefix) :]
                    if wanted.get(rest) == leaf.content:
                        rests[prefix].append((leaf.name, rest))
            if not rests:
                break
            best = max(rests.values(), key=len)
            claims = Counter(name for pairs in rests.values() for pair in pairs for name in pair)
            if any(claims[name] > 1 for pair in best for name in pair):
                break
            for long, short in best:
                matches.add(*((short, long) if side else (long, short)))


# Words that depend on their neighbours.


def in_context(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns the tensors with the concepts that their context decides, which must be the same in all layers."""
    modules: dict[tuple[str, str], dict[str, Shape]] = defaultdict(dict)
    for leaf in leaves:
        segments = leaf.name.split(".")
        if role_of(segments[-1])[1] not in ("", "weight"):
            continue
        for at, segment in enumerate(segments):
            member = role_of(segment)[0] or segment  # w1 of w1_weight
            modules[".".join(segments[:at]), ".".join(segments[at + 1 :])][member] = leaf.shape
    known: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for (parent, _), members in modules.items():
        if any(map(depends_on_members, members)):
            kind = known[_NUMBER.sub("#", parent)]
            for member, words in meanings_beside(members).items():
                # If layers contradict each other, the name only stands for itself.
                kind[member] = words if kind.get(member, words) == words else frozenset({f"={member}"})
    result = []
    for leaf in leaves:
        segments = leaf.name.split(".")
        context = {}
        for at, segment in enumerate(segments):
            member = role_of(segment)[0] or segment
            if found := known.get(_NUMBER.sub("#", ".".join(segments[:at])), {}).get(member):
                context[at] = found
        result.append(replace(leaf, context=context) if context else leaf)
    return result


# Transposed weights.


class Orientation(msgspec.Struct, frozen=True):
    """The orientation of the weights of one side."""

    transposed: frozenset[str]
    """Names of the weights that have their inputs first, as in a Conv1D."""
    families: Mapping[str, set[bool]]
    """Whether weights of a layer are certainly transposed or not, by the path of the layer."""

    def of_square(self, name: str) -> bool | None:
        """Whether a square weight is transposed, as its neighbours are; None if they do not agree."""
        known = self.families.get(family(name), set())
        return next(iter(known)) if len(known) == 1 else None

    def is_transposed(self, leaf: Leaf) -> bool:
        """Whether a weight is transposed, or is square and its neighbours are."""
        return leaf.name in self.transposed or (leaf.is_square and self.of_square(leaf.name) is True)

    def straight(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Returns the tensors with the shapes that they have in a Linear."""
        return [replace(leaf, shape=leaf.shape[::-1]) if leaf.name in self.transposed else leaf for leaf in leaves]


def orientation(leaves: Sequence[Leaf], misfits: Collection[str] = ()) -> Orientation:
    """Returns the orientation of weights, as their biases show; those in `misfits` are transposed.

    Weights without a bias in layers whose known weights are all transposed are transposed too.
    """
    biases = {leaf.name.removesuffix("bias"): leaf.shape for leaf in leaves if leaf.name.endswith("bias")}
    families: dict[str, set[bool]] = defaultdict(set)
    transposed, unknown = {*misfits}, []
    for leaf in leaves:
        if len(leaf.shape) != 2 or leaf.is_square or role_of(leaf.name.rpartition(".")[2])[1] not in ("", "weight"):
            continue
        bias = biases.get(leaf.name.removesuffix("weight"), ())
        shown = [size for size in leaf.shape if bias == (size,)]
        if shown == [leaf.shape[1]]:
            transposed.add(leaf.name)
        if shown or leaf.name in misfits:
            families[family(leaf.name)].add(leaf.name in transposed)
        else:
            unknown.append(leaf.name)
    transposed |= {name for name in unknown if family(name) and families.get(family(name)) == {True}}
    return Orientation(frozenset(transposed), families)


def _misfits(sources: Iterable[Leaf], targets: Sequence[Leaf], matches: Matches) -> set[str]:
    """Returns names of open weights of the checkpoint that fit an open weight of the model, and only transposed."""
    contents = {leaf.content for leaf in targets}
    open_contents = {leaf.content for leaf in matches.open(1, targets)}
    return {
        leaf.name
        for leaf in matches.open(0, sources)
        if len(leaf.shape) == 2
        and leaf.content not in contents
        and (leaf.shape[::-1], leaf.dtype_kind) in open_contents
    }


# Kinds of tensors.


class Kind(msgspec.Struct):
    """Tensors whose names differ only in numbers."""

    text: str
    """The name, with # for each number that was replaced."""
    leaves: dict[Ranks, Leaf]
    """The tensors by the rank of each number among all numbers in its place; constant numbers are left out."""
    role: str
    owner: str
    """The text without the role."""
    means: frozenset[str]
    taken: int
    """The count of replaced numbers."""
    varied: tuple[int, ...]
    """The indices of those that vary."""
    constant: tuple[str, ...]
    """The constant numbers within words: norm1 alone is not ln_2 alone."""
    places: dict[str, tuple[int, ...]]
    """For each tensor, the ranks of the numbers that have others in their places."""

    @property
    def sample(self) -> Leaf:
        return next(iter(self.leaves.values()))

    @property
    def signature(self) -> tuple[object, ...]:
        """What is equal for kinds that can match: role, shapes and dtypes at each combination of numbers."""
        return self.role, tuple(sorted((ranks, *leaf.content) for ranks, leaf in self.leaves.items()))


class _Name(msgspec.Struct):
    """A name that is cut at its numbers, and the numbers that have been replaced so far."""

    leaf: Leaf
    texts: list[str]
    numbers: list[str]
    text: str
    taken: list[tuple[str, str]] = []
    """Replaced numbers, each with the text before it."""
    ordinals: list[tuple[str, str]] = []
    """Other numbers, each with the text before it."""


def kinds_of(leaves: Iterable[Leaf], *, within_words: bool) -> list[Kind]:
    """Returns the kinds of tensors, in order.

    A number that is a whole part of a name is replaced if the modules that it numbers are alike, as the layers of an
    encoder are, and not if they differ, as the members of most `nn.Sequential` do: their names and shapes are compared.
    With `within_words`, numbers within a part are replaced, too, and of shapes only the numbers of dimensions compared.
    """
    names = []
    for leaf in leaves:
        pieces = [""]
        for at, segment in enumerate(leaf.name.split(".")):
            # Numbers of a part that has a meaning of its own, as w1, do not stand for an order.
            is_kept = leaf.context.get(at, SEQUENCE) != SEQUENCE
            first, *others = [segment] if is_kept else _NUMBER.split(segment)
            pieces[-1] += f".{first}" if at else first
            pieces += others
        names.append(_Name(leaf, pieces[::2], pieces[1::2], pieces[0]))
    places: dict[str, set[str]] = defaultdict(set)
    for depth in range(max((len(name.numbers) for name in names), default=0)):
        _replace_numbers([name for name in names if depth < len(name.numbers)], depth, places, within_words)
    ranks = {
        (text, number): (at, len(numbers))
        for text, numbers in places.items()
        for at, number in enumerate(sorted(numbers, key=lambda number: (int(number), number)))
    }
    groups: dict[str, list[_Name]] = defaultdict(list)
    for name in names:
        groups[name.text].append(name)
    return [_kind(text, members, ranks) for text, members in groups.items()]


def _replace_numbers(names: Sequence[_Name], depth: int, places: dict[str, set[str]], within_words: bool) -> None:
    """Replaces or keeps the number at this depth of every name."""
    below: dict[str, dict[str, set[object]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        shape = name.leaf.shape
        rest = "#".join(name.texts[depth + 1 :]), len(shape) if within_words else shape
        below[name.text][name.numbers[depth]].add(rest)
        places[name.text].add(name.numbers[depth])
    are_alike = {}
    for text, values in below.items():
        most = max(values.values(), key=len)
        are_alike[text] = all(len(content & most) >= _ALIKE * len(content | most) for content in values.values())
    for name in names:
        number, text, after = name.numbers[depth], name.text, name.texts[depth + 1]
        is_whole = text[-1:] in ("", ".") and after[:1] in ("", ".")
        is_taken = are_alike[text] and (within_words or is_whole)
        (name.taken if is_taken else name.ordinals).append((text, number))
        name.text += ("#" if is_taken else number) + after


def _kind(text: str, members: Sequence[_Name], ranks: Mapping[tuple[str, str], tuple[int, int]]) -> Kind:
    columns = list(zip(*(name.taken for name in members), strict=True))
    varied = tuple(at for at, column in enumerate(columns) if len(set(column)) > 1)
    constant = tuple(
        column[0][1] for at, column in enumerate(columns) if at not in varied and column[0][0][-1:] not in ("", ".")
    )
    path, _, last = text.rpartition(".")
    rest, role = role_of(last)
    owner = ".".join(filter(None, (path, rest)))
    means = set(of_path(owner.split("."), members[0].leaf.context))
    ordinals = [(before[-1:] in ("", "."), *ranks[before, number]) for before, number in members[0].ordinals]
    for is_whole in (True, False):
        # Numbers are compared from the last one, because names of the other side may have more before it.
        numbers = [(at, count) for whole, at, count in reversed(ordinals) if whole is is_whole]
        means |= {f"#{is_whole}{back}:{at}/{count}" for back, (at, count) in enumerate(numbers) if count > 1}
    if ordinals and "norm" in means and "#" in owner and owner[-1].isdecimal() and ordinals[-1][::2] == (False, 2):
        # Of two norms in a layer, the first belongs to attention and the second to the MLP.
        means.add("second" if ordinals[-1][1] else "first")
    leaves = {tuple(ranks[name.taken[at]][0] for at in varied): name.leaf for name in members}
    places = {
        name.leaf.name: tuple(rank for rank, count in map(ranks.__getitem__, name.taken) if count > 1)
        for name in members
    }
    return Kind(text, leaves, role, owner, frozenset(means), len(columns), varied, constant, places)


def by_signature(kinds: Iterable[Kind], settled: Collection[str] = ()) -> dict[tuple[object, ...], list[Kind]]:
    """Groups kinds that cannot be told apart without their names, and leaves out the tensors that are settled."""
    groups: dict[tuple[object, ...], list[Kind]] = defaultdict(list)
    for kind in kinds:
        kind.leaves = {ranks: leaf for ranks, leaf in kind.leaves.items() if leaf.name not in settled}
        if kind.leaves:
            groups[kind.signature].append(kind)
    return groups


# Similar names.

_Score = tuple[float, float, int]
"""The total score of a candidate, the positive part of it, and its index."""


def _match_kinds(sources: Sequence[Leaf], targets: Sequence[Leaf], matches: Matches, within_words: bool) -> None:
    """Matches kinds that are clearly each other's best match, until nothing changes."""
    first, second = (
        # The meaning of numbers depends on all names, with those that have a match.
        by_signature(kinds_of(side, within_words=within_words), settled)
        for side, settled in zip((sources, targets), matches.settled, strict=True)
    )
    groups = [
        (left, second[signature], len(left) == len(second[signature]))
        for signature, left in first.items()
        if signature in second and len(left) * len(second[signature]) <= _MOST_CANDIDATES
    ]
    is_changing = True
    while is_changing:
        is_changing = False
        for left, right, is_balanced in groups:
            for source, target, is_evident in _best_pairs(left, right, matches):
                if not (is_balanced or is_evident):
                    continue
                for ranks, leaf in source.leaves.items():
                    matches.add(leaf.name, target.leaves[ranks].name)
                    matches.by_shape |= set() if is_evident else {target.leaves[ranks].name}
                left.remove(source)
                right.remove(target)
                is_changing = True


def _best_pairs(sources: Sequence[Kind], targets: Sequence[Kind], matches: Matches) -> list[tuple[Kind, Kind, bool]]:
    """Returns pairs that clearly are each other's best match, and whether their names support it."""
    rows: dict[int, list[_Score]] = defaultdict(list)
    columns: dict[int, list[_Score]] = defaultdict(list)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            if _can_match(source, target):
                support = shared(source.means, target.means) + matches.context(source, target)
                total = support - lacked(source.means, target.means)
                rows[i].append((total, support, j))
                columns[j].append((total, support, i))
    pairs = []
    for i, candidates in rows.items():
        best = _clearly_best(candidates)
        if best is not None and _clearly_best(columns[best]) == i:
            source, target = sources[i], targets[best]
            score = shared(source.means, target.means) + max(matches.context(source, target), 0)
            pairs.append((source, target, score >= _EVIDENT))
    return pairs


def _clearly_best(candidates: list[_Score]) -> int | None:
    """Returns the candidate with the best total by a margin; its positive score must be the best, too."""
    (best, support, index), *others = sorted(candidates, reverse=True)
    is_clear = all(best - total >= _MARGIN and support > rival for total, rival, _ in others)
    return index if is_clear else None


def _can_match(source: Kind, target: Kind) -> bool:
    """Whether two kinds can match at all, whatever their score."""
    if contradict(source.means, target.means):
        return False
    # If both names have the same count of numbers, the same ones must vary: a layer is not a part of a layer.
    if source.taken == target.taken and source.varied != target.varied:
        return False
    if source.constant and target.constant and source.constant != target.constant:
        return False
    return not (_other_norm(source, target) or _other_norm(target, source)) and _order_is_clear(source, target)


def _other_norm(numbered: Kind, named: Kind) -> bool:
    """Whether one is a numbered norm and the other is a norm with another ordinal: norm1 and second."""
    ordinals = {number for word, number in (("first", "1"), ("second", "2")) if word in named.means}
    return "norm" in numbered.means and bool(numbered.constant and ordinals) and ordinals.isdisjoint(numbered.constant)


def _order_is_clear(source: Kind, target: Kind) -> bool:
    """Whether numbers whose exchange would change nothing can be told apart by the words before them."""
    if len(source.varied) != len(target.varied):
        return True
    for i, j in combinations(range(len(source.varied)), 2):
        order = [*range(len(source.varied))]
        order[i], order[j] = j, i
        swapped = (source.leaves.get(tuple(ranks[at] for at in order)) for ranks in source.leaves)
        if all(
            other is not None and other.content == leaf.content
            for leaf, other in zip(source.leaves.values(), swapped, strict=True)
        ):
            straight = _alike(source, i, target, i) + _alike(source, j, target, j)
            if straight - _alike(source, i, target, j) - _alike(source, j, target, i) < _MARGIN:
                return False
    return True


def _alike(source: Kind, i: int, target: Kind, j: int) -> float:
    """Returns how similar the text before a varying number is to the text before one of the other side."""
    words, meanings, are_whole = [], [], []
    for kind, number in ((source, i), (target, j)):
        texts, at = kind.text.split("#"), kind.varied[number]
        parts = [part for part in texts[at].lower().split(".") if part]
        words.append(parts[-1:])
        meanings.append(frozenset[str]().union(*map(concepts, parts)))
        are_whole.append(texts[at][-1:] in ("", ".") and texts[at + 1][:1] in ("", "."))
    score = shared(*meanings) + (0.5 if words[0] and words[0] == words[1] else 0.0)
    return score + (0.5 if are_whole[0] == are_whole[1] else 0.0)


# Fused tensors.


class _Parts(msgspec.Struct, frozen=True):
    """Kinds that could be the parts of one tensor, in order."""

    concept: str
    """What their whole is: "qkv", "gate_up"."""
    kinds: tuple[Kind, ...]
    means: frozenset[str]
    """The concepts of the names, without those of the single parts."""


def _match_fusions(
    sources: Sequence[Leaf],
    targets: Sequence[Leaf],
    matches: Matches,
    orientations: tuple[Orientation, Orientation],
    *,
    named: bool,
) -> None:
    """Finds tensors of one side that clearly consist of tensors of the other side.

    With `named`, only tensors whose names say that they are fused; otherwise those whose names do not contradict it.
    """
    for is_split in (True, False):
        sides = matches.open(0, sources), matches.open(1, targets)
        wholes = kinds_of(sides[not is_split], within_words=False)
        for group in list(_part_groups(kinds_of(sides[is_split], within_words=False))):
            whole = _best_whole(wholes, group, matches, is_split, named)
            if whole is None:
                continue
            wholes.remove(whole)
            first, second = (whole, group.kinds[0]) if is_split else (group.kinds[0], whole)
            is_transposed = orientations[0].is_transposed(first.sample)
            is_straight = not orientations[1].is_transposed(second.sample)
            if not is_straight and not is_transposed:
                continue  # the result would have to be transposed, after the split or join
            rows = tuple(
                (leaf.name, *(part.leaves[ranks].name for part in group.kinds)) for ranks, leaf in whole.leaves.items()
            )
            sizes = tuple(part.sample.shape[0] for part in group.kinds)
            dim = 0 if is_straight or len(whole.sample.shape) != 2 else 1
            is_turned = is_transposed and is_straight and len(whole.sample.shape) == 2
            fusion = Fusion(rows, dim, sizes if len(set(sizes)) > 1 else None, is_turned)
            (matches.splits if is_split else matches.joins).append(fusion)
            for name, *parts in rows:
                for part in parts:
                    matches.add(*((name, part) if is_split else (part, name)), is_part=True)


def _part_groups(kinds: Iterable[Kind]) -> Iterator[_Parts]:
    """Yields siblings that are named query, key and value, or like the parts of another fused tensor."""
    whole_of = {part: whole for whole, names in PARTS.items() for part in names if whole != "kv"}
    stems: dict[tuple[str, str, str], dict[str, Kind]] = defaultdict(dict)
    for kind in kinds:
        segments = kind.owner.split(".")
        for at in range(len(segments) - 1, max(len(segments) - 3, -1), -1):
            named = [word for word in kind.sample.words(at) if word in whole_of]
            if len(named) == 1:
                stem = ".".join([*segments[:at], "?", *segments[at + 1 :]])
                stems[stem, kind.role, whole_of[named[0]]][named[0]] = kind
                break
    for (stem, _, concept), members in stems.items():
        if members.keys() >= set(PARTS[concept]):
            yield _Parts(concept, tuple(members[name] for name in PARTS[concept]), of_path(stem.split(".")))


def _best_whole(wholes: Sequence[Kind], group: _Parts, matches: Matches, is_split: bool, named: bool) -> Kind | None:
    """Returns the kind that the parts clearly belong to."""
    scored = []
    for at, kind in enumerate(wholes):
        words = kind.sample.words(kind.owner.count("."))
        is_possible = group.concept in words if named else not words & _NOT_FUSED
        if is_possible and _adds_up(kind, group) and not contradict(kind.means - frozenset(PARTS), group.means):
            pair = (kind, group.kinds[0]) if is_split else (group.kinds[0], kind)
            scored.append((shared(kind.means, group.means) + matches.context(*pair), at))
    scored.sort(reverse=True)
    is_clear = len(scored) == 1 or (len(scored) > 1 and scored[0][0] - scored[1][0] >= _MARGIN)
    return wholes[scored[0][1]] if is_clear else None


def _adds_up(whole: Kind, group: _Parts) -> bool:
    """Whether the sizes of the parts add up to the size of the tensor, in the same way in every layer."""
    if whole.role != group.kinds[0].role or any(part.leaves.keys() != whole.leaves.keys() for part in group.kinds):
        return False
    splits = set()
    for ranks, leaf in whole.leaves.items():
        pieces = [part.leaves[ranks] for part in group.kinds]
        others = {(piece.shape[1:], piece.dtype_kind) for piece in pieces}
        if not leaf.shape or not all(piece.shape for piece in pieces) or others != {(leaf.shape[1:], leaf.dtype_kind)}:
            return False
        splits.add((leaf.shape[0] - sum(piece.shape[0] for piece in pieces), *(piece.shape[0] for piece in pieces)))
    return len(splits) == 1 and min(splits)[0] == 0 and _order_is_clear(whole, group.kinds[0])
