"""Finds which tensors of a checkpoint and a model belong together, from their names and shapes.

Tensors whose names differ only in numbers, such as those of the layers of an encoder, are one `Kind`. Kinds that have
the same shapes at the same numbers can match. The words of their names, and the matches beside them, decide: a match
counts only if it is clearly the best one in both directions. A fused tensor matches the kinds of its parts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec
import torch
from msgspec.structs import replace

from modelstate.planning.matching import prefixes, without_wrappers
from modelstate.suggestion.words import (
    CONVENTION,
    GENERIC,
    PARTS,
    SEQUENCE,
    Shape,
    concepts,
    contradict,
    meanings_beside,
    of_path,
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
_NUMBER = re.compile(r"(\d+)")
_ALIKE = 0.5
"""The share of equal names below two numbers from which on these number modules of one kind."""
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
    context: Mapping[int, frozenset[str]] = {}
    """The concepts of parts of the name, by their index, that differ beside the other members of their module."""

    @property
    def content(self) -> tuple[Shape, str]:
        return self.shape, self.dtype_kind

    def words(self, at: int) -> frozenset[str]:
        """Returns the concepts of one part of the name."""
        return self.context.get(at) or concepts(_member(self.name.split(".")[at]))


def dtype_kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"


def layer_of(name: str) -> str:
    """Returns the path of the layer of a tensor, with # for numbers."""
    text = without_numbers(name)
    return text[: text.rfind("#") + 1]


def module_of(name: str) -> str:
    """Returns the path of the module that owns the tensor."""
    path, _, last = name.rpartition(".")
    return ".".join(filter(None, (path, role_of(last)[0])))


def _above(module: str) -> str:
    """Returns the path above a module, with # for numbers."""
    return without_numbers(module).rpartition(".")[0]


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
    is_split: bool
    """Whether the checkpoint has the wholes, and not the parts."""


class Matches(msgspec.Struct):
    """The matches between the tensors of a checkpoint and those of a model."""

    sources: list[Leaf]
    targets: list[Leaf]
    pairs: dict[str, str] = {}
    """From names of the checkpoint to names of the model."""
    fusions: list[Fusion] = []
    """Tensors of the checkpoint that are split, and tensors of the model that are joined."""
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
    notes: list[str] = []
    owners: dict[str, str] = {}
    """The modules of the model by those of the checkpoint, where a tensor of them has a match."""
    parents: set[tuple[str, str]] = set()
    """The paths above such modules, of both sides."""

    def open_sources(self) -> list[Leaf]:
        """Returns the tensors of the checkpoint without a match."""
        return [leaf for leaf in self.sources if leaf.name not in self.used]

    def open_targets(self) -> list[Leaf]:
        """Returns the tensors of the model without a match."""
        return [leaf for leaf in self.targets if leaf.name not in self.expected]

    def add(self, sources: tuple[str, ...], target: str, *, is_part: bool = False) -> None:
        """Records what a tensor of the model is made of: another one, parts, or a part of another one."""
        self.expected[target] = sources
        self.used.update(sources)
        for source in sources:
            first, second = module_of(source), module_of(target)
            if not is_part and len(sources) == 1:
                self.pairs[source] = target
                self.owners[first] = second
            self.parents.add((_above(first), _above(second)))

    def score(self, source: Kind, target: Kind) -> float:
        """Returns how much speaks for a pair: the words that it shares, and matches of tensors beside it."""
        first, second = module_of(source.sample.name), module_of(target.sample.name)
        score = shared(source.means, target.means) + _SAME_PARENT * ((_above(first), _above(second)) in self.parents)
        if source.role and first in self.owners:
            score += _SAME_OWNER if self.owners[first] == second else -_SAME_OWNER
        return score


