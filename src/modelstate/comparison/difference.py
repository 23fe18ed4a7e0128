"""Measures how two tensors of one shape differ, chunk by chunk.

Values of at most 32 bits are compared in float32, to which all of them are converted without loss; integers of 32 bits
and float64 in float64. Within a chunk of 262,144 elements, sums are accumulated by torch's vectorised kernels; the sums
of the chunks are added exactly (`exact_sum`), so the order in which threads finish does not change the result. Chunks
with elements that are not finite, and those whose sums leave the range of float32 or become too small for it, are
computed again in float64. Differences of 64-bit integers below 2**62 are computed exactly and rounded once.
"""

from __future__ import annotations

import ctypes
import math

import msgspec
import torch

from modelstate.checkpoint.reduction import exact_sum, if_finite, scratch
from modelstate.torch_compat.dtypes import cast_between, is_numeric

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TINY, _SMALL = 1e-20, 1e-15
"""A sum of squares below the first, and a difference below the second, are computed in float64."""


class Difference(msgspec.Struct, frozen=True):
    """How the values of two tensors of one shape differ.

    A measure that does not apply is None, and so is one whose computation leaves the range of float64.

    The differences are those of the elements that are finite on both sides.
    """

    changed: float | None = None
    """The share of elements that differ, from 0 to 1: in their bits; in their values where the dtypes differ."""
    max_abs: float | None = None
    """The largest absolute difference."""
    relative_l2: float | None = None
    """The L2 norm of the difference over that of the first tensor. None if the first is zero and the second is not."""
    nan: tuple[int, int] | None = None
    """The number of NaN elements in the first and in the second tensor."""
    infinite: tuple[int, int] | None = None
    """The number of infinite elements in the first and in the second tensor."""


