"""Arguments that several rules have."""

from collections.abc import Sequence
from typing import Any

from modelstate.errors import RuleError


def whole_numbers(rule: Any, name: str, sizes: Any, least: int) -> tuple[int, ...]:
    """Sizes that a rule was given. Raises `RuleError`."""
    several = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not several or not all(isinstance(size, int) and size >= least for size in sizes):
        raise RuleError(f"{name}= takes sizes", where=type(rule).__name__, expected="whole numbers", found=repr(sizes))
    return tuple(sizes)
