"""modelstate moves model state between files and live PyTorch models: all or nothing, with every reference kept."""

from modelstate import errors as errors
from modelstate.codec.codec import register_codec as register_codec
from modelstate.convert.convert import convert as convert
from modelstate.convert.keeping import reference_keeping as reference_keeping
from modelstate.convert.target import UNCHANGED as UNCHANGED
from modelstate.errors import ModelStateError as ModelStateError
from modelstate.errors import PlanError as PlanError
from modelstate.extra.fields import declare_extra_state as declare_extra_state
from modelstate.extra.fields import extra_state as extra_state
from modelstate.extra.lazy import register_lazy_buffer as register_lazy_buffer
from modelstate.place.identity import Identity as Identity
from modelstate.place.identity import identity as identity
from modelstate.place.load import load as load
from modelstate.place.load import plan as plan
from modelstate.place.load_state_dict import load_state_dict as load_state_dict
from modelstate.place.optimizer_state import load_optimizer_state as load_optimizer_state
from modelstate.place.optimizer_state import optimizer_state as optimizer_state
from modelstate.place.report import Report as Report
from modelstate.place.skeleton import skeleton as skeleton
from modelstate.place.swap_tensors import swap_tensors as swap_tensors
from modelstate.plan.plan import Plan as Plan
from modelstate.plan.rules import known as known
from modelstate.plan.rules.chain import Rules as Rules
from modelstate.plan.rules.names import Ignore as Ignore
from modelstate.plan.rules.names import Prefix as Prefix
from modelstate.plan.rules.names import Rename as Rename
from modelstate.plan.rules.rule import Rule as Rule
from modelstate.plan.rules.schema import Migration as Migration
from modelstate.plan.rules.schema import Schema as Schema
from modelstate.plan.rules.tensors import Apply as Apply
from modelstate.plan.rules.tensors import Cast as Cast
from modelstate.plan.rules.tensors import Concat as Concat
from modelstate.plan.rules.tensors import Copy as Copy
from modelstate.plan.rules.tensors import Fill as Fill
from modelstate.plan.rules.tensors import Reshape as Reshape
from modelstate.plan.rules.tensors import Same as Same
from modelstate.plan.rules.tensors import Split as Split
from modelstate.plan.rules.tensors import Transpose as Transpose
from modelstate.read.checkpoint import Checkpoint as Checkpoint
from modelstate.read.open import open as open
from modelstate.spec import TensorSpec as TensorSpec

__version__ = "0.1.0"
