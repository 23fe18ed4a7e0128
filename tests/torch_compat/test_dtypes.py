"""Which casts keep every value: compared with really casting all bit patterns, there and back."""

import itertools
from functools import cache

import pytest
import torch

from modelstate.torch_compat.dtypes import cast_between, short
from tests.formats.torch_files import DTYPES

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2]
SMALL = [dtype for dtype in FLOATS if dtype.itemsize <= 2]
COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
INTEGERS = {
    getattr(torch, f"{sign}int{bits}"): (0 if sign else -(2 ** (bits - 1)), 2 ** (bits if sign else bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}


@cache
def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a float of one or two bytes."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def pairs(sources: list[torch.dtype]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(a, b) for a, b in itertools.product(sources, FLOATS) if a != b]


def keeps_all_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value is the same after the cast, and after the cast back; NaN stays NaN."""
    values = every_value(source)
    there = values.to(target)
    back = there.to(source)
    exact, seen, again = (tensor.to(torch.float64) for tensor in (values, there, back))
    return torch.equal(exact.nan_to_num(0.123), seen.nan_to_num(0.123)) and torch.equal(
        exact.nan_to_num(0.123), again.nan_to_num(0.123)
    )


@pytest.mark.slow_except(16)
@pytest.mark.parametrize(("source", "target"), pairs(SMALL), ids=str)
def test_floats_of_one_and_two_bytes(source: torch.dtype, target: torch.dtype) -> None:
    assert cast_between(source, target) == ("lossless" if keeps_all_values(source, target) else "lossy")


def test_there_are_casts_of_both_outcomes() -> None:
    assert {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16} < set(SMALL)
    assert {cast_between(*pair) for pair in pairs(SMALL)} == {"lossless", "lossy"}


# Float32 and float64 have too many values: these need more digits, a wider range, or finer steps near 0.
WITNESSES = {torch.float32: [1 + 2**-23, 2.0**127, 2.0**-149], torch.float64: [1 + 2**-52, 2.0**1023, 2.0**-1074]}


@pytest.mark.parametrize(("source", "target"), pairs([torch.float32, torch.float64]), ids=str)
def test_floats_of_four_and_eight_bytes(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.tensor(WITNESSES[source], dtype=source)
    kept = torch.equal(values.to(target).to(torch.float64), values.to(torch.float64))
    assert cast_between(source, target) == ("lossless" if kept else "lossy")
    assert kept == (target is torch.float64)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(COMPLEX, 2)), ids=str)
def test_complex_numbers_are_as_their_parts(source: torch.dtype, target: torch.dtype) -> None:
    assert cast_between(source, target) == cast_between(COMPLEX[source], COMPLEX[target])


@pytest.mark.slow_except(16)
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(INTEGERS, 2)), ids=str)
def test_integers_by_their_ranges(source: torch.dtype, target: torch.dtype) -> None:
    (low, high), (least, most) = INTEGERS[source], INTEGERS[target]
    assert cast_between(source, target) == ("lossless" if least <= low and high <= most else "lossy")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_dtype(dtype: torch.dtype) -> None:
    assert cast_between(dtype, dtype) == "same"


def kind(dtype: torch.dtype) -> str:
    if dtype in COMPLEX:
        return "complex"
    return "bool" if dtype is torch.bool else "integer" if dtype in INTEGERS else "float"


def test_a_change_of_kind() -> None:
    for source, target in itertools.permutations([*FLOATS, *COMPLEX, *INTEGERS, torch.bool], 2):
        assert (cast_between(source, target) == "kind") == (kind(source) != kind(target)), (source, target)


@pytest.mark.parametrize("other", [torch.float32, torch.int8, torch.bool, torch.uint4, torch.bits8], ids=str)
@pytest.mark.parametrize("odd", [torch.int4, torch.bits16], ids=str)
def test_dtypes_that_are_no_numbers_to_torch(odd: torch.dtype, other: torch.dtype) -> None:
    assert cast_between(odd, other) == "kind"
    assert cast_between(other, odd) == "kind"


def test_packed_floats_can_be_cast_to_nothing() -> None:
    assert torch.float4_e2m1fn_x2.is_floating_point
    for other in (torch.float32, torch.float8_e4m3fn, torch.bfloat16):
        assert cast_between(torch.float4_e2m1fn_x2, other) in ("kind", "lossy")
        assert cast_between(other, torch.float4_e2m1fn_x2) in ("kind", "lossy")


def test_quantized_numbers_are_no_integers() -> None:
    assert cast_between(torch.qint8, torch.int8) == "kind"
    assert cast_between(torch.uint8, torch.quint8) == "kind"


def test_short_names() -> None:
    assert short(torch.float8_e4m3fn) == "float8_e4m3fn"
