"""Buffers that requests change, and what becomes of them in the next version."""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from modelstate.live.program import Program
from modelstate.plan.placement import is_plain

Marks = dict[str, object]
"""What the values of each buffer were."""


def marks(program: Program) -> Marks:
    """What the buffers are now, to be asked later which of them requests have changed."""
    return {name: _mark(buffer) for name, buffer in program.buffers.items()}


def changed(program: Program, since: Marks) -> dict[str, torch.Tensor]:
    """The buffers that requests have changed."""
    return {name: buffer for name, buffer in program.buffers.items() if since.get(name) != _mark(buffer)}


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


def _mark(buffer: torch.Tensor) -> object:
    """A digest of the values. Autograd's counter would not do: batch normalisation writes its statistics past it."""
    if not is_plain(buffer) or buffer.is_meta:
        return id(buffer)
    with torch.no_grad():
        flat = buffer.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        content: Any = flat.view(torch.uint8).numpy()  # of which the type stubs do not know that it is a buffer
        return buffer.shape, xxhash.xxh3_128_digest(content)
