"""The layout of a store's directory, and the record of each checkpoint, which describes all of it but its tensors.

store.json                   the name of the store
.lock                        the lock of the process that writes
step-000000100/              a checkpoint, complete and durable under this name
    checkpoint.json          its record, written last
    model.safetensors.index.json, model-<digest>.safetensors
step-000000100.1/            the same step, saved again: the highest number is the valid one
.step-000000200.<random>.unfinished/    a checkpoint that is being written or removed
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.codec.codec import decode
from modelstate.errors import (
    ChecksumError,
    DamagedCheckpointError,
    EncodedValueError,
    ModelStateError,
    NewerManifestError,
    OpenError,
    ReadFailedError,
)
from modelstate.formats.safetensors import MAX_HEADER_BYTES
from modelstate.io.digests import OPEN_SEAL, SEAL, check_seal, digest, sealed
from modelstate.io.files import SourceFile, read_whole
from modelstate.objects.objects import Kind
from modelstate.version import __version__

STORE_FILE = "store.json"
RECORD_FILE = "checkpoint.json"
PIN_FILE = "pinned"
_STEP = re.compile(r"step-(\d{9,18})(?:\.(\d{1,9}))?")
_UNFINISHED = re.compile(r"\.step-\d+(?:\.\d+)?\.[0-9a-f]{12}\.unfinished")


class Place(NamedTuple):
    """The directory of a checkpoint."""

    step: int
    revision: int
    """0, or one more than the revision before where the step is saved again."""
    path: str


def name_of(step: int, revision: int) -> str:
    """Returns the name of a step's directory."""
    return f"step-{step:09d}" + (f".{revision}" if revision else "")


def unfinished_name(step: int) -> str:
    """Returns a new name for a directory that is being written or removed."""
    return f".step-{step:09d}.{secrets.token_hex(6)}.unfinished"


def places(directory: str) -> list[Place]:
    """Returns every revision of every step in a store, in order. Raises `OSError`."""
    every = []
    for name in os.listdir(directory):
        if match := _STEP.fullmatch(name):
            place = Place(int(match[1]), int(match[2] or 0), os.path.join(directory, name))
            if name == name_of(place.step, place.revision):
                every.append(place)
    return sorted(every)


def newest_revisions(every: list[Place]) -> list[Place]:
    """Returns the newest revision of each step, in the order of the steps."""
    return list({place.step: place for place in sorted(every)}.values())


def unfinished(directory: str) -> list[str]:
    """Returns the directories that killed saves and prunes have left. Raises `OSError`."""
    return [os.path.join(directory, name) for name in os.listdir(directory) if _UNFINISHED.fullmatch(name)]


