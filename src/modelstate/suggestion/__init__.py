"""Suggests rules from the names, shapes and dtypes of a checkpoint and a model. It never applies them itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.suggestion.suggest import Suggestion as Suggestion
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "modelstate.suggestion.suggest": ("Suggestion",),
        },
    )
