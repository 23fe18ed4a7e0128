"""Executing a plan: reading values, placing them, reporting what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.loading.load import LoadHandle as LoadHandle
    from modelstate.loading.quantize import Quantize as Quantize
    from modelstate.planning.options import LoadOptions as LoadOptions
    from modelstate.planning.plan import RankReport as RankReport
    from modelstate.planning.transfer import Way as Way
    from modelstate.planning.transforms import ModuleTransform as ModuleTransform
else:
    __getattr__, __dir__ = attach(__name__)