def is_comparable(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether the values of two dtypes can be compared: both are floats, integers, complex numbers or booleans."""
    return a == b or (cast_between(a, b) != "kind" and _arithmetic(a, b) is not None)


def _arithmetic(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """Returns the dtype in which values are subtracted; None for booleans and packed values."""
    if torch.bool in (a, b) or not (is_numeric(a) and is_numeric(b)):
        return None
    if a.is_complex:
        return torch.complex128 if torch.complex128 in (a, b) else torch.complex64
    widest = max(a.itemsize, b.itemsize)
    return torch.float32 if widest <= (4 if a.is_floating_point else 2) else torch.float64


def equal_unread(elements: int, dtype: torch.dtype) -> Difference:
    """Returns the difference of two tensors whose bits are known to be equal, without their values."""
    if not elements:
        return Difference()
    return Difference(0.0) if _arithmetic(dtype, dtype) is None else Difference(0.0, 0.0, 0.0)


class Accumulator:
    """Adds up what the chunks of two tensors differ by. Several threads may add chunks at once.

    Args:
        a: The dtype of the first tensor.
        b: The dtype of the second tensor, which `is_comparable` with the first.
    """

    def __init__(self, a: torch.dtype, b: torch.dtype) -> None:
        self._arithmetic, self._same_dtype = _arithmetic(a, b), a == b
        # Two values of 4 bits share an element: a share of elements would be wrong.
        self._counts_changes = self._arithmetic is not None or a is torch.bool
        self._is_exact = self._arithmetic is torch.float64 and not a.is_floating_point and 8 in (a.itemsize, b.itemsize)
        self._chunks: list[tuple[int, bool, _ChunkSums]] = []
        """The elements of each chunk, whether all of their bits are equal, and what they add. Threads append to it."""

    @property
    def is_equal(self) -> bool:
        """Whether all bits that were added are equal."""
        return self._same_dtype and all(is_same for _, is_same, _ in self._chunks)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Adds a chunk of both tensors: contiguous CPU tensors of one dimension."""
        # torch.equal takes several times as long as memcmp, and compares NaN as different.
        is_same = self._same_dtype and not _libc.memcmp(a.data_ptr(), b.data_ptr(), a.nbytes)
        if self._arithmetic is None:
            changed = 0 if is_same or not self._counts_changes else _differing(a, b)
            sums = _ChunkSums(changed, 0)
        else:
            sums = self._quick_sums(a, b, self._arithmetic, is_same) or self._sums(a, b, self._arithmetic)
        self._chunks.append((len(a), is_same, sums))

    def result(self) -> Difference:
        """Returns the difference of everything that was added."""
        elements, chunks = sum(count for count, _, _ in self._chunks), [sums for _, _, sums in self._chunks]
        if not elements:
            return Difference()
        is_counted = self._counts_changes or self.is_equal
        changed = sum(sums.changed for sums in chunks) / elements if is_counted else None
        if self._arithmetic is None:
            return Difference(changed)
        squares = exact_sum(sums.squares for sums in chunks)
        squared_differences = exact_sum(sums.squared_differences for sums in chunks)
        has_finite, largest, relative = any(sums.finite for sums in chunks), max(sums.largest for sums in chunks), None
        if has_finite and not largest:
            relative = 0.0
        elif squares and math.isfinite(squares) and math.isfinite(squared_differences):
            relative = math.sqrt(squared_differences / squares)
        nan, infinite = (
            (sum(of_a), sum(of_b))
            for of_a, of_b in (
                zip(*(sums.nan for sums in chunks), strict=True),
                zip(*(sums.infinite for sums in chunks), strict=True),
            )
        )
        return Difference(changed, if_finite(largest) if has_finite else None, relative, nan, infinite)

    def _quick_sums(
        self, a: torch.Tensor, b: torch.Tensor, arithmetic: torch.dtype, is_same: bool
    ) -> _ChunkSums | None:
        """Returns the sums in the dtype of the arithmetic; None where that is not exact enough."""
        if self._is_exact:
            return None
        x = _cast(a, arithmetic, "first values")
        squares = _dot(x, x)
        if is_same:
            is_in_range = _TINY <= squares < math.inf or not bool(torch.any(x))  # squares of small values may be 0
            return _ChunkSums(0, len(x), squares=squares) if is_in_range else None
        y = _cast(b, arithmetic, "second values")
        difference = torch.sub(x, y, out=scratch("difference", len(x), arithmetic))
        squared = _dot(difference, difference)  # not finite where an element of one side is not
        changed = _differing(a, b) if self._same_dtype else int(torch.count_nonzero(difference))
        largest = float(torch.amax(difference.abs() if difference.is_complex() else difference.abs_()))
        if not (math.isfinite(squared) and _TINY < squares < math.inf and (largest > _SMALL or not squared)):
            return None
        return _ChunkSums(changed, len(x), largest=largest, squares=squares, squared_differences=squared)

    def _sums(self, a: torch.Tensor, b: torch.Tensor, arithmetic: torch.dtype) -> _ChunkSums:
        """Returns the sums of the finite elements in float64, and the numbers of the others."""
        wide = torch.complex128 if arithmetic.is_complex else torch.float64
        x, y = a.to(wide), b.to(wide)
        nan = torch.isnan(x), torch.isnan(y)
        is_changed = (x != y) & ~(nan[0] & nan[1])
        changed = _differing(a, b) if self._same_dtype else int(torch.count_nonzero(is_changed))
        finite = torch.isfinite(x), torch.isfinite(y)
        nans = int(nan[0].sum()), int(nan[1].sum())
        infinite = len(x) - int(finite[0].sum()) - nans[0], len(x) - int(finite[1].sum()) - nans[1]
        both = finite[0] & finite[1]
        x, y = x[both], y[both]
        if not len(x):
            return _ChunkSums(changed, 0, nans, infinite)
        difference = _exact_difference(a, b) if self._is_exact else x - y
        largest = float(torch.amax(difference.abs()))
        squared = _dot(difference, difference)
        return _ChunkSums(changed, len(x), nans, infinite, largest, _dot(x, x), squared)


class _ChunkSums(msgspec.Struct, frozen=True):
    """What one chunk adds."""

    changed: int
    finite: int
    nan: tuple[int, int] = (0, 0)
    infinite: tuple[int, int] = (0, 0)
    largest: float = 0.0
    squares: float = 0.0
    squared_differences: float = 0.0


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Returns the number of elements whose bits differ."""
    if a.is_complex():
        a, b = (torch.view_as_real(side.to(torch.complex64) if side.itemsize == 4 else side) for side in (a, b))
        return int(torch.count_nonzero((a.view(_BITS[a.itemsize]) != b.view(_BITS[b.itemsize])).any(1)))
    return int(torch.count_nonzero(a.view(_BITS[a.itemsize]) != b.view(_BITS[b.itemsize])))


def _cast(tensor: torch.Tensor, dtype: torch.dtype, slot: str) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else scratch(slot, len(tensor), dtype).copy_(tensor)


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """Returns the inner product; the real part of it for complex numbers."""
    if x.is_complex():
        x, y = torch.view_as_real(x).view(-1), torch.view_as_real(y).view(-1)
    return float(torch.dot(x, y))


def _exact_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the differences of integers of up to 64 bits in float64; one below 2**62 is rounded once."""
    rough = a.double() - b.double()
    a, b = (side.view(torch.int64) if side.dtype is torch.uint64 else side.to(torch.int64) for side in (a, b))
    return torch.where(rough.abs() < 2.0**62, (a - b).double(), rough)  # a - b wraps around where it overflows
