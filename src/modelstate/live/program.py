"""What a kind of target has to know: how one of its versions is made, and how it is called."""

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn

from modelstate.plan.rules.rule import Rule


class Program(Protocol):
    """One version of a target, with its weights: what requests call. A swap in place changes those weights."""

    @property
    def holder(self) -> nn.Module:
        """The module whose parameters and buffers are the weights; loading into it changes the program."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Everything that a request may change, by name."""

    def __call__(self, *args: Any, **named: Any) -> Any: ...


class Target(Protocol):
    """A kind of thing that can be served. Nothing here is called by a request."""

    kind: str
    """ "eager", "compiled", "exported", ..."""
    name: str
    """What it is, in the words of a user."""

    def first(self) -> Program:
        """The target as it was given, with the memory that it has."""

    def names(self) -> Collection[str]:
        """The names that a checkpoint of it has, in the first of its spellings."""

    def rules(self, given: Collection[str]) -> tuple[Rule, ...]:
        """What leads the names of a checkpoint to those of `skeleton(given)`."""

    def skeleton(self, given: Collection[str]) -> nn.Module:
        """A module without memory that a checkpoint with these names is loaded into."""

    def hidden(self) -> dict[str, torch.Tensor]:
        """Buffers that no checkpoint has, with the values that a new version has in them. Not to be changed."""

    def program(self, filled: nn.Module) -> Program:
        """A version of the weights that a skeleton has been given. It shares nothing that a request may change."""
