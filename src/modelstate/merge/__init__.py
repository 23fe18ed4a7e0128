"""Checkpoints that are computed from several others: merged LoRA adapters and averages."""

from __future__ import annotations

from modelstate.merge.average import Average
from modelstate.merge.lora import LoRA

__all__ = ["Average", "LoRA"]
