"""The meaning of words in names, as far as model authors agree on it.

A part of a name becomes a set of concepts: "q", "attention", "norm", "first". Names are compared by their concepts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

Shape = tuple[int, ...]

_PHRASES = {
    # Whole parts of names, whose single words would mislead, by their concepts.
    "qkv": "c_attn in_proj wqkv",
    "interleaved": "query_key_value linear_qkv",
    "out": "c_proj o_proj to_out wo o proj",
    "up": "c_fc dense_h_to_4h wi",
    "up mlp": "intermediate",
    "down": "dense_4h_to_h",
    "gate_up": "gate_up_proj gate_up",
    "tok embedding": "wte embed_in",
    "pos embedding": "wpe",
    "tok": "shared",
    "head": "embed_out lm_head",
    "norm final": "ln_f norm_f",
    "norm first": "input_layernorm layernorm_before",
    "norm second": "post_attention_layernorm layernorm_after",
    "cross attention": "encoder_attn multihead_attn encdecattention",
}
_WORDS = {
    "q": "query wq",
    "k": "key wk",
    "v": "value wv",
    "attention": "attn att mha",
    "norm": "ln layernorm rmsnorm layrnorm normalization batchnorm bn",
    "conv": "convolution",
    "mlp": "ffn feedforward ff densereludense",
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
_OF_PHRASE = {phrase: frozenset(text.split()) for text, phrases in _PHRASES.items() for phrase in phrases.split()}
_OF_WORD = {word: concept for concept, words in _WORDS.items() for word in words.split()}
_ROLES = {"gamma": "weight", "kernel": "weight", "beta": "bias", "moving_mean": "running_mean"}
_ROLES |= {"moving_variance": "running_var"}
_ROLES |= {role: role for role in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
_GENERIC_TEXT = """
linear dense lin fc layer layers block blocks module model h net list to modules transformer projection backbone base w
c parametrizations original
"""
GENERIC = frozenset(_GENERIC_TEXT.split())
"""Words that hardly say which tensor it is."""
CONVENTION = "by convention"
"""Stands beside the concepts of w1 and w3: only Llama's convention says that w1 is the gate and w3 goes up."""
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
    {"attention", "mlp"},
    {"first", "second"},
)
PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "gate_up": ("gate", "up")}
"""Tensors that are often stored as one, with the order of their parts."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+")
_NORM = re.compile(r"(pre|post|input)_(\w+_)?\w*norm")
_SANDWICH = re.compile(r"(pre|post)_(feedforward|feed_forward|ffn|ffw|mlp|self_attn)_\w*norm")
"""Norms of layers that have norms behind attention and the MLP too, as in OLMo-2 and Gemma-2."""


def role_of(last: str) -> tuple[str, str]:
    """Splits the last part of a name into a rest and the role of the tensor in its module: weight, bias, ..."""
    if last.lower() in _ROLES:
        return "", _ROLES[last.lower()]
    head, _, tail = last.rpartition("_")
    return (head, tail) if head and tail in ("weight", "bias") else (last, "")


@lru_cache(maxsize=65536)
def concepts(segment: str) -> frozenset[str]:
    """Returns the concepts of one part of a name. An unknown word is its own concept; numbers are left out."""
    words = [word.lower() for word in _WORD.findall(segment)]
    joined = "".join(words)
    if phrase := _OF_PHRASE.get(segment.lower()) or _OF_PHRASE.get(joined):
        return phrase
    result = frozenset(_OF_WORD.get(word, word) for word in ([joined] if joined in _OF_WORD else words))
    # The norms of a layer are numbered, or named after the block before or behind them.
    for block, place in (("attention", "first"), ("mlp", "second")):
        if result - {"layer", "self"} == {"norm", block}:
            return frozenset({"norm", place})
    return result - {"layer", "proj"} if len(result) > 1 else result


def meaning(words: Sequence[frozenset[str]]) -> frozenset[str]:
    """Returns the concepts of a path from those of its parts."""
    result, last = frozenset[str]().union(*words), words[-1]
    if "attention" in result and last == {"dense"}:
        return result | {"out"}
    return result | {"first"} if last == {"norm"} and "attention" in result and "cross" not in result else result


@lru_cache(maxsize=65536)
def contradict(first: frozenset[str], second: frozenset[str]) -> bool:
    """Whether two sets of concepts exclude each other: a key is not a query."""
    return any(first & group and second & group and not first & second & group for group in _EXCLUSIVE)


def meanings_beside(members: Mapping[str, Shape]) -> dict[str, frozenset[str]]:
    """Returns the concepts of members of a module that mean something else beside the other members.

    Args:
        members: The members, such as "w1" or "post_attention_layernorm", with the shapes of their weights.
    """
    known: dict[str, frozenset[str]] = {}
    if any(map(_SANDWICH.fullmatch, members)):
        known = {name: frozenset({f"={name}", "norm"}) for name in members if _NORM.fullmatch(name)}
    if members.keys() >= {"w1", "w2", "w3"} and "w4" not in members:
        known |= {name: frozenset({f"={name}"}) for name in ("w1", "w2", "w3")}
        if members["w1"] == members["w3"] != members["w2"]:
            known |= {"w1": frozenset({"gate", CONVENTION}), "w2": frozenset({"down"})}
            known |= {"w3": frozenset({"up", CONVENTION})}
    return known
