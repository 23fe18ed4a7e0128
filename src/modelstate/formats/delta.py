"""The difference of two tensors of one dtype and shape: which elements changed, and by how much, bit for bit.

A payload is a sequence of bytes. The elements are divided into blocks, which are encoded independently of each other,
so that a block of elements is computed from one block of the payload. A change is the difference of the bits of an
element as integers, modulo 2 to the number of bits: the bits of floats of one sign are in the order of the floats, so
a small step of a weight is a small integer. docs/delta_format.md has the format byte for byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from modelstate.errors import DamagedFileError
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored, StoredTensor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_ELEMENTS = 1 << 20
"""The elements of a block: as many as a thread computes at once (`spec.block_elements`)."""

Bits: TypeAlias = "NDArray[np.signedinteger]"
"""The bits of elements, as integers of their size."""
_Bytes: TypeAlias = "NDArray[np.uint8]"

_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
"""By the size of an element in bytes."""
_MOST_CHANGED = 0.4
"""Where a larger part of the elements changed, a payload saves little and is slower to apply than a whole tensor."""
_ESCAPE = 255
"""In gaps: add 255, and go on with the next byte. In steps: the difference is in the third stream."""
_STREAMS = 3
"""Gaps between positions, small differences ("steps"), and differences that are no steps."""
_HEADER_BYTES = 8
_ENTRY_BYTES = 8 * _STREAMS
_LEVEL = 1
_STEPS = np.array([(code >> 1) ^ -(code & 1) for code in range(256)])
"""The difference of each byte of the steps."""


class Changes(NamedTuple):
    """The elements in which two tensors differ."""

    positions: NDArray[np.int64]
    """The indices of the elements, in ascending order."""
    differences: Bits
    """The bits after minus the bits before, modulo 2 to the number of bits."""


def changes(before: torch.Tensor, after: torch.Tensor) -> Changes:
    """Returns the elements in which two contiguous tensors of the CPU, of one dtype and shape, differ."""
    return _changes(_bits(before), _bits(after))


def encode(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """Returns the payload that turns `before` into `after`: contiguous tensors of the CPU, of one dtype and shape.

    The payload has no bytes where the tensors are equal. Returns None where a payload is not worth it: it would not be
    smaller than the tensor, more than two fifths of the elements changed, or an element has more than 8 bytes.
    """
    if after.dtype.itemsize not in _INTEGERS:
        return None
    old, new = _bits(before), _bits(after)
    return _encoded((_changes(a, b) for a, b in zip(_split(old), _split(new), strict=True)), len(new), new.itemsize)


def encode_changes(found: Changes, numel: int) -> torch.Tensor | None:
    """Returns the payload for changes of a tensor of `numel` elements, as `encode` does."""
    ends = np.searchsorted(found.positions, np.arange(0, numel + BLOCK_ELEMENTS, BLOCK_ELEMENTS))
    blocks = (
        Changes(found.positions[first:end] - index * BLOCK_ELEMENTS, found.differences[first:end])
        for index, (first, end) in enumerate(pairwise(ends.tolist()))
    )
    return _encoded(blocks, numel, found.differences.itemsize)


def apply(payload: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Applies a payload to `out`: flat elements of a tensor, from the element with the index `first` on.

    Only the blocks that have elements of `out` are decoded. Raises `DamagedFileError` where a block cannot be decoded;
    its elements are unchanged then.
    """
    if not payload.numel():
        return
    bits, data, last = _bits(out), payload.numpy(), first + out.numel()
    numel, blocks, starts = _directory(data)
    for index in range(first // BLOCK_ELEMENTS, -(-last // BLOCK_ELEMENTS)):
        start = index * BLOCK_ELEMENTS
        block = data[starts[index] : starts[index + 1]]
        found = _decoded(blocks[index], block, bits.dtype, min(BLOCK_ELEMENTS, numel - start))
        lower, upper = np.searchsorted(found.positions, (first - start, last - start))
        if upper > lower:
            bits[found.positions[lower:upper] + (start - first)] += found.differences[lower:upper]


def check(payload: torch.Tensor, numel: int, itemsize: int, where: str = "") -> None:
    """Raises `DamagedFileError` where the structure of a payload does not fit a tensor.

    Args:
        payload: The payload.
        numel: The number of elements of the tensor.
        itemsize: The bytes of an element.
        where: The file and the name of the tensor, for messages.
    """
    if not payload.numel():
        return
    data, count = payload.numpy(), -(-numel // BLOCK_ELEMENTS)
    if len(data) < _HEADER_BYTES + count * _ENTRY_BYTES or int(data[:_HEADER_BYTES].view("<u8")[0]) != numel:
        raise _damaged(f"{len(data)} bytes that do not begin with the directory of {numel} elements", where)
    _, blocks, starts = _directory(data)
    elements = np.full(count, BLOCK_ELEMENTS)
    elements[-1:] = numel - (count - 1) * BLOCK_ELEMENTS
    gaps, steps, large = blocks[..., 0].T
    if starts[-1] != len(data):
        raise _damaged(f"{len(data)} bytes, of which the directory describes {starts[-1]}", where)
    if (blocks[..., 1] > blocks[..., 0]).any() or (gaps > elements).any() or (steps > gaps).any():
        raise _damaged("a stream that is longer than its block", where)
    if (large > steps * itemsize).any() or (large % itemsize).any():
        raise _damaged("differences that no step refers to", where)


def patched(base: Stored, payloads: Sequence[StoredTensor]) -> Combined:
    """Returns a tensor with payloads applied to it in their order, to be computed when it is read."""

    def begin(whole: Sequence[torch.Tensor], _: Allocate) -> FillBlock:
        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
            if blocks[0].data_ptr() != out.data_ptr():
                out.copy_(blocks[0])
            for payload in whole:
                apply(payload, out, first)

        return fill

    numel = math.prod(base.shape)
    build = Blocks(begin, len(payloads), scratch_bytes=min(numel, BLOCK_ELEMENTS) * (16 + base.dtype.itemsize))
    return Combined(f"patched {len(payloads)} times", base.dtype, tuple(base.shape), (base, *payloads), build)


def _bits(tensor: torch.Tensor) -> Bits:
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    bits: Bits = flat.view(_INTEGERS[tensor.dtype.itemsize])
    return bits


def _split(bits: Bits) -> Iterator[Bits]:
    return (bits[first : first + BLOCK_ELEMENTS] for first in range(0, len(bits), BLOCK_ELEMENTS))


def _changes(old: Bits, new: Bits) -> Changes:
    positions = np.flatnonzero(old != new)
    return Changes(positions, new[positions] - old[positions])


def _encoded(blocks: Iterator[Changes], numel: int, itemsize: int) -> torch.Tensor | None:
    directory, streams, changed, nbytes = list[list[tuple[int, int]]](), list[bytes](), 0, _HEADER_BYTES
    for found in blocks:
        changed += len(found.positions)
        entries = []
        for plain in _streams(found):
            stored = zstd.compress(plain, _LEVEL)
            stored = stored if len(stored) < len(plain) else plain
            entries.append((len(plain), len(stored)))
            streams.append(stored)
        directory.append(entries)
        nbytes += _ENTRY_BYTES + sum(stored for _, stored in entries)
        if changed and (changed > numel * _MOST_CHANGED or nbytes >= numel * itemsize):
            return None
    if not changed:
        return torch.empty(0, dtype=torch.uint8)
    parts = [np.array(numel, "<u8").tobytes(), np.array(directory, "<u4").tobytes(), *streams]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _streams(found: Changes) -> tuple[bytes, bytes, bytes]:
    """The streams of a block."""
    gaps = np.diff(found.positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1)
    in_bytes = np.full(ends[-1] if len(ends) else 0, _ESCAPE, np.uint8)
    in_bytes[ends - 1] = gaps % _ESCAPE
    differences = found.differences
    itemsize = differences.itemsize
    zigzag = ((differences << 1) ^ (differences >> (8 * itemsize - 1))).view(f"u{itemsize}")
    large = differences[zigzag >= _ESCAPE].astype(f"<i{itemsize}")
    return in_bytes.tobytes(), np.minimum(zigzag, _ESCAPE).astype(np.uint8).tobytes(), large.tobytes()


def _directory(data: _Bytes) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """The elements of the tensor; the plain and stored bytes of each stream of each block; where each block begins.

    The beginnings have one entry more, the end of the last block.
    """
    numel = int(data[:_HEADER_BYTES].view("<u8")[0])
    count = -(-numel // BLOCK_ELEMENTS)
    end = _HEADER_BYTES + count * _ENTRY_BYTES
    blocks = data[_HEADER_BYTES:end].view("<u4").reshape(count, _STREAMS, 2).astype(np.int64)
    return numel, blocks, end + np.cumsum(np.append(0, blocks[..., 1].sum(axis=1)))


def _decoded(entries: NDArray[np.int64], data: _Bytes, dtype: np.dtype[np.signedinteger], elements: int) -> Changes:
    """The changes of a block, which has so many elements. Raises `DamagedFileError`."""
    streams, start = list[_Bytes](), 0
    for plain, stored in entries.tolist():
        streams.append(_decompressed(data[start : start + stored], plain))
        start += stored
    gaps, steps, large = streams
    ends = np.flatnonzero(gaps != _ESCAPE)
    escaped = np.flatnonzero(steps == _ESCAPE)
    if len(ends) != len(steps) or len(escaped) * dtype.itemsize != len(large):
        raise _damaged("streams that do not belong together")
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(positions) and positions[-1] >= elements:
        raise _damaged("a position behind the end of a block")
    differences = _STEPS.astype(dtype)[steps]
    differences[escaped] = large.view(f"<i{dtype.itemsize}")
    return Changes(positions, differences)


def _decompressed(stored: _Bytes, nbytes: int) -> _Bytes:
    """The plain bytes of a stream. Raises `DamagedFileError` where there are not so many."""
    if len(stored) == nbytes:
        return stored
    decompressor = zstd.ZstdDecompressor()
    try:
        # One byte more than expected, so that the end of the data is read. A stream cannot take more memory than that.
        plain = decompressor.decompress(stored.data, nbytes + 1)
    except zstd.ZstdError as error:
        raise _damaged(str(error)) from error
    if len(plain) != nbytes or not decompressor.eof or decompressor.unused_data:
        raise _damaged(f"a stream of another length than {nbytes} bytes")
    return np.frombuffer(plain, np.uint8)


def _damaged(found: str, where: str = "") -> DamagedFileError:
    return DamagedFileError("the payload of a delta is damaged", where=where, found=found)
