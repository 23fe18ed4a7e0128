"""The meaning of words in names, as far as model authors agree on it.

A part of a name becomes a set of concepts: "q", "attention", "norm", "first". Names are compared by their concepts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

Shape = tuple[int, ...]

_PHRASES = {
    # Whole parts of names, whose single words would mislead, by their concepts.
    "qkv": "c_attn in_proj wqkv qkv_proj",
    "interleaved": "query_key_value linear_qkv",
    "out": "c_proj o_proj out_proj to_out wo o proj",
    "up": "c_fc fc1 linear1 lin1 dense_h_to_4h wi up_proj",
    "up mlp": "intermediate",
    "down": "fc2 linear2 lin2 dense_4h_to_h down_proj",
    "gate": "gate_proj",
    "gate_up": "gate_up_proj gate_up",
    "kv": "kv_proj",
    "q": "wq",
    "k": "wk",
    "v": "wv",
    "tok embedding": "wte embed_tokens embed_in tok_embeddings",
    "pos embedding": "wpe embed_positions",
    "tok": "shared",
    "head": "embed_out lm_head",
    "norm final": "ln_f norm_f",
    "norm first": "input_layernorm layernorm_before",
    "norm second": "post_attention_layernorm layernorm_after",
    "cross attention": "encoder_attn multihead_attn encdecattention",
    "self attention": "selfattention",
    "mlp": "densereludense",
}
_WORDS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "attention": "attn att mha",
    "norm": "ln layernorm rmsnorm layrnorm normalization batchnorm bn",
    "conv": "convolution",
    "mlp": "ffn feedforward ff",
    "out": "output",
    "embedding": "embeddings embed embedder emb",
    "pos": "position positional positions",
    "tok": "word token tokens",
    "cross": "crossattention",
    "downsample": "shortcut",
    "class": "cls",
    "encoder": "enc",
    "decoder": "dec",
    "head": "classifier",
    "patch": "patches",
}
_CONCEPTS_OF_PHRASE = {
    phrase: frozenset(text.split()) for text, phrases in _PHRASES.items() for phrase in phrases.split()
}
_CONCEPT_OF_WORD = {word: concept for concept, words in _WORDS.items() for word in words.split()}
_ROLES = {
    "weight": "weight gamma kernel",
    "bias": "bias beta",
    "running_mean": "running_mean moving_mean",
    "running_var": "running_var moving_variance",
    "num_batches_tracked": "num_batches_tracked",
}
_ROLE_OF_WORD = {word: role for role, words in _ROLES.items() for word in words.split()}
_GENERIC_TEXT = """
linear dense lin fc layer layers block blocks module model h net list to modules transformer projection backbone base w
c parametrizations original
"""
CONVENTION = "by convention"
"""Stands beside the concepts of w1 and w3: only Llama's convention says that w1 is the gate and w3 goes up."""
GENERIC = frozenset(_GENERIC_TEXT.split())
"""Words that hardly say which tensor it is."""
_EXCLUSIVE = (
    {"q", "k", "v", "qkv", "kv", "interleaved", "out"},
    {"tok", "pos", "type", "patch"},
    {"encoder", "decoder"},
    {"up", "down", "gate", "gate_up"},
    {"self", "cross"},
    {"head", "embedding"},
    {"norm", "embedding"},
    {"norm", "conv"},
    {"class", "pos"},
    {"first", "second"},
    {"before", "behind"},
)

PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "gate_up": ("gate", "up")}
"""Tensors that are often stored as one, with the order of their parts."""

_DIGIT = re.compile(r"[\d#]")
_SHARED, _GENERIC_SHARED = 1.0, 0.05


def role_of(last: str) -> tuple[str, str]:
    """Splits the last part of a name into a rest and the role of the tensor in its module: weight, bias, ..."""
    if last.lower() in _ROLE_OF_WORD:
        return "", _ROLE_OF_WORD[last.lower()]
    head, _, tail = last.rpartition("_")
    if head and tail in ("weight", "bias"):
        return head, tail
    return last, ""


