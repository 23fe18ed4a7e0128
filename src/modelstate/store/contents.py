"""What is in a checkpoint of a store: opened, read and verified."""

import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

from modelstate.codec.codec import decode
from modelstate.errors import (
    ChecksumError,
    EncodedValueError,
    ModelStateError,
    NewerManifestError,
    OpenError,
)
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.digests import digest
from modelstate.read.open import open as open_checkpoint
from modelstate.read.source_file import SourceFile
from modelstate.store.record import Entry, damaged


def why_not_whole(directory: str, entries: Mapping[str, Entry]) -> str:
    """What keeps a checkpoint from being complete, by the names and sizes of its files; empty where nothing does."""
    for entry in entries.values():
        for name, file in entry.files.items():
            try:
                status = os.stat(os.path.join(directory, name))
            except OSError as error:
                return f"{name}: {error.strerror}"
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != file.nbytes:
                return f"{name} has {status.st_size:,} bytes, not {file.nbytes:,}"
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
        try:
            with SourceFile(os.path.join(directory, name)) as opened_file:
                found = digest(opened_file.read(0, file.head_bytes, "its header"))
        except OpenError as error:
            raise damaged(directory, _in_short(error)) from error
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
        return checkpoint.value()
    except EncodedValueError as error:
        raise damaged(directory, _in_short(error)) from error


def _in_short(error: ModelStateError) -> str:
    place = f"{os.path.basename(str(error.where))}: " if error.where else ""
    return f"{place}{error.what}" + (f": {error.found}" if error.found else "")


def _value(directory: str, entry: Entry) -> Any:
    try:
        return decode(entry.value)
    except EncodedValueError as error:
        raise damaged(directory, _in_short(error)) from error
