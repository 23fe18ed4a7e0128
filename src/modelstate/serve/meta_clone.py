"""Copies of modules without memory: deep copies on the meta device, and bare modules made from a state."""

import copy
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.spec import contiguous_stride
from modelstate.torch_compat.plain import is_dense, is_plain
from modelstate.torch_compat.private import (
    address_range,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)


def meta_clone(module: nn.Module) -> nn.Module:
    """Returns a deep copy whose parameters and persistent buffers are on meta, tied as in the module.

    Weights of tensor subclasses are copied in full, since only their class knows how to copy them. So are buffers that
    are not persistent: no checkpoint has their values.

    Raises:
        LiveTargetError: the module cannot be copied, or its tensors overlap without being tied, which a copy would not
            preserve.
    """
    _check_overlaps(module)
    memo: dict[int, object] = {}
    tensors = (*module.parameters(), *module.buffers())  # `memo` has their ids, so they must stay alive
    hidden = _hidden_buffer_ids(module)
    for tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise LiveTargetError(
                "a module that has not run yet has parameters without a shape",
                where=type(module).__name__,
                remedy="run it once before it is served",
            )
        if is_plain(tensor) and id(tensor) not in hidden:
            memo[id(tensor)] = _on_meta(tensor)
    try:
        clone = copy.deepcopy(module, memo)
    except Exception as error:
        raise LiveTargetError(
            "the module cannot be copied, so that no second version of it can be made",
            where=type(module).__name__,
            found=f"{type(error).__name__}: {error}",
            remedy="give the class that is named there a __deepcopy__, or keep what cannot be copied off the module",
        ) from error
    del tensors
    return clone


def state_module(state: Mapping[str, torch.Tensor], *, meta: bool = True) -> nn.Module:
    """Returns a bare module with the tensors of a state under their names.

    Args:
        state: tensors by dotted name; a tensor under several names stays tied.
        meta: puts plain tensors on the meta device; False registers the tensors themselves.
    """
    root, registered = nn.Module(), dict[int, torch.Tensor]()
    for name, tensor in state.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            # Not `add_module`, which rejects names of attributes of `nn.Module`, such as `forward`.
            child = own_modules(owner).get(part)
            if child is None:
                child = own_modules(owner)[part] = nn.Module()
            owner = child
        value = registered.setdefault(id(tensor), _on_meta(tensor) if meta and is_plain(tensor) else tensor)
        if isinstance(value, nn.Parameter):
            own_parameters(owner)[last] = value
        else:
            own_buffers(owner)[last] = value
    return root


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    # Not `empty_like`: for meta it imports sympy, which takes seconds in a process that answers requests.
    stride = tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape)
    empty = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
    clone: torch.Tensor = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    clone.__dict__.update(tensor.__dict__)
    return clone


def _hidden_buffer_ids(module: nn.Module) -> set[int]:
    """The ids of buffers that no module registers as persistent: no checkpoint has their values."""
    hidden: set[int] = set()
    persistent: set[int] = set()
    for submodule in module.modules():
        names = non_persistent_buffers(submodule)
        for name, buffer in own_buffers(submodule).items():
            if buffer is not None:
                (hidden if name in names else persistent).add(id(buffer))
    return hidden - persistent


def _check_overlaps(module: nn.Module) -> None:
    names = dict[int, str]()
    ranges: list[tuple[int, int, int]] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) in names or not is_plain(tensor) or tensor.is_meta or not tensor.numel():
            continue
        names[id(tensor)] = name
        start = tensor.data_ptr()
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((start, min(start + span * tensor.itemsize, address_range(tensor)[1]), id(tensor)))
    ranges.sort()
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise LiveTargetError(
                "tensors of the module overlap without being tied, which a second version would not keep",
                where=type(module).__name__,
                found=f"{names[first]} and {names[second]}",
                remedy="give each of them memory of its own, or register one tensor under both names",
            )
