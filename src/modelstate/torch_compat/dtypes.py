"""Dtypes and devices: their names, which casts keep every value, which casts overflow.

The check of a cast runs on a block of values while it is in the cache of the processor, and only for casts that can
overflow. It has three steps, each of which decides most of what the one before leaves open: the sum of the result,
which is finite where all of it is; the least and the greatest value of the source; and the count of the values.

The result of a function is summed too, which takes about 7% of the time of multiplying the tensor by a number. What the
function was given is looked at only where the result has infinite or NaN values.
"""

from __future__ import annotations

import cmath
import threading
from collections.abc import Callable, Iterator
from functools import cache

import msgspec
import torch

from modelstate.errors import OptionError
from modelstate.text_format import listed, short_repr

_WITHOUT_LIMITS = tuple(filter(None, [getattr(torch, "float4_e2m1fn_x2", None)]))
"""Dtypes of which torch does not say what they can represent."""
QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""The dtypes of torch's own quantized tensors."""
UNSAVED = frozenset(
    dtype for bits in range(1, 8) for kind in ("int", "uint") if (dtype := getattr(torch, f"{kind}{bits}", None))
)
"""Dtypes that `torch.save` does not save."""


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
    if dtype in QUANTIZED:  # torch.iinfo takes them for integers
        return "other"
    try:
        torch.iinfo(dtype)
    except (TypeError, RuntimeError):
        return "other"
    return "integer"


def is_numeric(dtype: torch.dtype) -> bool:
    """Whether torch converts the values of a dtype to float32, or to complex64."""
    return _kind(dtype) != "other" and dtype not in _WITHOUT_LIMITS


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


def floating_dtype(
    given: object, or_complex: bool = False, *, other_casts: str = "rules=[ms.rules.Cast(pattern, dtype)]"
) -> torch.dtype | None:
    """The dtype that a `dtype=` asks for, by itself or by its name. Raises `OptionError` for any other value.

    Args:
        given: what the caller has given as `dtype=`.
        or_complex: whether complex dtypes are accepted, too.
        other_casts: what the call has for a cast to another dtype, for the remedy of the error.
    """
    dtype = dtype_named(given) if isinstance(given, str) else given
    if dtype is None and given is None:
        return None
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or (or_complex and dtype.is_complex)):
        return dtype
    kinds = "floating-point or complex" if or_complex else "floating-point"
    raise OptionError(
        f"dtype= must be a {kinds} dtype",
        expected='a dtype such as torch.bfloat16, or its name, "bfloat16" or "bf16"',
        found=short_repr(given),
        names=("dtype",),
        remedy=f"for other casts: {other_casts}" if isinstance(dtype, torch.dtype) else "",
    )


@cache
def short(dtype: torch.dtype) -> str:
    """ "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


AT_ONCE = 1 << 20
"""Elements that are counted at a time, so that counting takes little memory."""
_SHOWN = 8
_CAST = "a cast"
_NAN = "NaN before a cast"
UNCHECKED = "a cast that was not looked at"


_FOUND = {
    _NAN: "values were NaN before a cast",
    UNCHECKED: "values were cast, and there was no memory to look whether they became infinite",
}
"""What there is of other causes than functions and casts."""


@cache
def can_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the target cannot hold finite values of the source that occur, not even rounded.

    bfloat16 has the range of float32, but for the values above 3.38e38: to look for those takes as long as the cast.
    """
    if (source, target) == (torch.float32, torch.bfloat16):
        return False
    kinds = (source.is_floating_point, source.is_complex), (target.is_floating_point, target.is_complex)
    if source == target or kinds[0] != kinds[1] or not any(kinds[0]):
        return False
    try:
        return torch.finfo(target).max < torch.finfo(source).max or target is torch.float8_e8m0fnu
    except (TypeError, RuntimeError):  # a dtype that torch says nothing about
        return False


