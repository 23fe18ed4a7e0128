"""Measures how two tensors of one shape differ, chunk by chunk.

Accumulation: values of at most 32 bits are compared in float32, which all of them are converted to without loss
(integers of 32 bits, and float64: in float64). Within a chunk of 262,144 elements, sums are accumulated in float32 by
torch's vectorised kernels; the sums of the chunks are added exactly (`exact_sum`), so the order in which threads finish
does not change the result. Sums that leave the range of float32, or become too small for it, are computed again in
float64. Differences of 64-bit integers are computed exactly and rounded once.
"""

import ctypes
import math
import threading
from enum import Enum

import msgspec
import torch

from modelstate.checkpoint.reduction import CONVERTIBLE, exact_sum, if_finite, scratch
from modelstate.torch_compat.dtypes import cast_between

Pair = tuple[torch.Tensor, torch.Tensor]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TINY, _SMALL = 1e-20, 1e-15
"""A sum of squares below the first, and a difference below the second, are computed in float64."""


class Difference(msgspec.Struct, frozen=True):
    """How the values of two tensors of one shape differ.

    A measure that does not apply is None, and so is one whose computation leaves the range of float64.

    The differences are those of the elements that are finite on both sides.
    """

    changed: float | None
    """The share of elements that differ, from 0 to 1: in their bits; in their values where the dtypes differ."""
    max_abs: float | None
    """The largest absolute difference."""
    relative_l2: float | None
    """The L2 norm of the difference over that of the first tensor. None if the first is zero and the second is not."""
    nan: tuple[int, int] | None
    """The number of NaN elements in the first and in the second tensor."""
    infinite: tuple[int, int] | None
    """The number of infinite elements in the first and in the second tensor."""


class _Arithmetic(Enum):
    """In which dtype two tensors are compared."""

    FLOAT32 = torch.float32
    FLOAT64 = torch.float64
    COMPLEX = torch.complex64
    COMPLEX128 = torch.complex128
    INT64 = torch.int64
    BITS = None
    """The values have no differences: booleans, packed values."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values whose sums are taken: float64 for integers of 64 bits."""
        assert self.value is not None
        return torch.float64 if self is _Arithmetic.INT64 else self.value


def _arithmetic(a: torch.dtype, b: torch.dtype) -> _Arithmetic | None:
    """None where the values cannot be compared."""
    kind = cast_between(a, b)
    if kind == "kind":
        return None
    if a is torch.bool or a not in CONVERTIBLE or b not in CONVERTIBLE:
        return _Arithmetic.BITS if a == b else None
    if a.is_complex:
        return _Arithmetic.COMPLEX128 if torch.complex128 in (a, b) else _Arithmetic.COMPLEX
    largest = max(a.itemsize, b.itemsize)
    if a.is_floating_point:
        return _Arithmetic.FLOAT64 if largest > 4 else _Arithmetic.FLOAT32
    if largest > 4:
        return _Arithmetic.INT64
    return _Arithmetic.FLOAT64 if largest > 2 else _Arithmetic.FLOAT32


