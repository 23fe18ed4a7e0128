"""Buffers that requests change, and what becomes of them in the next version."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from modelstate.serve.target import Program
from modelstate.torch_compat.plain import is_plain

BufferDigests = dict[str, object]
"""What the values of each buffer were."""


def buffer_digests(program: Program) -> BufferDigests:
    """What the buffers are now, to be asked later which of them requests have changed."""
    return {name: _mark(buffer) for name, buffer in program.buffers.items()}


def modified_buffers(program: Program, since: BufferDigests) -> dict[str, torch.Tensor | None]:
    """The buffers that requests have changed, and None for those that they have set to None."""
    found: dict[str, torch.Tensor | None] = {}
    for name, buffer in program.buffers.items():
        if since.get(name) != _mark(buffer):
            found[name] = buffer
    for path, one in program.holder.named_modules():
        names = [f"{path}.{last}" if path else last for last, buffer in one._buffers.items() if buffer is None]
        found.update({name: None for name in names if name in since})
    return found


def carry_over(buffers: Mapping[str, torch.Tensor | None], into: Program) -> tuple[str, ...]:
    """Gives a program the values that these buffers have. Returns the names."""
    own = into.buffers
    for name, value in buffers.items():
        if value is not None and name in own and _is_alike(own[name], value):
            _put(own[name], value)
        else:  # a buffer that requests replace, as a cache that grows
            path, _, last = name.rpartition(".")
            into.holder.get_submodule(path)._buffers[last] = None if value is None else value.detach().clone()
    return tuple(buffers)


def restorer(program: Program, copies: Mapping[int, torch.Tensor] | None = None) -> Callable[[], None]:
    """What makes all buffers what they are now: their values, and which there are. `copies` are those, by `id`."""
    tables = [(one._buffers, dict(one._buffers)) for one in program.holder.modules()]
    hidden = [(one._non_persistent_buffers_set, {*one._non_persistent_buffers_set}) for one in program.holder.modules()]
    kept = [(one, one.detach().clone() if copies is None else copies[id(one)]) for one in program.buffers.values()]

    def restore() -> None:
        resized: dict[int, torch.Tensor] = {}
        for one, value in kept:
            if _is_alike(one, value):
                _put(one, value)
            else:
                resized[id(one)] = value
        for table, buffers in tables:
            table.clear()
            table.update({name: resized.get(id(one), one) for name, one in buffers.items()})
        for names, before in hidden:
            names.clear()
            names.update(before)

    return restore


def renew(holder: nn.Module, like: nn.Module) -> None:
    """Gives a module the buffers that another one has, where code has replaced, added or deleted some.

    Those that fit stay, whatever their values; those that are on meta there get memory, and no values.
    """
    device = next((one.device for one in holder.parameters()), torch.device("cpu"))
    made: dict[int, torch.Tensor] = {}
    for path, one in like.named_modules(remove_duplicate=False):
        owner = holder.get_submodule(path)
        table: dict[str, torch.Tensor | None] = {}
        for name, slot in one._buffers.items():
            own = owner._buffers.get(name)
            if slot is not None and id(slot) not in made:
                made[id(slot)] = own if own is not None and _is_alike(own, slot) else _filled(slot, device)
            table[name] = None if slot is None else made[id(slot)]
        owner._buffers.clear()
        owner._buffers.update(table)
        owner._non_persistent_buffers_set.clear()
        owner._non_persistent_buffers_set.update(one._non_persistent_buffers_set)


def _filled(slot: torch.Tensor, device: torch.device) -> torch.Tensor:
    if slot.is_meta:
        return torch.empty_strided(slot.shape, slot.stride(), dtype=slot.dtype, device=device)
    return slot.detach().clone()


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one can take the other's values as they are."""
    return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)


def _put(one: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrites a tensor, also one that a request in inference mode has made."""
    with torch.inference_mode(one.is_inference()), torch.no_grad():
        one.detach().copy_(value)


def _mark(buffer: torch.Tensor) -> object:
    """A digest of the values. Autograd's counter would not do: batch normalisation writes its statistics past it."""
    if not is_plain(buffer) or buffer.is_meta:
        return id(buffer)
    with torch.no_grad():
        flat = buffer.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        content: Any = flat.view(torch.uint8).numpy()  # of which the type stubs do not know that it is a buffer
        return buffer.shape, xxhash.xxh3_128_digest(content)
