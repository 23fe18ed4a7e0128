"""The meaning of words in names, as far as model authors agree on it.

A part of a name becomes a set of concepts: "q", "attention", "norm", "first". Names are compared by their concepts.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

_PHRASES = {
    # Whole parts of names, whose single words would mislead.
    "c_attn": "qkv",
    "in_proj": "qkv",
    "wqkv": "qkv",
    "qkv_proj": "qkv",
    "query_key_value": "interleaved",
    "linear_qkv": "interleaved",
    "c_proj": "out",
    "o_proj": "out",
    "out_proj": "out",
    "to_out": "out",
    "wo": "out",
    "o": "out",
    "proj": "out",
    "c_fc": "up",
    "fc1": "up",
    "linear1": "up",
    "lin1": "up",
    "dense_h_to_4h": "up",
    "wi": "up",
    "intermediate": "up mlp",
    "up_proj": "up",
    "fc2": "down",
    "linear2": "down",
    "lin2": "down",
    "dense_4h_to_h": "down",
    "down_proj": "down",
    "gate_proj": "gate",
    "gate_up_proj": "gate_up",
    "gate_up": "gate_up",
    "kv_proj": "kv",
    "wq": "q",
    "wk": "k",
    "wv": "v",
    "wte": "tok embedding",
    "wpe": "pos embedding",
    "embed_tokens": "tok embedding",
    "embed_in": "tok embedding",
    "tok_embeddings": "tok embedding",
    "shared": "tok",
    "embed_positions": "pos embedding",
    "embed_out": "head",
    "lm_head": "head",
    "ln_f": "norm final",
    "norm_f": "norm final",
    "input_layernorm": "norm first",
    "layernorm_before": "norm first",
    "post_attention_layernorm": "norm second",
    "layernorm_after": "norm second",
    "encoder_attn": "cross attention",
    "multihead_attn": "cross attention",
    "encdecattention": "cross attention",
    "selfattention": "self attention",
    "densereludense": "mlp",
}
_WORDS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn": "attention",
    "att": "attention",
    "mha": "attention",
    "ln": "norm",
    "layernorm": "norm",
    "rmsnorm": "norm",
    "layrnorm": "norm",
    "normalization": "norm",
    "batchnorm": "norm",
    "bn": "norm",
    "convolution": "conv",
    "ffn": "mlp",
    "feedforward": "mlp",
    "ff": "mlp",
    "output": "out",
    "embeddings": "embedding",
    "embed": "embedding",
    "embedder": "embedding",
    "emb": "embedding",
    "position": "pos",
    "positional": "pos",
    "positions": "pos",
    "word": "tok",
    "token": "tok",
    "tokens": "tok",
    "crossattention": "cross",
    "shortcut": "downsample",
    "cls": "class",
    "enc": "encoder",
    "dec": "decoder",
    "classifier": "head",
    "patches": "patch",
}
_GENERIC = {
    *(
        "linear",
        "dense",
        "lin",
        "fc",
        "layer",
        "layers",
        "block",
        "blocks",
        "module",
        "model",
        "h",
        "net",
        "list",
        "to",
    ),
    *("modules", "transformer", "projection", "backbone", "base", "w", "c", "parametrizations", "original"),
}
_ROLES = {
    "weight": "weight",
    "gamma": "weight",
    "kernel": "weight",
    "bias": "bias",
    "beta": "bias",
    "running_mean": "running_mean",
    "moving_mean": "running_mean",
    "running_var": "running_var",
    "moving_variance": "running_var",
    "num_batches_tracked": "num_batches_tracked",
}
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
_KNOWN = {word for text in (*_PHRASES.values(), *_WORDS.values()) for word in text.split()} | {"gate", "up", "down"}

PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "gate_up": ("gate", "up")}
"""Tensors that are often stored as one, with the order of their parts."""
INTERLEAVED = "interleaved"
"""The concept of a fused projection whose parts are interleaved by head, so that it cannot be cut into three."""

_NOTHING: Mapping[int, frozenset[str]] = {}
_DIGIT = re.compile(r"[\d#]")
_SHARED, _GENERIC_SHARED, _LACKED = 1.0, 0.05, 0.3


def role_of(last: str) -> tuple[str, str]:
    """Splits the last part of a name into a rest and the role of the tensor in its module: weight, bias, ..."""
    if last.lower() in _ROLES:
        return "", _ROLES[last.lower()]
    head, _, tail = last.rpartition("_")
    if head and tail in ("weight", "bias"):
        return head, tail
    return last, ""


@lru_cache(maxsize=65536)
def concepts(segment: str) -> frozenset[str]:
    """Returns the concepts of one part of a name. An unknown word is its own concept; numbers are left out."""
    phrase = _PHRASES.get(segment.lower())
    if phrase is not None:
        return frozenset(phrase.split())
    bare = re.sub(r"[\d#]+", "_", segment)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W_a-zA-Z]+", bare)
    if "".join(words).lower() in _PHRASES:
        return frozenset(_PHRASES["".join(words).lower()].split())
    if "".join(words).lower() in _WORDS:
        return frozenset({_WORDS["".join(words).lower()]})
    result = {_WORDS.get(word.lower(), word.lower()) for word in words}
    # The norms of a layer are numbered, or named after the block before or behind them.
    if result - {"layer", "self"} == {"norm", "attention"}:
        return frozenset({"norm", "first"})
    if result - {"layer"} == {"norm", "mlp"}:
        return frozenset({"norm", "second"})
    return frozenset(result - {"layer", "proj"} if len(result) > 1 else result)


def of_path(segments: Sequence[str], known: Mapping[int, frozenset[str]] = _NOTHING) -> frozenset[str]:
    """Returns the concepts of all parts of a name; `known` has those of parts that their context determines."""
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
    return sum(_GENERIC_SHARED if word in _GENERIC else _SHARED for word in first & second)


@lru_cache(maxsize=65536)
def lacked(first: frozenset[str], second: frozenset[str]) -> float:
    """Returns the penalty for known concepts and ordinals that only one of two names has."""
    return _LACKED * sum(1 for word in first ^ second if word in _KNOWN or word.startswith("#"))