def match(sources: Sequence[Leaf], targets: Sequence[Leaf], ties: Mapping[str, Sequence[str]]) -> Matches:
    """Matches both sides: equal names, names that differ in a prefix, fused tensors, and similar names.

    Args:
        sources: The tensors of the checkpoint.
        targets: The tensors of the model.
        ties: All names of a tensor of the model, by each of them.
    """
    matches = Matches(list(sources), list(targets))
    _match_equal(matches, lambda name: name)
    matches.sources, matches.targets = (
        [leaf for leaf in side if _ORDINARY.fullmatch(leaf.name)] for side in (sources, targets)
    )
    _match_equal(matches, without_wrappers)
    _match_prefixes(matches)
    matches.sources, matches.targets = in_context(matches.sources), in_context(matches.targets)
    unturned, second = matches.sources, orientation(matches.targets)
    matches.targets = straight(matches.targets, second)
    contents = {leaf.content for leaf in matches.targets}
    misfits: set[str] = set()
    for _ in range(2):
        first = orientation(unturned, misfits)
        matches.sources = straight(unturned, first)
        _match_fusions(matches, first, second)
        for within_words in (True, False):
            _match_kinds(matches, within_words)
        # Open weights that fit an open weight of the model, and only transposed.
        open_contents = {leaf.content for leaf in matches.open_targets()}
        misfits = {
            leaf.name
            for leaf in unturned
            if leaf.name not in matches.used
            and len(leaf.shape) == 2
            and leaf.content not in contents
            and (leaf.shape[::-1], leaf.dtype_kind) in open_contents
        }
    _drop_shifted(matches)
    filled = {name for target in matches.expected for name in ties.get(target, (target,))}
    # Whether every tensor of both sides has a match, so that what is left over belongs together.
    is_whole = matches.used.issuperset(leaf.name for leaf in sources) and filled.issuperset(
        leaf.name for leaf in targets
    )
    _find_guesses(matches, is_whole)
    shapes, goals = ({leaf.name: leaf.shape for leaf in side} for side in (sources, targets))
    matches.transposed = {name for name, goal in matches.pairs.items() if shapes[name] != goals[goal]}
    _find_transposed(matches, first, second)
    return matches


def _drop_shifted(matches: Matches) -> None:
    """Removes pairs at the ends of a row in which each name may be shifted by one.

    If layers 1 and 2 of both sides have equal names, only 0 and 3 are left; but it is more likely that every number is
    one higher. The same holds if "a.a.w" and "a.w" match "a.w" and "w".
    """
    equal = {source for source, target in matches.pairs.items() if source == target}
    rows = {*map(without_numbers, equal)}
    for source, target in list(matches.pairs.items()):
        shorter, longer = sorted((source, target), key=len)
        is_prefixed = longer.endswith(f".{shorter}") and any(longer[len(part) :] in equal for part in prefixes(longer))
        row = without_numbers(source)
        if source != target and (is_prefixed or (row == without_numbers(target) and row in rows)):
            del matches.pairs[source], matches.expected[target]
            matches.used.remove(source)
            note = "names that fit as they are may each have moved by one; then only a Rename written by hand says so"
            matches.notes = [note]


# Equal names.


def _match_equal(matches: Matches, text: Callable[[str], str]) -> None:
    """Matches names that have the same text, such as that without wrappers, if no other name has it."""
    sides: list[dict[str, list[Leaf]]] = []
    for leaves in (matches.open_sources(), matches.open_targets()):
        sides.append(defaultdict(list))
        for leaf in leaves:
            sides[-1][text(leaf.name)].append(leaf)
    for key, candidates in sides[0].items():
        others = sides[1].get(key, [])
        if len(candidates) == len(others) == 1 and candidates[0].content == others[0].content:
            matches.add((candidates[0].name,), others[0].name)


