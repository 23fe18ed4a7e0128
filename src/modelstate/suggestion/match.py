"""Finds which tensors of a checkpoint and a model belong together, from their names and shapes.

Names that are equal belong together. Other tensors are matched as kinds: tensors whose names differ only in numbers,
such as those of the layers of an encoder. Two kinds can match if they have the same shapes at the same numbers. The
words of their names, and the matches beside them, decide: a match counts only if it is clearly the best one in both
directions. At first all numbers of a name may differ within a kind, then fewer and fewer of them, from the last one on.
Kinds that are named like the parts of a fused tensor are matched as the kind that they join to, too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, permutations, product

import msgspec
from msgspec.structs import replace

from modelstate.planning.matching import prefixes
from modelstate.rules.expression import Source
from modelstate.suggestion.words import (
    CONVENTION,
    GENERIC,
    PARTS,
    Shape,
    concepts,
    contradict,
    meaning,
    meanings_beside,
    role_of,
)
from modelstate.text_format import folded, without_numbers

LONGEST_NAME = 1000
"""Longer names are not compared: it takes time with the square of their length, and Python limits digits of an int."""
_ORDINARY = re.compile(rf"[^*#\n]{{1,{LONGEST_NAME}}}")
"""Names that contain the wildcards of patterns cannot be matched by a pattern, and long ones are of no model."""
_NUMBER = re.compile(r"(\d+)(?![^\W_])")
"""A number that is a part of a name, or the end of a word in it: not the 2 of 2d."""
_MARGIN = 0.25
"""The least lead of the best score over the others."""
_SAME_OWNER, _SAME_PARENT, _SAME_END = 2.0, 0.75, 1.0
_MOST_CANDIDATES = 20_000
PASSES = (2, 1, 0)
"""How many of the numbers of a name may vary within a kind."""


class Leaf(msgspec.Struct, eq=False):
    """A tensor of one side without its values, with what its name says."""

    name: str
    shape: Shape
    """The shape that it has in a Linear, where anything shows that it has another one."""
    is_float: bool
    owner: str
    """The path of the module that owns it."""
    role: str
    """What it is in this module: weight, bias, ..."""
    path: str
    """The owner, with # for numbers."""
    words: list[frozenset[str]]
    """The concepts of the parts of the owner's path."""
    texts: list[str]
    """The texts around the numbers."""
    numbers: list[str]
    ranks: list[tuple[int, int]] = []
    """The rank of each number in its place, and the count of the numbers that are in this place."""
    is_turned: bool | None = None
    """Whether it has another shape than in a Linear, its inputs first, as in a Conv1D; None if nothing shows it."""

    @classmethod
    def of(cls, name: str, tensor: Source) -> Leaf:
        """Returns a tensor of a checkpoint or a model without its values."""
        path, _, last = name.rpartition(".")
        rest, role = role_of(last)
        owner = ".".join(filter(None, (path, rest)))
        words = [concepts(segment) for segment in owner.split(".")]
        texts = _NUMBER.split(name) if _ORDINARY.fullmatch(name) else [name]
        is_float = tensor.dtype.is_floating_point
        shape = tuple(tensor.shape)
        return cls(name, shape, is_float, owner, role, without_numbers(owner), words, texts[::2], texts[1::2])

    def turn(self, is_turned: bool) -> None:
        """Notes whether the inputs are first, and takes the shape of a Linear."""
        self.is_turned = is_turned
        self.shape = self.shape[::-1] if is_turned else self.shape

    @property
    def content(self) -> tuple[Shape, bool]:
        return self.shape, self.is_float

    @property
    def size(self) -> tuple[object, ...]:
        """What is equal for tensors that could take each other's place, transposed too."""
        return self.is_float, self.role, *sorted(self.shape)

    @property
    def is_square(self) -> bool:
        return len(self.shape) == 2 and self.shape[0] == self.shape[1]

    @property
    def parent(self) -> str:
        """The path above the owner, with # for numbers."""
        return self.path.rpartition(".")[0]

    @property
    def layer(self) -> str:
        """The path of the layer, with # for numbers."""
        return self.path[: self.path.rfind("#") + 1]


