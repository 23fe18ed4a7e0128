"""The record of a checkpoint, `checkpoint.json`: its objects, the digests of their files, metrics, and time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from modelstate.checkpoint.checkpoint import Checkpoint, join
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.errors import (
    ChecksumError,
    CodecError,
    DamagedCheckpointError,
    ForbiddenGlobalError,
    ModelStateError,
    NewerManifestError,
    OpenError,
    ReadFailedError,
    SourceAccessError,
    UnknownClassError,
)
from modelstate.formats.manifest import MAX_INDEX_BYTES, OPEN_SEAL, SEAL, check_seal, digest, sealed
from modelstate.formats.safetensors import MAX_HEADER_BYTES
from modelstate.io.files import SourceFile, read_whole
from modelstate.objects.parts import Kind
from modelstate.version import __version__

if TYPE_CHECKING:
    from modelstate.remote.cache import Cache

RECORD_FILE = "checkpoint.json"
ALL = slice(None)
"""The share of the tensors that one rank verifies where it is alone."""
FORMAT = 1
"""The version of this layout. A reader refuses a newer one."""
MAX_RECORD_BYTES = 64_000_000
"""The most bytes of a record. A reader refuses more."""
_MAX_HEAD_BYTES = max(8 + MAX_HEADER_BYTES, MAX_INDEX_BYTES)
"""The most bytes of a header with its length, and of an index."""


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A file of a checkpoint as it was written."""

    nbytes: int
    mtime_ns: int
    head_bytes: int
    """The size of the head, which describes the tensors: the header of a file, or all of an index."""
    head: str
    """The digest of the head. The file's own seal is not enough: damage to the key of the seal removes it."""

    def __post_init__(self) -> None:
        if not 0 <= self.head_bytes <= min(self.nbytes, _MAX_HEAD_BYTES):
            raise ValueError(f"a file of {self.nbytes:,} bytes with a header of {self.head_bytes:,}")

    def read_head(self, path: str) -> bytes | None:
        """Returns the head of the file at a path; None where it is not what was written.

        Raises `OpenError`, and `ReadFailedError` for a disk that cannot be read.
        """
        with SourceFile(path) as file:
            head = file.read(0, self.head_bytes, "its header")
        return head if digest(head) == self.head else None


class ObjectEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An object of a checkpoint."""

    kind: Kind
    index: str = ""
    """The name of the index of the files with its tensors; empty for an object without tensors."""
    files: Mapping[str, FileRecord] = msgspec.field(default_factory=dict)
    """All its files by name, with the index."""
    value: object = None
    """The encoded state of an object without tensors."""
    ranks: int = 0
    """The number of ranks whose states it has, as a list; 0 where there is one state for all of them."""
    written_bytes: int = 0
    """The bytes that were written for this checkpoint; the other files are links."""
    patches: int = 0
    """The number of saves whose patches it needs; 0 where it is whole."""

    def open(
        self,
        directory: str,
        cache: Cache | None = None,
        *,
        verify: bool = False,
        share: slice = ALL,
        on_read: Callable[[int], None] | None = None,
    ) -> Checkpoint:
        """Opens an object that has tensors.

        Args:
            directory: the directory of its files.
            cache: keeps what is read of a bucket.
            verify: whether its tensors are read and compared with their digests. The checkpoint then refuses to read
                files that change later.
            share: the share of the tensors that is read.
            on_read: called with the size of each tensor that was read.

        Raises `DamagedCheckpointError`, `NewerManifestError`, `ForbiddenGlobalError` for tensors of classes that are
        not imported, and `ReadFailedError` where a file cannot be read, which may be for now only.
        """
        try:
            checkpoint = open_checkpoint(os.path.join(directory, self.index), cache=cache)
            if self.files.keys() != {os.path.basename(path) for path in checkpoint.fingerprints}:
                raise damaged(directory, f"{self.index} names other files than those that were written")
            for name, file in self.files.items() if verify else ():
                if file.read_head(os.path.join(directory, name)) is None:
                    raise damaged(directory, f"{name}: what it says of its tensors is not what was written")
            if verify and checkpoint.checksums:
                checkpoint.verification().run(on_read, share)
        except (NewerManifestError, ForbiddenGlobalError):
            raise
        except (OpenError, ChecksumError) as error:
            raise _unusable(directory, error) from error
        return checkpoint

    def decode(self, directory: str, *, opened: Checkpoint | None = None, map: bool = False) -> object:
        """Returns the state of an object as it was captured: containers, values, and tensors.

        `opened` is the object, where it is open. With `map` the tensors may be maps of the files, which nothing may
        write to; else their memory is their own.

        Raises `DamagedCheckpointError`, and `CodecError` for classes that are not imported or registered.
        """
        from modelstate.codec.codec import decode

        checkpoint = self.open(directory) if self.index and opened is None else opened
        try:
            return decode(self.value) if checkpoint is None else checkpoint.value(map=None if map else False)
        except UnknownClassError:
            raise
        except CodecError as error:
            raise damaged(directory, short(error)) from error


class Record(msgspec.Struct, frozen=True):
    """The record of a checkpoint."""

    store: str
    """The name of the store that it was written to."""
    step: int
    time: float
    """Seconds since 1970, when it was saved."""
    metrics: Mapping[str, float]
    entries: Mapping[str, ObjectEntry]
    serial: int = 0
    """The number of the save: the later checkpoint of a store has the higher one, independent of steps and clocks."""

    def __post_init__(self) -> None:
        for key, entry in self.entries.items():
            if any(os.path.basename(name) != name for name in (*entry.files, key)):
                raise ValueError(f"a file outside its directory: {key}")
            if (entry.index and entry.index not in entry.files) or entry.ranks < 0:
                raise ValueError(f"an invalid entry of an object: {key}")
        datetime.fromtimestamp(self.time)  # raises for a number that is not a time

    @property
    def files(self) -> dict[str, FileRecord]:
        """The files of all objects by name."""
        return {name: file for entry in self.entries.values() for name, file in entry.files.items()}

    @property
    def nbytes(self) -> int:
        """The size of its files."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def written_bytes(self) -> int:
        """The size of those that were written for it; the others are links."""
        return sum(entry.written_bytes for entry in self.entries.values())

    def open(self, directory: str, cache: Cache | None = None) -> Checkpoint:
        """Opens all objects as one checkpoint, whose names begin with the path of an object.

        Raises what `ObjectEntry.open` and `ObjectEntry.decode` raise.
        """
        opened = {path: entry.open(directory, cache) for path, entry in self.entries.items() if entry.index}
        tree = {
            path: opened[path].contents.tree if path in opened else entry.decode(directory)
            for path, entry in self.entries.items()
        }
        return join(list(opened.values()), tree, directory, format="safetensors")

    def text(self) -> bytes:
        """Returns the content of `checkpoint.json`."""
        content = {SEAL: OPEN_SEAL, "format": FORMAT, "writer": f"modelstate {__version__}"} | msgspec.to_builtins(self)
        content["metrics"] = {name: repr(value) for name, value in self.metrics.items()}  # JSON has no NaN
        return sealed(json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n")


def read_record(directory: str) -> Record:
    """Returns the record of the checkpoint in a directory.

    Raises `DamagedCheckpointError` where it is not what was written, `NewerManifestError`, and `ReadFailedError` where
    it cannot be read, which may be for now only.
    """
    try:
        content = read_sealed(os.path.join(directory, RECORD_FILE), MAX_RECORD_BYTES, FORMAT)
        return msgspec.convert(content, Record, strict=False)  # metrics are text
    except NewerManifestError:
        raise
    except (OpenError, ReadFailedError) as error:
        raise _unusable(directory, error) from error
    except (ValueError, OverflowError, OSError) as error:
        raise damaged(directory, f"{RECORD_FILE}: {error}") from error


def read_sealed(path: str, most_bytes: int, newest: int) -> dict[str, object]:
    """Returns the content of a file of JSON that has a seal, and a format up to the newest one.

    Raises `ValueError` where the content is not what was written, `NewerManifestError`, and the errors of `read_whole`.
    """
    data = read_whole(path, most_bytes, os.path.basename(path))
    try:
        content: dict[str, object] = json.loads(data)
        number = content["format"]
        if not isinstance(number, int):
            raise ValueError(f"format {str(number)[:80]!r}")
        if number > newest:
            raise NewerManifestError(
                "this was written by a newer version of modelstate",
                where=path,
                expected=f"format {newest} or older",
                found=f"format {number}, by {str(content.get('writer', '?'))[:80]}",
            )
        check_seal(data, str(content.get(SEAL, "")), path)
    except ChecksumError as error:
        raise ValueError("not what was written, or edited since") from error
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return content


def damaged(where: str, found: str) -> DamagedCheckpointError:
    """Returns the error for a checkpoint that is not what was saved."""
    return DamagedCheckpointError(
        "the checkpoint is damaged",
        where=where,
        found=found,
        remedy="restore another step: store.restore(objects) takes the newest one that is whole",
        options="another step, or leave out --step: the newest one that is whole is taken",
    )


def unreadable(where: str, found: object) -> ReadFailedError:
    """Returns the error for a checkpoint that may be whole, and cannot be read now."""
    return ReadFailedError(
        "the checkpoint cannot be read",
        where=where,
        found=found,
        remedy="look at the permissions, the disk or the network; or restore another step",
    )


def _unusable(where: str, error: ModelStateError) -> ModelStateError:
    """Returns the error for a checkpoint with a file that cannot be opened, or read.

    A missing permission, or credentials that have expired, say nothing about the content of the file.
    """
    return (unreadable if isinstance(error, SourceAccessError | ReadFailedError) else damaged)(where, short(error))


def short(error: ModelStateError) -> str:
    """Returns the text of an error in one line, for an error that has it as its reason."""
    name = os.path.basename(error.where)
    place = f"{name}: " if name and not error.what.startswith(name) else ""
    return f"{place}{error.what}" + (f": {error.found}" if error.found else "")
