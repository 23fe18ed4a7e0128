"""Payloads of deltas: bit for bit for every dtype, from any block of elements, and never out of bounds."""

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

import modelstate as ms
from modelstate.errors import DamagedFileError
from modelstate.formats.delta import BLOCK_ELEMENTS, advance, apply, check, patched, zstd
from modelstate.io.engine import read_ranges
from modelstate.io.tensors import read_tensor
from modelstate.spec import Blocks, StoredTensor

DTYPES = [
    *(torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int16, torch.float16, torch.bfloat16),
    *(torch.float32, torch.int64, torch.float64, torch.complex64),
]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LONG = 2 * BLOCK_ELEMENTS + 77


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
    after = torch.where(chosen < share / 2, random_bits(len(before), before.dtype, seed + 1), before)
    if before.dtype is torch.bool:
        return after
    after.view(BITS[before.dtype.itemsize])[(chosen >= share / 2) & (chosen < share)] += 1
    return after


def encode(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """Returns the payload of at most half of the bytes. The copy that is advanced gets the values."""
    copy = before.clone()
    advanced = advance(copy, after, after.nbytes // 2)
    if advanced is None:
        return None
    assert same_bits(copy, after)
    return advanced.payload(len(after))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.02, 0.2]), st.integers(0, 2**32), st.data())
def test_round_trip(dtype: torch.dtype, count: int, share: float, seed: int, data: st.DataObject) -> None:
    before = random_bits(count, dtype, seed)
    after = step(before, share, seed)
    payload = encode(before, after)
    if payload is None:
        assert not same_bits(before, after)
        return
    check(payload, count, dtype.itemsize)
    assert payload.numel() <= before.nbytes / 2
    assert bool(payload.numel()) == (not same_bits(before, after))
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    out = before[first:last].clone()
    apply(payload, out, first)
    assert same_bits(out, after[first:last])


@pytest.mark.parametrize(
    "positions", [[0], [255, 510, 766], [4095, 8190, 8191], [4096, 8192], [19999], [*range(400), 655, 911]], ids=str
)
def test_changes_around_the_longest_step(positions: list[int]) -> None:
    before, after = torch.zeros(20000), torch.zeros(20000)
    after[positions] = -0.0
    payload = encode(before, after)
    assert payload is not None
    apply(payload, before, 0)
    assert same_bits(before, after)


@pytest.mark.parametrize("numel", [512, 4096])
@pytest.mark.parametrize("itemsize", BITS)
def test_differences_around_the_escapes(itemsize: int, numel: int) -> None:
    before = torch.zeros(numel, dtype=BITS[itemsize])
    after = before.clone()
    least = torch.iinfo(before.dtype).min
    after[:16] = torch.tensor([1, -1, 7, -7, -8, 8, 9, 126, -127, 127, -128, least, -least - 1, 0, 3, -3])
    payload = encode(before, after)
    assert payload is not None
    apply(payload, before, 0)
    assert torch.equal(before, after)


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


def test_a_block_without_changes_has_no_bytes() -> None:
    before, after = torch.zeros(LONG, dtype=torch.bfloat16), torch.zeros(LONG, dtype=torch.bfloat16)
    after[-1] = 1
    payload = encode(before, after)
    assert payload is not None
    assert payload.numel() < 100
    apply(payload, before, 0)
    assert same_bits(before, after)


def test_a_payload_that_is_not_worth_it() -> None:
    before, after = random_bits(1000, torch.bfloat16, 0), random_bits(1000, torch.bfloat16, 1)
    assert encode(before, after) is None
    assert encode(before[:8], torch.cat([before[:7], after[7:8]])) is None
    assert encode(before.new_zeros(1000, dtype=torch.complex128), before.new_ones(1000, dtype=torch.complex128)) is None


