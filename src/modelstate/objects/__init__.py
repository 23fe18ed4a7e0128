"""Saves and restores the state of modules, optimizers, schedulers, data loaders and random generators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.objects.objects import Restored as Restored
else:
    __getattr__, __dir__ = attach(__name__)
