"""Finite values that become infinite or NaN by a cast to a dtype of a smaller range.

The check runs on a block of values while it is in the cache of the processor, and only for casts that can overflow. It
has three steps, each of which decides most of what the one before leaves open: the sum of the result, which is finite
where all of it is; the least and the greatest value of the source; and the count of the values.
"""

import math
import threading
from functools import cache

import torch

_AT_ONCE = 1 << 20
"""Elements that are counted at a time, so that counting takes little memory."""
_SHOWN = 8


@cache
def can_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the target cannot hold some finite values of the source, not even rounded."""
    kinds = (source.is_floating_point, source.is_complex), (target.is_floating_point, target.is_complex)
    if source == target or kinds[0] != kinds[1] or not any(kinds[0]):
        return False
    try:
        return torch.finfo(target).max < torch.finfo(source).max or target is torch.float8_e8m0fnu
    except (TypeError, RuntimeError):  # a dtype that torch says nothing about
        return False


class Overflows:
    """Counts, by the names of tensors, what overflows in the casts of one load, save or conversion."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def check(self, name: str, source: torch.Tensor, target: torch.Tensor | torch.dtype) -> None:
        """Counts the elements of `source` that are finite, and infinite or NaN in `target`, which it was cast to.

        A dtype as `target` stands for a cast that is made later. Called from any thread, with all of a tensor or a part
        of it.
        """
        dtype = target.dtype if isinstance(target, torch.Tensor) else target
        if not can_overflow(source.dtype, dtype) or source.is_meta or not source.numel():
            return
        with torch.no_grad():
            if isinstance(target, torch.Tensor) and _has_finite_sum(target):
                return
            if not _is_within(source, dtype):
                self.add({name: _newly_infinite(source, dtype)})

    def add(self, counts: dict[str, int]) -> None:
        """Adds what was counted elsewhere."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self.counts[name] = self.counts.get(name, 0) + count

    def notes(self) -> list[str]:
        """What a report says of it: nothing, or one sentence."""
        if not self.counts:
            return []
        shown = [f"{name} ({count:,})" for name, count in sorted(self.counts.items())[:_SHOWN]]
        more = f", and {len(self.counts) - _SHOWN} more" if len(self.counts) > _SHOWN else ""
        total = sum(self.counts.values())
        return [f"finite values became infinite or NaN by a cast, {total:,} in all: {', '.join(shown)}{more}"]


def _has_finite_sum(tensor: torch.Tensor) -> bool:
    if tensor.itemsize == 1 or tensor.device.type != "cpu":
        return False
    total = tensor.sum().item()
    return math.isfinite(total.real) and math.isfinite(total.imag)


def _is_within(source: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values lie within the limits of a dtype; False for NaN, and where torch cannot compare them."""
    if source.itemsize == 1 or source.is_complex() or dtype is torch.float8_e8m0fnu:
        return False
    least, greatest = (float(value) for value in torch.aminmax(source))
    limit = torch.finfo(dtype).max
    return -limit <= least and greatest <= limit


def _newly_infinite(source: torch.Tensor, dtype: torch.dtype) -> int:
    """The number of finite elements that the cast makes infinite or NaN."""
    flat = source.detach().flatten()
    count = 0
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        wide = part if part.itemsize > 1 else part.float()
        cast = part.to(dtype)
        cast = cast if cast.itemsize > 1 else cast.float()
        count += int((wide.isfinite() & ~cast.isfinite()).sum())
    return count
