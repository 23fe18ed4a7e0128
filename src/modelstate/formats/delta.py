"""The difference of two tensors of one dtype and shape: which elements changed, and by how much, bit for bit.

A payload is a sequence of bytes. The elements are divided into blocks, each of which is encoded by itself, so that a
block of elements is computed from one block of the payload. A change is the difference of the bits of an element as
integers, modulo 2 to the number of bits: floats of one sign are in the order of their bits, so a small step of a weight
is a small integer. docs/delta_format.md has the format byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from modelstate.errors import DamagedFileError
from modelstate.io.memory import empty_cpu
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored
from modelstate.torch_compat.plain import byte_tensor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_ELEMENTS = 1 << 21
"""The elements of a block, which a thread computes at once. The threads of Python wait for each other between calls of
NumPy: with smaller blocks, two threads were measured to be no faster than one."""

Bits: TypeAlias = "NDArray[np.signedinteger]"
"""The bits of elements, as integers of their size."""
_Bytes: TypeAlias = "NDArray[np.uint8]"

_INTEGERS: dict[int, np.dtype[np.signedinteger]] = {size: np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}
"""By the size of an element in bytes."""
_LONGEST_STEP = (1 << 12) - 1
"""From one entry to the next. Where changes are farther apart, entries without a change lie between them."""
_ESCAPE_4, _ESCAPE_8 = -8, -128
"""The differences of 4 and of 8 bits that say: the difference is in the next stream."""
_SEARCHED_ELEMENTS = 1 << 19
"""The elements in which changes are searched at once: they fit into the cache of a processor."""
_ENTRIES_AT_ONCE = 1 << 17
"""From so many entries on, those of several frames are added."""
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


class Difference(NamedTuple):
    """What turns a tensor into another one."""

    frames: list[bytes]
    """For each block its frame; empty where nothing changed."""
    blocks: list[tuple[int, int]]
    """`Directory.blocks` of the payload."""
    changed: int
    """The number of elements."""

    def payload(self, numel: int) -> torch.Tensor:
        """Returns the payload for a tensor of `numel` elements; without bytes where nothing changed."""
        return byte_tensor(b"".join([head(numel, self.blocks), *self.frames]) if self.changed else b"")


def advance(copy: torch.Tensor, values: torch.Tensor, most_bytes: int) -> Difference | None:
    """Turns `copy` into `values`: contiguous tensors of the CPU, of one dtype and shape.

    The difference and the copy get the same changes, even where `values` are being changed meanwhile.

    Returns:
        What does this. None where the payload would have more than `most_bytes`, or an element has more than 8 bytes.
        The copy may have some of the changes then.
    """
    if values.dtype.itemsize not in _INTEGERS:
        return None
    old, new = _bits(copy).numpy(), _bits(values).numpy()
    frames, blocks, changed, left = list[bytes](), list[tuple[int, int]](), 0, most_bytes - _NUMEL_BYTES
    for first in range(0, len(new), BLOCK_ELEMENTS):
        found = _advanced(old[first : first + BLOCK_ELEMENTS], new[first : first + BLOCK_ELEMENTS])
        frame, entries = _frame(found) if len(found.positions) else (b"", 0)
        frames.append(frame)
        blocks.append((len(frame), entries))
        changed += len(found.positions)
        left -= _ENTRY_BYTES + len(frame)
        if left < 0 and changed:
            return None
    return Difference(frames, blocks, changed)


class Directory(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """What a payload says of its blocks: see docs/delta_format.md."""

    numel: int
    blocks: NDArray[np.int64]
    """For each block the bytes of its frame, and the number of its entries."""
    starts: NDArray[np.int64]
    """Where each frame begins in the payload, and at the end where the last one ends."""

    def frames(self, first: int, last: int) -> tuple[int, int]:
        """Returns the bytes of a payload that have the changes of the elements from `first` to before `last`."""
        if first == last or not len(self.blocks):
            return 0, 0
        return int(self.starts[first // BLOCK_ELEMENTS]), int(self.starts[-(-last // BLOCK_ELEMENTS)])


def apply(payload: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Applies a payload to `out`: flat elements of a tensor, from the element with the index `first` on.

    Only the blocks that have elements of `out` are decoded. Raises as `Adder.add`.
    """
    directory = _directory(payload.numpy())
    begin, end = directory.frames(first, first + out.numel())
    Adder([directory], out.dtype, empty_cpu).add([payload[begin:end]], out, first)


