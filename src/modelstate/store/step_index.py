"""Lists the checkpoints in a store's directory, also while another process saves and prunes."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from modelstate.errors import (
    ChecksumError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    ModelStateError,
    NewerManifestError,
    OpenError,
    OptionError,
    ReadFailedError,
    SourceNotFoundError,
    StepNotFoundError,
)
from modelstate.io.atomic import atomic_file
from modelstate.io.digests import OPEN_SEAL, SEAL, check_seal, sealed
from modelstate.io.files import read_whole
from modelstate.store import records
from modelstate.store.records import PIN_FILE, RECORD_FILE, STORE_FILE, Place, Record, damaged, places, read_record
from modelstate.store.retention import CheckpointInfo, ages

FORMAT = 1
"""The version of a store as a whole. A writer refuses a newer one."""
_MAX_TRIES = 1000
_MAX_STORE_FILE_BYTES = 10_000
_MAX_CACHED_BYTES = 16 << 20
"""The limit of the cached records, by the size of their files."""
_Key = tuple[str, int]
"""The path and the inode of a checkpoint's directory."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A checkpoint in the directory, as it was when the directory was listed."""

    place: Place
    record: Record | None
    """None where it cannot be read."""
    error: ModelStateError | None = None
    """Why the checkpoint cannot be used, as far as names, sizes and earlier reads show."""

    @property
    def is_whole(self) -> bool:
        return self.error is None

    @property
    def is_damaged(self) -> bool:
        """Whether it is of this store and not what was saved. Foreign and newer ones are not damaged: they stay."""
        return isinstance(self.error, DamagedCheckpointError | ReadFailedError)

    @property
    def is_gone(self) -> bool:
        """Whether it was removed or replaced since the directory was listed."""
        return not os.path.isdir(self.place.path)

    @property
    def is_pinned(self) -> bool:
        return os.path.exists(os.path.join(self.place.path, PIN_FILE))

    @property
    def info(self) -> CheckpointInfo:
        """The public description of the checkpoint."""
        record = self.record
        files = () if record is None else [file for entry in record.entries.values() for file in entry.files.values()]
        return CheckpointInfo(
            step=self.place.step,
            time=record.time if record is not None else _modified_seconds(self.place.path),
            metrics=dict(record.metrics) if record is not None else {},
            pinned=self.is_pinned,
            intact=self.is_whole,
            nbytes=sum(file.nbytes for file in files),
            path=self.place.path,
            serial=record.serial if record is not None else 0,
            store=record.store if record is not None else "",
        )