def is_comparable(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether the values of two dtypes can be compared: both are floats, integers, complex numbers or booleans."""
    return _arithmetic(a, b) is not None


def equal_unread(elements: int, dtype: torch.dtype) -> Difference:
    """The difference of two tensors whose bits are known to be equal, without their values."""
    if not elements:
        return Difference(None, None, None, None, None)
    measure = None if _arithmetic(dtype, dtype) is _Arithmetic.BITS else 0.0
    return Difference(0.0, measure, measure, None, None)


class Accumulator:
    """Adds up what the chunks of two tensors differ by. Any thread may add a chunk.

    Args:
        a: The dtype of the first tensor.
        b: The dtype of the second tensor, which `is_comparable` with the first.
    """

    def __init__(self, a: torch.dtype, b: torch.dtype) -> None:
        arithmetic = _arithmetic(a, b)
        assert arithmetic is not None
        self._arithmetic, self._same_dtype = arithmetic, a == b
        # Two values of 4 bits share an element: a share of elements would be wrong.
        self._counts_changes = arithmetic is not _Arithmetic.BITS or a is torch.bool
        self.is_equal = a == b
        """Whether all bits that were added are equal."""
        self._lock = threading.Lock()
        self._elements = self._changed = self._finite = 0
        self._nan, self._infinite = [0, 0], [0, 0]
        self._largest = 0.0
        self._squares: list[float] = []
        self._squared_differences: list[float] = []

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Adds a chunk of both tensors: contiguous CPU tensors of one dimension."""
        chunk = _ChunkSums()
        # torch.equal takes several times as long as memcmp, and compares NaN as different.
        if self._same_dtype and not _libc.memcmp(a.data_ptr(), b.data_ptr(), a.nbytes):
            chunk.elements = len(a)
            self._measure_equal(a, chunk)
        else:
            chunk.is_equal = False
            chunk.elements = len(a)
            self._measure(a, b, chunk)
        with self._lock:
            self.is_equal = self.is_equal and chunk.is_equal
            self._elements += chunk.elements
            self._changed += chunk.changed
            self._finite += chunk.finite
            self._largest = max(self._largest, chunk.largest)
            for side in (0, 1):
                self._nan[side] += chunk.nan[side]
                self._infinite[side] += chunk.infinite[side]
            self._squares.append(chunk.squares)
            self._squared_differences.append(chunk.squared_differences)

    def result(self) -> Difference:
        """The difference of everything that was added."""
        if not self._elements:
            return Difference(None, None, None, None, None)
        changed = self._changed / self._elements if self._counts_changes else None
        if self.is_equal:
            changed = 0.0
        if self._arithmetic is _Arithmetic.BITS:
            return Difference(changed, None, None, None, None)
        squares, squared_differences = exact_sum(self._squares), exact_sum(self._squared_differences)
        largest = relative = None
        if self._finite:
            largest = if_finite(self._largest)
            if not self._largest:
                relative = 0.0
            elif squares and math.isfinite(squares) and math.isfinite(squared_differences):
                relative = math.sqrt(squared_differences / squares)
        nan, infinite = (self._nan[0], self._nan[1]), (self._infinite[0], self._infinite[1])
        return Difference(changed, largest, relative, nan, infinite)

    def _measure_equal(self, a: torch.Tensor, chunk: "_ChunkSums") -> None:
        """Adds a chunk whose bits are equal on both sides."""
        if self._arithmetic is _Arithmetic.BITS:
            return
        values = _cast(a, self._arithmetic.dtype, "first values")
        squares = _dot(values, values)
        chunk.finite = len(a)
        if not _TINY <= squares < math.inf and bool(torch.any(values)):  # squares of small values may be 0
            finite = torch.isfinite(values)
            chunk.finite = int(finite.sum())
            chunk.nan = [int(torch.isnan(values).sum())] * 2
            chunk.infinite = [len(a) - chunk.finite - chunk.nan[0]] * 2
            values = _widened(values[finite])
            squares = _dot(values, values)
        chunk.squares = squares

    def _measure(self, a: torch.Tensor, b: torch.Tensor, chunk: "_ChunkSums") -> None:
        """Adds a chunk that differs, or whose dtypes do."""
        if self._arithmetic is _Arithmetic.BITS:
            chunk.changed = int(torch.count_nonzero(_raw(a) != _raw(b))) if self._counts_changes else 0
            return
        x = _cast(a, self._arithmetic.dtype, "first values")
        y = _cast(b, self._arithmetic.dtype, "second values")
        squares, bits = _dot(x, x), (a, b)
        if not (math.isfinite(squares) and math.isfinite(_dot(y, y))):
            finite = torch.isfinite(x) & torch.isfinite(y)
            if not bool(finite.all()):
                for side, values in enumerate((x, y)):
                    chunk.nan[side] = int(torch.isnan(values).sum())
                    chunk.infinite[side] = len(a) - int(torch.isfinite(values).sum()) - chunk.nan[side]
                elsewhere = ~finite
                if self._same_dtype:
                    chunk.changed += _differing(_selected(a, elsewhere), _selected(b, elsewhere))
                else:
                    left, right = x[elsewhere], y[elsewhere]
                    is_same = (left == right) | (torch.isnan(left) & torch.isnan(right))
                    chunk.changed += len(left) - int(is_same.sum())
                x, y, bits = x[finite], y[finite], (_selected(a, finite), _selected(b, finite))
            x, y = _widened(x), _widened(y)
            squares = _dot(x, x)
        if not len(x):
            return
        chunk.finite = len(x)
        self._measure_finite((x, y), squares, bits, chunk)

    def _measure_finite(self, values: Pair, squares: float, bits: Pair, chunk: "_ChunkSums") -> None:
        """Adds the elements that are finite on both sides."""
        x, y = values
        if self._arithmetic is _Arithmetic.INT64:
            difference = _exact_difference(*bits)
        else:
            difference = torch.sub(x, y, out=scratch("difference", len(x), x.dtype))
        squared = _dot(difference, difference)
        absolute = difference.abs() if difference.is_complex() else difference.abs_()
        chunk.largest = float(torch.amax(absolute))
        is_wide = x.dtype in (torch.float64, torch.complex128)
        is_in_range = math.isfinite(squared) and squares > _TINY and (chunk.largest > _SMALL or squared == 0)
        if not is_wide and not is_in_range:
            x, y = _widened(x), _widened(y)
            difference = x - y
            chunk.largest = float(torch.amax(difference.abs()))
            squared, squares = _dot(difference, difference), _dot(x, x)
        chunk.squares, chunk.squared_differences = squares, squared
        chunk.changed += _differing(*bits) if self._same_dtype else int(torch.count_nonzero(difference))


class _ChunkSums:
    """What one chunk adds."""

    __slots__ = (
        "changed",
        "elements",
        "finite",
        "infinite",
        "is_equal",
        "largest",
        "nan",
        "squared_differences",
        "squares",
    )

    def __init__(self) -> None:
        self.is_equal = True
        self.elements = self.changed = self.finite = 0
        self.nan, self.infinite = [0, 0], [0, 0]
        self.largest = self.squares = self.squared_differences = 0.0


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.itemsize]) if tensor.itemsize in _BITS else tensor.view(torch.uint8)


