"""Which casts keep every value, and what dtypes and devices are called."""

from functools import cache

import torch

from modelstate.errors import OptionError

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


_OTHER_NAMES = {
    "bf16": torch.bfloat16,
    **dict.fromkeys(("fp16", "f16"), torch.float16),
    **dict.fromkeys(("fp32", "f32"), torch.float32),
    **dict.fromkeys(("fp64", "f64"), torch.float64),
}
"""What dtypes are called beside torch's own names for them."""


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a name: torch's, with or without `torch.`, or a usual short one ("bf16"). None for another text."""
    dtype = _OTHER_NAMES.get(name.lower()) or getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def floating_dtype(given: object, or_complex: bool = False) -> torch.dtype | None:
    """The dtype that a `dtype=` asks for, by itself or by its name. Raises `OptionError` for what is no such dtype."""
    dtype = dtype_named(given) if isinstance(given, str) else given
    if dtype is None and given is None:
        return None
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or (or_complex and dtype.is_complex)):
        return dtype
    kinds = "floating-point or complex" if or_complex else "floating-point"
    raise OptionError(
        "dtype= casts floats",
        expected=f'a {kinds} torch.dtype or its name, as torch.bfloat16, "bfloat16" or "bf16"; or None',
        found=repr(given),
        remedy="" if isinstance(given, str) else "for other casts: rules=[ms.Cast(pattern, dtype)]",
    )


@cache
def short(dtype: torch.dtype) -> str:
    """ "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@cache
def device_name(device: torch.device) -> str:
    """ "cuda:0" for `torch.device("cuda", 0)`."""
    return str(device)
