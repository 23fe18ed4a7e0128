"""modelstate moves model state between files and live PyTorch models: all or nothing, with every reference kept."""

from modelstate.lazy import attach
from modelstate.version import __version__ as __version__

TYPE_CHECKING = False  # of `typing`, which `python -m modelstate` would take from the working directory
if TYPE_CHECKING:
    from modelstate import (
        comparison as comparison,
        conversion as conversion,
        errors as errors,
        loading as loading,
        merge as merge,
        objects as objects,
        rules as rules,
        serve as serve,
        store as store,
        suggestion as suggestion,
        transaction as transaction,
    )
    from modelstate.checkpoint.checkpoint import Checkpoint as Checkpoint
    from modelstate.checkpoint.inspect import inspect as inspect, verify as verify
    from modelstate.checkpoint.open import open as open
    from modelstate.checkpoint.write import SaveReport as SaveReport
    from modelstate.codec.codec import register_codec as register_codec
    from modelstate.comparison.diff import diff as diff
    from modelstate.conversion.checkpoint import convert_checkpoint as convert_checkpoint
    from modelstate.conversion.convert import convert as convert, reference_keeping as reference_keeping
    from modelstate.errors import ModelStateError as ModelStateError, PlanError as PlanError
    from modelstate.integrations import dcp as dcp
    from modelstate.loading.load import load as load, plan as plan
    from modelstate.loading.load_state_dict import load_state_dict as load_state_dict
    from modelstate.loading.skeleton import skeleton as skeleton
    from modelstate.objects.extra_state import extra_state as extra_state
    from modelstate.objects.lazy_buffers import register_lazy_buffer as register_lazy_buffer
    from modelstate.objects.optimizer_state import (
        load_optimizer_state as load_optimizer_state,
        optimizer_state as optimizer_state,
    )
    from modelstate.objects.restore import restore as restore
    from modelstate.objects.rng import RNG as RNG
    from modelstate.objects.save import save as save
    from modelstate.planning.plan import LoadPlan as LoadPlan, LoadReport as LoadReport
    from modelstate.remote.cache import Cache as Cache
    from modelstate.serve.canary import Canary as Canary
    from modelstate.serve.export import export as export
    from modelstate.serve.follow import follow as follow
    from modelstate.serve.live import Live as Live
    from modelstate.store.deadline import Deadline as Deadline
    from modelstate.store.delta import Delta as Delta
    from modelstate.store.resumable import resumable as resumable
    from modelstate.store.retention import Keep as Keep
    from modelstate.store.store import Store as Store
    from modelstate.suggestion.suggest import suggest as suggest
    from modelstate.tensor_spec import TensorSpec as TensorSpec
    from modelstate.transaction.references import identity as identity
    from modelstate.transaction.swap_tensors import swap_tensors as swap_tensors
else:
    # The base classes of dcp in torch import sympy.
    __getattr__, __dir__ = attach(
        __name__, unlisted=("comparison", "conversion", "dcp", "loading", "objects", "suggestion", "transaction")
    )
