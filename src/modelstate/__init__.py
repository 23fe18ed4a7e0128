"""modelstate moves model state between files and live PyTorch models: all or nothing, with every reference kept."""

from modelstate.lazy import attach
from modelstate.version import __version__ as __version__

TYPE_CHECKING = False  # of `typing`, which `python -m modelstate` would take from the working directory
if TYPE_CHECKING:
    from modelstate import comparison as comparison
    from modelstate import conversion as conversion
    from modelstate import errors, merge, rules, serve, store
    from modelstate import loading as loading
    from modelstate import objects as objects
    from modelstate import suggestion as suggestion
    from modelstate import transaction as transaction
    from modelstate.checkpoint.checkpoint import Checkpoint
    from modelstate.checkpoint.inspect import inspect, verify
    from modelstate.checkpoint.open import open
    from modelstate.checkpoint.write import SaveReport
    from modelstate.codec.codec import register_codec
    from modelstate.comparison.diff import diff
    from modelstate.conversion.checkpoint import convert_checkpoint
    from modelstate.conversion.convert import convert
    from modelstate.conversion.reference_keeping import reference_keeping
    from modelstate.errors import ModelStateError, PlanError
    from modelstate.integrations import dcp as dcp
    from modelstate.loading.load import load, plan
    from modelstate.loading.load_state_dict import load_state_dict
    from modelstate.loading.skeleton import skeleton
    from modelstate.objects.extra_state import declare_extra_state, extra_state
    from modelstate.objects.lazy_buffers import register_lazy_buffer
    from modelstate.objects.optimizer_state import load_optimizer_state, optimizer_state
    from modelstate.objects.restore import restore
    from modelstate.objects.rng import RNG
    from modelstate.objects.save import save
    from modelstate.planning.plan import LoadPlan, LoadReport
    from modelstate.remote.cache import Cache
    from modelstate.serve.canary import Canary
    from modelstate.serve.export import export
    from modelstate.serve.follow import follow
    from modelstate.serve.live import Live
    from modelstate.store.deadline import Deadline
    from modelstate.store.resumable import resumable
    from modelstate.store.retention import Keep
    from modelstate.store.store import Store
    from modelstate.suggestion.suggest import suggest
    from modelstate.tensor_spec import TensorSpec
    from modelstate.transaction.references import identity
    from modelstate.transaction.swap_tensors import swap_tensors
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "modelstate": (
                "comparison",
                "conversion",
                "errors",
                "loading",
                "merge",
                "objects",
                "rules",
                "serve",
                "store",
                "suggestion",
                "transaction",
            ),
            "modelstate.checkpoint.checkpoint": ("Checkpoint",),
            "modelstate.checkpoint.inspect": ("inspect", "verify"),
            "modelstate.checkpoint.open": ("open",),
            "modelstate.checkpoint.write": ("SaveReport",),
            "modelstate.codec.codec": ("register_codec",),
            "modelstate.comparison.diff": ("diff",),
            "modelstate.conversion.checkpoint": ("convert_checkpoint",),
            "modelstate.conversion.convert": ("convert",),
            "modelstate.conversion.reference_keeping": ("reference_keeping",),
            "modelstate.errors": ("ModelStateError", "PlanError"),
            "modelstate.integrations": ("dcp",),
            "modelstate.loading.load": ("load", "plan"),
            "modelstate.loading.load_state_dict": ("load_state_dict",),
            "modelstate.loading.skeleton": ("skeleton",),
            "modelstate.objects.extra_state": ("declare_extra_state", "extra_state"),
            "modelstate.objects.lazy_buffers": ("register_lazy_buffer",),
            "modelstate.objects.optimizer_state": ("load_optimizer_state", "optimizer_state"),
            "modelstate.objects.restore": ("restore",),
            "modelstate.objects.rng": ("RNG",),
            "modelstate.objects.save": ("save",),
            "modelstate.planning.plan": ("LoadPlan", "LoadReport"),
            "modelstate.remote.cache": ("Cache",),
            "modelstate.serve.canary": ("Canary",),
            "modelstate.serve.export": ("export",),
            "modelstate.serve.follow": ("follow",),
            "modelstate.serve.live": ("Live",),
            "modelstate.store.deadline": ("Deadline",),
            "modelstate.store.resumable": ("resumable",),
            "modelstate.store.retention": ("Keep",),
            "modelstate.store.store": ("Store",),
            "modelstate.suggestion.suggest": ("suggest",),
            "modelstate.tensor_spec": ("TensorSpec",),
            "modelstate.transaction.references": ("identity",),
            "modelstate.transaction.swap_tensors": ("swap_tensors",),
        },
    )

# Without dcp, whose base classes in torch import sympy.
__all__ = [
    "RNG",
    "Cache",
    "Canary",
    "Checkpoint",
    "Deadline",
    "Keep",
    "Live",
    "LoadPlan",
    "LoadReport",
    "ModelStateError",
    "PlanError",
    "SaveReport",
    "Store",
    "TensorSpec",
    "convert",
    "convert_checkpoint",
    "declare_extra_state",
    "diff",
    "errors",
    "export",
    "extra_state",
    "follow",
    "identity",
    "inspect",
    "load",
    "load_optimizer_state",
    "load_state_dict",
    "merge",
    "open",
    "optimizer_state",
    "plan",
    "reference_keeping",
    "register_codec",
    "register_lazy_buffer",
    "restore",
    "resumable",
    "rules",
    "save",
    "serve",
    "skeleton",
    "store",
    "suggest",
    "swap_tensors",
    "verify",
]
