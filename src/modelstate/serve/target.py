"""The interface between `Live` and the kinds of programs that it serves: `Target`, `Program` and `RunnerPool`."""

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn

from modelstate.rules.rule import Rule


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

    def __call__(self, *args: Any, **named: Any) -> Any: ...


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


class Target(Protocol):
    """A kind of program that can be served. Requests call programs, and nothing of the target."""

    kind: str
    """ "eager", "compiled", "exported" or "aoti"."""
    name: str
    """The name in reports and errors: a class, or the path of a file."""
    fixed: tuple[str, ...]
    """Tensors that no swap changes, as far as they are known."""

    @property
    def runners(self) -> RunnerPool | None:
        """None where each program runs by itself."""

    def first(self) -> Program:
        """Version 1: the target in its own memory. Returned once, so that no other reference keeps that memory."""

    def names(self) -> Collection[str]:
        """The names that a checkpoint of the target has."""

    def is_runtime(self, names: Collection[str]) -> bool:
        """Whether a checkpoint has runtime names, which the skeleton's state-dict hooks would not accept."""

    def rules(self, names: Collection[str]) -> tuple[Rule, ...]:
        """Rules that rename the entries of a checkpoint with these names for `skeleton(names)`."""

    def skeleton(self, names: Collection[str]) -> nn.Module:
        """A module without memory, into which a checkpoint with these names is loaded."""

    def hidden(self) -> dict[str, torch.Tensor]:
        """Buffers that no checkpoint contains, with the values of a new version. Read-only."""

    def renew(self, program: Any) -> None:
        """Restores the set of buffers of a new version, where requests have replaced, added or deleted buffers."""

    def unexpected_error(self, unexpected: list[str]) -> Exception | None:
        """A more precise error than the plan's for names that the target does not have; None for the plan's own."""

    def program(self, filled: nn.Module) -> Program:
        """A new version with the weights of a filled skeleton. It shares no tensor that a request may change."""
