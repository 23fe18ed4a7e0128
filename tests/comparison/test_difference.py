"""Differences of two tensors against NumPy in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import modelstate as ms
from tests.sweeps import examples

Difference, Status = ms.comparison.Difference, ms.comparison.Status
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)


def compared(a: torch.Tensor, b: torch.Tensor) -> ms.comparison.TensorDiff:
    (tensor,) = ms.diff({"w": a}, {"w": b}).tensors
    return tensor


def measured(a: torch.Tensor, b: torch.Tensor) -> ms.comparison.Difference:
    found = compared(a, b).difference
    assert found is not None
    return found


def wide(tensor: torch.Tensor) -> Any:
    """The exact values, as NumPy has them."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        return tensor.float().double().numpy()
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy()
    if not tensor.dtype.is_floating_point:
        return np.array([int(value) for value in tensor.tolist()], dtype=object)
    return tensor.double().numpy()


def exact(a: torch.Tensor, b: torch.Tensor) -> dict[str, float | None]:
    """The measures of the elements that are finite on both sides, in float64 or as integers."""
    x, y = wide(a), wide(b)
    if x.dtype != object:
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[finite], y[finite]
    if not len(x):
        return dict.fromkeys(("max_abs", "relative_l2"))
    absolute = [abs(p - q) for p, q in zip(x.tolist(), y.tolist(), strict=True)]
    norm = math.sqrt(math.fsum(float(abs(value)) ** 2 for value in x.tolist()))
    l2 = math.sqrt(math.fsum(float(value) ** 2 for value in absolute))
    return {"max_abs": float(max(absolute)), "relative_l2": 0.0 if not l2 else l2 / norm if norm else None}


def assert_right(a: torch.Tensor, b: torch.Tensor) -> None:
    found, expected = measured(a, b), exact(a, b)
    for name, value in expected.items():
        measure = getattr(found, name)
        assert (measure is None) == (value is None), (name, measure, value)
        if value is not None:
            assert measure == pytest.approx(value, rel=2e-5), name


numbers = st.floats(min_value=-(2.0**60), max_value=2.0**60, width=32, allow_subnormal=False)
any_float = st.floats(width=32)


def cast(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(values, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([int(min(max(value, info.min), info.max)) for value in values], dtype=dtype)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(data=st.data())
def test_measures_are_those_of_numpy(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((*FLOATS, *INTEGERS, *COMPLEX)))
    count = data.draw(st.integers(1, 40))
    values = data.draw(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=count, max_size=count))
    a = cast([x for x, _, _ in values], dtype)
    b = cast([x if same else y for x, y, same in values], dtype)
    assert_right(a, b)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.tuples(any_float, any_float, st.booleans()), min_size=1, max_size=30), st.sampled_from(FLOATS))
def test_nan_infinity_and_the_share_of_changes(values: list[tuple[float, float, bool]], dtype: torch.dtype) -> None:
    a = cast([x for x, _, _ in values], dtype)
    b = cast([x if same else y for x, y, same in values], dtype)
    found = measured(a, b)
    sides = a.float() if dtype.itemsize < 4 else a, b.float() if dtype.itemsize < 4 else b
    assert found.nan == tuple(int(side.isnan().sum()) for side in sides)
    assert found.infinite == tuple(int(side.isinf().sum()) for side in sides)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    differing = int((a.view(bits) != b.view(bits)).sum())
    assert found.changed == differing / len(a)
    assert (compared(a, b).status is Status.EQUAL) == (not differing)


def test_minus_zero_is_a_change_of_bits_and_no_difference_of_values() -> None:
    found = measured(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.changed, found.max_abs, found.relative_l2) == (0.5, 0.0, 0.0)


def test_values_beyond_the_range_of_float32_sums() -> None:
    a, b = torch.full((20,), 1e30), torch.full((20,), 3e30)
    assert measured(a, b).relative_l2 == pytest.approx(2.0)
    assert measured(a * 1e-60, b * 1e-60).max_abs == 0.0  # both are zero
    a, b = torch.full((20,), 1e-30), torch.full((20,), 3e-30)
    assert measured(a, b).relative_l2 == pytest.approx(2.0)
    a, b = torch.ones(20), torch.full((20,), 1e-30)
    assert measured(a, b).relative_l2 == pytest.approx(1.0)
    assert measured(b, a).relative_l2 == pytest.approx(1e30)


@pytest.mark.parametrize("small", [1e-12, 1.0, math.nan])
def test_each_chunk_of_a_large_tensor_counts(small: float) -> None:
    a = torch.full((600_000,), small)
    a[300_000:] = torch.linspace(1, 3, 300_000)
    b = a.clone()
    b[-1] = 4.0
    assert_right(a, b)
    assert measured(a, b).changed == 1 / 600_000
    assert measured(a, b).nan == ((300_000,) * 2 if math.isnan(small) else (0, 0))


def test_wide_integers_are_subtracted_exactly() -> None:
    big = 2**62
    found = measured(torch.tensor([big + 1, -big]), torch.tensor([big, -big]))
    assert (found.max_abs, found.changed) == (1.0, 0.5)
    found = measured(torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 2], dtype=torch.uint64))
    assert found.max_abs == 1.0


def test_booleans_have_a_share_of_changes_alone() -> None:
    found = measured(torch.tensor([True, False, True]), torch.tensor([True, True, True]))
    assert found == Difference(1 / 3, None, None, None, None)


def test_tensors_without_elements() -> None:
    assert measured(torch.ones(0), torch.ones(0)) == Difference(None, None, None, None, None)


def test_tensors_without_a_finite_element() -> None:
    found = measured(torch.full((3,), math.nan), torch.full((3,), math.inf))
    assert (found.max_abs, found.relative_l2) == (None, None)
    assert (found.nan, found.infinite, found.changed) == ((3, 0), (0, 3), 1.0)


def test_which_dtypes_can_be_compared() -> None:
    values = torch.tensor([1.0, 0.0])
    pairs = [(torch.float32, torch.float8_e4m3fn), (torch.uint8, torch.int64)]
    others = [(torch.float32, torch.int32), (torch.bool, torch.uint8), (torch.complex64, torch.float32)]
    for a, b in (*pairs, *others):
        tensor = compared(values.to(a), values.to(b))
        assert tensor.status is Status.OTHER_DTYPE
        assert (tensor.difference is not None) == ((a, b) in pairs)


def test_packed_values_are_compared_bit_by_bit_alone() -> None:
    a = torch.tensor([1, 2], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = torch.tensor([1, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert compared(a, b).status is Status.CHANGED
    assert measured(a, b) == Difference(None, None, None, None, None)
    same = a.view(torch.uint8).clone().view(a.dtype)  # some versions of torch cannot copy this dtype
    assert compared(a, same).status is Status.EQUAL
    assert measured(a, same).changed == 0.0


def test_values_whose_squares_leave_the_range_of_float64() -> None:
    huge = torch.tensor([1e200] * 7 + [-1e200] * 7, dtype=torch.float64)
    found = measured(huge, -huge)
    assert (found.max_abs, found.relative_l2) == (2e200, None)
    assert measured(huge, huge.clone()).relative_l2 == 0.0
    largest = torch.full((4,), 1.7e308, dtype=torch.float64)
    assert measured(largest, -largest).max_abs is None
    tiny = torch.full((4,), 1e-200, dtype=torch.float64)
    assert measured(tiny, 2 * tiny).relative_l2 is None
