"""Rules for common changes that take several rules: wrappers, reparametrized weights, fused projections.

Each function returns `Rules`, whose `.reverse()` is the way back. In patterns, `*` matches any part of a name. An
`owner` is the path of a module, or a pattern for several; if empty, it is the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from modelstate.rules.joining import Split
from modelstate.rules.names import Rename
from modelstate.rules.schema import Rules
from modelstate.rules.tensors import Reshape

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DataParallel, torch.compile, FSDP and activation checkpointing add to names."""


def unwrapped(wrappers: Collection[str] = WRAPPERS) -> Rules:
    """Removes what wrappers have added to names, in any place of a name.

    Args:
        wrappers: The parts of names to remove.

    The rules have no reverse.

    Examples:
        >>> ms.load(model, "compiled_ddp.pt", rules=ms.rules.known.unwrapped())
    """
    parts = "|".join(map(re.escape, wrappers))
    return Rules([Rename(re.compile(rf"(^|\.)(?:(?:{parts})\.)+"), r"\1")])


def weight_norm(owner: str = "*", name: str = "weight") -> Rules:
    """From `torch.nn.utils.weight_norm` to `torch.nn.utils.parametrizations.weight_norm`.

    Args:
        owner: The modules. The old `spectral_norm` has a `weight_v` too: in a model with both, name the modules.
        name: The name of the parameter.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.known.weight_norm("encoder.conv*"))
    """
    old, new = _below(owner, name), _below(owner, f"parametrizations.{name}")
    return Rules([Rename(f"{old}_g", f"{new}.original0"), Rename(f"{old}_v", f"{new}.original1")])


def spectral_norm(owner: str = "*", name: str = "weight") -> Rules:
    """From `torch.nn.utils.spectral_norm` to `torch.nn.utils.parametrizations.spectral_norm`.

    Args:
        owner: The modules.
        name: The name of the parameter.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.known.spectral_norm())
    """
    old, new = _below(owner, name), _below(owner, f"parametrizations.{name}")
    return Rules(
        [Rename(f"{old}_orig", f"{new}.original"), Rename(f"{old}_u", f"{new}.0._u"), Rename(f"{old}_v", f"{new}.0._v")]
    )


def _below(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def separate_qkv_by_head(fused: str, parts: Sequence[str], heads: int, head_size: int, bias: bool = True) -> Rules:
    """From a fused projection whose rows are grouped by head, as in GPT-NeoX and BLOOM, to separate ones.

    Args:
        fused: The path of the fused projection, or a pattern.
        parts: The paths of query, key and value, with as many `*`.
        heads: The number of heads.
        head_size: The rows of one head in one part.
        bias: Whether the projections have a bias.

    Examples:
        >>> parts = ["h.*.q", "h.*.k", "h.*.v"]
        >>> rules = ms.rules.known.separate_qkv_by_head("h.*.query_key_value", parts, heads=16, head_size=64)
    """
    rules: list[object] = []
    for leaf, columns in [("weight", (-1,)), ("bias", ())] if bias else [("weight", (-1,))]:
        into = tuple(f"{part}.{leaf}" for part in parts)
        count, rows = len(into), heads * head_size
        rules.append(Reshape(f"{fused}.{leaf}", (heads, count, head_size, *columns), (count * rows, *columns)))
        rules.append(Split(f"{fused}.{leaf}", into, 1))
        rules += [Reshape(target, (rows, *columns), (heads, 1, head_size, *columns)) for target in into]
    return Rules(rules)
