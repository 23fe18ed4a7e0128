"""A mapping in memory: a state dict, or a training checkpoint that holds several."""

from collections.abc import Mapping
from typing import Any

from modelstate.spec import Contents


def read(mapping: Mapping[Any, Any]) -> Contents:
    """The mapping as contents: nothing is copied, every value is passed as it is, `_metadata` stays on its dict.

    A tensor that changes later changes what the checkpoint gives.
    """
    return Contents("mapping", mapping)
