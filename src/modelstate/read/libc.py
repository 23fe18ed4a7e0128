"""Functions of the C library, which let other threads of Python go on while they run."""

import ctypes
from collections.abc import Callable
from typing import Any


def function(name: str, *arguments: Any) -> Callable[..., int] | None:
    """The one of this name, by the ctypes of its arguments; None where there is none. `ctypes.get_errno` is its."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    found.argtypes = arguments
    return found  # type: ignore[no-any-return]
