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
from itertools import combinations, product

import msgspec
import torch
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
    shared,
)
from modelstate.text_format import folded, without_numbers

Ranks = tuple[int, ...]

LONGEST_NAME = 1000
"""The most characters of a name that is compared with similar ones, which takes time with the square of its length.
Its numbers are short enough for Python, which converts none of over 4,300 digits."""
_ORDINARY = re.compile(rf"[^*#\n]{{1,{LONGEST_NAME}}}")
"""Names that contain the wildcards of patterns cannot be matched by a pattern, and long ones are of no model."""
_NUMBER = re.compile(r"(\d+)(?![^\W_])")
"""A number that is a part of a name, or the end of a word in it: not the 2 of 2d."""
_MARGIN = 0.25
"""The least lead of the best score over the others."""
_SAME_OWNER, _SAME_PARENT = 2.0, 0.75
_MOST_CANDIDATES = 20_000


class Leaf(msgspec.Struct, frozen=True, eq=False):
    """A tensor without its values: name, shape and kind of dtype."""

    name: str
    shape: Shape
    dtype_kind: str
    """ "float", "int", "bool" or "complex"."""

    @classmethod
    def of(cls, name: str, tensor: Source) -> Leaf:
        """Returns a tensor of a checkpoint or a model without its values."""
        dtype = tensor.dtype
        kind = "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"
        return cls(name, tuple(tensor.shape), "float" if dtype.is_floating_point else kind)

    @property
    def content(self) -> tuple[Shape, str]:
        return self.shape, self.dtype_kind


def _owner_and_role(name: str) -> tuple[str, str]:
    """Returns the path of the module that owns a tensor, and the role of the tensor in it."""
    path, _, last = name.rpartition(".")
    rest, role = role_of(last)
    return ".".join(filter(None, (path, rest))), role


class Named(Leaf, frozen=True, eq=False):
    """A tensor of one side, with the shape that it has in a Linear, and with what its name says."""

    is_turned: bool | None
    """Whether it has another shape than in a Linear, its inputs first, as in a Conv1D; None if nothing shows it."""
    owner: str
    role: str
    words: tuple[frozenset[str], ...]
    """The concepts of the parts of the owner's path."""
    texts: list[str]
    """The texts around the numbers."""
    numbers: list[str]
    ranks: list[tuple[int, int]]
    """The rank of each number in its place, and the count of the numbers that are in this place."""

    def text(self, varied: Collection[int]) -> str:
        """Returns the name, with # for the numbers of these indices."""
        numbers = ["#" if at in varied else number for at, number in enumerate(self.numbers)]
        return "".join(text + number for text, number in zip(self.texts, [*numbers, ""], strict=True))

    @property
    def parent(self) -> str:
        """The path above the owner, with # for numbers."""
        return without_numbers(self.owner).rpartition(".")[0]

    @property
    def size(self) -> tuple[object, ...]:
        """What is equal for tensors that could take each other's place, transposed or reshaped too."""
        shape = self.shape if self.is_turned is not None else sorted(self.shape)
        return self.dtype_kind, self.role, *(size for size in shape if size != 1)


