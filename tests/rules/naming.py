"""What rules make of names alone."""

from collections.abc import Iterable
from typing import Any

import torch

from modelstate.rules.rule import Entry, Value
from modelstate.rules.schema import Applied, apply_rules
from modelstate.spec import Stored


def applied(rules: Iterable[Any], names: Iterable[str]) -> Applied:
    return apply_rules(rules, {name: Entry(Value(name), (name,)) for name in names}, _none)


def renamed(rules: Iterable[Any], names: Iterable[str]) -> dict[str, str]:
    """From each new name to the one that it was."""
    return {name: entry.sources[0] for name, entry in applied(rules, names).entries.items()}


def _none(stored: Stored) -> torch.Tensor:
    raise AssertionError("there are no tensors")
