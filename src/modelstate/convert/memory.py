"""The memory and the objects of what a function has made."""

import sys
from types import FunctionType, ModuleType

import torch
from torch import nn

from modelstate.errors import TransformError
from modelstate.plan.placement import is_dense, is_plain
from modelstate.plan.torch_private import payload_of, slots_of_class, storage_owners


def of_its_own(value: torch.Tensor) -> torch.Tensor:
    """What a function returned, out of any graph, in memory that it has alone and that can be trained."""
    value = value if value.is_leaf else value.detach()
    if not is_plain(value) or value.is_nested or value.is_meta or (is_dense(value) and storage_owners(value) == 1):
        return value
    return value.clone(memory_format=torch.preserve_format if is_dense(value) else torch.contiguous_format)


def is_referred_to(value: object) -> bool:
    """Whether anything but the one variable of the caller refers to an object."""
    return sys.getrefcount(value) > _ONE_VARIABLE


def _count_one_variable() -> int:
    value = object()
    return _count(value)


def _count(value: object) -> int:
    return sys.getrefcount(value)


_ONE_VARIABLE = _count_one_variable()


def object_of_its_own(name: str, tensor: torch.Tensor, value: torch.Tensor, shared: bool) -> torch.Tensor:
    """The value as an object that can take the place of `tensor`, which it does not hold itself.

    Two objects are exchanged. So a value that others refer to (`shared`) would become the old tensor for them, and one
    that holds the tensor, as `Wrapper(tensor)` does, would hold itself. Both get an alias of the value.

    Raises `TransformError` where the alias holds the tensor, too.
    """
    if not shared and not _holds(value, tensor):
        return value
    try:
        alias = value.detach()
    except (NotImplementedError, RuntimeError, TypeError):  # a class that cannot be detached
        alias = value
    if alias is value or _holds(alias, tensor):
        if not _holds(value, tensor):
            return value
        raise TransformError(
            "the function returned a tensor that holds its input; nothing has been changed",
            where=name,
            expected="a tensor that is made of others",
            found=f"a {type(value).__name__} that refers to the tensor itself",
            remedy="make it of a copy: tensor.clone(), or of tensor.detach(), which shares the memory",
        )
    return alias


def _holds(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the attributes of a value lead to a tensor, through containers and plain objects."""
    waiting: list[object] = [value]
    seen: dict[int, object] = {}
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _LEAVES):
            continue
        if found is tensor:
            return True
        seen[id(found)] = found
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        else:
            waiting += getattr(found, "__dict__", {}).values()
            waiting += [getattr(found, name, None) for name in slots_of_class(type(found))]
    return False


_LEAVES = (str, bytes, int, float, type(None), type, torch.dtype, torch.device, FunctionType, ModuleType, nn.Module)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values of one."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor.detach()._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.detach().values()]
    return payload_of(tensor)
