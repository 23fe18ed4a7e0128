"""Checkpoints of torch.distributed.checkpoint, made with torch's own classes, in any layout and with any flaw."""

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Offsets = tuple[int, ...]
Change = Callable[[Metadata], object]


def halves(tensor: torch.Tensor) -> dict[Offsets, torch.Tensor]:
    """The tensor in two chunks along its first dimension."""
    middle = (len(tensor) + 1) // 2
    rest = (0,) * (tensor.ndim - 1)
    return {(0, *rest): tensor[:middle].clone(), (middle, *rest): tensor[middle:].clone()}


def write(
    directory: Path,
    tensors: Mapping[str, Mapping[Offsets, Any]],
    values: Mapping[str, object] | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    paths: object = None,
    change: Change = lambda metadata: None,
) -> Path:
    """Writes chunks of tensors, by their offsets, each to the next of two files; `change` spoils the metadata."""
    directory.mkdir(exist_ok=True)
    files = [io.BytesIO(), io.BytesIO()]
    table: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def put(index: MetadataIndex, value: object) -> None:
        at = len(places) % 2
        start = files[at].tell()
        torch.save(value, files[at])
        places[index] = _StorageInfo(f"__{at}_0.distcp", start, files[at].tell() - start)

    for name, value in (values or {}).items():
        table[name] = BytesStorageMetadata()
        put(MetadataIndex(name), value)
    for name, chunks in tensors.items():
        first = next(iter(chunks.values()))
        shape = (shapes or {}).get(name) or [
            max((offset[at] + chunk.shape[at] for offset, chunk in chunks.items()), default=0)
            for at in range(first.ndim)
        ]
        boxes = [ChunkStorageMetadata(torch.Size(offset), chunk.shape) for offset, chunk in chunks.items()]
        table[name] = TensorStorageMetadata(TensorProperties(first.dtype), torch.Size(shape), boxes)
        for offset, chunk in chunks.items():
            put(MetadataIndex(name, offset), chunk)
    metadata = Metadata(table, planner_data=paths, storage_data=places)
    change(metadata)
    for number, file in enumerate(files):
        (directory / f"__{number}_0.distcp").write_bytes(file.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return directory


def boxes_of(shape: tuple[int, ...], cut: Callable[[int], int], depth: int) -> list[tuple[Offsets, Offsets]]:
    """Offsets and sizes of a division of the shape, each part again cut in two `depth` times; `cut(n)` is below n."""
    parts = [((0,) * len(shape), shape)]
    for _ in range(depth):
        divided = []
        for offset, size in parts:
            along = cut(len(shape))
            at = cut(size[along] + 1)
            low = tuple(at if axis == along else n for axis, n in enumerate(size))
            high = tuple(n - at if axis == along else n for axis, n in enumerate(size))
            start = tuple(n + at if axis == along else n for axis, n in enumerate(offset))
            divided += [(offset, low), (start, high)]
        parts = divided
    return [(offset, size) for offset, size in parts if math.prod(size)]
