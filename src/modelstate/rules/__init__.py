"""Rules that turn the names and tensors of a checkpoint into those of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.rules import known as known
    from modelstate.rules.joining import (
        Concat as Concat,
        Dequantize as Dequantize,
        Multiply as Multiply,
        Split as Split,
        WeightNorm as WeightNorm,
    )
    from modelstate.rules.names import (
        Copy as Copy,
        Fill as Fill,
        Ignore as Ignore,
        Prefix as Prefix,
        Rename as Rename,
        Same as Same,
    )
    from modelstate.rules.rule import Guess as Guess, Rule as Rule
    from modelstate.rules.schema import Migration as Migration, Rules as Rules, Schema as Schema
    from modelstate.rules.tensors import Apply as Apply, Cast as Cast, Reshape as Reshape, Transpose as Transpose
    from modelstate.rules.transformers_mapping import from_transformers as from_transformers
else:
    __getattr__, __dir__ = attach(__name__)