class Overflows(msgspec.Struct, eq=False):
    """Counts, by cause and by the names of tensors, the values that become infinite or NaN in one operation.

    Also counts the values that are NaN before a cast that can overflow. Nothing is read for that where all are finite.
    """

    counts: dict[tuple[str, str], int] = {}
    """By cause, as "a cast", and name."""
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    def check(self, name: str, source: torch.Tensor, target: torch.Tensor | torch.dtype) -> bool:
        """Counts the elements of `source` that are finite, and infinite or NaN in `target`, which it was cast to.

        A dtype as `target` stands for a cast that is made later. Called from any thread, with all of a tensor or a part
        of it. Returns whether it has seen that all values of `target` are finite.
        """
        dtype = target.dtype if isinstance(target, torch.Tensor) else target
        if not can_overflow(source.dtype, dtype) or source.is_meta or not source.numel():
            return False
        if isinstance(target, torch.Tensor) and has_finite_sum(target):
            return True
        with torch.no_grad():
            if not _is_within(source, dtype):
                try:
                    infinite, nan = _losses(source, dtype)
                except torch.OutOfMemoryError:  # a device may have no memory for that
                    infinite, nan = _losses(source.cpu(), dtype)
                self.add({(_CAST, name): infinite, (_NAN, name): nan})
        return False

    def check_function(self, name: str, cause: str, result: torch.Tensor, before: Callable[[], int]) -> None:
        """Counts the infinite and NaN values that the result of a function has more than what the function was given.

        `before` gives the number that the function was given. It is called only where the result has such values.
        """
        count = nonfinite(result)
        if count:
            self.add({(cause, name): max(count - before(), 0)})

    def add(self, counts: dict[tuple[str, str], int]) -> None:
        """Adds what was counted elsewhere."""
        with self.lock:
            for key, count in counts.items():
                if count:
                    self.counts[key] = self.counts.get(key, 0) + count

    def notes(self) -> list[str]:
        """One sentence for each cause, for a report."""
        notes = []
        for cause in sorted({cause for cause, _ in self.counts}):
            named = sorted((name, count) for (by, name), count in self.counts.items() if by == cause)
            shown = listed((f"{name} ({count:,})" for name, count in named), _SHOWN)
            total = sum(count for _, count in named)
            found = _FOUND.get(cause, f"finite values became infinite or NaN by {cause}")
            notes.append(f"{found}, {total:,} in all: {shown}")
        return notes


def nonfinite(tensor: torch.Tensor) -> int:
    """The number of infinite and NaN values: 0 at the cost of one sum where there are none and the sum is in range."""
    if tensor.is_meta or not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    with torch.no_grad():
        if has_finite_sum(tensor) or _is_within(tensor, tensor.dtype):
            return 0
        try:
            return sum(int((~_comparable(part).isfinite()).sum()) for part in _parts(tensor))
        except (RuntimeError, NotImplementedError):  # a dtype without arithmetic, as float4
            return 0


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().flatten()
    for start in range(0, flat.numel(), AT_ONCE):
        yield flat[start : start + AT_ONCE]


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.itemsize > 1 else tensor.float()  # torch has no comparisons of float8


def has_finite_sum(tensor: torch.Tensor) -> bool:
    """Whether all values are seen to be finite by their sum; False where that cannot be computed cheaply.

    Also False where a CUDA device has no memory left for the computation.
    """
    if tensor.itemsize == 1 or not (tensor.is_cpu or tensor.is_cuda):
        return False
    try:
        return cmath.isfinite(tensor.sum().item())
    except (torch.OutOfMemoryError, NotImplementedError):  # torch has no sum of complex32 and float4 on the CPU
        return False


def _is_within(source: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are seen to lie within the limits of a dtype. False where torch cannot compare them.

    Also False where a CUDA device has no memory left for the computation.
    """
    if source.itemsize == 1 or source.is_complex() or dtype is torch.float8_e8m0fnu:
        return False
    try:
        least, greatest = torch.aminmax(source)
    except torch.OutOfMemoryError:
        return False
    limit = torch.finfo(dtype).max
    return -limit <= float(least) and float(greatest) <= limit  # both are NaN where a value is


def _losses(source: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """The number of finite elements that the cast makes infinite or NaN, and that of elements that are NaN before."""
    infinite = nan = 0
    for part in _parts(source):
        values, cast = _comparable(part), _comparable(part.to(dtype))
        infinite += int((values.isfinite() & ~cast.isfinite()).sum())
        nan += int(values.isnan().sum())
    return infinite, nan
