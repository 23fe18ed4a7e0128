"""Rules that are worked out from the names, shapes and dtypes of both sides. They are proposed, and never applied."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.suggestion.suggestion import Suggestion as Suggestion
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "Suggestion": "modelstate.suggestion.suggestion",
        },
    )

__all__ = [
    "Suggestion",
]
