"""What several arguments are checked for."""

from numbers import Real
from typing import TypeGuard


def is_number(given: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's among them, and no truth value."""
    return isinstance(given, Real) and not isinstance(given, bool)