class Kind(msgspec.Struct, eq=False, dict=True):
    """Tensors whose names differ only in numbers."""

    first: Named
    """The first of them."""
    varied: tuple[int, ...]
    """The indices of the numbers in which the names differ."""
    text: str
    """The name, with # for these numbers."""
    leaves: dict[Ranks, Named]
    """The tensors by the ranks of these numbers."""
    parts: Sequence[Kind] = ()
    """Of a join, which is in no file, the kinds that it consists of: query, key and value."""
    concept: str = ""
    """What a tensor that consists of these parts is named: "qkv"."""

    @property
    def signature(self) -> tuple[object, ...]:
        """What is equal for kinds that can match: role, shapes and dtypes at each combination of numbers."""
        return self.first.role, tuple(sorted((ranks, *leaf.content) for ranks, leaf in self.leaves.items()))

    @cached_property
    def means(self) -> frozenset[str]:
        """The concepts of the name."""
        *path, last = self.first.words
        rank, count = self.first.ranks[-1] if self.first.ranks else (0, 0)
        is_numbered = self.first.owner[-1:].isdecimal() and len(self.first.ranks) - 1 not in self.varied
        if last == {"norm"} and is_numbered and count < 3:
            # Of two norms in a layer, the first belongs to attention and the second to the MLP.
            rank = rank if count > 1 else int(self.first.numbers[-1]) - 1
            last |= {("first", "second")[rank]} if rank in (0, 1) else set()
        return meaning([*path, last])

    @cached_property
    def ordinals(self) -> dict[int, str]:
        """The ranks of the numbers that do not vary, by their indices from the end of the name."""
        ranks = [(at, *rank) for at, rank in enumerate(self.first.ranks) if at not in self.varied]
        return {at - len(self.first.ranks): f"{rank}/{count}" for at, rank, count in ranks if count > 1}

    @cached_property
    def alone(self) -> list[str]:
        """The numbers at the ends of words that are alone in their place: norm1 is not ln_2."""
        numbers = zip(self.first.texts, self.first.numbers, self.first.ranks, strict=False)
        return [number for text, number, (_, count) in numbers if count == 1 and text[-1:] not in ("", ".")]

    @cached_property
    def facts(self) -> frozenset[str]:
        """What the name states: concepts, and which one of several it is."""
        return self.means | {f"#{at}:{rank}" for at, rank in self.ordinals.items()}

    @cached_property
    def claims(self) -> frozenset[str]:
        """The facts that tell kinds apart; a fused tensor has those of its parts too."""
        ranks = self.first.ranks
        numbered = [f"#{at - len(ranks)}" for at, (_, count) in enumerate(ranks) if count > 1]
        return (self.facts - GENERIC).union(numbered, *(PARTS.get(word, ()) for word in self.means))


class Side:
    """The tensors of a checkpoint or a model with ordinary names."""

    def __init__(self, leaves: Sequence[Leaf], misfits: Collection[str] = ()) -> None:
        turned = _orientation(leaves, misfits)
        shapes = {leaf.name: leaf.shape[::-1] if turned.get(leaf.name) else leaf.shape for leaf in leaves}
        beside = _words_beside(shapes)
        places: dict[str, set[str]] = defaultdict(set)
        self.names: dict[str, Named] = {}
        for leaf in leaves:
            name, shape, is_turned = leaf.name, shapes[leaf.name], turned.get(leaf.name)
            owner, role = _owner_and_role(name)
            words = [concepts(segment) for segment in owner.split(".")]
            words[-1] = beside.get(without_numbers(owner), words[-1])
            # The number of a part that has a meaning of its own, as w1, does not stand for an order.
            end = owner.rfind(".") + 1 if without_numbers(owner) in beside else len(name)
            texts = _NUMBER.split(name[:end])
            texts[-1] += name[end:]
            numbers, texts = texts[1::2], texts[::2]
            for at, number in enumerate(numbers):
                places["#".join(texts[: at + 1])].add(number)
            named = Named(name, shape, leaf.dtype_kind, is_turned, owner, role, tuple(words), texts, numbers, [])
            self.names[name] = named
        order = {place: sorted(numbers, key=lambda text: (int(text), text)) for place, numbers in places.items()}
        ranks = {place: {number: at for at, number in enumerate(numbers)} for place, numbers in order.items()}
        for named in self.names.values():
            for at, number in enumerate(named.numbers):
                of_place = ranks["#".join(named.texts[: at + 1])]
                named.ranks.append((of_place[number], len(of_place)))
        self.open = dict(self.names)
        """The tensors without a match."""
        self.counts = Counter(named.size for named in self.names.values())
        """The count of tensors of each size."""

    def kinds(self, varying: int) -> list[Kind]:
        """Returns the kinds of open tensors whose names differ in the first numbers, at most so many, in order."""
        kinds: dict[str, Kind] = {}
        for name in self.open.values():
            varied = tuple(at for at, (_, count) in enumerate(name.ranks) if count > 1)[:varying]
            text = name.text(varied)
            kind = kinds.setdefault(text, Kind(name, varied, text, {}))
            kind.leaves[tuple(name.ranks[at][0] for at in varied)] = name
        return list(kinds.values())


