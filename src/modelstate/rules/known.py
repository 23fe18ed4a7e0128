"""Rules for what has often changed: wrappers, reparametrized weights, fused projections, tied heads.

Each function gives `Rules`, with patterns in which `*` is any part of a name; `.reverse()` gives the way back. An
`owner` is the path of a module, or a pattern for several; empty, it is the model itself.
"""

import re
from collections.abc import Collection, Sequence

from modelstate.rules.names import Rename
from modelstate.rules.schema import Rules
from modelstate.rules.tensors import Reshape, Split, Transpose
from modelstate.rules.values import Copy, Fill, Same

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DataParallel, torch.compile, FSDP and activation checkpointing put into names."""


def unwrapped(wrappers: Collection[str] = WRAPPERS) -> Rules:
    """Takes what wrappers have put into names out, wherever it is. There is no way back."""
    parts = "|".join(map(re.escape, wrappers))
    return Rules([Rename(re.compile(rf"(^|\.)(?:(?:{parts})\.)+"), r"\1")])


def weight_norm(owner: str = "*", name: str = "weight") -> Rules:
    """From `torch.nn.utils.weight_norm` to `torch.nn.utils.parametrizations.weight_norm`.

    The old `spectral_norm` has a `weight_v` too: in a model with both, say which modules are meant.
    """
    old, new = _below(owner, name), _below(owner, f"parametrizations.{name}")
    return Rules([Rename(f"{old}_g", f"{new}.original0"), Rename(f"{old}_v", f"{new}.original1")])


def spectral_norm(owner: str = "*", name: str = "weight") -> Rules:
    """From `torch.nn.utils.spectral_norm` to `torch.nn.utils.parametrizations.spectral_norm`."""
    old, new = _below(owner, name), _below(owner, f"parametrizations.{name}")
    return Rules(
        [
            Rename(f"{old}_orig", f"{new}.original"),
            Rename(f"{old}_u", f"{new}.0._u"),
            Rename(f"{old}_v", f"{new}.0._v"),
        ]
    )


def batch_norm_counter(owner: str = "*") -> Rules:
    """Gives batch norms the counter that they have had since PyTorch 0.4.1, which begins at 0."""
    return Rules([Fill(_below(owner, "num_batches_tracked"), 0)])


def _below(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def separate_qkv(fused: str, parts: Sequence[str], sizes: Sequence[int] | None = None) -> Rules:
    """From one projection for query, key and value to three: `separate_qkv("*.qkv", ["*.q", "*.k", "*.v"])`.

    `sizes` are the rows of each, where they are not the same, as with grouped queries.
    """
    rows = None if sizes is None else tuple(sizes)
    return Rules([Split(f"{fused}.*", tuple(f"{part}.*" for part in parts), 0, rows)])


def separate_qkv_by_head(fused: str, parts: Sequence[str], heads: int, head_size: int, bias: bool = True) -> Rules:
    """The same where the rows lie head by head, each with its part of all three, as in GPT-NeoX and BLOOM."""
    rules: list[object] = []
    for leaf, columns in [("weight", (-1,)), ("bias", ())] if bias else [("weight", (-1,))]:
        into = tuple(f"{part}.{leaf}" for part in parts)
        count, rows = len(into), heads * head_size
        rules.append(Reshape(f"{fused}.{leaf}", (heads, count, head_size, *columns), (count * rows, *columns)))
        rules.append(Split(f"{fused}.{leaf}", into, 1))
        rules += [Reshape(one, (rows, *columns), (heads, 1, head_size, *columns)) for one in into]
    return Rules(rules)


def conv1d_to_linear(pattern: str) -> Rules:
    """From the `Conv1D` of GPT-2, whose weight is transposed, to `Linear`; also the way back."""
    return Rules([Transpose(f"{pattern}.weight")])


def untied_head(embedding: str, head: str) -> Rules:
    """For a model that has a head of its own, and a checkpoint that lacks it, as it was tied to the embedding."""
    return Rules([Copy(embedding, head)])


def tied_head(embedding: str, head: str) -> Rules:
    """For a model that has no name for its head, as it uses the embedding, and a checkpoint that has both, equal."""
    return Rules([Same(embedding, head)])
