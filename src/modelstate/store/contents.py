"""What is in a checkpoint of a store: opened, read and verified."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from modelstate.codec.codec import decode
from modelstate.errors import (
    ChecksumError,
    EncodedValueError,
    ModelStateError,
    NewerManifestError,
    OpenError,
    ReadFailedError,
)
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.digests import digest
from modelstate.read.open import open as open_checkpoint
from modelstate.read.ranges import Request
from modelstate.read.tree import rebuild, subtree
from modelstate.spec import Stored, StoredTensor
from modelstate.store.record import Entry, damaged


def why_not_whole(directory: str, entries: Mapping[str, Entry]) -> str:
    """What keeps a checkpoint from being complete, by the names and sizes of its files; empty where nothing does."""
    for entry in entries.values():
        for name, file in entry.files.items():
            try:
                nbytes = os.stat(os.path.join(directory, name)).st_size
            except OSError as error:
                return f"{name}: {error.strerror}"
            if nbytes != file.nbytes:
                return f"{name} has {nbytes:,} bytes, not {file.nbytes:,}"
    return ""


def opened(directory: str, entry: Entry) -> Checkpoint:
    """The tensors and values of an object that has tensors. Raises `DamagedCheckpointError`, `NewerManifestError`."""
    try:
        return open_checkpoint(os.path.join(directory, entry.index))
    except NewerManifestError:
        raise
    except (OpenError, ChecksumError) as error:
        raise damaged(directory, _in_short(error)) from error


def verify(directory: str, entry: Entry, on_read: Callable[[int], None] | None = None) -> int:
    """Reads all of an object, and returns how many bytes were compared with their digests.

    Raises `DamagedCheckpointError`, and `ReadFailedError` for a disk that cannot be read.
    """
    if not entry.index:
        return 0  # it stands in the record, which is sealed
    _verify_heads(directory, entry)
    checkpoint = opened(directory, entry)
    if not checkpoint.checksums:
        return 0
    try:
        return checkpoint.verify(on_read)
    except ChecksumError as error:
        raise damaged(directory, _in_short(error)) from error


def _verify_heads(directory: str, entry: Entry) -> None:
    for name, file in entry.files.items():
        path = os.path.join(directory, name)
        try:
            with open(path, "rb") as opened_file:
                found = digest(opened_file.read(file.head_bytes))
        except OSError as error:
            raise ReadFailedError("reading failed", where=path, found=error) from error
        if found != file.head:
            raise damaged(directory, f"{name}: what it says of its tensors is not what was written")


def value_of(directory: str, entry: Entry) -> Any:
    """The state of an object as it was captured: containers, values, and tensors in memory of their own.

    Raises `DamagedCheckpointError`, and `CodecError` for classes that are not known here.
    """
    if not entry.index:
        return _value(directory, entry)
    checkpoint = opened(directory, entry)
    try:
        return value_at(checkpoint, "")
    except EncodedValueError as error:
        raise damaged(directory, _in_short(error)) from error


def value_at(checkpoint: Checkpoint, path: str) -> Any:
    """What stands at a dotted path: containers, values, and tensors in memory of their own.

    Raises `KeyNotFoundError`, `ReadFailedError`, and `CodecError`.
    """
    node = subtree(checkpoint.contents.tree, ".".join(filter(None, (checkpoint.key, path))), checkpoint.source)
    made = _read_plain(checkpoint, [name for name in checkpoint if not path or f"{name}.".startswith(f"{path}.")])
    return rebuild(node, lambda stored: _taken(made, checkpoint, stored))


def _in_short(error: ModelStateError) -> str:
    place = f"{os.path.basename(str(error.where))}: " if error.where else ""
    return f"{place}{error.what}" + (f": {error.found}" if error.found else "")


def _value(directory: str, entry: Entry) -> Any:
    try:
        return decode(entry.value)
    except EncodedValueError as error:
        raise damaged(directory, _in_short(error)) from error


def _read_plain(checkpoint: Checkpoint, names: Iterable[str]) -> dict[int, torch.Tensor]:
    """The tensors of those that are one run of bytes, read at once; by the identity of their descriptions."""
    made: dict[int, torch.Tensor] = {}
    requests = []
    for name in names:
        stored = checkpoint.stored(name)
        if isinstance(stored, StoredTensor) and stored.is_contiguous and id(stored) not in made:
            made[id(stored)] = tensor = torch.empty(stored.shape, dtype=stored.dtype)
            if stored.nbytes:
                requests.append(Request(stored.extent, tensor.data_ptr()))
    checkpoint.read_all(requests)
    return made


def _taken(made: dict[int, torch.Tensor], checkpoint: Checkpoint, stored: Stored) -> torch.Tensor:
    found = made.get(id(stored))
    return checkpoint.read(stored) if found is None else found