def _words_beside(shapes: Mapping[str, Shape]) -> dict[str, frozenset[str]]:
    """Returns the concepts of modules that the other members of their parents decide, the same in all layers."""
    parents: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        owner, role = _owner_and_role(name)
        parent, _, member = without_numbers(owner).rpartition(".")
        if role in ("", "weight") and parents[parent].setdefault(member, shape) != shape:
            parents[parent][member] = ()
    return {
        f"{parent}.{member}" if parent else member: words
        for parent, members in parents.items()
        for member, words in meanings_beside(members).items()
    }


class Fusion(msgspec.Struct, frozen=True):
    """How tensors consist of others."""

    is_split: bool
    """Whether the checkpoint has the wholes, and not the parts."""
    dim: int
    """The dimension along which the parts are joined."""
    sizes: tuple[int, ...] | None
    """The sizes of the parts along that dimension; None if they are equal."""


class Matches(msgspec.Struct):
    """The matches between the tensors of a checkpoint and those of a model."""

    sources: Side
    targets: Side
    pairs: dict[str, str] = {}
    """From names of the checkpoint to names of the model."""
    fusions: dict[Fusion, list[tuple[str, ...]]] = {}
    """The names of tensors of the checkpoint that are split, and of the model that are joined, each with its parts."""
    links: list[tuple[Kind, Kind]] = []
    """The kinds that match; a kind of fused tensors with that of each of its parts."""
    expected: dict[str, tuple[str, ...]] = {}
    """For each name of the model with a match, the names in the checkpoint that it is made of."""
    used: set[str] = set()
    """Names of the checkpoint with a match."""
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

    @property
    def passes(self) -> range:
        """How many of the numbers of a name may vary within a kind, from all of them to none."""
        sides = (self.sources, self.targets)
        return range(max((len(name.ranks) for side in sides for name in side.names.values()), default=0), -1, -1)

    def add(self, sources: tuple[str, ...], target: str) -> None:
        """Records what a tensor of the model is made of."""
        self.expected[target] = sources
        self.used.update(sources)
        goal = self.targets.open.pop(target, None)
        for name in (self.sources.open.pop(source, None) for source in sources):
            if name is not None and goal is not None:
                self.beside |= {(name.owner, goal.owner), (name.parent, goal.parent)}

    def replace_sources(self, side: Side) -> None:
        """Takes the same tensors of the checkpoint with other shapes; the matches stay."""
        side.open = {name: side.names[name] for name in self.sources.open}
        self.sources = side
        for at, (source, target) in enumerate(self.links):
            leaves = {ranks: side.names[leaf.name] for ranks, leaf in source.leaves.items()}
            self.links[at] = Kind(side.names[source.first.name], source.varied, source.text, leaves), target

    def link(self, source: Kind, target: Kind) -> None:
        """Records that two kinds match. One of them may be a join, whose `parts` are the kinds that it consists of."""
        parts = source.parts or target.parts
        sizes = tuple(part.first.shape[0] for part in parts)
        is_matrix = len(source.first.shape) == 2
        dim = 1 if is_matrix and target.first.is_turned else 0
        fusion = Fusion(bool(target.parts), dim, sizes if len({*sizes}) > 1 else None)
        here, there = source.parts or [source], target.parts or [target]
        for ranks in source.leaves:
            names, goals = (tuple(kind.leaves[ranks].name for kind in side) for side in (here, there))
            if not parts:
                self.pairs[names[0]] = goals[0]
            else:
                self.fusions.setdefault(fusion, []).append((*names, *goals) if fusion.is_split else (*goals, *names))
                if is_matrix and bool(source.first.is_turned) != bool(target.first.is_turned):
                    self.transposed.update(names)
            for goal in goals:
                self.add(names, goal)
        self.links += product(here, there)

    def score(self, source: Kind, target: Kind) -> float:
        """Returns how much speaks for a pair: what both names state, and matches of tensors beside it."""
        first, second = source.first, target.first
        score = shared(source.facts, target.facts) + _SAME_PARENT * ((first.parent, second.parent) in self.beside)
        return score + _SAME_OWNER * ((first.owner, second.owner) in self.beside)


