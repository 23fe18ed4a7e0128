"""Buffers that requests change, and what becomes of them in the next version."""

from collections.abc import Mapping

import torch

from modelstate.live.program import Program

Marks = dict[str, tuple[int, int | None]]
"""Which tensor each buffer is, and how often it had changed."""


def version_of(tensor: torch.Tensor) -> int | None:
    """How often autograd has seen the tensor change; None where it does not look."""
    return None if tensor.is_inference() else tensor._version


def marks(program: Program) -> Marks:
    """What the buffers are now, to be asked later which of them requests have changed."""
    return {name: (id(buffer), version_of(buffer)) for name, buffer in program.buffers.items()}


def changed(program: Program, since: Marks) -> dict[str, torch.Tensor]:
    """The buffers that requests have changed."""
    found = {}
    for name, buffer in program.buffers.items():
        version = version_of(buffer)
        if version is None or since.get(name) != (id(buffer), version):
            found[name] = buffer
    return found


def carry(buffers: Mapping[str, torch.Tensor], into: Program) -> tuple[str, ...]:
    """Gives a program the values that these buffers have. Returns the names."""
    own = into.buffers
    with torch.no_grad():
        for name, value in buffers.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
            else:  # a buffer that requests replace, as a cache that grows
                path, _, last = name.rpartition(".")
                into.holder.get_submodule(path)._buffers[last] = value.detach().clone()
    return tuple(buffers)
