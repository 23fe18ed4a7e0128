"""Executing a plan: reading values, placing them, reporting what happened."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.loading.background import LoadHandle as LoadHandle
    from modelstate.loading.quantize import Quantize as Quantize
    from modelstate.planning.assignment import ReadRoute as ReadRoute
    from modelstate.planning.transforms import ModuleTransform as ModuleTransform
    from modelstate.planning.transforms import RowsWriter as RowsWriter
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "LoadHandle": "modelstate.loading.background",
            "ModuleTransform": "modelstate.planning.transforms",
            "Quantize": "modelstate.loading.quantize",
            "ReadRoute": "modelstate.planning.assignment",
            "RowsWriter": "modelstate.planning.transforms",
        },
    )

__all__ = [
    "LoadHandle",
    "ModuleTransform",
    "Quantize",
    "ReadRoute",
    "RowsWriter",
]
