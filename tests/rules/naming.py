"""What rules make of names alone."""

from collections.abc import Iterable
from typing import Any

import pytest

import modelstate as ms


def renamed(rules: Iterable[Any], names: Iterable[str]) -> dict[str, str]:
    """From each new name to the one that it was."""
    return ms.rules.Rules(rules).apply({name: name for name in names})


def problems_of(rules: Iterable[Any], names: Iterable[str]) -> list[tuple[str, str]]:
    """The kinds of the problems of rules, each with its name."""
    with pytest.raises(ms.errors.RuleError) as raised:
        renamed(rules, names)
    return [(problem.kind.name, problem.name) for problem in raised.value.problems]
