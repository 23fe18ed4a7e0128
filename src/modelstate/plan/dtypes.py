"""Which casts keep every value, and what dtypes and devices are called."""

from functools import cache

import torch

_WITHOUT_LIMITS = tuple(filter(None, [getattr(torch, "float4_e2m1fn_x2", None)]))
"""Dtypes of which torch does not say what they can represent."""


@cache
def cast_between(source: torch.dtype, target: torch.dtype) -> str:
    """What casting does to values: "same", "lossless", "lossy", or "kind" where it changes what they are.

    Booleans, integers, floats and complex numbers are kinds. A cast is lossless where the target can represent every
    value of the source: precision, range and subnormals for floats (IEEE 754 and its 8-bit kin), range for integers.
    """
    if source == target:
        return "same"
    if _kind(source) != _kind(target) or _kind(source) == "other":
        return "kind"
    if _kind(source) == "integer":
        a, b = torch.iinfo(source), torch.iinfo(target)
        return "lossless" if b.min <= a.min and a.max <= b.max else "lossy"
    if target.itemsize == 1 or source in _WITHOUT_LIMITS:
        return "lossy"  # none of the 8-bit floats has all the values of another
    f, g = torch.finfo(source), torch.finfo(target)
    wider = g.eps <= f.eps and g.max >= f.max and g.smallest_normal * g.eps <= f.smallest_normal * f.eps
    return "lossless" if wider else "lossy"


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    if dtype is torch.bool:
        return "bool"
    if "torch.q" in str(dtype):  # qint8 and its kin, which torch.iinfo takes for integers
        return "other"
    try:
        torch.iinfo(dtype)
    except (TypeError, RuntimeError):
        return "other"
    return "integer"


@cache
def short(dtype: torch.dtype) -> str:
    """ "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@cache
def device_name(device: torch.device) -> str:
    """ "cuda:0" for `torch.device("cuda", 0)`."""
    return str(device)