def _match_prefixes(matches: Matches) -> None:
    """Matches names that differ by a prefix, if no other prefix fits as well."""
    for is_longer in (True, False):  # whether the names of the checkpoint have the prefix
        sides = matches.open_sources(), matches.open_targets()
        contents = {leaf.name: leaf.content for leaf in sides[is_longer]}
        rests: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for leaf in sides[not is_longer]:
            for prefix in prefixes(leaf.name):
                rest = leaf.name[len(prefix) :]
                if contents.get(rest) == leaf.content:
                    rests[prefix].append((leaf.name, rest))
        best = max(rests.values(), key=len, default=[])
        claims = Counter(name for pairs in rests.values() for pair in pairs for name in pair)
        if not any(claims[name] > 1 for pair in best for name in pair):
            for long, short in best:
                matches.add((long,), short) if is_longer else matches.add((short,), long)


# Words that depend on their neighbours.


def _member(segment: str) -> str:
    """Returns a part of a name without its role: w1 of w1_weight."""
    return role_of(segment)[0] or segment


def in_context(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns the tensors with the concepts that the other members of their modules decide, the same in all layers."""
    modules: dict[tuple[str, str], dict[str, Shape]] = defaultdict(dict)
    for leaf in leaves:
        segments = leaf.name.split(".")
        if role_of(segments[-1])[1] not in ("", "weight"):
            continue
        for at, segment in enumerate(segments):
            members = modules[without_numbers(".".join(segments[:at])), ".".join(segments[at + 1 :])]
            if members.setdefault(_member(segment), leaf.shape) != leaf.shape:
                members[_member(segment)] = ()
    known = {
        (parent, member): words
        for (parent, _), members in modules.items()
        for member, words in meanings_beside(members).items()
    }
    result = []
    for leaf in leaves:
        segments = leaf.name.split(".")
        keys = [(without_numbers(".".join(segments[:at])), _member(segment)) for at, segment in enumerate(segments)]
        result.append(replace(leaf, context={at: known[key] for at, key in enumerate(keys) if key in known}))
    return result


# Transposed weights.

Orientation = Mapping[str, bool | None]
"""Whether weights have their inputs first, as in a Conv1D; None if nothing shows it."""


def orientation(leaves: Sequence[Leaf], misfits: Collection[str] = ()) -> Orientation:
    """Returns the orientation of weights, as their biases show; those in `misfits` are transposed.

    Square weights, and weights without a bias in a layer, are oriented as the known weights of their layer are.
    """
    biases = {leaf.name.removesuffix("bias"): leaf.shape for leaf in leaves if leaf.name.endswith("bias")}
    layers: dict[str, set[bool]] = defaultdict(set)
    known: dict[str, bool | None] = {}
    for leaf in leaves:
        if len(leaf.shape) != 2 or role_of(leaf.name.rpartition(".")[2])[1] not in ("", "weight"):
            continue
        bias = biases.get(leaf.name.removesuffix("weight"))
        known[leaf.name] = None
        if not _is_square(leaf) and (leaf.name in misfits or bias in ((leaf.shape[0],), (leaf.shape[1],))):
            is_transposed = leaf.name in misfits or bias == (leaf.shape[1],)
            known[leaf.name] = is_transposed
            layers[layer_of(leaf.name)].add(is_transposed)
    for leaf in leaves:
        layer = layer_of(leaf.name)
        if leaf.name in known and known[leaf.name] is None and len(layers[layer]) == 1 and (layer or _is_square(leaf)):
            (known[leaf.name],) = layers[layer]
    return known


def straight(leaves: Iterable[Leaf], known: Orientation) -> list[Leaf]:
    """Returns the tensors with the shapes that they have in a Linear."""
    return [replace(leaf, shape=leaf.shape[::-1]) if known.get(leaf.name) else leaf for leaf in leaves]


def _is_square(leaf: Leaf) -> bool:
    return len(leaf.shape) == 2 and leaf.shape[0] == leaf.shape[1]


def _find_transposed(matches: Matches, first: Orientation, second: Orientation) -> None:
    """Finds the tensors that are the transpose of the other one of their pair."""
    for fusion in matches.fusions:
        if fusion.is_transposed:
            rows = (row[:1] if fusion.is_split else row[1:] for row in fusion.rows)
            matches.transposed.update(name for row in rows for name in row)
    square = {leaf.name for leaf in matches.sources if _is_square(leaf) and leaf.shape[0] > 1}
    is_mixed = any(first.values()) or any(second.values())
    doubtful = []
    for name, goal in matches.pairs.items():
        here, there = first.get(name), second.get(goal)
        if name not in square or not name.endswith("weight"):
            continue
        if here is not None and there is not None:
            matches.inferred |= {name} if here != there else set()
        elif is_mixed:
            doubtful.append(name)
    for names, what in ((sorted(matches.inferred), "transposed as the weights beside it"), (doubtful, "left as it is")):
        matches.guesses.update(matches.pairs[name] for name in names)
        if names:
            matches.notes.append(
                f"square, so its shape does not show whether to transpose it: {', '.join(folded(names))}; {what}"
            )


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
    return Kind(text, leaves, role, owner, frozenset(means), len(columns), varied, constant)


def by_signature(kinds: Iterable[Kind], settled: Collection[str] = ()) -> dict[tuple[object, ...], list[Kind]]:
    """Groups kinds that cannot be told apart without their names, and leaves out the tensors that are settled."""
    groups: dict[tuple[object, ...], list[Kind]] = defaultdict(list)
    for kind in kinds:
        kind.leaves = {ranks: leaf for ranks, leaf in kind.leaves.items() if leaf.name not in settled}
        if kind.leaves:
            groups[kind.signature].append(kind)
    return groups


# Similar names.


def _match_kinds(matches: Matches, within_words: bool) -> None:
    """Matches kinds that are clearly each other's best match, until nothing changes."""
    # The meaning of numbers depends on all names, with those that have a match.
    first = by_signature(kinds_of(matches.sources, within_words=within_words), matches.used)
    second = by_signature(kinds_of(matches.targets, within_words=within_words), matches.expected)
    groups = [
        (left, second[signature])
        for signature, left in first.items()
        if signature in second and len(left) * len(second[signature]) <= _MOST_CANDIDATES
    ]
    is_changing = True
    while is_changing:
        is_changing = False
        for left, right in groups:
            for source, target in _best_pairs(left, right, matches):
                for ranks, leaf in source.leaves.items():
                    matches.add((leaf.name,), target.leaves[ranks].name)
                left.remove(source)
                right.remove(target)
                is_changing = True


def _best_pairs(sources: Sequence[Kind], targets: Sequence[Kind], matches: Matches) -> list[tuple[Kind, Kind]]:
    """Returns pairs that clearly are each other's best match."""
    rows: dict[int, list[tuple[float, int]]] = defaultdict(list)
    columns: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            if _can_match(source, target):
                score = matches.score(source, target)
                rows[i].append((score, j))
                columns[j].append((score, i))
    best = {i: _clearly_best(candidates) for i, candidates in rows.items()}
    return [(sources[i], targets[j]) for i, j in best.items() if j is not None and _clearly_best(columns[j]) == i]


def _clearly_best(candidates: list[tuple[float, int]]) -> int | None:
    """Returns the candidate with the best score by a margin."""
    (best, index), *others = sorted(candidates, reverse=True)
    return index if all(best - score >= _MARGIN for score, _ in others) else None


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


def _match_fusions(matches: Matches, first: Orientation, second: Orientation) -> None:
    """Finds tensors that are fused by their names, and clearly consist of tensors of the other side."""
    for is_split in (True, False):
        sides = matches.open_sources(), matches.open_targets()
        wholes = kinds_of(sides[not is_split], within_words=False)
        for joined, parts, concept in list(_part_groups(kinds_of(sides[is_split], within_words=False))):
            named = [kind for kind in wholes if concept in kind.sample.words(kind.owner.count("."))]
            fitting = [kind for kind in named if kind.signature == joined.signature]
            best = _best_pairs(fitting, [joined], matches) if is_split else _best_pairs([joined], fitting, matches)
            if not best:
                continue
            ((source, target),) = best
            whole = source if is_split else target
            wholes.remove(whole)
            is_transposed, is_straight = bool(first.get(source.sample.name)), not second.get(target.sample.name)
            if not is_straight and not is_transposed:
                continue  # the result would have to be transposed, after the split or join
            rows = tuple(
                (leaf.name, *(part.leaves[ranks].name for part in parts)) for ranks, leaf in whole.leaves.items()
            )
            sizes = tuple(part.sample.shape[0] for part in parts)
            is_matrix = len(whole.sample.shape) == 2
            dim = 1 if is_matrix and not is_straight else 0
            is_turned = is_transposed and is_straight and is_matrix
            matches.fusions.append(Fusion(rows, dim, sizes if len(set(sizes)) > 1 else None, is_turned, is_split))
            for name, *names in rows:
                if is_split:
                    for part in names:
                        matches.add((name,), part, is_part=True)
                else:
                    matches.add(tuple(names), name)


def _part_groups(kinds: Iterable[Kind]) -> Iterator[tuple[Kind, list[Kind], str]]:
    """Yields siblings that are named query, key and value, or like the parts of another fused tensor.

    Yields the kind of what they join to, under the names of the first parts; the parts; and the concept of the whole.
    """
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
        parts = [members[name] for name in PARTS[concept] if name in members]
        if len(parts) == len(PARTS[concept]) and (leaves := _joined(parts)):
            yield replace(parts[0], leaves=leaves, means=of_path(stem.split(".")) | {concept}), parts, concept


def _joined(parts: Sequence[Kind]) -> dict[Ranks, Leaf]:
    """Returns the tensors that the parts join to; none unless they fit together, in the same way in every layer."""
    leaves: dict[Ranks, Leaf] = {}
    splits = set()
    for ranks, leaf in parts[0].leaves.items():
        pieces = [part.leaves.get(ranks, leaf) for part in parts]
        if not leaf.shape or len({(len(piece.shape), piece.shape[1:], piece.dtype_kind) for piece in pieces}) > 1:
            return {}
        sizes = tuple(piece.shape[0] for piece in pieces)
        splits.add(sizes)
        leaves[ranks] = replace(leaf, shape=(sum(sizes), *leaf.shape[1:]))
    is_alike = all(part.leaves.keys() == leaves.keys() for part in parts)
    return leaves if is_alike and len(splits) == 1 else {}


# Certainty.

Fact = str | tuple[bool, int, int]
"""What a name states: a word; or which layer it is: whether numbers within words count, the place of one, its rank."""


class _Side:
    """The names of one side: what each of them states, and which open ones have tensors of the same size."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.facts: dict[str, set[Fact]] = {}
        self.words: dict[str, frozenset[str]] = {}
        """The words of a name that say which tensor it is."""
        self.own: dict[str, frozenset[str]] = {}
        """The words of the last part of the name that has any."""
        self.ranks: dict[str, Ranks] = {}
        """The ranks of the numbers of layers in a name."""
        self.size: dict[str, tuple[object, ...]] = {}
        """What is equal for tensors that could take each other's place, transposed or reshaped too."""
        self._open: dict[object, set[str]] = defaultdict(set)
        self._all: dict[object, set[str]] = defaultdict(set)
        self._having: dict[tuple[object, Fact], set[str]] = defaultdict(set)
        kinds = [(kind, within) for within in (True, False) for kind in kinds_of(leaves, within_words=within)]
        for kind, within_words in kinds:
            words = kind.means - GENERIC
            parts = {part for word in words for part in PARTS.get(word, ())}
            for ranks, leaf in kind.leaves.items():
                sizes = sorted(size for size in leaf.shape if size != 1)
                size = self.size[leaf.name] = leaf.dtype_kind, kind.role, *sizes
                self._all[size].add(leaf.name)
                self._open[size].add(leaf.name)
                facts: set[Fact] = {*words, *parts, *((within_words, at, rank) for at, rank in enumerate(ranks))}
                self.facts.setdefault(leaf.name, set()).update(facts)
                for fact in facts:
                    self._having[size, fact].add(leaf.name)
                segments = [leaf.words(at) - GENERIC for at in range(kind.owner.count(".") + 1)]
                self.own[leaf.name] = next((segment for segment in reversed(segments) if segment), frozenset())
                self.words[leaf.name] = frozenset(word for word in words if not word.startswith("#"))
                self.ranks[leaf.name] = ranks

    def settle(self, names: Iterable[str]) -> None:
        """Records that names have a sure match, so that no other match can be with them."""
        for name in names:
            self._open[self.size.get(name)].discard(name)

    def alike(self, name: str) -> set[str]:
        """Returns all names of tensors of this size and role, open or not."""
        return self._all[self.size[name]]

    def has_rival(self, name: str, facts: Iterable[Fact]) -> bool:
        """Whether another open name of this size and role has all of these facts."""
        size = self.size[name]
        return bool(self._open[size].intersection(*(self._having[size, fact] for fact in facts)) - {name})


def _find_guesses(matches: Matches, is_whole: bool) -> None:
    """Finds the matches that are not sure.

    A match is sure where names or structure leave no other one: the words and numbers that both names share are
    together in no other open name of a tensor of this size, or all other tensors of this size have a sure match.
    Everything else is a guess, however high its score is.
    """
    first, second = _Side(matches.sources), _Side(matches.targets)
    owners: set[tuple[str, str]] = set()  # modules with a sure match

    def is_sure(source: str, target: str) -> bool:
        if source == target or (module_of(source), module_of(target)) in owners:
            return True
        if source not in first.size or target not in second.size:
            return False
        common = first.facts[source] & second.facts[target]
        # Numbers that differ may stand for the same layers only where no layer lacks a match.
        numbers = [first.ranks[source], second.ranks[target]] if is_whole else [*map(_NUMBER.findall, (source, target))]
        differs_in_numbers = _NUMBER.sub("", source) == _NUMBER.sub("", target)  # and in nothing else: conv and conv2
        if numbers[0] != numbers[1] and (len(numbers[0]) == len(numbers[1]) or differs_in_numbers):
            return False
        here, there = first.words[source] - second.facts[target], second.words[target] - first.facts[source]
        if CONVENTION in here | there or (here and there and not is_whole):
            return False
        return (
            (
                bool(first.own[source] & common and second.own[target] & common)
                or source.endswith(f".{target}")
                or target.endswith(f".{source}")
                or (is_whole and any(isinstance(fact, tuple) or fact[0] == "#" for fact in common))
                or (is_whole and len(first.alike(source)) == len(second.alike(target)) == 1)
            )
            and not first.has_rival(source, common)
            and not second.has_rival(target, common)
            and not any(second.has_rival(target, [word]) for word in here)
            and not any(first.has_rival(source, [word]) for word in there)
        )

    left = [(source, target) for target, sources in matches.expected.items() for source in sources]
    sure = {*left}
    while sure:
        sure = {pair for pair in left if is_sure(*pair)}
        left = [pair for pair in left if pair not in sure]
        owners |= {(module_of(source), module_of(target)) for source, target in sure}
        first.settle({source for source, _ in sure} - {source for source, _ in left})
        second.settle({target for _, target in sure} - {target for _, target in left})
    matches.guesses |= {target for _, target in left}
    if any(
        (CONVENTION in first.words.get(source, ())) != (CONVENTION in second.words.get(target, ()))
        for source, target in left
    ):
        matches.notes.append("gate (w1) and up (w3) are told apart by Llama's convention alone")