FORMAT = 1
"""The version of this layout. A reader refuses a newer one."""
MAX_BYTES = 64_000_000
"""The most bytes of a record. A reader refuses more."""
_MAX_HEAD_BYTES = 8 + MAX_HEADER_BYTES
"""The most bytes of a header with its length, and of an index."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint as it was written."""

    nbytes: int
    mtime_ns: int
    head_bytes: int
    """The size of the head, which describes the tensors: the header of a file, or all of an index."""
    head: str
    """The digest of the head. The file's own seal is not enough: damage to the key of the seal removes it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of a checkpoint."""

    kind: Kind
    index: str = ""
    """The name of the index of the files with its tensors; empty for an object without tensors."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """All its files by name, with the index."""
    value: Any = None
    """The encoded state of an object without tensors."""


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a checkpoint."""

    store: str
    """The name of the store that it was written to."""
    step: int
    time: float
    """Seconds since 1970, when it was saved."""
    metrics: Mapping[str, float]
    entries: Mapping[str, Entry]
    serial: int = 0
    """The number of the save: the later checkpoint of a store has the higher one, independent of steps and clocks."""

    def text(self) -> bytes:
        """Returns the content of `checkpoint.json`."""
        entries = {}
        for key, entry in self.entries.items():
            fields: dict[str, object] = {"kind": entry.kind}
            if entry.index:
                fields["index"] = entry.index
                fields["files"] = {
                    name: [file.nbytes, file.mtime_ns, file.head_bytes, file.head] for name, file in entry.files.items()
                }
            else:
                fields["value"] = entry.value
            entries[key] = fields
        content = {
            SEAL: OPEN_SEAL,
            "format": FORMAT,
            "writer": f"modelstate {__version__}",
            "store": self.store,
            "step": self.step,
            "serial": self.serial,
            "time": self.time,
            "metrics": {name: repr(value) for name, value in self.metrics.items()},  # JSON has no NaN
            "entries": entries,
        }
        return sealed(json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n")


def read_record(directory: str) -> Record:
    """Returns the record of the checkpoint in a directory.

    Raises `DamagedCheckpointError` where it is not what was written, and `NewerManifestError`.
    """
    path = os.path.join(directory, RECORD_FILE)
    try:
        data = read_whole(path, MAX_BYTES, RECORD_FILE)
    except (OpenError, ReadFailedError) as error:
        raise damaged(directory, f"{RECORD_FILE} cannot be read: {error.what}, {error.found}".rstrip(" ,")) from error
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(directory, f"{RECORD_FILE} is no JSON: {error}") from error
    if type(content) is not dict:
        raise damaged(directory, f"{RECORD_FILE} is no object")
    if type(content.get("format")) is int and content["format"] > FORMAT:
        raise NewerManifestError(
            "the checkpoint was written by a newer version of modelstate",
            where=path,
            expected=f"format {FORMAT} or older",
            found=f"format {content['format']}, by {str(content.get('writer', '?'))[:80]}",
            remedy="update modelstate",
        )
    try:
        check_seal(data, str(content.get(SEAL, "")), path)
        return _parsed(content)
    except ChecksumError as error:
        raise damaged(directory, f"{RECORD_FILE} is not what was written, or has been edited") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise damaged(directory, f"{RECORD_FILE}: {type(error).__name__}: {error}") from error


def _parsed(content: dict[str, Any]) -> Record:
    """Returns a record from its JSON. Raises `ValueError` and the errors of a wrong type."""
    if type(content["format"]) is not int:
        raise ValueError(f"format {str(content['format'])[:80]!r}")
    entries = {}
    for key, fields in content["entries"].items():
        files = {name: _file(*values) for name, values in fields.get("files", {}).items()}
        if any(os.path.basename(name) != name for name in (*files, key)):
            raise ValueError(f"a file outside its directory: {key}")
        index = fields.get("index", "")
        if fields["kind"] not in tuple(Kind) or (index and index not in files):
            raise ValueError(f"an invalid entry of an object: {key}")
        entries[key] = Entry(Kind(fields["kind"]), index, files, fields.get("value"))
    metrics = {str(name): float(value) for name, value in content["metrics"].items()}
    time = float(content["time"])
    datetime.fromtimestamp(time)  # raises for a number that is not a time
    return Record(str(content["store"]), int(content["step"]), time, metrics, entries, int(content.get("serial", 0)))


def _file(nbytes: Any, mtime_ns: Any, head_bytes: Any, head: Any) -> FileRecord:
    if not type(nbytes) is type(mtime_ns) is type(head_bytes) is int or type(head) is not str:
        raise ValueError("the record of a file has values of other types")
    if not 0 <= head_bytes <= min(nbytes, _MAX_HEAD_BYTES):
        raise ValueError(f"a file of {nbytes:,} bytes with a header of {head_bytes:,}")
    return FileRecord(nbytes, mtime_ns, head_bytes, head)


def damaged(where: str, found: str) -> DamagedCheckpointError:
    """Returns the error for a checkpoint that is not what was saved."""
    return DamagedCheckpointError(
        "the checkpoint is damaged",
        where=where,
        found=found,
        remedy="restore another step: store.restore(objects) takes the newest one that is whole",
    )


def why_not_whole(directory: str, entries: Mapping[str, Entry]) -> str:
    """Returns which file is missing or has another size; empty where the checkpoint is complete."""
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
    """Opens an object that has tensors. Raises `DamagedCheckpointError` and `NewerManifestError`."""
    try:
        return open_checkpoint(os.path.join(directory, entry.index))
    except NewerManifestError:
        raise
    except (OpenError, ChecksumError) as error:
        raise damaged(directory, _short(error)) from error


def verify(directory: str, entry: Entry, on_read: Callable[[int], None] | None = None) -> int:
    """Reads all of an object, and returns how many bytes it compared with their digests.

    Raises `DamagedCheckpointError`, and `ReadFailedError` for a disk that cannot be read.
    """
    if not entry.index:
        return 0  # the state is in the record, which is sealed
    _verify_heads(directory, entry)
    checkpoint = opened(directory, entry)
    if not checkpoint.checksums:
        return 0
    try:
        return checkpoint.verify(on_read)
    except ChecksumError as error:
        raise damaged(directory, _short(error)) from error


def _verify_heads(directory: str, entry: Entry) -> None:
    for name, file in entry.files.items():
        try:
            with SourceFile(os.path.join(directory, name)) as opened_file:
                head = digest(opened_file.read(0, file.head_bytes, "its header"))
        except OpenError as error:
            raise damaged(directory, _short(error)) from error
        if head != file.head:
            raise damaged(directory, f"{name}: what it says of its tensors is not what was written")


def value_of(directory: str, entry: Entry) -> Any:
    """Returns the state of an object as it was captured: containers, values, and tensors in memory of their own.

    Raises `DamagedCheckpointError`, and `CodecError` for classes that are not imported or registered.
    """
    checkpoint = opened(directory, entry) if entry.index else None
    try:
        return decode(entry.value) if checkpoint is None else checkpoint.value()
    except EncodedValueError as error:
        raise damaged(directory, _short(error)) from error


def _short(error: ModelStateError) -> str:
    place = f"{os.path.basename(str(error.where))}: " if error.where else ""
    return f"{place}{error.what}" + (f": {error.found}" if error.found else "")
