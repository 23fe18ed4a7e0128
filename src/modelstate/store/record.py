"""What a checkpoint of a store says of itself: `checkpoint.json`, written last, sealed by its own digest."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from modelstate.errors import ChecksumError, DamagedCheckpointError, NewerManifestError, OpenError, ReadFailedError
from modelstate.read.digests import OPEN_SEAL, SEAL, check_seal, sealed
from modelstate.read.safetensors import MAX_HEADER_BYTES
from modelstate.read.source_file import read_whole
from modelstate.store.layout import RECORD_FILE
from modelstate.store.objects import KINDS
from modelstate.version import __version__

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

    kind: str
    """What it was: see `modelstate.store.objects`."""
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
        if one["kind"] not in KINDS or (index and index not in files):
            raise ValueError(f"an object that cannot be: {key}")
        entries[key] = Entry(one["kind"], index, files, one.get("value"))
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