def match(sources: Sequence[Leaf], targets: Sequence[Leaf], ties: Mapping[str, Sequence[str]]) -> Matches:
    """Matches both sides: equal names, then fused tensors and similar names.

    Args:
        sources: The tensors of the checkpoint.
        targets: The tensors of the model.
        ties: All names of a tensor of the model, by each of them.
    """
    here, there = ([leaf for leaf in side if _ORDINARY.fullmatch(leaf.name)] for side in (sources, targets))
    matches = Matches(Side(here), Side(there))
    of_model = {leaf.name: leaf for leaf in targets}
    for leaf in sources:
        if leaf.name in of_model and of_model[leaf.name].content == leaf.content:
            matches.pairs[leaf.name] = leaf.name
            matches.add((leaf.name,), leaf.name)
    _match_names(matches)
    if misfits := _misfits(matches):
        matches.replace_sources(Side(here, misfits))
        _match_names(matches)
    filled = {name for target in matches.expected for name in ties.get(target, (target,))}
    # Whether every tensor of both sides has a match, so that what is left over belongs together.
    is_whole = matches.used.issuperset(leaf.name for leaf in sources) and filled.issuperset(of_model)
    _find_guesses(matches, is_whole)
    shapes = {leaf.name: leaf.shape for leaf in sources}
    matches.transposed |= {name for name, goal in matches.pairs.items() if shapes[name] != of_model[goal].shape}
    _find_turned_squares(matches)
    return matches


def _match_names(matches: Matches) -> None:
    """Matches kinds that are clearly each other's best match, joins first."""
    for varying in matches.passes:
        for here, there in ((iter, _joined), (_joined, iter), (iter, iter)):
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
    wanted = {leaf.content for leaf in matches.targets.open.values()}
    open_leaves = matches.sources.open.values()
    return [
        leaf.name
        for leaf in open_leaves
        if not leaf.is_turned
        and len(leaf.shape) == 2
        and leaf.content not in contents
        and (leaf.shape[::-1], leaf.dtype_kind) in wanted
    ]


def _orientation(leaves: Sequence[Leaf], misfits: Collection[str] = ()) -> dict[str, bool | None]:
    """Returns whether weights have their inputs first, as in a Conv1D, as their biases show; None if nothing shows it.

    Weights in `misfits` have. Square weights, and weights without a bias in a layer, are as the known weights of their
    layer are.
    """
    biases = {leaf.name.removesuffix("bias"): leaf.shape for leaf in leaves if leaf.name.endswith("bias")}
    layers: dict[str, set[bool]] = defaultdict(set)
    known: dict[str, bool | None] = {}
    for leaf in leaves:
        if len(leaf.shape) != 2 or _owner_and_role(leaf.name)[1] not in ("", "weight"):
            continue
        known[leaf.name] = None
        bias = biases.get(leaf.name.removesuffix("weight"))
        if not _is_square(leaf) and (leaf.name in misfits or bias in ((leaf.shape[0],), (leaf.shape[1],))):
            is_turned = known[leaf.name] = leaf.name in misfits or bias == (leaf.shape[1],)
            layers[_layer_of(leaf.name)].add(is_turned)
    for leaf in leaves:
        layer = _layer_of(leaf.name)
        if leaf.name in known and known[leaf.name] is None and len(layers[layer]) == 1 and (layer or _is_square(leaf)):
            (known[leaf.name],) = layers[layer]
    return known


def _layer_of(name: str) -> str:
    """Returns the path of the layer of a tensor, with # for numbers."""
    text = without_numbers(name)
    return text[: text.rfind("#") + 1]


def _is_square(leaf: Leaf) -> bool:
    return len(leaf.shape) == 2 and leaf.shape[0] == leaf.shape[1]


