"""Changes to live objects: undo transaction, object snapshots, references, `swap_tensors`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.transaction.references import Identity as Identity
else:
    __getattr__, __dir__ = attach(__name__)
