"""Suggests rules from the names, shapes and dtypes of a checkpoint and a model. It never applies them itself."""

from __future__ import annotations

from modelstate.suggestion.suggest import Suggestion

__all__ = ["Suggestion"]
