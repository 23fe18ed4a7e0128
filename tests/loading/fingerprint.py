"""What a module is, for comparing: before and after a failure, and between two ways of loading it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def raw(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, and everything else that it is but its identity."""
    with torch._C.DisableTorchFunctionSubclass():
        if torch.nn.parameter.is_lazy(tensor):
            return type(tensor).__name__, "lazy"
        attributes = {k: described(v) for k, v in getattr(tensor, "__dict__", {}).items()}
        head = (
            type(tensor).__name__,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            attributes,
        )
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_meta:
            return head
        if tensor.layout is not torch.strided:
            return *head, tensor.detach().to_dense().numpy().tobytes()
        if tensor.is_quantized:
            return *head, tensor.int_repr().numpy().tobytes()
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return *head, tensor.stride(), plain.cpu().numpy().tobytes()


def described(value: Any) -> Any:
    """Any value, by what it is and not by who it is."""
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, dict):
        return {k: described(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    if isinstance(value, str | int | float | bool | bytes | None):
        return value
    return type(value).__name__


def described_module(module: nn.Module) -> Any:
    """All state of a module tree, hooks aside."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, value in part.__dict__.items():
            if name.startswith("_") and name not in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                continue
            found[f"{path}/{name}"] = sorted(value) if isinstance(value, set) else described(value)
        for name, param in part._parameters.items():
            found[f"{path}/{name}.grad"] = None if param is None or param.grad is None else raw(param.grad)
    return found


def identities(module: nn.Module) -> Any:
    """Who is who: the objects behind every name, their storages and gradients."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        found[path] = id(part)
        for group in (part._parameters, part._buffers):
            for name, tensor in group.items():
                if tensor is None:
                    found[f"{path}.{name}"] = None
                    continue
                with torch._C.DisableTorchFunctionSubclass():
                    lazy = torch.nn.parameter.is_lazy(tensor)
                    dispatch = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
                    strided = not lazy and not dispatch and tensor.layout is torch.strided
                    address = tensor.untyped_storage().data_ptr() if strided else None
                    grad = None if lazy or tensor.grad is None else id(tensor.grad)
                found[f"{path}.{name}"] = (id(tensor), address, grad)
    return found


def whole(module: nn.Module) -> Any:
    """Everything about a module that a failed load must leave alone."""
    return described_module(module), identities(module)


def raised_by(function: Callable[[], object]) -> BaseException | None:
    """What it raises, without the tracebacks, which would keep alive what a load has in its frames."""
    try:
        function()
    except BaseException as error:
        one: BaseException | None = error
        while one is not None:
            one.__traceback__, one = None, one.__cause__ or one.__context__
        return error
    return None


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with just these parameters and buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module
