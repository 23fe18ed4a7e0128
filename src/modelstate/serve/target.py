"""The interface between `Live` and the kinds of programs that it serves: `Target`, `Program` and `RunnerPool`."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.rules.rule import Rule
from modelstate.serve.meta_clone import meta_clone, state_module
from modelstate.serve.state_names import NameMap, runtime_state


class Program(Protocol):
    """One version of a target with its weights: the callable that answers requests.

    A swap in place changes the weights of a program; a swap beside it makes another program.
    """

    @property
    def weights_module(self) -> nn.Module:
        """The module whose parameters and buffers are the weights; loading into it changes the program."""

    @property
    def module(self) -> nn.Module | None:
        """The module whose methods a request may call; None for a program without methods."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """All tensors that a request may change, by name."""

    def end(self) -> None:
        """Releases what the program holds beyond its own memory. The program is not called afterwards."""

    def __call__(self, *args: object, **named: object) -> Any: ...


class RunnerPool(Protocol):
    """The two runners of a target whose programs cannot run by themselves: one for the version that serves, one spare.

    A program without a runner holds weights only, and cannot be called.
    """

    def holds(self, program: Program) -> bool:
        """Whether a runner is attached to a program."""

    def next_evicted(self, serving: Program) -> Program | None:
        """The program that loses its runner at the next `attach`; no request may use it at that time."""

    def attach(self, program: Any, serving: Program | None) -> None:
        """Gives a program a runner that the serving program does not use."""

    def after_fork(self) -> None:
        """Replaces locks in the child of a fork, where the threads that held them do not exist."""


class ReadPlan(NamedTuple):
    """How a target reads a checkpoint with certain names."""

    skeleton: nn.Module
    """A module without memory, into which the checkpoint is loaded."""
    rules: tuple[Rule, ...] = ()
    """Rules that rename the entries of the checkpoint for the skeleton."""
    without_hooks: bool = False
    """Whether the names are runtime names, which the skeleton's state-dict hooks would not accept."""


class Target(ABC):
    """A kind of program that can be served. Requests call programs, and nothing of the target."""

    kind: str
    """ "eager", "compiled", "exported" or "aoti"."""
    name: str
    """The name in reports and errors: a class, or the path of a file."""
    fixed: tuple[str, ...] = ()
    """Tensors that no swap changes, as far as they are known."""
    runners: RunnerPool | None = None
    """None where each program runs by itself."""
    _first: Program | None

    def first(self) -> Program:
        """Version 1: the target in its own memory. Returned once, so that no other reference keeps that memory."""
        first, self._first = self._first, None
        assert first is not None
        return first

    @abstractmethod
    def names(self) -> Collection[str]:
        """The names that a checkpoint of the target has."""

    @abstractmethod
    def read_plan(self, names: Collection[str]) -> ReadPlan:
        """How a checkpoint with these names is read."""

    @abstractmethod
    def hidden(self) -> dict[str, torch.Tensor]:
        """Buffers that no checkpoint contains, with the values of a new version. Read-only."""

    @abstractmethod
    def program(self, filled: nn.Module) -> Program:
        """A new version with the weights of a filled skeleton. It shares no tensor that a request may change."""

    @abstractmethod
    def renew(self, program: Program) -> None:
        """Restores the set of buffers of a program whose requests have replaced, added or deleted buffers."""

    def unexpected_error(self, unexpected: list[str]) -> Exception | None:
        """A more precise error than the plan's for names that the target does not have; None for the plan's own."""
        return None


class GraphTarget(Target):
    """An exported program or a package. Checkpoints have its own names, those of a map, or those of its module.

    Args:
        name: the name in reports and errors.
        state: the tensors of version 1 by their runtime names.
        names: the map of names, or the module that was exported.
    """

    _hidden: dict[str, torch.Tensor]

    def __init__(self, name: str, state: Mapping[str, torch.Tensor], names: NameMap | nn.Module | None) -> None:
        self.name = name
        # On meta: a reference to the tensors would keep the memory of version 1 alive.
        on_meta = runtime_state(state_module(state))
        self._state = {name: on_meta[name] for name in state}
        self._map = names if isinstance(names, NameMap) else None
        self._module = meta_clone(names) if isinstance(names, nn.Module) else None

    def names(self) -> Collection[str]:
        if self._module is not None:
            return list(self._module.state_dict())
        return list(self._state if self._map is None else self._map.runtime)

    def read_plan(self, names: Collection[str]) -> ReadPlan:
        # The module's loading code is for the names that it saves. The program's own names do not need it.
        if self._module is not None and not set(names) <= self._state.keys():
            return ReadPlan(meta_clone(self._module))
        return ReadPlan(state_module(self._state), () if self._map is None else (self._map,))

    def hidden(self) -> dict[str, torch.Tensor]:
        return self._hidden

    def renew(self, program: Program) -> None:
        """Does nothing: a graph writes into buffers, and replaces none."""


def check_names(state: Collection[str], names: NameMap | nn.Module | None, where: str) -> None:
    """Raises `LiveTargetError` where `names` belongs to another module than the one that was exported."""
    if names is None:
        return
    expected = runtime_state(names) if isinstance(names, nn.Module) else names.eager
    if set(expected) != set(state):
        differing = sorted(set(expected) ^ set(state))
        raise LiveTargetError(
            "names= is of another module than the program",
            where=where,
            expected="the module that was exported, or NameMap.of(module)",
            found=f"names that only one of them has: {', '.join(differing[:8])}",
        )
