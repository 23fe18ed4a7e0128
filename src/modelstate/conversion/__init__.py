"""Conversions of live modules to another dtype or device, with every reference kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.conversion.tensors import UNCHANGED as UNCHANGED
else:
    __getattr__, __dir__ = attach(__name__)
