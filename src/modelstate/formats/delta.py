"""The difference of two tensors of one dtype and shape: which elements changed, and by how much, bit for bit.

A payload is a sequence of bytes. The elements are divided into blocks, each of which is encoded by itself, so that a
block of elements is computed from one block of the payload. A change is the difference of the bits of an element as
integers, modulo 2 to the number of bits: floats of one sign are in the order of their bits, so a small step of a weight
is a small integer. docs/delta_format.md has the format byte for byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from modelstate.errors import DamagedFileError
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored, StoredTensor
from modelstate.torch_compat.plain import byte_tensor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_ELEMENTS = 1 << 20
"""The elements of a block: as many as a thread computes at once (`spec.block_elements`)."""

Bits: TypeAlias = "NDArray[np.signedinteger]"
"""The bits of elements, as integers of their size."""
_Bytes: TypeAlias = "NDArray[np.uint8]"

_INTEGERS: dict[int, np.dtype[np.signedinteger]] = {size: np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}
"""By the size of an element in bytes."""
_LONG_GAP = 255
"""A byte of a gap that adds 255, and after which the gap goes on."""
_ESCAPE_4, _ESCAPE_8 = 15, 255
"""The codes of 4 and of 8 bits that say: the code is in the next stream."""
_DIFFERENCES = {
    dtype: np.array([(code >> 1) ^ -(code & 1) for code in range(256)], dtype) for dtype in _INTEGERS.values()
}
"""The difference of each code, for each dtype."""
_PAIRS = {dtype: of[[[byte & 15, byte >> 4] for byte in range(256)]] for dtype, of in _DIFFERENCES.items()}
"""The differences of the two codes of 4 bits in each byte."""
_CHANGES_AT_ONCE = BLOCK_ELEMENTS // 8
"""Of several payloads, so many changes are collected before they are applied."""
_NUMEL_BYTES, _ENTRY_BYTES = 8, 8
"""The directory is the number of elements, and an entry for each block."""
_OPTIONS: dict[int, int] = {
    # A match by chance, of a few bytes that have few values, takes more bits than their Huffman codes.
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.min_match: 7,
    zstd.CompressionParameter.hash_log: 6,
}


class Changes(NamedTuple):
    """The elements in which two tensors differ."""

    positions: NDArray[np.int64]
    """The indices of the elements, in ascending order."""
    differences: Bits
    """The bits after minus the bits before, modulo 2 to the number of bits."""


def advance(copy: torch.Tensor, values: torch.Tensor, most_bytes: int) -> tuple[torch.Tensor, int] | None:
    """Turns `copy` into `values`: contiguous tensors of the CPU, of one dtype and shape.

    The payload and the copy get the same changes, even where `values` are being changed meanwhile.

    Returns:
        The payload that does this, which has no bytes where nothing changed, and the number of elements that changed.
        None where the payload would have more than `most_bytes`, or an element has more than 8 bytes. The copy may
        have some of the changes then.
    """
    if values.dtype.itemsize not in _INTEGERS:
        return None
    (bits, old), (_, new) = _bits(copy), _bits(values)
    directory, frames, changed, left = list[tuple[int, int]](), list[bytes](), 0, most_bytes - _NUMEL_BYTES
    for first in range(0, len(new), BLOCK_ELEMENTS):
        block = slice(first, first + BLOCK_ELEMENTS)
        found = _changes(old[block], new[block])
        frame, gap_bytes = _frame(found) if len(found.positions) else (b"", 0)
        frames.append(frame)
        directory.append((len(frame), gap_bytes))
        left -= _ENTRY_BYTES + len(frame)
        if left < 0 and any(frames):
            return None
        changed += _add(bits[block], [found])
    return byte_tensor(b"".join([head(len(new), directory), *frames]) if changed else b""), changed


class Directory(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """What a payload says of its blocks: see docs/delta_format.md."""

    numel: int
    blocks: NDArray[np.int64]
    """For each block the bytes of its frame, and of its gaps."""
    starts: NDArray[np.int64]
    """Where each frame begins in the payload, and at the end where the last one ends."""

    def frames(self, first: int, last: int) -> tuple[int, int]:
        """Returns the bytes of a payload that have the changes of the elements from `first` to before `last`."""
        if first == last or not len(self.blocks):
            return 0, 0
        return int(self.starts[first // BLOCK_ELEMENTS]), int(self.starts[-(-last // BLOCK_ELEMENTS)])


def apply(payload: torch.Tensor, out: torch.Tensor, first: int) -> int:
    """Applies a payload to `out`: flat elements of a tensor, from the element with the index `first` on.

    Only the blocks that have elements of `out` are decoded. Returns and raises as `apply_frames`.
    """
    directory = _directory(payload.numpy())
    begin, end = directory.frames(first, first + out.numel())
    return apply_frames([directory], [payload[begin:end]], out, first)


def apply_frames(
    directories: Sequence[Directory], frames: Sequence[torch.Tensor], out: torch.Tensor, first: int
) -> int:
    """Applies payloads as `apply`. Of each one, `frames` are the bytes that `Directory.frames` names for `out`.

    The order of payloads makes no difference: their differences are added.

    Returns the number of changes. Raises `DamagedFileError` for a block that cannot be decoded; others may be changed.
    """
    bits, old = _bits(out)
    last, changed, waiting = first + len(old), 0, list[Changes]()
    for directory, of_directory in zip(directories, frames, strict=True):
        data, begin = of_directory.numpy(), directory.frames(first, last)[0]
        for block in range(first // BLOCK_ELEMENTS, -(-last // BLOCK_ELEMENTS)) if len(data) else ():
            frame_bytes, gap_bytes = directory.blocks[block].tolist()
            if frame_bytes:
                start, at = block * BLOCK_ELEMENTS - first, int(directory.starts[block]) - begin
                indices = range(start, min(start + BLOCK_ELEMENTS, directory.numel - first))
                found = _decoded(data[at : at + frame_bytes], gap_bytes, indices, old.dtype)
                inside = slice(*np.searchsorted(found.positions, (0, len(old))))
                waiting.append(Changes(found.positions[inside], found.differences[inside]))
                if sum(len(each.positions) for each in waiting) >= _CHANGES_AT_ONCE:
                    changed += _add(bits, waiting)
                    waiting.clear()
    return changed + _add(bits, waiting)


def check(payload: torch.Tensor, numel: int, itemsize: int, where: str = "") -> Directory:
    """Returns the directory of a payload. Raises `DamagedFileError` where it does not fit the payload and the tensor.

    Args:
        payload: The payload.
        numel: The number of elements of the tensor.
        itemsize: The bytes of an element.
        where: The file and the name of the tensor, for messages.
    """
    data, directory_bytes = payload.numpy(), _NUMEL_BYTES + -(-numel // BLOCK_ELEMENTS) * _ENTRY_BYTES
    if len(data):
        is_too_short = itemsize not in _INTEGERS or len(data) < directory_bytes
        if is_too_short or int(data[:_NUMEL_BYTES].view("<u8")[0]) != numel:
            raise _damaged(f"{len(data)} bytes that are not for {numel} elements of {itemsize} bytes", where)
    directory = _directory(data)
    if directory.starts[-1] != len(data):
        raise _damaged(f"{len(data)} bytes; its directory describes {directory.starts[-1]}", where)
    return directory


def patched(
    base: Stored, position: int = 0, *, payloads: Sequence[StoredTensor], directories: Sequence[Directory]
) -> Combined:
    """Returns a tensor with the payloads from a position on applied to it in their order, when it is read."""
    payloads, directories = payloads[position:], directories[position:]

    def starting_at(origin: int) -> Blocks:
        def begin(_: Sequence[torch.Tensor], __: Allocate) -> FillBlock:
            def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
                if blocks[0].data_ptr() != out.data_ptr():
                    out.copy_(blocks[0])
                apply_frames(directories, blocks[1:], out, origin + first)

            return fill

        def pieces(first: int, last: int) -> list[tuple[int, int]]:
            return [directory.frames(origin + first, origin + last) for directory in directories]

        return Blocks(
            begin, len(payloads), 1, scratch_bytes, pieces, piece_bytes, starting_at=lambda at: starting_at(origin + at)
        )

    scratch_bytes = min(math.prod(base.shape), BLOCK_ELEMENTS) * (24 + 2 * base.dtype.itemsize)
    # A region may have elements of two blocks in each block that is computed.
    piece_bytes = sum(2 * int(max(directory.blocks[:, 0], default=0)) for directory in directories)
    kind = f"patched {len(payloads)} times"
    return Combined(kind, base.dtype, tuple(base.shape), (base, *payloads), starting_at(0))


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor, Bits]:
    """The bits of elements, as a tensor and as an array of the same memory."""
    dtype = _INTEGERS[tensor.dtype.itemsize]
    bits = tensor.detach().reshape(-1).view(getattr(torch, dtype.name))
    return bits, bits.numpy()


def _add(bits: torch.Tensor, changes: Sequence[Changes]) -> int:
    """Adds the differences. Returns their number."""
    if not changes:
        return 0
    positions, differences = changes[0] if len(changes) == 1 else map(np.concatenate, zip(*changes, strict=True))
    bits.scatter_add_(0, torch.from_numpy(positions), torch.from_numpy(differences))
    return len(positions)


def _changes(old: Bits, new: Bits) -> Changes:
    differences = new - old
    # Words of 8 flags: few of them have a change, so the second search is in a small part of the flags.
    is_changed = np.zeros((-(-len(new) // 8), 8), bool)
    np.not_equal(differences, 0, out=is_changed.reshape(-1)[: len(new)])
    (words,) = (is_changed.view(np.int64)[:, 0] != 0).nonzero()
    (flags,) = is_changed.take(words, axis=0).reshape(-1).nonzero()
    positions = words.take(flags >> 3) * 8 + (flags & 7)
    return Changes(positions, differences.take(positions))


def head(numel: int, blocks: Iterable[Sequence[int]]) -> bytes:
    """Returns what is before the frames of a payload: the number of elements, and `Directory.blocks`."""
    return np.array(numel, "<u8").tobytes() + np.array([*blocks], "<u4").tobytes()


def _frame(found: Changes) -> tuple[bytes, int]:
    """The zstd frame of a block, and the number of bytes of its gaps."""
    gaps = np.diff(found.positions, prepend=-1) - 1
    long = np.flatnonzero(gaps >= _LONG_GAP)
    more, gaps[long] = np.divmod(gaps[long], _LONG_GAP)
    of_gaps = np.insert(gaps.astype(np.uint8), np.repeat(long, more), _LONG_GAP)
    itemsize = found.differences.itemsize
    codes = (found.differences << 1 ^ found.differences >> 8 * itemsize - 1).view(f"<u{itemsize}")
    nibbles = np.zeros(len(codes) + len(codes) % 2, np.uint8)
    nibbles[: len(codes)] = np.minimum(codes, _ESCAPE_4)
    codes = codes[codes >= _ESCAPE_4]
    streams = [
        of_gaps,
        nibbles[::2] | nibbles[1::2] << 4,
        np.minimum(codes, _ESCAPE_8).astype(np.uint8),
        codes[codes >= _ESCAPE_8],
    ]
    compressor = zstd.ZstdCompressor(options=_OPTIONS)
    compressor.set_pledged_input_size(sum(stream.nbytes for stream in streams))
    # A zstd block for each stream, which gives it Huffman codes of its own.
    parts = [compressor.compress(stream.tobytes(), compressor.FLUSH_BLOCK) for stream in streams if len(stream)]
    return b"".join([*parts, compressor.flush()]), len(of_gaps)


def _directory(data: _Bytes) -> Directory:
    if not len(data):
        return Directory(0, np.zeros((0, 2), np.int64), np.zeros(1, np.int64))
    numel = int(data[:_NUMEL_BYTES].view("<u8")[0])
    end = _NUMEL_BYTES + -(-numel // BLOCK_ELEMENTS) * _ENTRY_BYTES
    blocks = data[_NUMEL_BYTES:end].view("<u4").reshape(-1, 2).astype(np.int64)
    return Directory(numel, blocks, end + np.cumsum(np.append(0, blocks[:, 0])))


def _decoded(frame: _Bytes, gap_bytes: int, indices: range, dtype: np.dtype[np.signedinteger]) -> Changes:
    """The changes of a block, whose elements have these indices. Raises `DamagedFileError`."""
    decompressor = zstd.ZstdDecompressor()
    try:
        plain = np.frombuffer(decompressor.decompress(frame.data, len(indices) * (3 + dtype.itemsize)), np.uint8)
    except zstd.ZstdError as error:
        raise _damaged(str(error)) from error
    gaps = plain[:gap_bytes]
    is_end = gaps != _LONG_GAP
    positions = (gaps + is_end).cumsum(dtype=np.int64)[is_end]
    positions += indices.start - 1
    end_4 = gap_bytes + (len(positions) + 1) // 2
    differences = _PAIRS[dtype].take(plain[gap_bytes:end_4], axis=0).reshape(-1)[: len(positions)]
    (escaped,) = (differences == _DIFFERENCES[dtype][_ESCAPE_4]).nonzero()
    end_8 = end_4 + len(escaped)
    codes = plain[end_4:end_8]
    escaped_again = escaped[: len(codes)][codes == _ESCAPE_8]
    end = end_8 + len(escaped_again) * dtype.itemsize
    is_complete = decompressor.eof and not decompressor.unused_data and end == len(plain)
    if not is_complete or not len(positions) or positions[-1] >= indices.stop:
        raise _damaged("a block of other streams than its directory describes")
    differences[escaped] = _DIFFERENCES[dtype][codes]
    large = plain[end_8:].view(f"<u{dtype.itemsize}")
    differences[escaped_again] = (large >> 1 ^ -(large & 1)).view(dtype)
    return Changes(positions, differences)


def _damaged(found: str, where: str = "") -> DamagedFileError:
    return DamagedFileError("the payload of a delta is damaged", where=where, found=found)
