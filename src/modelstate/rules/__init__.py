"""Rules that turn the names and tensors of a checkpoint into those of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.rules import known
    from modelstate.rules.joining import Concat, Dequantize, Multiply, Split, WeightNorm
    from modelstate.rules.names import Copy, Fill, Ignore, Prefix, Rename, Same
    from modelstate.rules.rule import Guess, Rule
    from modelstate.rules.schema import Migration, Rules, Schema
    from modelstate.rules.tensors import Apply, Cast, Reshape, Transpose
    from modelstate.rules.transformers_mapping import from_transformers
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "modelstate.rules": ("known",),
            "modelstate.rules.joining": ("Concat", "Dequantize", "Multiply", "Split", "WeightNorm"),
            "modelstate.rules.names": ("Copy", "Fill", "Ignore", "Prefix", "Rename", "Same"),
            "modelstate.rules.rule": ("Guess", "Rule"),
            "modelstate.rules.schema": ("Migration", "Rules", "Schema"),
            "modelstate.rules.tensors": ("Apply", "Cast", "Reshape", "Transpose"),
            "modelstate.rules.transformers_mapping": ("from_transformers",),
        },
    )

__all__ = [
    "Apply",
    "Cast",
    "Concat",
    "Copy",
    "Dequantize",
    "Fill",
    "Guess",
    "Ignore",
    "Migration",
    "Multiply",
    "Prefix",
    "Rename",
    "Reshape",
    "Rule",
    "Rules",
    "Same",
    "Schema",
    "Split",
    "Transpose",
    "WeightNorm",
    "from_transformers",
    "known",
]
