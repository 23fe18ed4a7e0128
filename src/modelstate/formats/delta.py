"""The difference of two tensors of one dtype and shape: which elements changed, and by how much, bit for bit.

A payload is a sequence of bytes. The elements are divided into blocks, each of which is encoded by itself, so that a
block of elements is computed from one block of the payload. A change is the difference of the bits of an element as
integers, modulo 2 to the number of bits: floats of one sign are in the order of their bits, so a small step of a weight
is a small integer. docs/delta_format.md has the format byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from modelstate.errors import DamagedFileError
from modelstate.io.engine import memory_at
from modelstate.io.memory import empty_cpu
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored
from modelstate.torch_compat.plain import byte_tensor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_ELEMENTS = 1 << 21
"""The elements of a block."""

Bits: TypeAlias = "NDArray[np.signedinteger]"
"""The bits of elements, as integers of their size."""
_Bytes: TypeAlias = "NDArray[np.uint8]"

_INTEGERS: dict[int, np.dtype[np.signedinteger]] = {size: np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}
"""By the size of an element in bytes."""
_SEARCHED_BYTES = 1 << 20
"""The bytes in which changes are searched at once: they fit into the cache of a processor."""
_BLOCKS_AT_ONCE, _ENTRIES_AT_ONCE = 4, 1 << 17
"""A thread reads so many blocks at once, and adds the entries of several frames together, up to so many: threads of
Python wait for each other between calls of NumPy, so that two were no faster than one with shorter calls."""
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
    old, new = _bits(copy), _bits(values)
    frames, blocks, changed, left = list[bytes](), list[tuple[int, int]](), 0, most_bytes - _NUMEL_BYTES
    for first in range(0, len(new), BLOCK_ELEMENTS):
        found = _advanced(old[first : first + BLOCK_ELEMENTS], new[first : first + BLOCK_ELEMENTS])
        count, elements = len(found.positions), min(BLOCK_ELEMENTS, len(new) - first)
        frame, entries = _encoded(found, elements, _step_bits(count, elements)) if count else (b"", 0)
        frames.append(frame)
        blocks.append((len(frame), entries))
        changed += count
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

    Args:
        directories: Those of the payloads.
        dtype: The dtype of the elements.
        allocate: Allocates memory: `scratch_bytes` in all.
    """

    def __init__(self, directories: Sequence[Directory], dtype: torch.dtype, allocate: Allocate) -> None:
        self._directories, entries = directories, _most_entries(directories)
        self._steps, self._positions = allocate((2, entries), torch.int64).numpy()
        self._differences = allocate((entries,), getattr(torch, _INTEGERS[dtype.itemsize].name)).numpy()

    @staticmethod
    def scratch_bytes(directories: Sequence[Directory], itemsize: int) -> int:
        """Returns the memory that adding takes, with that of frames that are decompressed."""
        return _most_entries(directories) * (40 + 3 * itemsize)

    def add(self, frames: Sequence[torch.Tensor], out: torch.Tensor, first: int) -> None:
        """Adds the differences to `out`: flat elements, from the element with the index `first` on.

        Of each payload, `frames` are the bytes that `Directory.frames` names for `out`.

        Raises `DamagedFileError` for a block that cannot be decoded; others may be changed.
        """
        elements, last = _bits(out), first + out.numel()
        memory = [memory_at(data.data_ptr(), data.nbytes) for data in frames]
        begins = [directory.frames(first, last)[0] for directory in self._directories]
        of_bits: dict[int, list[_Frame]] = {8: [], 12: []}
        for block in range(first // BLOCK_ELEMENTS, -(-last // BLOCK_ELEMENTS)):
            start = block * BLOCK_ELEMENTS
            for directory, data, begin in zip(self._directories, memory, begins, strict=True):
                nbytes, entries = directory.blocks[block].tolist() if len(data) else (0, 0)
                if nbytes:
                    at, length = int(directory.starts[block]) - begin, min(BLOCK_ELEMENTS, directory.numel - start)
                    frame = _Frame(data[at : at + nbytes], entries, start - first, length)
                    of_bits[_step_bits(entries, length)].append(frame)
        for step_bits, waiting in of_bits.items():
            together, room = list[_Frame](), len(self._positions)
            for frame in waiting:
                if frame.entries > room:
                    self._add(together, step_bits, elements)
                    together, room = [], len(self._positions)
                together.append(frame)
                room -= frame.entries
            if together:
                self._add(together, step_bits, elements)

    def _add(self, frames: Sequence[_Frame], step_bits: int, elements: Bits) -> None:
        """Adds the differences of frames to elements."""
        streams = [frame.streams(elements.itemsize) for frame in frames]
        escaped_bytes = [whole.nbytes for _, _, whole in streams]
        low, high, whole = streams[0] if len(streams) == 1 else map(np.concatenate, zip(*streams, strict=True))
        streams.clear()
        count, small = len(low), high.view(np.int8)
        steps, positions, differences = self._steps[:count], self._positions[:count], self._differences[:count]
        if step_bits > 8:
            low = low.astype(np.int16)
            low += (small & 15).astype(np.int16) << 8
            small = small >> 4
        steps[:], differences[:] = low, small
        (escaped,) = (small == _escape(step_bits)).nonzero()
        # Of one dtype: other threads wait for a call that casts.
        np.add.accumulate(steps, out=positions)
        is_right, begin, before, number = True, 0, 0, 0
        for frame, nbytes in zip(frames, escaped_bytes, strict=True):
            end = begin + frame.entries
            last, after = int(positions[end - 1]), int(escaped.searchsorted(end))
            is_right = is_right and last - before < frame.length and nbytes == (after - number) * elements.itemsize
            if frame.start != before:
                positions[begin:end] += frame.start - before
            begin, before, number = end, last, after
        if not is_right:
            raise _damaged("a block of other streams than its directory describes")
        differences[escaped] = whole.view(differences.dtype)
        if frames[0].start < 0 or frames[-1].start + frames[-1].length > len(elements):
            is_inside = (positions >= 0) & (positions < len(elements))
            positions, differences = positions[is_inside], differences[is_inside]
        # Not `np.add.at`, which other threads wait for.
        torch.from_numpy(elements).scatter_add_(0, torch.from_numpy(positions), torch.from_numpy(differences))


class _Frame(NamedTuple):
    """What a payload has of a block."""

    data: memoryview
    entries: int
    start: int
    """The index of the first element of the block, which may be before the elements that are changed."""
    length: int
    """The number of elements of the block."""

    def streams(self, itemsize: int) -> tuple[_Bytes, _Bytes, _Bytes]:
        """Decompresses the frame. Raises `DamagedFileError`."""
        decompressor, entries = zstd.ZstdDecompressor(), self.entries
        try:
            content = decompressor.decompress(self.data, entries * (2 + itemsize))
        except zstd.ZstdError as error:
            raise _damaged(str(error)) from error
        if not decompressor.eof or decompressor.unused_data or not 0 < 2 * entries <= len(content):
            raise _damaged("a block of other streams than its directory describes")
        streams = np.frombuffer(content, np.uint8)
        return streams[:entries], streams[entries : 2 * entries], streams[2 * entries :]


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
    if directory.blocks[directory.blocks[:, 0] == 0].any():
        raise _damaged("a block with entries and without a frame", where)
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
            *(begin, len(payloads), BLOCK_ELEMENTS * _BLOCKS_AT_ONCE, scratch_bytes, pieces, piece_bytes),
            starting_at=lambda at: starting_at(origin + at),
        )

    scratch_bytes = Adder.scratch_bytes(directories, base.dtype.itemsize)
    # A region that begins within a block needs one more.
    most = [int(directory.blocks[:, 0].max(initial=0)) * (_BLOCKS_AT_ONCE + 1) for directory in directories]
    piece_bytes = sum(map(min, most, (int(directory.starts[-1]) for directory in directories)))
    kind = f"patched {len(payloads)} times"
    return Combined(kind, base.dtype, tuple(base.shape), (base, *payloads), starting_at(0))


