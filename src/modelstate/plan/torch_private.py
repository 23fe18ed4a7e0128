"""What has to be asked of torch under names that are not public, all of it in this file.

Each is used by torch's own `nn.Module` or `torch.utils.swap_tensors` for the same purpose.
"""

from typing import Any

import torch

without_subclasses: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses do not see what is done to them."""


def use_count(tensor: torch.Tensor) -> int:
    """How many owners the tensor has in torch's core; 1 where only Python holds it, more for views and graphs."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def swap_impl(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges what two Python tensors stand for in torch's core; classes and attributes stay where they are."""
    torch._C._swap_tensor_impl(a, b)


def can_set_data(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `tensor.data = value` is possible."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, value))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, whatever its class has to say to that."""
    with without_subclasses():
        return tensor.untyped_storage()


def storage_id(tensor: torch.Tensor) -> int:
    """The address of the storage object of a tensor; 0 where it has none of its own (sparse, wrapper subclasses)."""
    try:
        return int(storage_of(tensor)._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def module_load(tensor: torch.Tensor, value: torch.Tensor, assign: bool) -> torch.Tensor:
    """`torch.Tensor.module_load`, through the handlers of both classes."""
    load: Any = tensor.module_load
    made: torch.Tensor = load(value, assign=assign)
    return made


def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """`torch.utils.swap_tensors`."""
    swap: Any = torch.utils.swap_tensors
    swap(a, b)


def is_tensor_like(value: object) -> bool:
    """`torch.overrides.is_tensor_like`."""
    check: Any = torch.overrides.is_tensor_like
    return bool(check(value))
