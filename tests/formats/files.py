"""Files for the tests of reading, made byte by byte, and values read back without the code under test."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modelstate.io import system
from modelstate.spec import StoredTensor


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    """An entry of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes | int = b"", length: int | None = None) -> bytes:
    """A safetensors file; `data` as a number is so many bytes 0, 1, 2, ..."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = bytes(i % 256 for i in range(data)) if isinstance(data, int) else data
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def value(stored: object) -> torch.Tensor:
    """A stored tensor, read with nothing but the standard library."""
    assert isinstance(stored, StoredTensor)
    assert stored.is_contiguous
    place = stored.extent
    with Path(place.path).open("rb") as file:
        file.seek(place.start)
        data = bytearray(file.read(place.nbytes))
    assert len(data) == place.nbytes
    if not data:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(stored.dtype).reshape(stored.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bit for bit the same, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8)))


def index_text(weight_map: Mapping[str, str], total_size: int = 0) -> str:
    """An index as transformers writes it."""
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, indent=2) + "\n"


def evict(path: Path) -> None:
    """Takes a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached_share(path: Path) -> float | None:
    """The part of a file that is in the page cache; None where the kernel does not say."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        pages = system.resident(descriptor, 0, path.stat().st_size)
        return None if pages is None else pages.count(1) / len(pages)
    finally:
        os.close(descriptor)
