"""The names of a program's state, and those that eager checkpoints have for it."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.live.name_map import NameMap
from modelstate.live.names import runtime_state
from modelstate.live.twin import holder, twin
from modelstate.plan.rules.rule import Rule


class Spellings:
    """Leads checkpoints, by a map or by the code of the module that was exported, to the names of a program's state."""

    def __init__(self, state: Mapping[str, torch.Tensor], names: NameMap | nn.Module | None) -> None:
        self._state = state
        self._names = names if isinstance(names, NameMap) else None
        self._module = twin(names) if isinstance(names, nn.Module) else None

    def names(self) -> Collection[str]:
        """As `Target.names`."""
        if self._module is not None:
            return list(self._module.state_dict())
        return list(self._state if self._names is None else self._names.runtime)

    def rules(self) -> tuple[Rule, ...]:
        """As `Target.rules`."""
        return () if self._names is None else (self._names,)

    def skeleton(self, given: Collection[str]) -> nn.Module:
        """As `Target.skeleton`."""
        # Code of the module is for the names that it saves; the program's own names need none.
        if self._module is not None and not set(given) <= self._state.keys():
            return twin(self._module)
        return holder(self._state)


class Spelled:
    """What targets have in common that are a graph and a state. As `Target`."""

    _spellings: Spellings
    _hidden: dict[str, torch.Tensor]

    def names(self) -> Collection[str]:
        return self._spellings.names()

    def is_runtime(self, given: Collection[str]) -> bool:
        return False  # rules lead to a skeleton without hooks, or the module's own take the names that it saves

    def rules(self, given: Collection[str]) -> tuple[Rule, ...]:
        return self._spellings.rules()

    def skeleton(self, given: Collection[str]) -> nn.Module:
        return self._spellings.skeleton(given)

    def hidden(self) -> dict[str, torch.Tensor]:
        return self._hidden

    def renew(self, program: Any) -> None:
        """Code of a graph writes into buffers, and replaces none."""


def check_names(state: Collection[str], names: NameMap | nn.Module | None, where: str) -> None:
    """Raises `LiveTargetError` for names of another module than the one that was exported."""
    if names is None:
        return
    found = runtime_state(names) if isinstance(names, nn.Module) else names.eager
    if set(found) != set(state):
        differing = sorted(set(found) ^ set(state))
        raise LiveTargetError(
            "names= is of another module than the program",
            where=where,
            expected="the module that was exported, or NameMap.of(module)",
            found=f"names that only one of them has: {', '.join(differing[:8])}",
        )
