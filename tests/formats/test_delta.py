"""Payloads of deltas: bit for bit for every dtype, from any block of elements, and never out of bounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from modelstate.errors import DamagedFileError
from modelstate.formats.delta import BLOCK_ELEMENTS, Changes, apply, changes, check, encode, encode_changes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
]


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements of every pattern: NaN payloads, infinities, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def step(before: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """The tensor with other bits in about this share of its elements: half of them a step away, half of any pattern."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(before), generator=generator)
    other = random_bits(len(before), before.dtype, seed + 1)
    after = torch.where(chosen < share / 2, other, before)
    if before.dtype is torch.bool:
        return after
    bits = after.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.dtype.itemsize])
    bits += ((chosen >= share / 2) & (chosen < share)).to(bits.dtype)
    return after


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.02, 0.2]), st.integers(0, 2**32), st.data())
def test_round_trip(dtype: torch.dtype, count: int, share: float, seed: int, data: st.DataObject) -> None:
    before = random_bits(count, dtype, seed)
    after = step(before, share, seed)
    payload = encode(before, after)
    if payload is None:
        assert share or not count
        return
    check(payload, count, dtype.itemsize)
    assert payload.numel() < max(before.nbytes, 1)
    assert bool(payload.numel()) == (not same_bits(before, after))
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    out = before[first:last].clone()
    apply(payload, out, first)
    assert same_bits(out, after[first:last])


@pytest.mark.parametrize(("positions", "count"), [([0], 1000), ([254, 510, 999], 1000), ([0, 255, 512, 1022], 1024)])
def test_gaps_around_the_escape(positions: list[int], count: int) -> None:
    before, after = torch.zeros(count), torch.zeros(count)
    after[positions] = -0.0
    payload = encode(before, after)
    assert payload is not None
    apply(payload, before, 0)
    assert same_bits(before, after)


LONG = 2 * BLOCK_ELEMENTS + 77


@pytest.fixture(scope="module")
def long() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor of three blocks, its next step, and the payload."""
    before = torch.randn(LONG, generator=torch.Generator().manual_seed(0)).bfloat16()
    after = step(before, 0.02, 1)
    payload = encode(before, after)
    assert payload is not None
    check(payload, LONG, 2)
    return before, after, payload


@given(st.integers(0, LONG), st.integers(0, LONG))
def test_any_block_of_elements(long: tuple[torch.Tensor, ...], first: int, last: int) -> None:
    before, after, payload = long
    out = before[first:last].clone()
    apply(payload, out, first)
    assert same_bits(out, after[first:last])


def test_changes_of_parts_encode_to_the_same_payload(long: tuple[torch.Tensor, ...]) -> None:
    before, after, payload = long
    parts = [slice(0, 5), slice(5, BLOCK_ELEMENTS + 3), slice(BLOCK_ELEMENTS + 3, LONG)]
    of_parts = [changes(before[part], after[part]) for part in parts]
    positions = np.concatenate([found.positions + part.start for found, part in zip(of_parts, parts, strict=True)])
    encoded = encode_changes(Changes(positions, np.concatenate([found.differences for found in of_parts])), LONG)
    assert encoded is not None
    assert torch.equal(encoded, payload)


def test_a_payload_that_is_not_worth_it() -> None:
    zeros, ones = torch.zeros(1000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)
    assert encode(zeros, ones) is None
    assert encode(zeros[:2], torch.cat([zeros[:1], ones[:1]])) is None
    assert encode(torch.zeros(1000, dtype=torch.complex128), torch.ones(1000, dtype=torch.complex128)) is None


@given(st.data())
def test_damaged_payloads(long: tuple[torch.Tensor, ...], data: st.DataObject) -> None:
    before, _, payload = long
    directory = st.integers(0, 8 + 3 * 24 - 1)
    damaged = payload.clone()
    for place in data.draw(st.lists(directory | st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.just(len(payload)) | st.integers(1, len(payload)))]
    memory = torch.cat([torch.zeros(64), before.float(), torch.zeros(64)]).bfloat16()
    try:
        check(damaged, LONG, 2, "a.safetensors")
        apply(damaged, memory[64:-64], 0)
    except DamagedFileError:
        pass
    assert not memory[:64].any()
    assert not memory[-64:].any()
