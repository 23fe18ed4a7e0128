"""Executing a plan: reading values, placing them, reporting what happened."""

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.io.memory import set_spare_bytes as set_spare_bytes
    from modelstate.loading.background import LoadHandle as LoadHandle
    from modelstate.loading.mesh_plan import MeshPlan as MeshPlan
    from modelstate.loading.mesh_plan import RankPlan as RankPlan
    from modelstate.loading.mesh_plan import plan_for_mesh as plan_for_mesh
    from modelstate.loading.mesh_plan import read_parallel as read_parallel
    from modelstate.loading.quantize import Quantize as Quantize
    from modelstate.loading.report import RankReport as RankReport
    from modelstate.planning.assignment import ReadRoute as ReadRoute
    from modelstate.planning.transforms import ModuleTransform as ModuleTransform
    from modelstate.planning.transforms import RowsWriter as RowsWriter
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "LoadHandle": "modelstate.loading.background",
            "MeshPlan": "modelstate.loading.mesh_plan",
            "ModuleTransform": "modelstate.planning.transforms",
            "Quantize": "modelstate.loading.quantize",
            "RankPlan": "modelstate.loading.mesh_plan",
            "RankReport": "modelstate.loading.report",
            "ReadRoute": "modelstate.planning.assignment",
            "RowsWriter": "modelstate.planning.transforms",
            "plan_for_mesh": "modelstate.loading.mesh_plan",
            "read_parallel": "modelstate.loading.mesh_plan",
            "set_spare_bytes": "modelstate.io.memory",
        },
    )

__all__ = [
    "LoadHandle",
    "MeshPlan",
    "ModuleTransform",
    "Quantize",
    "RankPlan",
    "RankReport",
    "ReadRoute",
    "RowsWriter",
    "plan_for_mesh",
    "read_parallel",
    "set_spare_bytes",
]
