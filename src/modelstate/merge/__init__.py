"""Checkpoints that are computed from several others: merged LoRA adapters and averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.merge.average import Average as Average
    from modelstate.merge.lora import LoRA as LoRA
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "modelstate.merge.average": ("Average",),
            "modelstate.merge.lora": ("LoRA",),
        },
    )
