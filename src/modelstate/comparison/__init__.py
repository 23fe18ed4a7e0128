"""Compares two checkpoints: `modelstate.diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.comparison.difference import Difference as Difference
    from modelstate.comparison.result import (
        Diff as Diff,
        Status as Status,
        TensorDiff as TensorDiff,
        ValueDiff as ValueDiff,
    )
else:
    __getattr__, __dir__ = attach(__name__)
