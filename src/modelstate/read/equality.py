"""Whether two values of checkpoints are the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_DEEPEST = 200


def same_value(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are equal, NaN and all. False where they are nested too deep, or cannot be compared."""
    if one is other:
        return True
    if depth > _DEEPEST:
        return False
    if is_lazy(one) or is_lazy(other):
        return type(one) is type(other) and (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and same_tensor(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        same_kind = isinstance(one, list) == isinstance(other, list) and len(one) == len(other)
        return same_kind and all(same_value(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal) or bool(one != one and other != other)
    except Exception:  # whatever the comparison of somebody's class raises
        return False


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; a tensor that is not strided only equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided or one.is_quantized or other.is_quantized:
        return one is other
    a, b = (tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1) for tensor in (one, other))
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
