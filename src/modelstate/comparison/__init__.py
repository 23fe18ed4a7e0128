"""Compares two checkpoints: `modelstate.diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.comparison.difference import Difference
    from modelstate.comparison.result import Diff, Status, TensorDiff, ValueDiff
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "modelstate.comparison.difference": ("Difference",),
            "modelstate.comparison.result": ("Diff", "Status", "TensorDiff", "ValueDiff"),
        },
    )

__all__ = ["Diff", "Difference", "Status", "TensorDiff", "ValueDiff"]
