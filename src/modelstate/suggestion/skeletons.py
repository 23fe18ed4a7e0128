"""Skeletons, which are names without their numbers, and the meaning of words that depends on neighbours.

Tensors whose names differ only in numbers, such as those of the layers of an encoder, are one skeleton.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec
import torch

from modelstate.suggestion.words import concepts, of_path, role_of, without_digits

Shape = tuple[int, ...]
Ranks = tuple[int, ...]
Profile = tuple[tuple[Ranks, Shape, str], ...]
"""A skeleton without its name: shape and kind of dtype for each combination of its numbers."""

PartConcepts = tuple[int, frozenset[str]]
"""The index of a part of a name, and its concepts in this context."""

NUMBERED = frozenset({"linear"})
"""The concept of weights that are numbered in their order, so that their numbers count."""
_ALIKE = 0.5


class Level(Enum):
    """Which numbers of names are replaced by #."""

    ALL = "all"
    WHOLE = "whole"
    """Only numbers that are a whole part of a name."""
    SAME = "same"
    """Only those whole parts that number modules of the same shapes: layers, and not the members of an MLP."""
    NONE = "none"


_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor without its values: name, shape and kind of dtype."""

    name: str
    shape: Shape
    kind: str
    """The kind of its dtype: "float", "int", "bool" or "complex"."""
    context: tuple[PartConcepts, ...] = field(default=(), compare=False)
    """The concepts of parts of the name that differ in this context from what the parts mean alone."""

    @property
    def is_square(self) -> bool:
        return len(self.shape) == 2 and self.shape[0] == self.shape[1]

    def words(self, at: int) -> frozenset[str]:
        """Returns the concepts of one part of the name."""
        return dict(self.context).get(at) or concepts(self.name.split(".")[at])


def kind_of(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"


class Skeleton(msgspec.Struct):
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

    def profile(self, flipped: bool) -> Profile:
        return tuple(
            sorted(
                (ranks, leaf.shape[::-1] if flipped else leaf.shape, leaf.kind) for ranks, leaf in self.leaves.items()
            )
        )


class _Name(msgspec.Struct):
    leaf: Leaf
    texts: list[str]
    numbers: list[str]
    text: str = ""
    taken: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Replaced numbers, each with the text before it."""
    ordinals: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Other numbers, each with the text before it."""


def skeletons(leaves: Iterable[Leaf], level: Level) -> list[Skeleton]:
    """Returns the skeletons of names, in order.

    A number is replaced if the modules that it numbers are alike, as the layers of an encoder are, and not if they
    differ, as the members of most `nn.Sequential` do.
    """
    names = []
    for leaf in leaves:
        pieces = _pieces(leaf)
        names.append(_Name(leaf, pieces[::2], pieces[1::2], pieces[0]))
    places: dict[str, set[str]] = defaultdict(set)
    for depth in range(max((len(name.numbers) for name in names), default=0)):
        _take_out(names, depth, places, level)
    return _collected(names, places)


def _pieces(leaf: Leaf) -> list[str]:
    """Splits the name at its numbers, except for numbers that do not stand for an order, as in w1."""
    kept = {at for at, words in leaf.context if words != NUMBERED}
    if not kept:
        return _NUMBER.split(leaf.name)
    pieces = [""]
    for at, segment in enumerate(leaf.name.split(".")):
        first, *others = [segment] if at in kept else _NUMBER.split(segment)
        pieces[-1] += f".{first}" if at else first
        pieces += others
    return pieces


def _take_out(names: list[_Name], depth: int, places: dict[str, set[str]], level: Level) -> None:
    """Replaces or keeps the number at this depth of every name."""
    below: dict[str, dict[str, set[tuple[str, int | Shape]]]] = defaultdict(lambda: defaultdict(set))
    deep = [name for name in names if depth < len(name.numbers)]
    for name in deep:
        rest = "#".join(name.texts[depth + 1 :])
        shape = name.leaf.shape
        below[name.text][name.numbers[depth]].add((rest, shape if level is Level.SAME else len(shape)))
    are_alike = {}
    for text, values in below.items():
        contents = list(values.values())
        most = max(contents, key=len)
        are_alike[text] = all(len(content & most) >= _ALIKE * len(content | most) for content in contents)
    for text, values in below.items():
        places[text] |= values.keys()
    for name in deep:
        number, text = name.numbers[depth], name.text
        after = name.texts[depth + 1]
        is_whole = (not text or text[-1] == ".") and (not after or after[0] == ".")
        taken = are_alike[text] and (level is Level.ALL or (level is not Level.NONE and is_whole))
        (name.taken if taken else name.ordinals).append((text, number))
        name.text += ("#" if taken else number) + after


def _collected(names: list[_Name], places: Mapping[str, set[str]]) -> list[Skeleton]:
    rank = {
        (text, number): (at, len(numbers))
        for text, numbers in places.items()
        for at, number in enumerate(
            sorted(numbers, key=lambda number: (len(number.lstrip("0")), number.lstrip("0"), number))
        )
    }
    groups: dict[str, list[_Name]] = defaultdict(list)
    for name in names:
        groups[name.text].append(name)
    result = []
    for text, members in groups.items():
        columns = list(zip(*(name.taken for name in members), strict=True))
        varied = tuple(at for at, column in enumerate(columns) if len(set(column)) > 1)
        leaves = {tuple(rank[name.taken[at]][0] for at in varied): name.leaf for name in members}
        ordinals = [(before[-1:] in ("", "."), *rank[before, number]) for before, number in members[0].ordinals]
        within = (at for at, column in enumerate(columns) if at not in varied and column[0][0][-1:] not in ("", "."))
        constant = tuple(columns[at][0][1] for at in within)
        path, _, last = text.rpartition(".")
        rest, role = role_of(last)
        owner = ".".join(filter(None, (path, rest)))
        means = _concepts(owner, members[0].leaf, ordinals)
        result.append(Skeleton(text, leaves, role, owner, means, len(columns), varied, constant))
    return result


def _concepts(owner: str, leaf: Leaf, ordinals: Sequence[tuple[bool, int, int]]) -> frozenset[str]:
    """Returns the concepts of a name and of its ordinals: whether each is a whole part, its rank, and of how many."""
    means = set(of_path(owner.split("."), dict(leaf.context)))
    for is_whole in (True, False):
        # Numbers are compared from the last one, because names of the other side may have more before it.
        places = [(at, count) for whole, at, count in reversed(ordinals) if whole is is_whole]
        means |= {f"#{is_whole}{back}:{at}/{count}" for back, (at, count) in enumerate(places) if count > 1}
    if ordinals and "norm" in means and "#" in owner and owner[-1].isdecimal():
        is_whole, at, count = ordinals[-1]
        if count == 2 and not is_whole:
            # Of two norms in a layer, the first belongs to attention and the second to the MLP.
            means.add("second" if at else "first")
    return frozenset(means)


_STEM = re.compile(r"(w|fc|lin|linear)_?([1-9]\d?)", re.IGNORECASE)
_NORM = re.compile(
    r"(?:(pre|post|input)_)?(?:(self_attn|attention|attn|feedforward|feed_forward|ffn|ffw|mlp)_)?\w*norm"
)
_ATTENTION = frozenset(("q", "k", "v", "qkv", "kv", "interleaved"))
_ELSEWHERE = _ATTENTION.union(
    ("norm", "embedding", "head", "tok", "pos", "type", "patch", "class", "conv", "attention", "downsample", "router")
)
"""Concepts of weights that are not part of a gated MLP, although they may lie beside it."""

MemberConcepts = Mapping[str, frozenset[str]]
"""The concepts of members of a module that differ in this context from what the members mean alone."""


def in_context(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Returns the tensors with the concepts that their context determines, which must be the same in all layers."""
    leaves = list(leaves)
    known = _known_members(_modules(leaves))
    if not known:
        return leaves
    result = []
    for leaf in leaves:
        segments = leaf.name.split(".")
        context = [
            (at, words)
            for at, segment in enumerate(segments)
            if _is_ambiguous(member := _without_role(segment))
            and (words := known.get(without_digits(".".join(segments[:at])), {}).get(member)) is not None
        ]
        result.append(replace(leaf, context=tuple(context)))
    return result