@lru_cache(maxsize=65536)
def concepts(segment: str) -> frozenset[str]:
    """Returns the concepts of one part of a name. An unknown word is its own concept; numbers are left out."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W_a-zA-Z]+", re.sub(r"[\d#]+", "_", segment))
    joined = "".join(words).lower()
    if phrase := _CONCEPTS_OF_PHRASE.get(segment.lower()) or _CONCEPTS_OF_PHRASE.get(joined):
        return phrase
    if joined in _CONCEPT_OF_WORD:
        return frozenset({_CONCEPT_OF_WORD[joined]})
    result = {_CONCEPT_OF_WORD.get(word.lower(), word.lower()) for word in words}
    # The norms of a layer are numbered, or named after the block before or behind them.
    if result - {"layer", "self"} == {"norm", "attention"}:
        return frozenset({"norm", "first"})
    if result - {"layer"} == {"norm", "mlp"}:
        return frozenset({"norm", "second"})
    return frozenset(result - {"layer", "proj"} if len(result) > 1 else result)


def of_path(segments: Sequence[str], known: Mapping[int, frozenset[str]] | None = None) -> frozenset[str]:
    """Returns the concepts of all parts of a name; `known` has those of parts that their context determines."""
    known = known or {}
    *path, last = [known.get(at) or concepts(segment) for at, segment in enumerate(segments)]
    result = frozenset[str]().union(*path, last)
    if "attention" in result and last == {"dense"}:
        return result | {"out"}
    is_first = last == {"norm"} and "attention" in result and "cross" not in result and not _DIGIT.search(segments[-1])
    return result | {"first"} if is_first else result


@lru_cache(maxsize=65536)
def contradict(first: frozenset[str], second: frozenset[str]) -> bool:
    """Whether two sets of concepts exclude each other: a key is not a query."""
    for group in _EXCLUSIVE:
        of_first, of_second = first & group, second & group
        if of_first and of_second and not of_first & of_second:
            return True
    return False


@lru_cache(maxsize=65536)
def shared(first: frozenset[str], second: frozenset[str]) -> float:
    """Returns the score of the concepts that two names have in common."""
    return sum(_GENERIC_SHARED if word in GENERIC else _SHARED for word in first & second)


# Words whose meaning depends on the tensors beside them.

_NUMBERED = re.compile(r"(w|fc|lin|linear)_?([1-9]\d?)", re.IGNORECASE)
_NORM = re.compile(r"(?:(?:pre|post|input)_)(?:\w+_)?\w*norm")
_SANDWICH = re.compile(r"(pre|post)_(feedforward|feed_forward|ffn|ffw|mlp|self_attn)_\w*norm")
"""Norms of layers that have norms behind attention and the MLP too, as in OLMo-2 and Gemma-2."""
SEQUENCE = frozenset({"linear"})
"""The concept of weights that are numbered in their order, so that their numbers count."""


def meanings_beside(shapes: Mapping[str, Shape]) -> dict[str, frozenset[str]]:
    """Returns the concepts of members of a module that mean something else beside the other members.

    Args:
        shapes: The members, such as "w1" or "post_attention_layernorm", with the shapes of their weights; () for one
            whose shape differs between layers.
    """
    known: dict[str, frozenset[str]] = {}
    if any(_SANDWICH.fullmatch(name.lower()) for name in shapes):
        known = {name: frozenset({f"={name}", "norm"}) for name in shapes if _NORM.fullmatch(name.lower())}
    matrices = {name: shape[-2:] for name, shape in shapes.items() if len(shape) in (2, 3)}
    stems: dict[str, dict[str, str]] = defaultdict(dict)
    for name in shapes:
        if stem := _NUMBERED.fullmatch(name):
            stems[stem[1].lower()][stem[2]] = name
    for stem_name, numbered in stems.items():
        members = list(numbered.values())
        fitting = {size for name in members for size in (matrices.get(name, ()), matrices.get(name, ())[::-1])}
        beside = {name: size for name, size in matrices.items() if size in fitting}
        sizes: list[Shape | None] = list(beside.values())
        if len(numbered) > 2 and (len(numbered) > 3 or len(fitting) > 2):
            known |= dict.fromkeys(members, SEQUENCE)
        elif len(beside) == 2 and numbered.keys() == {"1", "2"} and (stem_name != "w" or sizes[0] != sizes[1]):
            known |= {numbered["1"]: frozenset({"up"}), numbered["2"]: frozenset({"down"})}
        elif (stem_name, *sorted(numbered)) == ("w", "1", "2", "3") and sizes.count(matrices.get(numbered["2"])) == 1:
            known |= {numbered["1"]: frozenset({"gate", CONVENTION}), numbered["2"]: frozenset({"down"})}
            known |= {numbered["3"]: frozenset({"up", CONVENTION})}
        elif len(beside) > 1:
            known |= {name: frozenset({f"={name}/{','.join(sorted(beside))}"}) for name in members}
    return known