def test_a_chain_of_patches_is_read_as_one_tensor(long: tuple[torch.Tensor, ...], tmp_path: Path) -> None:
    tensors, path = [long[0]], tmp_path / "layers.safetensors"
    payloads: dict[str, torch.Tensor] = {}
    for name in ("a", "b", "c"):
        tensors.append(step(tensors[-1], 0.02, len(tensors)))
        payload = encode(tensors[-2], tensors[-1])
        assert payload is not None
        payloads[name] = payload
    save_file({"base": tensors[0], **payloads}, path)
    file = ms.open(path)
    layers = [layer for layer in map(file.stored, payloads) if isinstance(layer, StoredTensor)]
    directories = [check(payload, LONG, long[0].itemsize) for payload in payloads.values()]
    for count in range(len(tensors)):
        for base in (file.stored("base"), tensors[0]):
            stored = patched(base, payloads=layers[:count], directories=directories[:count])
            read = partial(read_tensor, read_all=partial(read_ranges, files={}))
            assert same_bits(read(stored), tensors[count])
            for rows in (slice(5, 9), slice(1 << 20, LONG), slice(700, LONG - 1), slice(LONG, LONG)):
                part = stored.region([rows])
                assert part is not None
                assert same_bits(read(part), tensors[count][rows])
            assert isinstance(stored.build, Blocks)
            # Each block of a payload is decoded once.
            assert not stored.build.unit % BLOCK_ELEMENTS


