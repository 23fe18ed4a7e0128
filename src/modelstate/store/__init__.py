"""Stores of checkpoints of a training run, and loops that resume from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.store.resumable import Resumable
    from modelstate.store.retention import CheckpointInfo
    from modelstate.store.saving import PendingSave, SavedStep
    from modelstate.store.store import RestoredStep
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "modelstate.store.resumable": ("Resumable",),
            "modelstate.store.retention": ("CheckpointInfo",),
            "modelstate.store.saving": ("PendingSave", "SavedStep"),
            "modelstate.store.store": ("RestoredStep",),
        },
    )

__all__ = [
    "CheckpointInfo",
    "PendingSave",
    "RestoredStep",
    "Resumable",
    "SavedStep",
]
