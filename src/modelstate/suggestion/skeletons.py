"""Names without their numbers, and what words in them mean beside their neighbours."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from modelstate.suggestion.words import concepts, of_path, role_of

Shape = tuple[int, ...]
Ranks = tuple[int, ...]
Profile = tuple[tuple[Ranks, Shape, str], ...]
"""What a skeleton is like, whatever its name: shape and kind of dtype, at each combination of its numbers."""

Told = tuple[int, frozenset[str]]
"""What a part of a name means where it stands, and which part."""

NUMBERED = frozenset({"linear"})
"""What is told of weights that come one after the other: their numbers count."""
_ALIKE = 0.5


class Level(Enum):
    """Which numbers are taken out."""

    ALL = "all"
    WHOLE = "whole"
    """Only those that are a whole part of a name."""
    SAME = "same"
    """Only those of these that tell apart parts of the same shapes: layers, and not the members of an MLP."""
    NONE = "none"


_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, by what is known without its values."""

    name: str
    shape: Shape
    kind: str
    """The kind of its dtype: "float", "int", "bool" or "complex"."""
    told: tuple[Told, ...] = field(default=(), compare=False)
    """What parts of the name mean beside those of its neighbours, where that is not what they mean alone."""

    def words(self, at: int) -> frozenset[str]:
        """What one part of the name means."""
        return dict(self.told)[at] if at in dict(self.told) else concepts(self.name.split(".")[at])