def _selected(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements where the mask is set. Some versions of torch cannot index 8-bit floats."""
    return _raw(tensor)[mask].view(tensor.dtype) if tensor.itemsize == 1 else tensor[mask]


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """The number of elements whose bits differ."""
    if a.is_complex():
        a, b = (torch.view_as_real(side.to(torch.complex64) if side.itemsize == 4 else side) for side in (a, b))
        return int(torch.count_nonzero((_raw(a) != _raw(b)).any(1)))
    return int(torch.count_nonzero(_raw(a) != _raw(b)))


def _cast(tensor: torch.Tensor, dtype: torch.dtype, slot: str) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else scratch(slot, len(tensor), dtype).copy_(tensor)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """The inner product; the real part of it for complex numbers."""
    if x.is_complex():
        x, y = torch.view_as_real(x).view(-1), torch.view_as_real(y).view(-1)
    return float(torch.dot(x, y))


def _exact_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The differences of integers of up to 64 bits in float64. Each difference is rounded once."""
    halves = []
    for side in (a, b):
        wide = side.view(torch.int64) if side.dtype is torch.uint64 else side.to(torch.int64)
        high = wide >> 32
        if side.dtype is torch.uint64:
            high &= 0xFFFFFFFF
        halves.append((high, wide & 0xFFFFFFFF))
    (a_high, a_low), (b_high, b_low) = halves
    return (a_high - b_high).double() * 2.0**32 + (a_low - b_low).double()