def _find_turned_squares(matches: Matches) -> None:
    """Finds the square weights that are transposed as the other weights of their layer, which is a guess.

    Under another name, it is a guess too that one stays as it is, unless another weight of its layer surely matches.
    """
    first, second = matches.sources.names, matches.targets.names
    is_mixed = any(name.is_turned for side in (first, second) for name in side.values())
    sure = {name for goal, names in matches.expected.items() if goal not in matches.guesses for name in names}
    others = [name for name, leaf in first.items() if len(leaf.shape) == 2 and not _is_square(leaf)]
    unclear = {_layer_of(name) for name in others} - {_layer_of(name) for name in others if name in sure}
    doubtful = []
    for name, goal in matches.pairs.items():
        if name not in first or not _is_square(first[name]) or first[name].role not in ("", "weight"):
            continue
        here, there = first[name].is_turned, second[goal].is_turned
        if here is None or there is None:
            doubtful += [name] if is_mixed or (name != goal and _layer_of(name) in unclear) else []
        elif here != there:
            matches.inferred.add(name)
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
    scores = [
        (matches.score(source, target), source, target)
        for source in sources
        for target in targets
        if not exclude(source, target) and _is_ordered(source, target, matches)
    ]
    ranked: dict[Kind, list[float]] = defaultdict(list)
    for score, *pair in scores:
        for kind in pair:
            ranked[kind].append(score)
    best: dict[Kind, float] = {}
    for kind, of_kind in ranked.items():
        *others, first = sorted(of_kind)
        if not others or first - others[-1] >= _MARGIN:
            best[kind] = first
    pairs = [(source, target) for score, source, target in scores if best.get(source) == best.get(target) == score]
    moved = [pair for pair in pairs if _may_have_moved(*pair, matches.pairs)]
    if moved:
        matches.notes[
            "names that fit as they are may each have moved by one; then only a Rename written by hand says so"
        ] = None
    return [pair for pair in pairs if pair not in moved]


def exclude(source: Kind, target: Kind) -> bool:
    """Whether words or numbers of two kinds say that they do not match."""
    for joined, whole in ((source, target), (target, source)):
        if joined.parts and joined.concept not in whole.first.words[-1]:
            return True
    if (source.parts or target.parts) and target.first.is_turned and not source.first.is_turned:
        return True  # the result would have to be transposed, after the split or join
    if contradict(source.means, target.means) or (source.alone and target.alone and source.alone != target.alone):
        return True
    if any(target.ordinals.get(at, rank) != rank for at, rank in source.ordinals.items()):
        return True
    # If both names have the same count of numbers, the same ones must vary: a layer is not a part of a layer.
    if len(source.first.ranks) == len(target.first.ranks):
        return source.varied != target.varied
    # Else they have the first number that varies in common, that of the layer: ln2 in layer 0 is not in layer 1.
    layers = [[rank for rank in kind.first.ranks if rank[1] > 1][:1] for kind in (source, target)]
    return not (source.varied or target.varied) and [] not in layers and layers[0] != layers[1]


def _is_ordered(source: Kind, target: Kind, matches: Matches) -> bool:
    """Whether the numbers of two kinds cannot be exchanged; also where not all of them vary any more."""
    texts = "#".join(source.first.texts), "#".join(target.first.texts)
    if not _order_is_clear(source, target):
        matches.unordered.add(texts)
    return texts not in matches.unordered


def _may_have_moved(source: Kind, target: Kind, pairs: Mapping[str, str]) -> bool:
    """Whether all names may be shifted: if "a.a.w" and "a.w" match "a.w" and "w", the equal names may be wrong."""
    shorter, longer = sorted((source.first.name, target.first.name), key=len)
    rests = (longer[len(part) :] for part in prefixes(longer))
    return longer.endswith(f".{shorter}") and any(pairs.get(rest) == rest for rest in rests)


def _is_end(first: str, second: str) -> bool:
    """Whether one of two names is the other one behind a prefix."""
    return f".{first}".endswith(f".{second}") or f".{second}".endswith(f".{first}")


def _order_is_clear(source: Kind, target: Kind) -> bool:
    """Whether numbers whose exchange would change nothing can be told apart by the words before them."""
    first, second = _words_before(source), _words_before(target)
    for i, j in combinations(range(min(len(first), len(second))), 2):
        order = [*range(len(first))]
        order[i], order[j] = j, i
        contents = {ranks: leaf.content for ranks, leaf in source.leaves.items()}
        if contents == {tuple(ranks[at] for at in order): content for ranks, content in contents.items()}:
            straight = shared(first[i], second[i]) + shared(first[j], second[j])
            if straight - shared(first[i], second[j]) - shared(first[j], second[i]) < _MARGIN:
                return False
    return True