def kind_of(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"


@dataclass(slots=True)
class Skeleton:
    """Tensors whose names differ in numbers only."""

    text: str
    """The name, with # for the numbers that were taken out."""
    leaves: dict[Ranks, Leaf]
    """By what place each number has among all that stand there; numbers that are always the same are left out."""
    role: str
    owner: str
    """The text without what says the role."""
    means: frozenset[str]
    taken: int = 0
    """How many numbers were taken out."""
    varied: tuple[int, ...] = ()
    """Which of them are not always the same."""
    constant: tuple[str, ...] = ()
    """Those within words that are: norm1 alone is not ln_2 alone."""

    def profile(self, flipped: bool = False) -> Profile:
        return tuple(
            sorted(
                (ranks, leaf.shape[::-1] if flipped else leaf.shape, leaf.kind) for ranks, leaf in self.leaves.items()
            )
        )


@dataclass(slots=True)
class _Name:
    leaf: Leaf
    texts: list[str]
    numbers: list[str]
    text: str = ""
    taken: list[tuple[str, str]] = field(default_factory=list)
    """Numbers that were taken out, each with the text before it."""
    ordinals: list[tuple[str, str]] = field(default_factory=list)
    """Numbers that were left, each with the text before it."""


def skeletons(leaves: Iterable[Leaf], level: Level) -> list[Skeleton]:
    """The skeletons of names, in their order.

    A number is taken out where the parts that it tells apart are alike, as the layers of an encoder are; not where
    they differ, as the members of most `nn.Sequential` do.
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
    """The name, cut at its numbers; those that say nothing certain of the order, as in w1, are none."""
    kept = {at for at, words in leaf.told if words != NUMBERED}
    if not kept:
        return _NUMBER.split(leaf.name)
    pieces = [""]
    for at, segment in enumerate(leaf.name.split(".")):
        first, *others = [segment] if at in kept else _NUMBER.split(segment)
        pieces[-1] += f".{first}" if at else first
        pieces += others
    return pieces


def _take_out(names: list[_Name], depth: int, places: dict[str, set[str]], level: Level) -> None:
    """Decides about the number at this depth of every name."""
    below: dict[str, dict[str, set[tuple[str, int | Shape]]]] = defaultdict(lambda: defaultdict(set))
    deep = [name for name in names if depth < len(name.numbers)]
    for name in deep:
        rest = "#".join(name.texts[depth + 1 :])
        shape = name.leaf.shape
        below[name.text][name.numbers[depth]].add((rest, shape if level is Level.SAME else len(shape)))
    lists = {text: _are_alike(list(values.values())) for text, values in below.items()}
    for text, values in below.items():
        places[text] |= values.keys()
    for name in deep:
        number, text = name.numbers[depth], name.text
        after = name.texts[depth + 1]
        is_whole = (not text or text[-1] == ".") and (not after or after[0] == ".")
        taken = lists[text] and (level is Level.ALL or (level is not Level.NONE and is_whole))
        (name.taken if taken else name.ordinals).append((text, number))
        name.text += ("#" if taken else number) + after


def _are_alike(contents: list[set[tuple[str, int | Shape]]]) -> bool:
    most = max(contents, key=len)
    return all(len(one & most) >= _ALIKE * len(one | most) for one in contents)


def _collected(names: list[_Name], places: Mapping[str, set[str]]) -> list[Skeleton]:
    rank = {
        (text, number): (at, len(numbers))
        for text, numbers in places.items()
        for at, number in enumerate(sorted(numbers, key=_in_order))
    }
    groups: dict[str, list[_Name]] = defaultdict(list)
    for name in names:
        groups[name.text].append(name)
    found = []
    for text, members in groups.items():
        columns = list(zip(*(name.taken for name in members), strict=True))
        varied = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        leaves = {tuple(rank[name.taken[at]][0] for at in varied): name.leaf for name in members}
        ordinals = [(before[-1:] in ("", "."), *rank[before, number]) for before, number in members[0].ordinals]
        skeleton = _skeleton(text, leaves, ordinals)
        skeleton.taken, skeleton.varied = len(columns), tuple(varied)
        within = (at for at, column in enumerate(columns) if at not in varied and column[0][0][-1:] not in ("", "."))
        skeleton.constant = tuple(columns[at][0][1] for at in within)
        found.append(skeleton)
    return found


def _in_order(number: str) -> tuple[int, str, str]:
    """By size, however long it is."""
    bare = number.lstrip("0")
    return len(bare), bare, number


def _skeleton(text: str, leaves: dict[Ranks, Leaf], ordinals: list[tuple[bool, int, int]]) -> Skeleton:
    """`ordinals` are the numbers that were left: whether each is a part of its own, its place, and of how many."""
    owner, _, last = text.rpartition(".")
    rest, role = role_of(last)
    owner = ".".join(filter(None, (owner, rest)))
    means = set(of_path(owner.split("."), dict(next(iter(leaves.values())).told)))
    for is_whole in (True, False):
        # The last number of a kind has to do with the last one of the other side.
        places = [(at, count) for whole, at, count in reversed(ordinals) if whole is is_whole]
        means |= {f"#{is_whole}{back}:{at}/{count}" for back, (at, count) in enumerate(places) if count > 1}
    if ordinals and "norm" in means and "#" in owner and owner[-1].isdecimal():
        is_whole, at, count = ordinals[-1]
        if count == 2 and not is_whole:
            # Of two norms in a layer the first goes with attention, the second with what follows.
            means.add("second" if at else "first")
    return Skeleton(text, leaves, role, owner, frozenset(means))


_STEM = re.compile(r"(w|fc|lin|linear)_?([1-9]\d?)", re.IGNORECASE)
_NORM = re.compile(
    r"(?:(pre|post|input)_)?(?:(self_attn|attention|attn|feedforward|feed_forward|ffn|ffw|mlp)_)?\w*norm"
)
_ATTENTION = frozenset(("q", "k", "v", "qkv", "kv", "interleaved"))
_ELSEWHERE = _ATTENTION.union(
    ("norm", "embedding", "head", "tok", "pos", "type", "patch", "class", "conv", "attention", "downsample", "router")
)
"""What is said of weights that are no part of a gated MLP, though they may lie beside it."""

Said = Mapping[str, frozenset[str]]
"""What the members of a module mean, where that is other than what they mean alone."""


def in_place(leaves: Iterable[Leaf]) -> list[Leaf]:
    """The tensors, with what their names say where they are. It is the same for all layers, or nothing is said."""
    given = list(leaves)
    told = _told(_siblings(given))
    return [replace(leaf, told=tuple(_of_leaf(leaf.name, told))) for leaf in given] if told else given


def by_convention(leaves: Iterable[Leaf]) -> set[str]:
    """Tensors of which only Llama's convention says that they are the gate, or what it is multiplied with."""
    wanted = (frozenset({"gate"}), frozenset({"up"}))
    return {leaf.name for leaf in leaves if any(words in wanted and _is_w(leaf, at) for at, words in leaf.told)}


def _is_w(leaf: Leaf, at: int) -> bool:
    return leaf.name.split(".")[at].lower() in ("w1", "w_1", "w3", "w_3")


def _of_leaf(name: str, told: Mapping[str, Said]) -> Iterable[Told]:
    segments = name.split(".")
    for at, segment in enumerate(segments):
        if _is_asked(_bare(segment)):
            words = told.get(_kind(segments[:at]), {}).get(_bare(segment))
            if words is not None:
                yield at, words


def _is_asked(segment: str) -> bool:
    return bool(_STEM.fullmatch(segment) or (segment.lower().endswith("norm") and _NORM.fullmatch(segment.lower())))


def _bare(segment: str) -> str:
    """Without what says the role, where a weight and a bias are parameters of one module."""
    return role_of(segment)[0] or segment


def _kind(path: Sequence[str]) -> str:
    return re.sub(r"\d+", "#", ".".join(path))


def _siblings(leaves: Sequence[Leaf]) -> Mapping[tuple[str, str], dict[str, Shape]]:
    """The members of modules with words to be asked of: by module and path within the member, each with its shape."""
    asked = set()
    for leaf in leaves:
        segments = leaf.name.split(".")
        asked |= {".".join(segments[:at]) for at, one in enumerate(segments) if _is_asked(_bare(one))}
    found: dict[tuple[str, str], dict[str, Shape]] = defaultdict(dict)
    for leaf in leaves if asked else ():
        segments = leaf.name.split(".")
        for at, segment in enumerate(segments):
            parent = ".".join(segments[:at])
            if parent in asked and role_of(segment if at == len(segments) - 1 else segments[-1])[1] in ("", "weight"):
                found[parent, ".".join(segments[at + 1 :])][_bare(segment)] = leaf.shape
    return found


def _told(modules: Mapping[tuple[str, str], dict[str, Shape]]) -> dict[str, dict[str, frozenset[str]]]:
    found: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for (parent, _), members in modules.items():
        kind = found[_kind(parent.split(".") if parent else [])]
        for segment, words in {**_of_norms(members), **_of_weights(members)}.items():
            # Where layers do not agree, nothing is certain.
            kind[segment] = words if kind.get(segment, words) == words else frozenset({f"={segment}"})
    return {kind: said for kind, said in found.items() if said}


def _of_weights(members: Mapping[str, Shape]) -> Said:
    """What numbered weights are, by what else is there and by their shapes."""
    shapes = {name: shape[-2:] for name, shape in members.items() if len(shape) in (2, 3)}
    stems: dict[str, dict[str, str]] = defaultdict(dict)
    for name in shapes:
        stem = _STEM.fullmatch(name)
        if stem:
            stems[stem[1].lower()][stem[2]] = name
    said: dict[str, frozenset[str]] = {}
    has_attention = any(concepts(name) & _ATTENTION for name in members)
    for stem_name, numbered in stems.items():
        sizes = {shapes[name] for name in numbered.values()}
        fitting = sizes | {size[::-1] for size in sizes}
        if len(numbered) > 2 and (len(numbered) > 3 or len(fitting) > 2):
            said |= dict.fromkeys(numbered.values(), NUMBERED)  # one after the other, and no gate
            continue
        others = [
            name
            for name, shape in shapes.items()
            if shape in fitting
            and name not in numbered.values()
            and not concepts(name) & _ELSEWHERE
            and not (has_attention and "out" in concepts(name))
        ]
        said |= _of_gated(stem_name, numbered, {name: shapes[name] for name in (*numbered.values(), *others)})
    return said


def _of_gated(stem: str, numbered: Mapping[str, str], shapes: Mapping[str, Shape]) -> Said:
    """What they are if they are the gate, what goes up and what goes down, or only some of these."""
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
    said = {name: frozenset({"down"}) if name == down[0] else words for name, words in literal.items()}
    if stem == "w" and len(shapes) == 3 and numbered.keys() == {"1", "2", "3"} and numbered["2"] == down[0]:
        said |= {numbered["1"]: frozenset({"gate"}), numbered["3"]: frozenset({"up"})}
    return said


def _of_norms(members: Mapping[str, Shape]) -> Said:
    """The norms of a layer that has them before its parts, as Llama, or behind them, as OLMo-2, Gemma-2 and GLM-4."""
    parts = {name: found for name in members if (found := _NORM.fullmatch(name.lower())) and found[1]}
    behind = {name for name, found in parts.items() if found[2] == "self_attn"}
    about_mlp = {name for name, found in parts.items() if found[2] not in (None, "self_attn", "attention", "attn")}
    said = {}
    for name, found in parts.items():
        before = found[1] != "post"
        second = name in about_mlp
        if found[1] == "post" and found[2] in ("attention", "attn") and (behind or not about_mlp):
            before = second = True  # behind attention is before the MLP
        if found[2] is not None or found[1] == "input":
            said[name] = frozenset({"norm", "second" if second else "first", "before" if before else "behind"})
    return said