def test_a_tensor_of_many_blocks_is_computed_in_parts(tmp_path: Path) -> None:
    """Also a region that begins and ends within blocks."""
    numel = 9 * BLOCK_ELEMENTS + 7
    before = torch.arange(numel, dtype=torch.int32).to(torch.uint8)
    after = before.clone()
    after[::3] += 1
    payload = encode(before, after)
    assert payload is not None
    save_file({"payload": payload}, tmp_path / "layer.safetensors")
    layer = ms.open(tmp_path / "layer.safetensors").stored("payload")
    assert isinstance(layer, StoredTensor)
    stored = patched(before, payloads=[layer], directories=[check(payload, numel, 1)])
    read = partial(read_tensor, read_all=partial(read_ranges, files={}))
    assert same_bits(read(stored), after)
    rows = slice(BLOCK_ELEMENTS // 2, numel - 3)
    part = stored.region([rows])
    assert part is not None
    assert same_bits(read(part), after[rows])


def payload_of(numel: int, plain: bytes, entries: int, frame: bytes | None = None) -> torch.Tensor:
    """The payload of a tensor of one block."""
    frame = zstd.compress(plain) if frame is None else frame
    return torch.tensor([*struct.pack("<QII", numel, len(frame), entries), *frame], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("numel", "low", "high", "places"),
    [
        (4800, [1, 44, 2, 255, 107], [0x30, 0x81, 0x80, 0x0F, 0x70], [1, 301, 303, 4505]),
        (320, [1, 44, 2, 255, 1], [3, 128, 128, 0, 7], [1, 45, 47, 303]),
    ],
    ids=["few", "many"],
)
def test_a_payload_from_its_description(numel: int, low: list[int], high: list[int], places: list[int]) -> None:
    out = torch.tensor([1.0, -2.0, 0.0, 0.5] * (numel // 4))
    after = out.clone()
    after.view(torch.int32)[places] += torch.tensor([3, -1000, -(2**31), 7], dtype=torch.int32)
    payload = payload_of(numel, bytes(low + high) + struct.pack("<ii", -1000, -(2**31)), 5)
    check(payload, numel, 4)
    apply(payload, out, 0)
    assert same_bits(out, after)


def check_and_apply(payload: torch.Tensor, out: torch.Tensor) -> None:
    check(payload, len(out), out.itemsize)
    apply(payload, out, 0)


GOOD = bytes([4, 0x10])
DAMAGED = {
    "cut within the directory": torch.zeros(12, dtype=torch.uint8),
    "of another tensor": payload_of(101, GOOD, 1),
    "of more elements than there are": payload_of(2**63, GOOD, 1),
    "cut": payload_of(100, GOOD, 1)[:-1],
    "longer": torch.cat([payload_of(100, GOOD, 1), torch.zeros(1, dtype=torch.uint8)]),
    "a frame that is none": payload_of(100, b"", 1, b"no frame"),
    "a frame that is cut": payload_of(100, b"", 1, zstd.compress(GOOD)[:-1]),
    "two frames": payload_of(100, b"", 1, zstd.compress(GOOD[:1]) + zstd.compress(GOOD[1:])),
    "a frame of 64 MB": payload_of(100, b"", 1, zstd.compress(bytes(64 << 20))),
    "more entries than elements": payload_of(100, GOOD, 2**32 - 1),
    "more entries than bytes": payload_of(100, GOOD, 2),
    "no entries": payload_of(100, GOOD, 0),
    "entries without a frame": payload_of(100, b"", 1, b""),
    "a position behind the end": payload_of(100, bytes([100, 0x10]), 1),
    "a long step behind the end": payload_of(100, bytes([4, 0x11]), 1),
    "positions behind the end": payload_of(100, bytes([1] * 100 + [3] * 100), 100),
    "an escape without a number": payload_of(100, bytes([4, 0x80]), 1),
    "one of many without a number": payload_of(100, bytes([4, 4, 3, 128]), 2),
    "a part of a number": payload_of(100, bytes([4, 0x80, 128]), 1),
    "bytes behind the end": payload_of(100, GOOD + b"\0", 1),
}


@pytest.mark.parametrize("payload", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_payload_is_refused_and_changes_nothing(payload: torch.Tensor) -> None:
    out = torch.zeros(100, dtype=torch.bfloat16)
    with pytest.raises(DamagedFileError, match="the payload of a delta is damaged"):
        check_and_apply(payload, out)
    assert not out.any()


def test_a_block_does_not_take_the_number_of_another_one() -> None:
    frames = [zstd.compress(bytes([4, 0x80])), zstd.compress(bytes([4, 0x10]) + struct.pack("<i", 1000))]
    directory = struct.pack("<QIIII", 2 * BLOCK_ELEMENTS, len(frames[0]), 1, len(frames[1]), 1)
    payload, out = torch.tensor([*directory, *b"".join(frames)], dtype=torch.uint8), torch.zeros(2 * BLOCK_ELEMENTS)
    with pytest.raises(DamagedFileError, match="the payload of a delta is damaged"):
        check_and_apply(payload, out)
    assert not out.any()


@given(st.data())
def test_flipped_bytes_never_write_out_of_bounds(long: tuple[torch.Tensor, ...], data: st.DataObject) -> None:
    before, _, payload = long
    damaged = payload.clone()
    directory = st.integers(0, 8 + 3 * 8 - 1)
    for place in data.draw(st.lists(directory | st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    memory = torch.zeros(64 + LONG + 64, dtype=torch.bfloat16)
    memory[64:-64] = before
    with suppress(DamagedFileError):
        check_and_apply(damaged, memory[64:-64])
    assert not memory[:64].any()
    assert not memory[-64:].any()


def test_the_reader_of_the_documentation(long: tuple[torch.Tensor, ...]) -> None:
    page = Path(__file__).parents[2] / "docs" / "delta_format.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Callable[[bytes, list[int], int], None]] = {}
    exec(code, names)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        before = long[0] if dtype is torch.bfloat16 else random_bits(2000, dtype, 0)
        after = step(before, 0.02, 1)
        payload = encode(before, after)
        assert payload is not None
        unsigned = f"<u{dtype.itemsize}"
        elements = before.view(torch.uint8).numpy().view(unsigned).tolist()
        names["apply"](payload.numpy().tobytes(), elements, dtype.itemsize)
        assert elements == after.view(torch.uint8).numpy().view(unsigned).tolist()
