"""Buffers that requests change: which ones have changed, carrying them into a new version, and restoring them."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
import xxhash
from torch import nn

from modelstate.torch_compat.modules import module_tables, non_persistent_buffers, own_buffers
from modelstate.torch_compat.plain import in_a_row, is_plain

BufferDigests = dict[str, object]
"""A digest of the values of each buffer, by name."""


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns all buffers by name. A tied one has an entry for each of its names."""
    return {
        f"{prefix}{name}": buffer
        for prefix, _, _, buffers in module_tables(module)
        for name, buffer in buffers.items()
        if buffer is not None
    }


def on_gpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that are on GPUs."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [tensor for tensor in tensors if tensor.is_cuda] if is_used else []


def settle(tensors: list[torch.Tensor]) -> None:
    """Waits for all work that is queued on the GPUs of these tensors, on any stream.

    A request on a GPU ends when its work is queued, and requests may use streams of their own.
    """
    for device in {tensor.device for tensor in on_gpu(tensors)}:
        torch.cuda.synchronize(device)


def buffer_digests(module: nn.Module) -> BufferDigests:
    """Returns digests of the present buffers, for a later `modified_buffers`."""
    return {name: _digest(buffer) for name, buffer in buffers_of(module).items()}


def modified_buffers(module: nn.Module, since: BufferDigests) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that requests have changed, and None for buffers that they have set to None."""
    present = buffers_of(module)
    settle([*present.values()])
    modified: dict[str, torch.Tensor | None] = {
        name: buffer for name, buffer in present.items() if since.get(name) != _digest(buffer)
    }
    for prefix, _, _, buffers in module_tables(module):
        names = [f"{prefix}{last}" for last, buffer in buffers.items() if buffer is None]
        modified.update({name: None for name in names if name in since})
    return modified


def carry_over(buffers: Mapping[str, torch.Tensor | None], module: nn.Module) -> tuple[str, ...]:
    """Copies the values of these buffers into a module. Returns their names.

    Names that have one tensor as their value are tied in the module too, and others are not.
    """
    if not buffers:
        return ()
    present = buffers_of(module)
    values_of_present: defaultdict[int, set[int]] = defaultdict(set)
    for name, tensor in present.items():
        values_of_present[id(tensor)].add(id(buffers.get(name)))
    carried: dict[int, torch.Tensor | None] = {id(None): None}
    for name, value in buffers.items():
        buffer = present.get(name)
        if value is not None and id(value) not in carried:
            if buffer is not None and _fits(buffer, value) and len(values_of_present[id(buffer)]) == 1:
                _overwrite(buffer, value)
                carried[id(value)] = buffer
            else:
                carried[id(value)] = value.detach().clone()
        replacement = carried[id(value)]
        if replacement is not buffer:  # requests replace the buffer, such as a cache that grows
            path, _, last = name.rpartition(".")
            own_buffers(module.get_submodule(path))[last] = replacement
    settle([*present.values()])
    return tuple(buffers)


def buffer_restorer(module: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the present buffers: their values, and the set of buffers of each submodule."""
    tables = [(own_buffers(part), dict(own_buffers(part).items())) for part in module.modules()]
    hidden = [(non_persistent_buffers(part), {*non_persistent_buffers(part)}) for part in module.modules()]
    saved = [(buffer, buffer.detach().clone()) for buffer in buffers_of(module).values()]

    def restore() -> None:
        resized: dict[int, torch.Tensor] = {}
        for buffer, value in saved:
            if _fits(buffer, value):
                _overwrite(buffer, value)
            else:
                resized[id(buffer)] = value
        for table, buffers in tables:
            wanted = {name: resized.get(id(buffer), buffer) for name, buffer in buffers.items()}
            present = dict(table.items())
            # TorchScript does not allow writing its table, so an equal one is left alone.
            if list(present) != list(wanted) or any(present[name] is not value for name, value in wanted.items()):
                table.clear()
                table.update(wanted)
        for names, before in hidden:
            names.clear()
            names.update(before)

    return restore


def _fits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the value can be copied into the tensor without conversion."""
    return (tensor.shape, tensor.dtype, tensor.layout) == (value.shape, value.dtype, value.layout)


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies into a tensor, which a request in inference mode may have created."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(value)


def _digest(buffer: torch.Tensor) -> object:
    """A digest of the values. Autograd's version counter does not suffice: batch norm writes past it."""
    if not is_plain(buffer) or buffer.is_meta or buffer.is_quantized:
        return id(buffer)
    return buffer.shape, xxhash.xxh3_128_digest(in_a_row(buffer).view(torch.uint8).numpy().data)