class StepIndex:
    """The checkpoints in a directory.

    Every call lists the directory anew. Only the results of reading whole checkpoints are kept in memory: which of
    them are damaged, and which are not.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._damage: dict[_Key, ModelStateError] = {}
        """Damage that only reading a checkpoint shows."""
        self._whole: set[_Key] = set()
        """Checkpoints all of whose bytes this object has read, or written."""
        self.doubtful: set[tuple[int, int]] = set()
        """Devices and inodes of the files of damaged checkpoints; other checkpoints may link to the same files."""
        self._cache: _RecordCache | None = None

    def cached(self) -> "StepIndex":
        """Returns an index of the same directory that reads each record once, as long as its file is the same."""
        index = StepIndex(self.directory)
        index._damage, index._whole, index.doubtful = self._damage, self._whole, self.doubtful
        index._cache = _RecordCache()
        return index

    def all_revisions(self) -> list[StepEntry]:
        """Returns every revision of every step, in order. Raises `ReadFailedError`."""
        for _ in range(_MAX_TRIES):
            entries = self._list()
            # A checkpoint that was removed meanwhile may have been replaced by one that is not on this list.
            if not any(entry.error and entry.is_gone for entry in entries):
                return entries
        raise ReadFailedError("the store changes all the time", where=self.directory)

    def steps(self) -> list[StepEntry]:
        """Returns, for every step, the newest revision that is whole, or else the newest; in the order of the steps."""
        best: dict[int, StepEntry] = {}
        for entry in self.all_revisions():
            other = best.get(entry.place.step)
            if other is None or entry.is_whole or not other.is_whole:
                best[entry.place.step] = entry
        return [best[step] for step in sorted(best)]

    def by_age(self) -> list[StepEntry]:
        """Returns `steps()` in the order of saving; one that cannot be used follows the step before it."""
        entries = self.steps()
        order = ages(
            {entry.place.step: entry.record.serial if entry.record and entry.is_whole else None for entry in entries}
        )
        return sorted(entries, key=lambda entry: order[entry.place.step])

    def step(self, step: object) -> StepEntry:
        """Returns one step. Raises `StepNotFoundError`, and `OptionError` for another type."""
        if type(step) is not int:
            raise OptionError("step= is the number of a step", expected="an int", found=repr(step))
        entries = self.steps()
        for entry in entries:
            if entry.place.step == step:
                return entry
        raise StepNotFoundError(
            "there is no checkpoint of this step",
            where=self.directory,
            expected=", ".join(str(entry.place.step) for entry in entries[-20:]) or "none is there",
            found=step,
        )

    def note_damage(self, entry: StepEntry, error: ModelStateError) -> None:
        """Counts a checkpoint as damaged from now on, unless it is replaced."""
        if isinstance(error, DamagedCheckpointError) and (key := _key(entry.place.path)) is not None:
            self._damage[key] = error
            self._whole.discard(key)
            self.doubtful |= _inodes(entry.place.path)

    def note_whole(self, path: str) -> None:
        """Counts a checkpoint as whole, so that it need not be read again before others are pruned."""
        if (key := _key(path)) is not None:
            self._whole.add(key)

    def is_known_whole(self, entry: StepEntry) -> bool:
        """Whether this object has read or written all of the checkpoint, and it was not replaced since."""
        return _key(entry.place.path) in self._whole

    def name(self) -> str:
        """Returns the name of the store, which each of its checkpoints has too; empty where nothing has a name.

        Where `store.json` is lost or damaged, it is the name that most of the checkpoints have.
        """
        return _stored_name(self.directory) or _most_common(self._records())

    def ensure_name(self) -> str:
        """Returns the name of the store, and writes `store.json` where it is missing or damaged.

        Raises `NewerManifestError`, the errors of a write, and `OpenError` or `ReadFailedError` where `store.json`
        exists and cannot be read: it may have the name, and with another name all checkpoints would be foreign.
        """
        try:
            name, version = _read_store_file(self.directory)
            if not (type(version) is int and version <= FORMAT):
                raise NewerManifestError(
                    "the store is that of a newer version of modelstate",
                    where=os.path.join(self.directory, STORE_FILE),
                    expected=f"format {FORMAT} or older",
                    found=f"format {str(version)[:80]}",
                    remedy="update modelstate, or take another directory",
                )
            if name:
                return name
        except (SourceNotFoundError, DamagedCheckpointError):
            pass  # it is written below
        name = _most_common(self._records()) or os.urandom(8).hex()
        text = json.dumps({SEAL: OPEN_SEAL, "format": FORMAT, "store": name}).encode() + b"\n"
        with atomic_file(os.path.join(self.directory, STORE_FILE), overwrite=True) as output:
            output.append(sealed(text))
        return name

    def _list(self) -> list[StepEntry]:
        records = [(place, *self._read(place)) for place in self._places()]
        name = _stored_name(self.directory) or _most_common(record for _, record, _ in records if record is not None)
        return [self._entry(place, record, error, name) for place, record, error in records]

    def _entry(self, place: Place, record: Record | None, error: ModelStateError | None, name: str) -> StepEntry:
        if record is None:
            return StepEntry(place, None, error)
        if record.step != place.step or record.store != name:
            foreign = ForeignCheckpointError(
                "the checkpoint was put here from another store, or under another step",
                where=place.path,
                expected=f"step {place.step} of the store {name}",
                found=f"step {record.step} of the store {record.store}",
                remedy="open the store that it is from; ms.open reads what is in it by itself",
            )
            return StepEntry(place, record, foreign)
        if problem := records.why_not_whole(place.path, record.entries):
            return StepEntry(place, record, damaged(place.path, problem))
        key = _key(place.path) if self._damage else None
        return StepEntry(place, record, self._damage.get(key) if key is not None else None)

    def _records(self) -> Iterator[Record]:
        for place in self._places():
            record, _ = self._read(place)
            if record is not None:
                yield record

    def _read(self, place: Place) -> tuple[Record | None, ModelStateError | None]:
        try:
            return (read_record if self._cache is None else self._cache.read)(place.path), None
        except ModelStateError as error:
            return None, error

    def _places(self) -> list[Place]:
        try:
            return places(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ReadFailedError("the store cannot be read", where=self.directory, found=error) from error


class _RecordCache:
    """Records that have been read, each valid as long as its file is the same."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[tuple[int, int, int], Record]] = {}

    def read(self, path: str) -> Record:
        """Returns the record of the checkpoint at a path. Raises what `read_record` raises."""
        try:
            status = os.stat(os.path.join(path, RECORD_FILE))
        except OSError:
            return read_record(path)  # which raises the error for it
        identity = status.st_ino, status.st_size, status.st_mtime_ns
        cached = self._records.get(path)
        if cached is not None and cached[0] == identity:
            return cached[1]
        record = read_record(path)
        if identity[1] + sum(size for (_, size, _), _ in self._records.values()) <= _MAX_CACHED_BYTES:
            self._records[path] = identity, record
        return record


