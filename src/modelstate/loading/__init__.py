"""Executing a plan: reading values, placing them, reporting what happened."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.loading.background import LoadHandle as LoadHandle
    from modelstate.loading.quantize import Quantize as Quantize
    from modelstate.loading.report import RankReport as RankReport
    from modelstate.planning.assignment import ReadRoute as ReadRoute
    from modelstate.planning.options import LoadOptions as LoadOptions
    from modelstate.planning.transforms import ModuleTransform as ModuleTransform
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "LoadHandle": "modelstate.loading.background",
            "LoadOptions": "modelstate.planning.options",
            "ModuleTransform": "modelstate.planning.transforms",
            "Quantize": "modelstate.loading.quantize",
            "RankReport": "modelstate.loading.report",
            "ReadRoute": "modelstate.planning.assignment",
        },
    )

__all__ = [
    "LoadHandle",
    "LoadOptions",
    "ModuleTransform",
    "Quantize",
    "RankReport",
    "ReadRoute",
]