def by_convention(leaves: Iterable[Leaf]) -> set[str]:
    """Returns the names of gate and up projections that only Llama's convention (w1 and w3) tells apart."""
    gated, numbered = (frozenset({"gate"}), frozenset({"up"})), ("w1", "w_1", "w3", "w_3")
    return {
        leaf.name
        for leaf in leaves
        if any(words in gated and leaf.name.split(".")[at].lower() in numbered for at, words in leaf.context)
    }


def _is_ambiguous(segment: str) -> bool:
    return bool(_STEM.fullmatch(segment) or (segment.lower().endswith("norm") and _NORM.fullmatch(segment.lower())))


def _without_role(segment: str) -> str:
    """Returns the part without the role, for names such as w1_weight and w1_bias of one module."""
    return role_of(segment)[0] or segment


def _modules(leaves: Sequence[Leaf]) -> Mapping[tuple[str, str], dict[str, Shape]]:
    """Returns the shapes of the members of modules with ambiguous names, by module and path within the member."""
    parents = set()
    for leaf in leaves:
        segments = leaf.name.split(".")
        parents |= {
            ".".join(segments[:at]) for at, segment in enumerate(segments) if _is_ambiguous(_without_role(segment))
        }
    modules: dict[tuple[str, str], dict[str, Shape]] = defaultdict(dict)
    for leaf in leaves if parents else ():
        segments = leaf.name.split(".")
        for at, segment in enumerate(segments):
            parent = ".".join(segments[:at])
            if parent in parents and role_of(segment if at == len(segments) - 1 else segments[-1])[1] in ("", "weight"):
                modules[parent, ".".join(segments[at + 1 :])][_without_role(segment)] = leaf.shape
    return modules


