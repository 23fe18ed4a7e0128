"""Rules that turn the names and tensors of a checkpoint into those of a model."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.rules import known as known
    from modelstate.rules.joining import Concat as Concat
    from modelstate.rules.joining import Dequantize as Dequantize
    from modelstate.rules.joining import Multiply as Multiply
    from modelstate.rules.joining import Split as Split
    from modelstate.rules.joining import WeightNorm as WeightNorm
    from modelstate.rules.names import Copy as Copy
    from modelstate.rules.names import Fill as Fill
    from modelstate.rules.names import Ignore as Ignore
    from modelstate.rules.names import Prefix as Prefix
    from modelstate.rules.names import Rename as Rename
    from modelstate.rules.names import Same as Same
    from modelstate.rules.rule import Guess as Guess
    from modelstate.rules.rule import Rule as Rule
    from modelstate.rules.schema import Migration as Migration
    from modelstate.rules.schema import Rules as Rules
    from modelstate.rules.schema import Schema as Schema
    from modelstate.rules.tensors import Apply as Apply
    from modelstate.rules.tensors import Cast as Cast
    from modelstate.rules.tensors import Reshape as Reshape
    from modelstate.rules.tensors import Transpose as Transpose
    from modelstate.rules.transformers_mapping import from_transformers as from_transformers
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "Apply": "modelstate.rules.tensors",
            "Cast": "modelstate.rules.tensors",
            "Concat": "modelstate.rules.joining",
            "Copy": "modelstate.rules.names",
            "Dequantize": "modelstate.rules.joining",
            "Fill": "modelstate.rules.names",
            "Guess": "modelstate.rules.rule",
            "Ignore": "modelstate.rules.names",
            "Migration": "modelstate.rules.schema",
            "Multiply": "modelstate.rules.joining",
            "Prefix": "modelstate.rules.names",
            "Rename": "modelstate.rules.names",
            "Reshape": "modelstate.rules.tensors",
            "Rule": "modelstate.rules.rule",
            "Rules": "modelstate.rules.schema",
            "Same": "modelstate.rules.names",
            "Schema": "modelstate.rules.schema",
            "Split": "modelstate.rules.joining",
            "Transpose": "modelstate.rules.tensors",
            "WeightNorm": "modelstate.rules.joining",
            "known": "modelstate.rules.known",
            "from_transformers": "modelstate.rules.transformers_mapping",
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