def _read_store_file(directory: str) -> tuple[str, object]:
    """Returns the name in `store.json`, and the version of its format.

    Raises `OpenError` and `ReadFailedError` where the file cannot be read, and `DamagedCheckpointError` where its
    content is not what was written.
    """
    path = os.path.join(directory, STORE_FILE)
    data = read_whole(path, _MAX_STORE_FILE_BYTES, STORE_FILE)
    try:
        content = json.loads(data)
        check_seal(data, content[SEAL], path)
        name, version = content["store"], content["format"]
        if type(name) is not str:
            raise ValueError(f"a name of type {type(name).__name__}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ChecksumError) as error:
        raise DamagedCheckpointError(
            "the file that has the store's name is damaged",
            where=path,
            found="its content does not have its digest"
            if isinstance(error, ChecksumError)
            else f"{type(error).__name__}: {error}",
            remedy="the checkpoints can be used: they have the name too, and the next save writes the file again",
        ) from error
    return name, version


def store_file_problem(directory: str) -> str:
    """Returns what is wrong with `store.json`; empty where nothing is, and where the directory has no such file."""
    try:
        _read_store_file(directory)
    except (OpenError, ReadFailedError, DamagedCheckpointError) as error:
        return str(error) if os.path.lexists(os.path.join(directory, STORE_FILE)) else ""
    return ""


def _stored_name(directory: str) -> str:
    """Returns the name in `store.json`; empty where the file is missing or damaged."""
    try:
        return _read_store_file(directory)[0]
    except (OpenError, ReadFailedError, DamagedCheckpointError):
        return ""


def _most_common(records: Iterator[Record]) -> str:
    counted = Counter(record.store for record in records).most_common(1)
    return counted[0][0] if counted else ""


def _inodes(path: str) -> set[tuple[int, int]]:
    try:
        with os.scandir(path) as entries:
            statuses = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return set()
    return {(status.st_dev, status.st_ino) for status in statuses}


def _key(path: str) -> _Key | None:
    try:
        return path, os.stat(path).st_ino
    except OSError:
        return None


def _modified_seconds(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
