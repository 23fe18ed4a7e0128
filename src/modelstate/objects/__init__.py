"""Saves and restores the state of modules, optimizers, schedulers, data loaders and random generators."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.objects.restore import Restored as Restored
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "Restored": "modelstate.objects.restore",
        },
    )

__all__ = [
    "Restored",
]
