"""Compares two checkpoints: `modelstate.diff`."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.comparison.difference import Difference as Difference
    from modelstate.comparison.result import Diff as Diff
    from modelstate.comparison.result import Status as Status
    from modelstate.comparison.result import TensorDiff as TensorDiff
    from modelstate.comparison.result import ValueDiff as ValueDiff
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "Diff": "modelstate.comparison.result",
            "Difference": "modelstate.comparison.difference",
            "Status": "modelstate.comparison.result",
            "TensorDiff": "modelstate.comparison.result",
            "ValueDiff": "modelstate.comparison.result",
        },
    )

__all__ = ["Diff", "Difference", "Status", "TensorDiff", "ValueDiff"]