class Kind(msgspec.Struct, eq=False, dict=True):
    """Tensors whose names differ only in numbers."""

    first: Leaf
    """The first of them."""
    varied: tuple[int, ...]
    """The indices of the numbers in which the names differ."""
    text: str
    """The name, with # for these numbers."""
    leaves: dict[tuple[int, ...], Leaf]
    """The tensors by the ranks of these numbers."""
    parts: Sequence[Kind] = ()
    """Of a join, which is in no file, the kinds that it consists of: query, key and value."""

    @property
    def signature(self) -> tuple[object, ...]:
        """What is equal for kinds that can match: role, shapes and dtypes at each combination of numbers."""
        return self.first.role, tuple(sorted((ranks, *leaf.content) for ranks, leaf in self.leaves.items()))

    @cached_property
    def means(self) -> frozenset[str]:
        """The concepts of the name."""
        *path, last = self.first.words
        rank, count = self.first.ranks[-1] if self.first.ranks else (0, 0)
        if last == {"norm"} and self.first.owner[-1:].isdecimal() and count < 3:
            # Of two norms in a layer, the first belongs to attention and the second to the MLP.
            rank = rank if count > 1 else int(self.first.numbers[-1]) - 1
            last |= {("first", "second")[rank]} if rank in (0, 1) else set()
        return meaning([*path, last])

    @cached_property
    def places(self) -> list[tuple[str, str]]:
        """For each number two places: its index from the end, and that among the parts of the name or ends of words.

        So the layer has the same second place in "layers.3.w1" as in "layers.3.gate".
        """
        signs = ["#" if text[-1:] in ("", ".") else "#w" for text in self.first.texts[: len(self.first.ranks)]]
        return [(f"#at{at - len(signs)}", f"{sign}{-signs[at:].count(sign)}") for at, sign in enumerate(signs)]

    @cached_property
    def ordinals(self) -> tuple[dict[str, str], ...]:
        """The ranks of the numbers that do not vary, by their first and by their second places."""
        ranks = [(at, *rank) for at, rank in enumerate(self.first.ranks) if at not in self.varied]
        of_numbers = [(self.places[at], f"{rank}/{count}") for at, rank, count in ranks if count > 1]
        return tuple({places[which]: rank for places, rank in of_numbers} for which in (0, 1))

    @cached_property
    def alone(self) -> list[str]:
        """The numbers at the ends of words that are alone in their place: norm1 is not ln_2."""
        numbers = zip(self.first.texts, self.first.numbers, self.first.ranks, strict=False)
        return [number for text, number, (_, count) in numbers if count == 1 and text[-1:] not in ("", ".")]

    @cached_property
    def claims(self) -> frozenset[str]:
        """What the name states: concepts, and which one of several it is; a fused tensor has that of its parts too."""
        numbered = [place for at, (_, count) in enumerate(self.first.ranks) if count > 1 for place in self.places[at]]
        ranked = [f"{place}:{rank}" for ordinals in self.ordinals for place, rank in ordinals.items()]
        return (self.means - GENERIC).union(ranked, numbered, *(PARTS.get(word, ()) for word in self.means))

    def same_ordinals(self, other: Kind) -> list[bool]:
        """Whether each number that does not vary has the same rank as its counterpart in another kind, if it has one.

        In names with the same count of numbers, that is the one with the same index.
        """
        which = int(len(self.first.ranks) != len(other.first.ranks))
        others = other.ordinals[which]
        return [others[place] == rank for place, rank in self.ordinals[which].items() if place in others]


