"""Serves programs while their weights are swapped, and follows a store of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelstate.lazy import attach

if TYPE_CHECKING:
    from modelstate.serve.follow import Following as Following
    from modelstate.serve.meta_clone import runtime_state as runtime_state
    from modelstate.serve.program_file import Manifest as Manifest
    from modelstate.serve.state_names import NameMap as NameMap
    from modelstate.serve.swap import SwapReport as SwapReport
    from modelstate.torch_compat.modules import without_state_dict_hooks as without_state_dict_hooks
else:
    __getattr__, __dir__ = attach(__name__)
