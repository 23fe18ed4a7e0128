"""Stores of checkpoints of a training run, and loops that resume from them."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.store.resumable import Resumable as Resumable
    from modelstate.store.retention import CheckpointInfo as CheckpointInfo
    from modelstate.store.saving import PendingSave as PendingSave
    from modelstate.store.saving import SavedStep as SavedStep
    from modelstate.store.store import RestoredStep as RestoredStep
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "CheckpointInfo": "modelstate.store.retention",
            "PendingSave": "modelstate.store.saving",
            "RestoredStep": "modelstate.store.store",
            "Resumable": "modelstate.store.resumable",
            "SavedStep": "modelstate.store.saving",
        },
    )

__all__ = [
    "CheckpointInfo",
    "PendingSave",
    "RestoredStep",
    "Resumable",
    "SavedStep",
]