class Adder:
    """Adds the differences of payloads to elements of a tensor. Their order makes no difference.

    The entries of several frames are computed together, in few calls of NumPy and in the same memory.

    Args:
        directories: Those of the payloads.
        dtype: The dtype of the elements.
        allocate: Allocates memory for entries: `scratch_bytes` in all.
    """

    def __init__(self, directories: Sequence[Directory], dtype: torch.dtype, allocate: Allocate) -> None:
        self._directories, entries = directories, (_most_entries(directories),)
        self._positions, self._steps = allocate(entries, torch.int64), allocate(entries, torch.int32).numpy()
        self._differences = _bits(allocate(entries, dtype))
        self._high = allocate(entries, torch.int8).numpy()

    @staticmethod
    def scratch_bytes(directories: Sequence[Directory], itemsize: int) -> int:
        """Returns the memory that adding takes, with that of frames that are decompressed."""
        return _most_entries(directories) * (19 + 3 * itemsize)

    def add(self, frames: Sequence[torch.Tensor], out: torch.Tensor, first: int) -> None:
        """Adds the differences to `out`: flat elements, from the element with the index `first` on.

        Of each payload, `frames` are the bytes that `Directory.frames` names for `out`.

        Raises `DamagedFileError` for a block that cannot be decoded; others may be changed.
        """
        bits, waiting, entries_waiting = _bits(out), list[_Frame](), 0
        last = first + len(bits)
        for directory, of_directory in zip(self._directories, frames, strict=True):
            data, begin = of_directory.numpy(), directory.frames(first, last)[0]
            for block in range(first // BLOCK_ELEMENTS, -(-last // BLOCK_ELEMENTS)) if len(data) else ():
                frame_bytes, entries = directory.blocks[block].tolist()
                if frame_bytes:
                    start, at = block * BLOCK_ELEMENTS - first, int(directory.starts[block]) - begin
                    indices = range(start, min(start + BLOCK_ELEMENTS, directory.numel - first))
                    content = _content(data[at : at + frame_bytes], entries, bits.itemsize)
                    waiting.append(_Frame(content, entries, indices))
                    entries_waiting += entries
                    if entries_waiting >= _ENTRIES_AT_ONCE:
                        self._add(bits, waiting)
                        waiting, entries_waiting = [], 0
        if waiting:
            self._add(bits, waiting)

    def _add(self, bits: torch.Tensor, frames: Sequence[_Frame]) -> None:
        # Numbers of frames are in lists: there are few, and a call of NumPy takes as long as a thousand entries.
        counts = [frame.entries for frame in frames]
        ends = [*accumulate(counts)]
        starts, count = [0, *ends[:-1]], ends[-1]
        positions, steps, high = self._positions.numpy()[:count], self._steps[:count], self._high[:count]
        low = positions.view(np.int32)[:count]  # before there are positions
        np.concatenate([frame.content[: frame.entries] for frame in frames], out=low)
        np.concatenate([frame.content[frame.entries : 2 * frame.entries] for frame in frames], out=high)
        steps[:] = high
        steps &= 15
        steps <<= 8
        steps += low
        spans = np.add.reduceat(steps, starts, dtype=np.int64).tolist()
        is_right, last, shifts = True, 0, list[int]()
        for frame, first, span in zip(frames, steps[starts].tolist(), spans, strict=True):
            # The first step in a block is from the last position in the block before.
            before = frame.indices.start - 1
            shifts.append(before - last)
            last = before + span
            is_right = is_right and first > 0 and last < frame.indices.stop
        steps[starts] += shifts
        steps.cumsum(out=positions)
        differences = self._differences.numpy()[:count]
        differences[:] = high
        differences >>= 4
        (escaped_4,) = np.less(high, (_ESCAPE_4 + 1) << 4, out=steps.view(np.bool_)[:count]).nonzero()
        until_4 = escaped_4.searchsorted(ends)
        ends_8 = [2 * entries + more for entries, more in zip(counts, _numbers(until_4), strict=True)]
        of_8 = [frame.content[2 * frame.entries : end] for frame, end in zip(frames, ends_8, strict=True)]
        codes = np.concatenate(of_8).view(np.int8)
        (escaped_8,) = (codes == _ESCAPE_8).nonzero()
        last_bytes = [number * bits.itemsize for number in _numbers(escaped_8.searchsorted(until_4))]
        sizes = [end + nbytes for end, nbytes in zip(ends_8, last_bytes, strict=True)]
        if not is_right or sizes != [len(frame.content) for frame in frames]:
            raise _damaged("a block of other streams than its directory describes")
        differences[escaped_4] = codes
        if len(escaped_8):
            whole = np.concatenate([frame.content[end:] for frame, end in zip(frames, ends_8, strict=True)])
            differences[escaped_4[escaped_8]] = whole.view(differences.dtype)
        index, source = self._positions[:count], self._differences[:count]
        if min(frame.indices.start for frame in frames) < 0 or max(frame.indices.stop for frame in frames) > len(bits):
            is_inside = (index >= 0) & (index < len(bits))
            index, source = index[is_inside], source[is_inside]
        bits.scatter_add_(0, index, source)


def _numbers(until: NDArray[np.int64]) -> list[int]:
    """How many there are of each frame, from how many there are until its end."""
    ends = until.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


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
    if directory.blocks.max(initial=0, axis=0)[1] > BLOCK_ELEMENTS:
        raise _damaged("a block of more entries than elements", where)
    if directory.starts[-1] != len(data):
        raise _damaged(f"{len(data)} bytes; its directory describes {directory.starts[-1]}", where)
    return directory


def patched(
    base: Stored, position: int = 0, *, payloads: Sequence[Stored], directories: Sequence[Directory]
) -> Combined:
    """Returns a tensor with the payloads from a position on applied to it in their order, when it is read."""
    payloads, directories = payloads[position:], directories[position:]

    def starting_at(origin: int) -> Blocks:
        def begin(_: Sequence[torch.Tensor], allocate: Allocate) -> FillBlock:
            adder = Adder(directories, base.dtype, allocate)

            def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
                if blocks[0].data_ptr() != out.data_ptr():
                    out.copy_(blocks[0])
                adder.add(blocks[1:], out, origin + first)

            return fill

        def pieces(first: int, last: int) -> list[tuple[int, int]]:
            return [directory.frames(origin + first, origin + last) for directory in directories]

        return Blocks(
            *(begin, len(payloads), BLOCK_ELEMENTS, scratch_bytes, pieces, piece_bytes),
            starting_at=lambda at: starting_at(origin + at),
        )

    scratch_bytes = Adder.scratch_bytes(directories, base.dtype.itemsize)
    # A region may have elements of two blocks in each block that is computed.
    piece_bytes = sum(2 * int(directory.blocks[:, 0].max(initial=0)) for directory in directories)
    kind = f"patched {len(payloads)} times"
    return Combined(kind, base.dtype, tuple(base.shape), (base, *payloads), starting_at(0))


def _most_entries(directories: Sequence[Directory]) -> int:
    """The most entries that are added at once."""
    entries = [directory.blocks[:, 1] for directory in directories]
    most = max((int(each.max(initial=0)) for each in entries), default=0)
    return min(_ENTRIES_AT_ONCE + most, sum(int(each.sum()) for each in entries))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(getattr(torch, _INTEGERS[tensor.dtype.itemsize].name))


def _advanced(old: Bits, new: Bits) -> Changes:
    """Turns `old` into `new`. Returns what has changed."""
    found, size = list[Changes](), 16 // old.itemsize
    for first in range(0, len(old), _SEARCHED_ELEMENTS):
        stop = min(first + _SEARCHED_ELEMENTS, len(old))
        whole = slice(first, stop - (stop - first) % size)
        # Words of 16 bytes: there are fewer of them than elements, and few of them have changed.
        is_changed = (old[whole].view(np.int64) != new[whole].view(np.int64)).view(np.int16) != 0
        (words,) = is_changed.nonzero()
        old_words, new_words = old[whole].view(np.complex128), new[whole].view(np.complex128)
        before, after = old_words.take(words), new_words.take(words)
        old_words[words] = after
        differences = after.view(old.dtype) - before.view(old.dtype)
        (changed,) = (differences != 0).nonzero()
        positions = words.take(changed // size)
        positions *= size
        positions += changed % size
        positions += first
        found.append(Changes(positions, differences.take(changed)))
        if whole.stop < stop:
            rest = slice(whole.stop, stop)
            differences = new[rest] - old[rest]
            old[rest] += differences
            (changed,) = differences.nonzero()
            found.append(Changes(changed + rest.start, differences.take(changed)))
    return Changes(*map(np.concatenate, zip(*found, strict=True)))


def head(numel: int, blocks: Iterable[Sequence[int]]) -> bytes:
    """Returns what is before the frames of a payload: the number of elements, and `Directory.blocks`."""
    return np.array(numel, "<u8").tobytes() + np.array([*blocks], "<u4").tobytes()


def _frame(found: Changes) -> tuple[bytes, int]:
    """The zstd frame of a block, and the number of its entries."""
    differences, steps = found.differences, np.diff(found.positions, prepend=-1)
    (long,) = (steps > _LONGEST_STEP).nonzero()
    if len(long):
        more, rest = np.divmod(steps[long] - 1, _LONGEST_STEP)
        steps[long], long = rest + 1, np.repeat(long, more)
        steps, differences = np.insert(steps, long, _LONGEST_STEP), np.insert(differences, long, 0)
    steps, fits_4 = steps.astype(np.uint16), _fits(differences, _ESCAPE_4)
    high = np.where(fits_4, differences, _ESCAPE_4).astype(np.uint8) << 4 | (steps >> 8).astype(np.uint8)
    large = differences[~fits_4]
    fits_8 = _fits(large, _ESCAPE_8)
    streams = [steps.astype(np.uint8), high, np.where(fits_8, large, _ESCAPE_8).astype(np.int8), large[~fits_8]]
    compressor = zstd.ZstdCompressor(options=_OPTIONS)
    compressor.set_pledged_input_size(sum(stream.nbytes for stream in streams))
    # A zstd block for each stream, which gives it Huffman codes of its own.
    parts = [compressor.compress(stream.tobytes(), compressor.FLUSH_BLOCK) for stream in streams if len(stream)]
    return b"".join([*parts, compressor.flush()]), len(steps)


def _fits(differences: Bits, escape: int) -> NDArray[np.bool_]:
    return (differences > escape) & (differences < -escape)


def _directory(data: _Bytes) -> Directory:
    if not len(data):
        return Directory(0, np.zeros((0, 2), np.int64), np.zeros(1, np.int64))
    numel = int(data[:_NUMEL_BYTES].view("<u8")[0])
    end = _NUMEL_BYTES + -(-numel // BLOCK_ELEMENTS) * _ENTRY_BYTES
    blocks = data[_NUMEL_BYTES:end].view("<u4").reshape(-1, 2).astype(np.int64)
    return Directory(numel, blocks, end + np.cumsum(np.append(0, blocks[:, 0])))


class _Frame(NamedTuple):
    """A frame that is decompressed."""

    content: _Bytes
    entries: int
    indices: range
    """The elements of the block."""


def _content(frame: _Bytes, entries: int, itemsize: int) -> _Bytes:
    """Decompresses a frame. Raises `DamagedFileError`."""
    decompressor = zstd.ZstdDecompressor()
    try:
        content = decompressor.decompress(frame.data, entries * (3 + itemsize))
    except zstd.ZstdError as error:
        raise _damaged(str(error)) from error
    if not decompressor.eof or decompressor.unused_data or not 0 < 2 * entries <= len(content):
        raise _damaged("a block of other streams than its directory describes")
    return np.frombuffer(content, np.uint8)


def _damaged(found: str, where: str = "") -> DamagedFileError:
    return DamagedFileError("the payload of a delta is damaged", where=where, found=found)
