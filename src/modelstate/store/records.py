"""The layout of a store's directory, and the record that each checkpoint keeps of itself.

store.json                   the store's own name
.lock                        who writes
step-000000100/              a checkpoint: complete and durable since it has this name
    checkpoint.json          what it holds; written last
    model.safetensors.index.json, model-<digest>.safetensors
step-000000100.1/            the same step, saved again: the highest number counts
.step-000000200.<random>.unfinished/    what is being written, or being taken away
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
    """A directory that holds a step."""

    step: int
    revision: int
    """From 0; a step that is saved again has the next one."""
    path: str


def name_of(step: int, revision: int) -> str:
    """The name of a step's directory."""
    return f"step-{step:09d}" + (f".{revision}" if revision else "")


def unfinished_name(step: int) -> str:
    """A new name for what is not, or no longer, a checkpoint."""
    return f".step-{step:09d}.{secrets.token_hex(6)}.unfinished"


def places(directory: str) -> list[Place]:
    """All steps in a store, every revision of them, by step and revision. Raises `OSError`."""
    found = []
    for name in os.listdir(directory):
        if match := _STEP.fullmatch(name):
            place = Place(int(match[1]), int(match[2] or 0), os.path.join(directory, name))
            if name == name_of(place.step, place.revision):
                found.append(place)
    return sorted(found)


def newest_revisions(every: list[Place]) -> list[Place]:
    """Of each step the one that counts, in the order of the steps."""
    return list({place.step: place for place in sorted(every)}.values())


def unfinished(directory: str) -> list[str]:
    """Paths of what killed saves and prunes have left. Raises `OSError`."""
    return [os.path.join(directory, name) for name in os.listdir(directory) if _UNFINISHED.fullmatch(name)]


FORMAT = 1
"""The version of what is described here. A reader refuses what is newer."""
MAX_BYTES = 64_000_000
"""Of the text: a reader refuses more."""
_MAX_HEAD_BYTES = 8 + MAX_HEADER_BYTES
"""Of a header with its length; an index may not have more either."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint as it was when it had been written."""

    nbytes: int
    mtime_ns: int
    head_bytes: int
    """What says of its tensors where and what they are: the header, or all of an index."""
    head: str
    """The digest of that. A file's own seal says less: whoever damages its name takes the seal away."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of a checkpoint."""

    kind: Kind
    index: str = ""
    """The index of the files that its tensors are in; empty where it has none."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """All its files by their names, the index among them."""
    value: Any = None
    """Where it has no tensors: its state, encoded."""


@dataclass(frozen=True, slots=True)
class Record:
    """All of a checkpoint but its tensors."""

    store: str
    """The name of the store that it was written to."""
    step: int
    time: float
    """Seconds since 1970, when it was saved."""
    metrics: Mapping[str, float]
    entries: Mapping[str, Entry]
    serial: int = 0
    """Of two checkpoints of a store the one with the higher one was saved later, whatever steps and clocks say."""

    def text(self) -> bytes:
        """As it is written."""
        entries = {}
        for key, entry in self.entries.items():
            said: dict[str, Any] = {"kind": entry.kind}
            if entry.index:
                files = {
                    name: [one.nbytes, one.mtime_ns, one.head_bytes, one.head] for name, one in entry.files.items()
                }
                said |= {"index": entry.index, "files": files}
            else:
                said["value"] = entry.value
            entries[key] = said
        made = {
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
        return sealed(json.dumps(made, ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n")


def read_record(directory: str) -> Record:
    """The record of the checkpoint in a directory.

    Raises `DamagedCheckpointError` where it is not what was written, and `NewerManifestError`.
    """
    path = os.path.join(directory, RECORD_FILE)
    try:
        data = read_whole(path, MAX_BYTES, RECORD_FILE)
    except (OpenError, ReadFailedError) as error:
        raise damaged(directory, f"{RECORD_FILE} cannot be read: {error.what}, {error.found}".rstrip(" ,")) from error
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(directory, f"{RECORD_FILE} is no JSON: {error}") from error
    if type(said) is not dict:
        raise damaged(directory, f"{RECORD_FILE} is no object")
    if type(said.get("format")) is int and said["format"] > FORMAT:
        raise NewerManifestError(
            "the checkpoint was written by a newer version of modelstate",
            where=path,
            expected=f"format {FORMAT} or older",
            found=f"format {said['format']}, by {str(said.get('writer', '?'))[:80]}",
            remedy="update modelstate",
        )
    try:
        check_seal(data, str(said.get(SEAL, "")), path)
        return _parsed(said)
    except ChecksumError as error:
        raise damaged(directory, f"{RECORD_FILE} is not what was written, or has been edited") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise damaged(directory, f"{RECORD_FILE}: {type(error).__name__}: {error}") from error


def _parsed(said: dict[str, Any]) -> Record:
    if type(said["format"]) is not int:
        raise ValueError(f"format {str(said['format'])[:80]!r}")
    entries = {}
    for key, one in said["entries"].items():
        files = {name: _file(*said) for name, said in one.get("files", {}).items()}
        if any(os.path.basename(name) != name for name in (*files, key)):
            raise ValueError(f"a file outside its directory: {key}")
        index = one.get("index", "")
        if one["kind"] not in tuple(Kind) or (index and index not in files):
            raise ValueError(f"an object that cannot be: {key}")
        entries[key] = Entry(Kind(one["kind"]), index, files, one.get("value"))
    metrics = {str(name): float(value) for name, value in said["metrics"].items()}
    time = float(said["time"])
    datetime.fromtimestamp(time)  # raises where it is none
    return Record(str(said["store"]), int(said["step"]), time, metrics, entries, int(said.get("serial", 0)))


def _file(nbytes: Any, mtime_ns: Any, head_bytes: Any, head: Any) -> FileRecord:
    if not type(nbytes) is type(mtime_ns) is type(head_bytes) is int or type(head) is not str:
        raise ValueError("what is said of a file is not what it must be")
    if not 0 <= head_bytes <= min(nbytes, _MAX_HEAD_BYTES):
        raise ValueError(f"a file of {nbytes:,} bytes with a header of {head_bytes:,}")
    return FileRecord(nbytes, mtime_ns, head_bytes, head)


def damaged(where: str, found: str) -> DamagedCheckpointError:
    """The error for a checkpoint that is no longer what was saved."""
    return DamagedCheckpointError(
        "the checkpoint is damaged",
        where=where,
        found=found,
        remedy="restore another step: store.restore(objects) takes the newest one that is whole",
    )


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