def _most_entries(directories: Sequence[Directory]) -> int:
    """The most entries that are added at once."""
    entries = [directory.blocks[:, 1] for directory in directories]
    most = max((int(each.max(initial=0)) for each in entries), default=0)
    return min(max(_ENTRIES_AT_ONCE, most), sum(int(each.sum()) for each in entries))


def _bits(tensor: torch.Tensor) -> Bits:
    """Returns the bits of a contiguous tensor of the CPU, which the caller keeps alive.

    It calls torch once: between blocks that fill the caches, calls of torch take 5 to 20 times as long as elsewhere.
    """
    return np.frombuffer(memory_at(tensor.data_ptr(), tensor.nbytes), _INTEGERS[tensor.dtype.itemsize])


def _advanced(old: Bits, new: Bits) -> Changes:
    """Turns `old` into `new`. Returns what has changed."""
    shift = (16 // old.itemsize).bit_length() - 1
    size, whole = 1 << shift, len(old) >> shift << shift
    # Words of 16 bytes: there are fewer of them than elements, and few of them have changed.
    old_words, new_words = old[:whole].view(np.complex128), new[:whole].view(np.complex128)
    changed_words, differences = list[NDArray[np.int64]](), list[Bits]()
    for first in range(0, len(old_words), _SEARCHED_BYTES // 16):
        part = slice(first, first + _SEARCHED_BYTES // 16)
        before, after = old_words[part], new_words[part]
        (words,) = ((before.view(np.int64) != after.view(np.int64)).view(np.int16) != 0).nonzero()
        was, taken = before.take(words), after.take(words)
        before[words] = taken
        words += first
        changed_words.append(words)
        difference = taken.view(old.dtype)
        difference -= was.view(old.dtype)
        differences.append(difference)
    rest = new[whole:] - old[whole:]
    old[whole:] += rest
    words = np.concatenate([*changed_words, np.array([whole >> shift])])
    found = np.concatenate([*differences, rest])
    (changed,) = (found != 0).nonzero()
    positions = words.take(changed >> shift)
    positions <<= shift
    positions += changed & (size - 1)
    return Changes(positions, found.take(changed))


def head(numel: int, blocks: Iterable[Sequence[int]]) -> bytes:
    """Returns what is before the frames of a payload: the number of elements, and `Directory.blocks`."""
    return np.array(numel, "<u8").tobytes() + np.array([*blocks], "<u4").tobytes()


def _encoded(found: Changes, elements: int, step_bits: int) -> tuple[bytes, int]:
    """The zstd frame of a block of elements, and the number of its entries."""
    differences, steps, longest = found.differences, found.positions.copy(), (1 << step_bits) - 1
    steps[1:] -= found.positions[:-1]
    (long,) = (steps > longest).nonzero()
    if len(long):
        more, rest = np.divmod(steps[long] - 1, longest)
        steps[long], long = rest + 1, np.repeat(long, more)
        steps, differences = np.insert(steps, long, longest), np.insert(differences, long, 0)
        if _step_bits(len(steps), elements) < step_bits:
            return _encoded(found, elements, 8)
    escape = _escape(step_bits)
    is_escaped = (differences <= escape) | (differences >= -escape)
    low, high = steps.astype(np.uint8), differences.astype(np.uint8)
    high[is_escaped] = escape + 256
    if step_bits > 8:
        high <<= 4
        high |= (steps >> 8).astype(np.uint8)
    streams = [low, high, differences[is_escaped]]
    compressor = zstd.ZstdCompressor(options=_OPTIONS)
    compressor.set_pledged_input_size(sum(stream.nbytes for stream in streams))
    # A zstd block for each stream, which gives it Huffman codes of its own.
    parts = [compressor.compress(stream.data, compressor.FLUSH_BLOCK) for stream in streams if len(stream)]
    return b"".join([*parts, compressor.flush()]), len(steps)


def _step_bits(entries: int, elements: int) -> int:
    """How many bits the steps between the entries of a block have."""
    return 8 if entries * 64 >= elements else 12


def _escape(step_bits: int) -> int:
    """The difference that says: it is in the last stream. A difference has the bits that steps leave of two bytes."""
    return -1 << (15 - step_bits)


def _directory(data: _Bytes) -> Directory:
    if not len(data):
        return Directory(0, np.zeros((0, 2), np.int64), np.zeros(1, np.int64))
    numel = int(data[:_NUMEL_BYTES].view("<u8")[0])
    end = _NUMEL_BYTES + -(-numel // BLOCK_ELEMENTS) * _ENTRY_BYTES
    blocks = data[_NUMEL_BYTES:end].view("<u4").reshape(-1, 2).astype(np.int64)
    return Directory(numel, blocks, end + np.cumsum(np.append(0, blocks[:, 0])))


def _damaged(found: str, where: str = "") -> DamagedFileError:
    return DamagedFileError("the payload of a delta is damaged", where=where, found=found)
