"""Stores of checkpoints of a training run, and loops that resume from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.store.resumable import Resumable as Resumable
    from modelstate.store.retention import CheckpointInfo as CheckpointInfo
    from modelstate.store.saving import SavedStep as SavedStep
    from modelstate.store.store import PendingSave as PendingSave, RestoredStep as RestoredStep
else:
    __getattr__, __dir__ = attach(__name__)
