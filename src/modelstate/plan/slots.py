"""The places of a module that a load can fill."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from modelstate.read.tree import EXTRA_STATE

PARAMETER, BUFFER, HIDDEN, EXTRA = "parameter", "buffer", "non-persistent buffer", "extra state"

LAZY = "_modelstate_lazy_buffers"
"""The attribute in which a module names the buffers that may be None; see `modelstate.extra.lazy`."""

_STRICTEST = (PARAMETER, BUFFER, HIDDEN)


class Slot(NamedTuple):
    """A tensor of a module, and all the names under which it is reached: more than one where it is tied."""

    names: tuple[str, ...]
    kind: str
    """"parameter", "buffer" or "non-persistent buffer"; the strictest of its places where they differ."""
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of a module."""

    tensors: tuple[Slot, ...]
    by_name: dict[str, Slot]
    empty: frozenset[str]
    """Names that are registered with None."""
    lazy: frozenset[str]
    """Those of them that are lazy buffers, which may get a value all the same."""
    extra: tuple[str, ...]
    """Names of the extra state of modules that take some."""


def slots_of(root: nn.Module) -> Slots:
    """The slots of `root` and its descendants, in the order of `state_dict`."""
    found: dict[int, Slot] = {}
    empty: set[str] = set()
    lazy: set[str] = set()
    extra: list[str] = []
    for prefix, module in _modules_of(root, ""):
        for group, usual in ((module._parameters, PARAMETER), (module._buffers, BUFFER)):
            for name, tensor in group.items():
                if tensor is None:
                    empty.add(prefix + name)
                    if name in module.__dict__.get(LAZY, ()):
                        lazy.add(prefix + name)
                    continue
                kind = HIDDEN if usual is BUFFER and name in module._non_persistent_buffers_set else usual
                known = found.get(id(tensor))
                if known is None:
                    found[id(tensor)] = Slot((prefix + name,), kind, tensor)
                else:
                    strictest = min(known.kind, kind, key=_STRICTEST.index)
                    found[id(tensor)] = Slot((*known.names, prefix + name), strictest, tensor)
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            extra.append(prefix + EXTRA_STATE)
    tensors = tuple(found.values())
    by_name = {name: slot for slot in tensors for name in slot.names}
    return Slots(tensors, by_name, frozenset(empty), frozenset(lazy), tuple(extra))


def _modules_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name that it has, with its prefix."""
    stack = [(prefix, module)]
    while stack:
        prefix, module = stack.pop()
        yield prefix, module
        if module._modules:
            children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
            stack.extend(reversed(children))


def named_modules_of(root: nn.Module) -> dict[str, nn.Module]:
    """Every module by every path that leads to it."""
    return {prefix.removesuffix("."): module for prefix, module in _modules_of(root, "")}


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Every module once."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting.extend(module._modules.values())
    return list(found.values())
