"""modelstate moves model state between files and live PyTorch models: all or nothing, with every reference kept."""

from modelstate.lazy import attach
from modelstate.version import __version__ as __version__

TYPE_CHECKING = False  # of `typing`, which `python -m modelstate` would take from the working directory
if TYPE_CHECKING:
    from modelstate import comparison as comparison
    from modelstate import conversion as conversion
    from modelstate import errors as errors
    from modelstate import loading as loading
    from modelstate import merge as merge
    from modelstate import objects as objects
    from modelstate import rules as rules
    from modelstate import serve as serve
    from modelstate import store as store
    from modelstate import suggestion as suggestion
    from modelstate import transaction as transaction
    from modelstate.checkpoint.checkpoint import Checkpoint as Checkpoint
    from modelstate.checkpoint.inspect import inspect as inspect
    from modelstate.checkpoint.inspect import verify as verify
    from modelstate.checkpoint.open import open as open
    from modelstate.checkpoint.write import SaveReport as SaveReport
    from modelstate.codec.codec import register_codec as register_codec
    from modelstate.comparison.diff import diff as diff
    from modelstate.conversion.checkpoint import convert_checkpoint as convert_checkpoint
    from modelstate.conversion.convert import convert as convert
    from modelstate.conversion.reference_keeping import reference_keeping as reference_keeping
    from modelstate.errors import ModelStateError as ModelStateError
    from modelstate.errors import PlanError as PlanError
    from modelstate.integrations import dcp as dcp
    from modelstate.loading.load import load as load
    from modelstate.loading.load import plan as plan
    from modelstate.loading.load_state_dict import load_state_dict as load_state_dict
    from modelstate.loading.report import LoadReport as LoadReport
    from modelstate.loading.skeleton import skeleton as skeleton
    from modelstate.objects.extra_state import declare_extra_state as declare_extra_state
    from modelstate.objects.extra_state import extra_state as extra_state
    from modelstate.objects.lazy_buffers import register_lazy_buffer as register_lazy_buffer
    from modelstate.objects.optimizer_state import load_optimizer_state as load_optimizer_state
    from modelstate.objects.optimizer_state import optimizer_state as optimizer_state
    from modelstate.objects.restore import restore as restore
    from modelstate.objects.rng import RNG as RNG
    from modelstate.objects.save import save as save
    from modelstate.planning.plan import LoadPlan as LoadPlan
    from modelstate.remote.cache import Cache as Cache
    from modelstate.serve.canary import Canary as Canary
    from modelstate.serve.export import export as export
    from modelstate.serve.follow import follow as follow
    from modelstate.serve.live import Live as Live
    from modelstate.store.deadline import Deadline as Deadline
    from modelstate.store.resumable import resumable as resumable
    from modelstate.store.retention import Keep as Keep
    from modelstate.store.store import Store as Store
    from modelstate.suggestion.suggest import suggest as suggest
    from modelstate.tensor_spec import TensorSpec as TensorSpec
    from modelstate.transaction.references import identity as identity
    from modelstate.transaction.swap_tensors import swap_tensors as swap_tensors
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "Cache": "modelstate.remote.cache",
            "Canary": "modelstate.serve.canary",
            "Checkpoint": "modelstate.checkpoint.checkpoint",
            "Deadline": "modelstate.store.deadline",
            "Keep": "modelstate.store.retention",
            "Live": "modelstate.serve.live",
            "LoadPlan": "modelstate.planning.plan",
            "LoadReport": "modelstate.loading.report",
            "ModelStateError": "modelstate.errors",
            "PlanError": "modelstate.errors",
            "RNG": "modelstate.objects.rng",
            "SaveReport": "modelstate.checkpoint.write",
            "Store": "modelstate.store.store",
            "TensorSpec": "modelstate.tensor_spec",
            "comparison": "modelstate.comparison",
            "conversion": "modelstate.conversion",
            "convert": "modelstate.conversion.convert",
            "convert_checkpoint": "modelstate.conversion.checkpoint",
            "dcp": "modelstate.integrations.dcp",
            "declare_extra_state": "modelstate.objects.extra_state",
            "diff": "modelstate.comparison.diff",
            "errors": "modelstate.errors",
            "export": "modelstate.serve.export",
            "extra_state": "modelstate.objects.extra_state",
            "follow": "modelstate.serve.follow",
            "identity": "modelstate.transaction.references",
            "inspect": "modelstate.checkpoint.inspect",
            "load": "modelstate.loading.load",
            "load_optimizer_state": "modelstate.objects.optimizer_state",
            "load_state_dict": "modelstate.loading.load_state_dict",
            "loading": "modelstate.loading",
            "merge": "modelstate.merge",
            "objects": "modelstate.objects",
            "open": "modelstate.checkpoint.open",
            "optimizer_state": "modelstate.objects.optimizer_state",
            "plan": "modelstate.loading.load",
            "reference_keeping": "modelstate.conversion.reference_keeping",
            "register_codec": "modelstate.codec.codec",
            "register_lazy_buffer": "modelstate.objects.lazy_buffers",
            "restore": "modelstate.objects.restore",
            "resumable": "modelstate.store.resumable",
            "rules": "modelstate.rules",
            "save": "modelstate.objects.save",
            "serve": "modelstate.serve",
            "skeleton": "modelstate.loading.skeleton",
            "store": "modelstate.store",
            "suggest": "modelstate.suggestion.suggest",
            "suggestion": "modelstate.suggestion",
            "swap_tensors": "modelstate.transaction.swap_tensors",
            "transaction": "modelstate.transaction",
            "verify": "modelstate.checkpoint.inspect",
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
