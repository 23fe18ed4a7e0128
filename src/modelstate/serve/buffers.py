"""Buffers that requests change: finding them, restoring them, and carrying them over to the next version."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from modelstate.serve.target import Program
from modelstate.torch_compat.modules import non_persistent_buffers, own_buffers
from modelstate.torch_compat.plain import is_plain

BufferDigests = dict[str, object]
"""A digest of the values of each buffer, by name."""


def buffer_digests(program: Program) -> BufferDigests:
    """Returns digests of the present buffers, for a later `modified_buffers`."""
    return {name: _digest(buffer) for name, buffer in program.buffers.items()}


def modified_buffers(program: Program, since: BufferDigests) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that requests have changed, and None for buffers that they have set to None."""
    modified: dict[str, torch.Tensor | None] = {}
    for name, buffer in program.buffers.items():
        if since.get(name) != _digest(buffer):
            modified[name] = buffer
    for path, module in program.weights_module.named_modules():
        unset = [last for last, buffer in own_buffers(module).items() if buffer is None]
        names = [f"{path}.{last}" if path else last for last in unset]
        modified.update({name: None for name in names if name in since})
    return modified


def carry_over(buffers: Mapping[str, torch.Tensor | None], program: Program) -> tuple[str, ...]:
    """Copies the values of these buffers into a program. Returns their names."""
    present = program.buffers
    for name, value in buffers.items():
        if value is not None and name in present and _fits(present[name], value):
            _overwrite(present[name], value)
        else:  # requests replace the buffer by another tensor, such as a cache that grows
            path, _, last = name.rpartition(".")
            owner = own_buffers(program.weights_module.get_submodule(path))
            owner[last] = None if value is None else value.detach().clone()
    return tuple(buffers)


def buffer_restorer(program: Program, copies: Mapping[int, torch.Tensor] | None = None) -> Callable[[], None]:
    """Returns a function that restores the present buffers: their values, and the set of buffers of each module.

    Args:
        program: the program.
        copies: copies of the buffers by `id` of the buffer; without them the buffers are copied here.
    """
    modules = list(program.weights_module.modules())
    tables = [(own_buffers(module), dict(own_buffers(module))) for module in modules]
    hidden = [(non_persistent_buffers(module), {*non_persistent_buffers(module)}) for module in modules]
    saved = [
        (buffer, buffer.detach().clone() if copies is None else copies[id(buffer)])
        for buffer in program.buffers.values()
    ]

    def restore() -> None:
        resized: dict[int, torch.Tensor] = {}
        for buffer, value in saved:
            if _fits(buffer, value):
                _overwrite(buffer, value)
            else:
                resized[id(buffer)] = value
        for table, buffers in tables:
            table.clear()
            table.update({name: resized.get(id(buffer), buffer) for name, buffer in buffers.items()})
        for names, before in hidden:
            names.clear()
            names.update(before)

    return restore


def renew_buffers(module: nn.Module, skeleton: nn.Module) -> None:
    """Restores the set of buffers of a skeleton in a module whose code has replaced, added or deleted buffers.

    A buffer that has the right shape and dtype stays, whatever its values. Where the skeleton's buffer is on meta, a
    missing buffer gets uninitialized memory.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    renewed: dict[int, torch.Tensor] = {}
    for path, wanted in skeleton.named_modules(remove_duplicate=False):
        owner = module.get_submodule(path)
        table: dict[str, torch.Tensor | None] = {}
        for name, slot in own_buffers(wanted).items():
            present = own_buffers(owner).get(name)
            if slot is not None and id(slot) not in renewed:
                if present is not None and _fits(present, slot):
                    renewed[id(slot)] = present
                elif slot.is_meta:
                    renewed[id(slot)] = torch.empty_strided(slot.shape, slot.stride(), dtype=slot.dtype, device=device)
                else:
                    renewed[id(slot)] = slot.detach().clone()
            table[name] = None if slot is None else renewed[id(slot)]
        own_buffers(owner).clear()
        own_buffers(owner).update(table)
        non_persistent_buffers(owner).clear()
        non_persistent_buffers(owner).update(non_persistent_buffers(wanted))


def _fits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the value can be copied into the tensor without conversion."""
    return (tensor.shape, tensor.dtype, tensor.layout) == (value.shape, value.dtype, value.layout)


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies into a tensor, which a request in inference mode may have created."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(value)


def _digest(buffer: torch.Tensor) -> object:
    """A digest of the values. Autograd's version counter does not suffice: batch norm writes past it."""
    if not is_plain(buffer) or buffer.is_meta:
        return id(buffer)
    with torch.no_grad():
        flat = buffer.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        content: Any = flat.view(torch.uint8).numpy()  # its type stubs do not declare the buffer protocol
        return buffer.shape, xxhash.xxh3_128_digest(content)