class Side:
    """The tensors of a checkpoint or a model."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.names = {leaf.name: leaf for leaf in leaves}
        self.open = dict(self.names)  # the tensors without a match
        places: dict[str, set[str]] = defaultdict(set)
        members: dict[str, dict[str, Shape]] = defaultdict(dict)
        for leaf in leaves:
            members[leaf.parent].setdefault(leaf.path.rpartition(".")[2], leaf.shape)
            for at, number in enumerate(leaf.numbers):
                places["#".join(leaf.texts[: at + 1])].add(number)
        order = {
            place: {number: at for at, number in enumerate(sorted(numbers, key=int))}
            for place, numbers in places.items()
        }
        beside = {parent: meanings_beside(of_parent) for parent, of_parent in members.items()}
        for leaf in leaves:
            leaf.words[-1] = beside[leaf.parent].get(leaf.path.rpartition(".")[2], leaf.words[-1])
            of_places = [order["#".join(leaf.texts[: at + 1])] for at in range(len(leaf.numbers))]
            leaf.ranks = [(ranks[number], len(ranks)) for ranks, number in zip(of_places, leaf.numbers, strict=True)]

    def kinds(self, varying: int) -> list[Kind]:
        """Returns the kinds of open tensors whose names differ in the first numbers, at most so many, in order."""
        kinds: dict[str, Kind] = {}
        for leaf in filter(lambda leaf: _ORDINARY.fullmatch(leaf.name), self.open.values()):
            varied = tuple(at for at, (_, count) in enumerate(leaf.ranks) if count > 1)[:varying]
            numbers = ["#" if at in varied else number for at, number in enumerate(leaf.numbers)]
            text = "".join(map("".join, zip(leaf.texts, [*numbers, ""], strict=True)))
            kind = kinds.setdefault(text, Kind(leaf, varied, text, {}))
            kind.leaves[tuple(leaf.ranks[at][0] for at in varied)] = leaf
        return list(kinds.values())


class Matches(msgspec.Struct):
    """The matches between the tensors of a checkpoint and those of a model."""

    sources: Side
    targets: Side
    pairs: dict[str, str] = {}
    """From names of the checkpoint to names of the model."""
    fusions: dict[tuple[bool, tuple[int, ...] | None], list[tuple[str, ...]]] = {}
    """Names of wholes, each with its parts, by whether the checkpoint has the wholes, and by sizes that are unequal."""
    links: list[tuple[Kind, Kind]] = []
    """The kinds that match; a kind of fused tensors with that of each of its parts."""
    expected: dict[str, tuple[str, ...]] = {}
    """For each name of the model with a match, the names in the checkpoint that it is made of."""
    transposed: set[str] = set()
    """Names of the checkpoint that certainly are transposed."""
    inferred: set[str] = set()
    """Names of square tensors that are transposed because their neighbours are."""
    guesses: set[str] = set()
    """Names of the model whose match, or whose transposition, is a guess."""
    notes: dict[str, None] = {}
    beside: set[tuple[str, str]] = set()
    """The modules of both sides with tensors that match, and the paths above them with # for numbers."""
    unordered: set[tuple[str, ...]] = set()
    """Texts of names whose numbers could be exchanged."""

    def add(self, sources: tuple[str, ...], target: str) -> None:
        """Records what a tensor of the model is made of."""
        self.expected[target] = sources
        goal = self.targets.open.pop(target)
        for name in sources:
            self.sources.open.pop(name, None)
            leaf = self.sources.names[name]
            self.beside |= {(leaf.owner, goal.owner), (leaf.parent, goal.parent)}

    def link(self, source: Kind, target: Kind) -> None:
        """Records that two kinds match. One of them may be a join, whose `parts` are the kinds that it consists of."""
        parts = source.parts or target.parts
        sizes = tuple(part.first.shape[0] for part in parts)
        fusion = bool(target.parts), sizes if len({*sizes}) > 1 else None
        here, there = source.parts or [source], target.parts or [target]
        for ranks, leaf in source.leaves.items():
            names, goals = (tuple(kind.leaves[ranks].name for kind in side) for side in (here, there))
            if not parts:
                self.pairs[names[0]] = goals[0]
            else:
                self.fusions.setdefault(fusion, []).append((*names, *goals) if target.parts else (*goals, *names))
            if bool(leaf.is_turned) != bool(target.leaves[ranks].is_turned) and (parts or not leaf.is_square):
                self.transposed.update(names)
            for goal in goals:
                self.add(names, goal)
        self.links += product(here, there)

    def score(self, source: Kind, target: Kind) -> float:
        """Returns how much speaks for a pair: what both names state, their ends, and matches of tensors beside it."""
        first, second = source.first, target.first
        score = (
            len(source.means & target.means)
            + sum(source.same_ordinals(target))
            + _SAME_PARENT * ((first.parent, second.parent) in self.beside)
        )
        score += _SAME_OWNER * ((first.owner, second.owner) in self.beside)
        return score + _SAME_END * _is_end(source, target)


def match(sources: Sequence[Leaf], targets: Sequence[Leaf], ties: Mapping[str, Sequence[str]]) -> Matches:
    """Matches both sides: equal names, then fused tensors and similar names.

    Args:
        sources: The tensors of the checkpoint.
        targets: The tensors of the model.
        ties: All names of a tensor of the model, by each of them.
    """
    matches = Matches(Side(sources), Side(targets))
    for name, leaf in matches.sources.names.items():
        if name in matches.targets.names and matches.targets.names[name].content == leaf.content:
            matches.pairs[name] = name
            matches.add((name,), name)
    for leaves in (sources, targets):
        _turn(leaves)
    _match_names(matches)
    if misfits := _misfits(matches):
        _turn(sources, misfits)
        _match_names(matches)
    filled = {name for target in matches.expected for name in ties.get(target, (target,))}
    # Whether every tensor of both sides has a match, so that what is left over belongs together.
    is_whole = not matches.sources.open and filled.issuperset(matches.targets.names)
    _find_guesses(matches, is_whole)
    _find_turned_squares(matches)
    return matches


