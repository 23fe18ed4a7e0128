"""Compares two checkpoints: `modelstate.diff`."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.comparison.diff import Diff as Diff
    from modelstate.comparison.diff import Match as Match
    from modelstate.comparison.diff import Status as Status
    from modelstate.comparison.diff import TensorDiff as TensorDiff
    from modelstate.comparison.diff import ValueDiff as ValueDiff
    from modelstate.comparison.difference import Difference as Difference
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "Diff": "modelstate.comparison.diff",
            "Difference": "modelstate.comparison.difference",
            "Match": "modelstate.comparison.diff",
            "Status": "modelstate.comparison.diff",
            "TensorDiff": "modelstate.comparison.diff",
            "ValueDiff": "modelstate.comparison.diff",
        },
    )

__all__ = ["Diff", "Difference", "Match", "Status", "TensorDiff", "ValueDiff"]