def _known_members(modules: Mapping[tuple[str, str], dict[str, Shape]]) -> dict[str, dict[str, frozenset[str]]]:
    """Returns what members mean, by the path of their module without digits."""
    known: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for (parent, _), members in modules.items():
        kind = known[without_digits(parent)]
        for segment, words in {**_of_norms(members), **_of_weights(members)}.items():
            # If layers contradict each other, the name only stands for itself.
            kind[segment] = words if kind.get(segment, words) == words else frozenset({f"={segment}"})
    return {path: members for path, members in known.items() if members}


def _of_weights(members: Mapping[str, Shape]) -> MemberConcepts:
    """Returns the concepts of numbered weights, from the other members and from their shapes."""
    shapes = {name: shape[-2:] for name, shape in members.items() if len(shape) in (2, 3)}
    stems: dict[str, dict[str, str]] = defaultdict(dict)
    for name in shapes:
        stem = _STEM.fullmatch(name)
        if stem:
            stems[stem[1].lower()][stem[2]] = name
    result: dict[str, frozenset[str]] = {}
    has_attention = any(concepts(name) & _ATTENTION for name in members)
    for stem_name, numbered in stems.items():
        sizes = {shapes[name] for name in numbered.values()}
        fitting = sizes | {size[::-1] for size in sizes}
        if len(numbered) > 2 and (len(numbered) > 3 or len(fitting) > 2):
            result |= dict.fromkeys(numbered.values(), NUMBERED)  # a sequence of layers without a gate
            continue
        others = [
            name
            for name, shape in shapes.items()
            if shape in fitting
            and name not in numbered.values()
            and not concepts(name) & _ELSEWHERE
            and not (has_attention and "out" in concepts(name))
        ]
        result |= _of_gated(stem_name, numbered, {name: shapes[name] for name in (*numbered.values(), *others)})
    return result


def _of_gated(stem: str, numbered: Mapping[str, str], shapes: Mapping[str, Shape]) -> MemberConcepts:
    """Returns the concepts of weights that are the gate, up and down projections of an MLP, or some of these."""
    if len(shapes) < 2 or (len(shapes) == 2 and stem != "w" and numbered.keys() == {"1", "2"}):
        return {}
    sizes = list(shapes.values())
    literal = {name: frozenset({f"={name}/{','.join(sorted(shapes))}"}) for name in numbered.values()}
    if len(shapes) == 2:
        pair = numbered.keys() == {"1", "2"} and sizes[0] != sizes[1]
        return {numbered["1"]: frozenset({"up"}), numbered["2"]: frozenset({"down"})} if pair else literal
    down = [name for name, size in shapes.items() if sizes.count(size) == 1 and sizes.count(size[::-1]) > 1]
    if len(down) != 1:
        return literal
    result = {name: frozenset({"down"}) if name == down[0] else words for name, words in literal.items()}
    if stem == "w" and len(shapes) == 3 and numbered.keys() == {"1", "2", "3"} and numbered["2"] == down[0]:
        result |= {numbered["1"]: frozenset({"gate"}), numbered["3"]: frozenset({"up"})}
    return result


def _of_norms(members: Mapping[str, Shape]) -> MemberConcepts:
    """Returns the concepts of norms: before the blocks of a layer, as in Llama, or behind, as in OLMo-2 and Gemma-2."""
    parts = {name: match for name in members if (match := _NORM.fullmatch(name.lower())) and match[1]}
    behind = {name for name, match in parts.items() if match[2] == "self_attn"}
    about_mlp = {name for name, match in parts.items() if match[2] not in (None, "self_attn", "attention", "attn")}
    result = {}
    for name, match in parts.items():
        before = match[1] != "post"
        second = name in about_mlp
        if match[1] == "post" and match[2] in ("attention", "attn") and (behind or not about_mlp):
            before = second = True  # the norm behind attention is the one before the MLP
        if match[2] is not None or match[1] == "input":
            result[name] = frozenset({"norm", "second" if second else "first", "before" if before else "behind"})
    return result