def _match_names(matches: Matches) -> None:
    """Matches kinds that are clearly each other's best match, joins first."""
    for varying, (here, there) in product(PASSES, ((iter, _joined), (_joined, iter), (iter, iter))):
        is_changing = True
        while is_changing:
            is_changing = False
            first = by_signature(here(matches.sources.kinds(varying)))
            second = by_signature(there(matches.targets.kinds(varying)))
            for signature, left in first.items():
                for pair in _best_pairs(left, second.get(signature, []), matches):
                    matches.link(*pair)
                    is_changing = True


# Transposed weights.


def _misfits(matches: Matches) -> list[str]:
    """Returns the open weights that fit an open weight of the model, and only transposed."""
    contents = {leaf.content for leaf in matches.targets.names.values()}
    required = {leaf.content for leaf in matches.targets.open.values()}
    leaves = [leaf for leaf in matches.sources.open.values() if leaf.is_turned is None and len(leaf.shape) == 2]
    return [
        leaf.name for leaf in leaves if leaf.content not in contents and (leaf.shape[::-1], leaf.is_float) in required
    ]


def _turn(leaves: Collection[Leaf], misfits: Collection[str] = ()) -> None:
    """Notes which weights have their inputs first, as in a Conv1D, as their biases show.

    Weights in `misfits` have. Square weights, and weights without a bias in a layer, are as the known weights of their
    layer are.
    """
    biases = {leaf.name.removesuffix("bias"): leaf.shape for leaf in leaves if leaf.name.endswith("bias")}
    layers: dict[str, set[bool]] = defaultdict(set)
    weights = [leaf for leaf in leaves if len(leaf.shape) == 2]
    for leaf in weights:
        bias = biases.get(leaf.name.removesuffix("weight"))
        is_known = not leaf.is_square and bias in (leaf.shape[:1], leaf.shape[1:])
        if leaf.is_turned is None and (is_known or leaf.name in misfits):
            leaf.turn(leaf.name in misfits or bias == leaf.shape[1:])
        if leaf.is_turned is not None:
            layers[leaf.layer].add(leaf.is_turned)
    for leaf in weights:
        if leaf.is_turned is None and len(layers[leaf.layer]) == 1 and (leaf.layer or leaf.is_square):
            leaf.turn(*layers[leaf.layer])


def _find_turned_squares(matches: Matches) -> None:
    """Finds the square weights that are transposed as the other weights of their layer, which is a guess.

    Under another name, it is a guess too that one stays as it is, unless another weight of its layer surely matches.
    """
    first, second = matches.sources.names, matches.targets.names
    is_mixed = any(name.is_turned for side in (first, second) for name in side.values())
    sure = {name for goal, names in matches.expected.items() if goal not in matches.guesses for name in names}
    others = [leaf for leaf in first.values() if len(leaf.shape) == 2 and not leaf.is_square]
    unclear = {leaf.layer for leaf in others} - {leaf.layer for leaf in others if leaf.name in sure}
    doubtful = []
    for name, goal in matches.pairs.items():
        here, states = first[name], {first[name].is_turned, second[goal].is_turned}
        if here.is_square and states == {True, False}:
            matches.inferred.add(name)
        elif here.is_square and None in states and (is_mixed or (name != goal and here.layer in unclear)):
            doubtful.append(name)
    for names, what in ((sorted(matches.inferred), "transposed as the weights beside it"), (doubtful, "left as it is")):
        matches.guesses.update(matches.pairs[name] for name in names)
        if names:
            text = f"square, so its shape does not show whether to transpose it: {', '.join(folded(names))}; {what}"
            matches.notes[text] = None


# Similar names.


def by_signature(kinds: Iterable[Kind]) -> dict[tuple[object, ...], list[Kind]]:
    """Groups kinds that cannot be told apart without their names."""
    groups: dict[tuple[object, ...], list[Kind]] = defaultdict(list)
    for kind in kinds:
        groups[kind.signature].append(kind)
    return groups


