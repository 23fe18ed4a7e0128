"""What a word means beside others: `fc1` goes up beside `fc2` alone, and may be the gate where there is a third."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from modelstate.plan.suggest.concepts import concepts, role_of
from modelstate.plan.suggest.skeletons import NUMBERED, Leaf, Shape, Told

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
