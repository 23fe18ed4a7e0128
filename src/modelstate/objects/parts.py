"""The kinds of objects whose state is saved, and the saved state of one. Records of checkpoints need no more."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

KEPT: Final = object()
"""The tree of a `Part` whose object stays as it is."""


class Kind(StrEnum):
    """What an object is, in the order in which states are captured and restored."""

    VALUE = "value"
    MODULE = "module"
    OPTIMIZER = "optimizer"
    STATEFUL = "stateful"
    """An object with `state_dict` and `load_state_dict`."""
    GENERATOR = "generator"


class Part(msgspec.Struct, frozen=True):
    """The state of one object."""

    kind: Kind
    tree: Any
    """The state, not copied. Of a module its `state_dict()` with `_metadata`, or a `Checkpoint`; of an optimizer its
    state by parameter names, which begin with the path of the module; of a stateful object its `state_dict()`; of a
    generator a tensor of bytes; of a plain value the value. Where it differs between ranks, a list of the states."""
    ranks: int = 0
    """The number of ranks whose states the tree lists; 0 where there is one state for all of them."""