def _best_pairs(sources: Sequence[Kind], targets: Sequence[Kind], matches: Matches) -> list[tuple[Kind, Kind]]:
    """Returns pairs that clearly are each other's best match."""
    if len(sources) * len(targets) > _MOST_CANDIDATES:
        return []
    scores = {
        pair: matches.score(*pair)
        for pair in product(sources, targets)
        if not exclude(*pair) and _is_ordered(*pair, matches)
    }
    ranked: dict[Kind, list[float]] = defaultdict(list)
    for pair, score in scores.items():
        for kind in pair:
            ranked[kind].append(score)
    second = {kind: [-1.0, *sorted(of_kind)][-2] for kind, of_kind in ranked.items()}
    pairs = [pair for pair, score in scores.items() if max(second[kind] for kind in pair) + _MARGIN <= score]
    moved = [pair for pair in pairs if _may_have_moved(*pair, matches.pairs)]
    if moved:
        matches.notes["equal names may each have moved by one; then only a Rename written by hand says so"] = None
    return [pair for pair in pairs if pair not in moved]


def exclude(source: Kind, target: Kind) -> bool:
    """Whether words or numbers of two kinds say that they do not match."""
    for joined, whole in ((source, target), (target, source)):
        # Parts are joined along the outputs of a Linear.
        if joined.parts and (target.first.is_turned or not joined.first.words[-1] <= whole.first.words[-1]):
            return True
    if contradict(source.means, target.means) or (source.alone and target.alone and source.alone != target.alone):
        return True
    if not all(source.same_ordinals(target)):
        return True
    # If both names have the same count of numbers, the same ones must vary: a layer is not a part of a layer.
    if len(source.first.ranks) == len(target.first.ranks):
        return source.varied != target.varied
    # Else they have the first number that varies in common, that of the layer: ln2 in layer 0 is not in layer 1.
    layers = [[rank for rank in kind.first.ranks if rank[1] > 1][:1] for kind in (source, target)]
    return not (source.varied or target.varied) and [] not in layers and layers[0] != layers[1]


def _is_end(first: Kind, second: Kind) -> bool:
    """Whether one of two names is the end of the other one."""
    return any(f".{text}".endswith(f".{end}") for text, end in permutations((first.text, second.text)))


def _may_have_moved(source: Kind, target: Kind, pairs: Mapping[str, str]) -> bool:
    """Whether all names may be shifted: if "a.a.w" and "a.w" match "a.w" and "w", the equal names may be wrong."""
    shorter, longer = sorted((source.first.name, target.first.name), key=len)
    rests = (longer[len(part) :] for part in prefixes(longer))
    return longer.endswith(f".{shorter}") and any(pairs.get(rest) == rest for rest in rests)


def _is_ordered(source: Kind, target: Kind, matches: Matches) -> bool:
    """Whether the numbers of two kinds cannot be exchanged; also where not all of them vary any more.

    Numbers whose exchange would change nothing are told apart by the words before them.
    """
    texts = "#".join(source.first.texts), "#".join(target.first.texts)
    first, second = _words_before(source), _words_before(target)
    for i, j in combinations(range(min(len(first), len(second))), 2):
        order = [*range(len(first))]
        order[i], order[j] = j, i
        contents = {ranks: leaf.content for ranks, leaf in source.leaves.items()}
        if contents == {tuple(ranks[at] for at in order): content for ranks, content in contents.items()}:
            straight = len(first[i] & second[i]) + len(first[j] & second[j])
            if straight <= len(first[i] & second[j]) + len(first[j] & second[i]):
                matches.unordered.add(texts)
    return texts not in matches.unordered


def _words_before(kind: Kind) -> list[frozenset[str]]:
    """Returns the concepts before each number that varies, up to the number before it, and the last word itself."""
    parts = [re.findall(r"[^.]+", kind.first.texts[at].lower()) for at in kind.varied]
    return [frozenset(f"={part}" for part in path[-1:]).union(*map(concepts, path)) for path in parts]


# Fused tensors.


