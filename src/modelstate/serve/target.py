"""What a kind of target has to know: how one of its versions is made, and how it is called."""

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn

from modelstate.rules.rule import Rule


class Program(Protocol):
    """One version of a target, with its weights: what requests call. A swap in place changes those weights."""

    @property
    def holder(self) -> nn.Module:
        """The module whose parameters and buffers are the weights; loading into it changes the program."""

    @property
    def module(self) -> nn.Module | None:
        """The module whose methods a request may call; None for a program that has none."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Everything that a request may change, by name."""

    def end(self) -> None:
        """Nobody will call it any more: it lets go of what it has taken beyond memory of its own."""

    def __call__(self, *args: Any, **named: Any) -> Any: ...


class Seats(Protocol):
    """What calls the programs of a target, where there are only two of it: one for what serves, one for what is next.

    A program that has no seat cannot be called, and has nothing but its weights.
    """

    def holds(self, program: Any) -> bool:
        """Whether a program has a seat."""

    def in_the_way(self, serving: Any) -> Program | None:
        """The program that leaves its seat to the next one: no request may have it any more."""

    def seat(self, program: Any, serving: Any) -> None:
        """Gives a program the seat that is not that of the one that serves."""

    def forked(self) -> None:
        """In the child of a fork: other threads are not there any more."""


class Target(Protocol):
    """A kind of thing that can be served. Nothing here is called by a request."""

    kind: str
    """ "eager", "compiled", "exported", ..."""
    name: str
    """What it is, in the words of a user."""
    fixed: tuple[str, ...]
    """Tensors that are a part of it, as far as is known, and that no weights change."""

    @property
    def seats(self) -> Seats | None:
        """None where each program can be called by itself."""

    def first(self) -> Program:
        """The target as it was given, with the memory that it has. Asked for once; nothing else holds that memory."""

    def names(self) -> Collection[str]:
        """The names that a checkpoint of it has, in the first of its spellings."""

    def is_runtime(self, given: Collection[str]) -> bool:
        """Whether a checkpoint has the names of what runs, which state-dict hooks of the skeleton would not take."""

    def rules(self, given: Collection[str]) -> tuple[Rule, ...]:
        """What leads the names of a checkpoint to those of `skeleton(given)`."""

    def skeleton(self, given: Collection[str]) -> nn.Module:
        """A module without memory that a checkpoint with these names is loaded into."""

    def hidden(self) -> dict[str, torch.Tensor]:
        """Buffers that no checkpoint has, with the values that a new version has in them. Not to be changed."""

    def renew(self, program: Any) -> None:
        """Brings back the buffers that a version has when it is made, where requests have replaced some by others."""

    def refused(self, unexpected: list[str]) -> Exception | None:
        """Why weights of these names, which it does not have, are refused, where it knows better than a plan."""

    def program(self, filled: nn.Module) -> Program:
        """A version of the weights that a skeleton has been given. It shares nothing that a request may change."""