def _words_before(kind: Kind) -> list[frozenset[str]]:
    """Returns the concepts before each number that varies, up to the number before it, and the last word itself."""
    parts = [re.findall(r"[^.]+", kind.first.texts[at].lower()) for at in kind.varied]
    return [frozenset(f"={part}" for part in path[-1:]).union(*map(concepts, path)) for path in parts]


# Fused tensors.


def _joined(kinds: Iterable[Kind]) -> Iterator[Kind]:
    """Yields what siblings join to that are named query, key and value, or like the parts of another fused tensor.

    They have the names of the first parts.
    """
    whole_of = {part: whole for whole, names in PARTS.items() for part in names if whole != "kv"}
    stems: dict[tuple[str, int, str, str], dict[str, Kind]] = defaultdict(dict)
    for kind in kinds:
        path = _owner_and_role(kind.text)[0].split(".")
        for at in range(len(path))[:-3:-1]:
            named = [word for word in kind.first.words[at] if word in whole_of]
            if len(named) == 1:
                path[at] = "?"
                stems[".".join(path), at, kind.first.role, whole_of[named[0]]][named[0]] = kind
                break
    for (_, at, _, concept), members in stems.items():
        parts = [members[name] for name in PARTS[concept] if name in members]
        if len(parts) == len(PARTS[concept]) and (leaves := _joined_leaves(parts)):
            words = list(parts[0].first.words)
            words[at] = frozenset({concept})
            first = replace(parts[0].first, words=tuple(words))
            yield Kind(first, parts[0].varied, parts[0].text, leaves, parts, concept)


def _joined_leaves(parts: Sequence[Kind]) -> dict[Ranks, Named]:
    """Returns the tensors that the parts join to; none unless they fit together, in the same way in every layer."""
    rests = {frozenset((ranks, x.shape[1:], x.dtype_kind) for ranks, x in part.leaves.items()) for part in parts}
    sizes = [{leaf.shape[:1] for leaf in part.leaves.values()} for part in parts]
    if len(rests) > 1 or any(len(of_part) > 1 or () in of_part for of_part in sizes):
        return {}
    size = sum(part.first.shape[0] for part in parts)
    return {ranks: replace(leaf, shape=(size, *leaf.shape[1:])) for ranks, leaf in parts[0].leaves.items()}


# Certainty.


def _find_guesses(matches: Matches, is_whole: bool) -> None:
    """Finds the matches that are not sure.

    A match is sure where names or structure leave no other one: what both names state is together in no other open
    name of a tensor of this size, or all other tensors of this size have a sure match. Everything else is a guess,
    however high its score is.
    """
    sides = matches.sources, matches.targets
    unmatched = [side.kinds(0) for side in sides]
    left = list(matches.links)
    owners: set[tuple[str, str]] = set()  # modules with a sure match
    rivals: list[dict[object, set[Kind]]] = []
    """Kinds of both sides without a sure match, by the sizes of their tensors."""

    def has_rival(at: int, kind: Kind, facts: frozenset[str]) -> bool:
        others = (rivals[at][leaf.size] for leaf in kind.leaves.values())
        return any(other is not kind and facts <= other.claims for of_size in others for other in of_size)

    def is_only_one(at: int, kind: Kind) -> bool:
        sizes = {leaf.size for leaf in kind.leaves.values()}
        return len(kind.leaves) == sum(sides[at].counts[size] for size in sizes)

    def is_sure(source: Kind, target: Kind) -> bool:
        if (source.first.owner, target.first.owner) in owners:
            return True
        common = source.claims & target.claims
        here, there = source.means - GENERIC - target.claims, target.means - GENERIC - source.claims
        if CONVENTION in here | there or (not is_whole and ((here and there) or _is_renumbered(source, target))):
            return False
        is_placed = any(fact[0] == "#" for fact in common)
        is_named = bool(_own(source) & common and _own(target) & common) or _is_end(source.text, target.text)
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
    for ranks, leaf in source.leaves.items():
        name, goal = leaf.name, target.leaves[ranks].name
        first, second = _NUMBER.findall(name), _NUMBER.findall(goal)
        if first != second and (len(first) == len(second) or _NUMBER.sub("", name) == _NUMBER.sub("", goal)):
            return True
    return False