def _joined(kinds: Iterable[Kind]) -> Iterator[Kind]:
    """Yields what siblings join to that are named query, key and value, or like the parts of another fused tensor.

    They have the names of the first parts, and fit together in the same way in every layer.
    """
    whole_of = {part: whole for whole, names in PARTS.items() for part in names if whole != "kv"}
    stems: dict[tuple[str, str], dict[str, Kind]] = defaultdict(dict)
    for kind in kinds:
        path = kind.text.split(".")
        path[len(kind.first.words) - 1] = "?"
        named = kind.first.words[-1] & whole_of.keys()
        if len(named) == 1 and kind.first.shape:
            (name,) = named
            stems[".".join([*path, kind.first.role]), whole_of[name]][name] = kind
    for (_, whole), members in stems.items():
        parts = [members[name] for name in PARTS[whole] if name in members]
        rests = {frozenset((ranks, x.shape[1:], x.is_float) for ranks, x in part.leaves.items()) for part in parts}
        sizes = {(part.text, leaf.shape[:1]) for part in parts for leaf in part.leaves.values()}
        if len(parts) == len(PARTS[whole]) == len(sizes) and len(rests) == 1:
            size = sum(part.first.shape[0] for part in parts)
            words = [*parts[0].first.words[:-1], frozenset({whole})]
            leaves = {rank: replace(x, shape=(size, *x.shape[1:]), words=words) for rank, x in parts[0].leaves.items()}
            yield Kind(replace(parts[0].first, words=words), parts[0].varied, parts[0].text, leaves, parts)


# Certainty.


def _find_guesses(matches: Matches, is_whole: bool) -> None:
    """Finds the matches that are not sure.

    A match is sure where names or structure leave no other one: what both names state is together in no other open
    name of a tensor of this size, or all other tensors of this size have a sure match. Everything else is a guess,
    however high its score is.
    """
    sides = matches.sources, matches.targets
    unmatched = [side.kinds(0) for side in sides]
    counts = [Counter(leaf.size for leaf in side.names.values()) for side in sides]
    left = list(matches.links)
    owners: set[tuple[str, str]] = set()  # modules with a sure match
    # Kinds of both sides without a sure match, by the sizes of their tensors.
    rivals: list[dict[object, set[Kind]]] = []

    def has_rival(at: int, kind: Kind, facts: frozenset[str]) -> bool:
        others = (rivals[at][leaf.size] for leaf in kind.leaves.values())
        return any(other is not kind and facts <= other.claims for of_size in others for other in of_size)

    def is_only_one(at: int, kind: Kind) -> bool:
        return len(kind.leaves) == sum(counts[at][size] for size in {leaf.size for leaf in kind.leaves.values()})

    def is_sure(source: Kind, target: Kind) -> bool:
        if (source.first.owner, target.first.owner) in owners:
            return True
        common = source.claims & target.claims
        here, there = source.means - GENERIC - target.claims, target.means - GENERIC - source.claims
        # A norm in the only layer is not the one behind all layers.
        paths = permutations((source.first.path, target.first.path))
        is_layer_lost = any(".#." in path and ".#" not in other for path, other in paths)
        if (
            is_layer_lost
            or CONVENTION in here | there
            or (not is_whole and ((here and there) or _is_renumbered(source, target)))
        ):
            return False
        is_placed = any(fact[0] == "#" for fact in common)
        is_named = bool(_own(source) & common and _own(target) & common) or _is_end(source, target)
        is_left = is_whole and (is_placed or (is_only_one(0, source) and is_only_one(1, target)))
        return (is_named or is_left) and not any(
            has_rival(at, kind, facts)
            for at, kind, words in ((0, source, there), (1, target, here))
            for facts in (common, *(frozenset({word}) for word in words))
        )

    is_changing = True
    while is_changing:
        rivals = [defaultdict(set), defaultdict(set)]
        for at in (0, 1):
            for kind in (*(link[at] for link in left), *unmatched[at]):
                for leaf in kind.leaves.values():
                    rivals[at][leaf.size].add(kind)
        sure = {link for link in left if is_sure(*link)}
        left = [link for link in left if link not in sure]
        owners.update((source.first.owner, target.first.owner) for source, target in sure)
        is_changing = bool(sure)
    matches.guesses.update(leaf.name for _, target in left for leaf in target.leaves.values())
    if any((CONVENTION in source.means) != (CONVENTION in target.means) for source, target in left):
        matches.notes["gate (w1) and up (w3) are told apart by Llama's convention alone"] = None


def _own(kind: Kind) -> frozenset[str]:
    """Returns the concepts of the last part of the name that says which tensor it is."""
    return next((own for words in reversed(kind.first.words) if (own := words - GENERIC)), frozenset())


def _is_renumbered(source: Kind, target: Kind) -> bool:
    """Whether the numbers of two names differ, so that they stand for the same layers only where no layer is left."""
    return any(
        here.numbers != there.numbers
        and (len(here.numbers) == len(there.numbers) or "".join(here.texts) == "".join(there.texts))
        for here, there in ((leaf, target.leaves[ranks]) for ranks, leaf in source.leaves.items())
    )
