"""The kinds of objects whose state is saved, and the saved state of one. Records of checkpoints need no more."""

from __future__ import annotations

import sys
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


def start_anew(path: str) -> str:
    """Returns how to begin without the saved state of the object at a path; of one alone, the path is empty."""
    if not path:
        return "do not load this state"
    new = f"{path}_new"
    return f"call it {new!r} among the objects, with allow_missing=[{new!r}], allow_unexpected=[{path!r}]"


def class_name(cls: type) -> str:
    """Returns the qualified name of a class; of torch's own the public one, which every version of torch has."""
    import torch  # a record is read without

    if getattr(torch.optim, cls.__qualname__, None) is cls:
        return f"torch.optim.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def is_same_class(saved: object, live: type) -> bool:
    """Whether a saved `class_name` is that of a class, which may have moved to another module since."""
    return isinstance(saved, str) and saved.rpartition(".")[2] == live.__name__


def imported_class(saved: object) -> type | None:
    """Returns the class of a saved `class_name`, where its module has been imported."""
    module, _, attribute = saved.rpartition(".") if isinstance(saved, str) else ("", "", "")
    imported = getattr(sys.modules.get(module), attribute, None) if attribute else None
    return imported if isinstance(imported, type) else None


def is_related(saved: object, live: type) -> bool:
    """Whether one of two classes, a saved `class_name` and a live one, is derived from the other."""
    imported = imported_class(saved)
    return saved in [class_name(base) for base in live.__mro__] or (imported is not None and issubclass(imported, live))
