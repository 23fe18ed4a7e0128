"""What can be said of a value without importing torch: whether it is a tensor, and the versions of a state dict.

As long as torch has not been imported, no value is of a class of torch. So a checkpoint is opened, described and
verified in programs that never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelstate.spec import StoredTensors

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Whether a value is a `torch.Tensor`."""
    # The attribute is missing while another thread imports torch.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_size(value: object) -> bool:
    """Whether a value is a `torch.Size`, which is a tuple, too."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Size", ()))


def is_uninitialised(value: object) -> bool:
    """Whether a value is a parameter or buffer of a lazy module, which has no shape yet."""
    if not is_tensor(value):
        return False
    from torch.nn.parameter import is_lazy

    return is_lazy(value)


def set_version_metadata(state_dict: object, versions: Mapping[str, object]) -> None:
    """Attaches the version metadata of modules to an `OrderedDict`, where `load_state_dict` looks for it."""
    state_dict._metadata = versions  # type: ignore[attr-defined]


def version_metadata(state_dict: object) -> Mapping[str, object] | None:
    """The version metadata of modules that `state_dict()` or a reader attaches; None without it."""
    versions = state_dict.versions if isinstance(state_dict, StoredTensors) else getattr(state_dict, "_metadata", None)
    return versions if isinstance(versions, Mapping) else None
