"""What is in a store's directory, for everybody who looks, while somebody writes and takes away."""

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
"""The version of a store as a whole. A writer refuses what is newer."""
_TRIES = 1000
_MAX_BYTES = 10_000
_MOST_KEPT_BYTES = 16 << 20
"""Of the texts of records."""
_Key = tuple[str, int]
"""The path and the inode of a checkpoint's directory."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A checkpoint in the directory."""

    place: Place
    record: Record | None
    """None where it cannot be read."""
    error: ModelStateError | None = None
    """What keeps it from being used, as far as names, sizes and what has been read before say."""

    @property
    def is_whole(self) -> bool:
        return self.error is None

    @property
    def is_damaged(self) -> bool:
        """Whether it is this store's, and no longer what was saved; others are left alone."""
        return isinstance(self.error, DamagedCheckpointError | ReadFailedError)

    @property
    def is_gone(self) -> bool:
        """Whether somebody has taken it away, or replaced it, since it was found."""
        return not os.path.isdir(self.place.path)

    @property
    def is_pinned(self) -> bool:
        return os.path.exists(os.path.join(self.place.path, PIN_FILE))

    @property
    def info(self) -> CheckpointInfo:
        """What is known of it."""
        record = self.record
        files = () if record is None else [one for entry in record.entries.values() for one in entry.files.values()]
        return CheckpointInfo(
            step=self.place.step,
            time=record.time if record is not None else _changed(self.place.path),
            metrics=dict(record.metrics) if record is not None else {},
            pinned=self.is_pinned,
            intact=self.is_whole,
            nbytes=sum(one.nbytes for one in files),
            path=self.place.path,
            serial=record.serial if record is not None else 0,
            store=record.store if record is not None else "",
        )


class StepIndex:
    """The checkpoints in a directory.

    Nothing of it is kept in memory but which of them have been read, and found to be damaged or not.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._damage: dict[_Key, ModelStateError] = {}
        """Damage that only reading shows."""
        self._whole: set[_Key] = set()
        """Those all of whose bytes this object has read, or written."""
        self.doubtful: set[tuple[int, int]] = set()
        """Devices and inodes of files, one of which at least is damaged: other checkpoints may have them, too."""
        self._records_read: _Records | None = None

    def for_a_moment(self) -> "StepIndex":
        """The same, for one that looks several times and need not see records change that nobody replaces."""
        made = StepIndex(self.directory)
        made._damage, made._whole, made.doubtful = self._damage, self._whole, self.doubtful
        made._records_read = _Records()
        return made

    def all_revisions(self) -> list[StepEntry]:
        """Every revision of every step, in order. Raises `ReadFailedError`."""
        for _ in range(_TRIES):
            found = self._look()
            # What has been taken away meanwhile has perhaps been replaced by what is not on this list.
            if not any(one.error and one.is_gone for one in found):
                return found
        raise ReadFailedError("the store changes all the time", where=self.directory)

    def steps(self) -> list[StepEntry]:
        """Of every step the newest revision that is whole, or else the newest; from old to new."""
        best: dict[int, StepEntry] = {}
        for found in self.all_revisions():
            other = best.get(found.place.step)
            if other is None or found.is_whole or not other.is_whole:
                best[found.place.step] = found
        return [best[step] for step in sorted(best)]

    def by_age(self) -> list[StepEntry]:
        """The same, in the order in which they were saved; one that cannot be used comes behind the step before it."""
        every = self.steps()
        order = ages({one.place.step: one.record.serial if one.record and one.is_whole else None for one in every})
        return sorted(every, key=lambda one: order[one.place.step])

    def step(self, step: object) -> StepEntry:
        """Raises `StepNotFoundError`, and `OptionError` for what is no number."""
        if type(step) is not int:
            raise OptionError("step= is the number of a step", expected="an int", found=repr(step))
        every = self.steps()
        for found in every:
            if found.place.step == step:
                return found
        raise StepNotFoundError(
            "there is no checkpoint of this step",
            where=self.directory,
            expected=", ".join(str(found.place.step) for found in every[-20:]) or "none is there",
            found=step,
        )

    def note_damage(self, found: StepEntry, error: ModelStateError) -> None:
        """Has it count as damaged from now on: as long as this object is there, and it is in its place."""
        if isinstance(error, DamagedCheckpointError) and (key := _key(found.place.path)) is not None:
            self._damage[key] = error
            self._whole.discard(key)
            self.doubtful |= _inodes(found.place.path)

    def note_whole(self, path: str) -> None:
        """Has a checkpoint count as one that need not be read again to be relied upon."""
        if (key := _key(path)) is not None:
            self._whole.add(key)

    def is_known_whole(self, found: StepEntry) -> bool:
        """Whether this object has read or written all of it, and it is in its place."""
        return _key(found.place.path) in self._whole

    def name(self) -> str:
        """What the store is called: every checkpoint says of which it is. Empty where nothing says so.

        Where the file that says so is lost or damaged, it is what most of the checkpoints say.
        """
        return _stored_name(self.directory) or _most_common(self._records())

    def ensure_name(self) -> str:
        """The name, which is written down if it was not.

        Raises what writing raises, `NewerManifestError`, and `OpenError` or `ReadFailedError` where `store.json` is
        there and cannot be read: it may hold the name, and another one would make all checkpoints foreign.
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

    def _look(self) -> list[StepEntry]:
        records = [(place, *self._read(place)) for place in self._places()]
        mine = _stored_name(self.directory) or _most_common(record for _, record, _ in records if record is not None)
        return [self._found(place, record, error, mine) for place, record, error in records]

    def _found(self, place: Place, record: Record | None, error: ModelStateError | None, mine: str) -> StepEntry:
        if record is None:
            return StepEntry(place, None, error)
        if record.step != place.step or record.store != mine:
            return StepEntry(place, record, _foreign(place, record, mine))
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
            read = read_record if self._records_read is None else self._records_read.read
            return read(place.path), None
        except ModelStateError as error:
            return None, error

    def _places(self) -> list[Place]:
        try:
            return places(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ReadFailedError("the store cannot be read", where=self.directory, found=error) from error


class _Records:
    """Records that have been read, as long as their files are the same."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, int, int], Record]] = {}

    def read(self, path: str) -> Record:
        """Raises what `read_record` raises."""
        try:
            found = os.stat(os.path.join(path, RECORD_FILE))
        except OSError:
            return read_record(path)  # which says what is wrong
        identity = found.st_ino, found.st_size, found.st_mtime_ns
        kept = self._kept.get(path)
        if kept is not None and kept[0] == identity:
            return kept[1]
        record = read_record(path)
        if identity[1] + sum(size for (_, size, _), _ in self._kept.values()) <= _MOST_KEPT_BYTES:
            self._kept[path] = identity, record
        return record


def _read_store_file(directory: str) -> tuple[str, object]:
    """The name in `store.json`, and the version of the format that the file states.

    Raises `OpenError` and `ReadFailedError` where the file cannot be read, and `DamagedCheckpointError` where its
    content is not what was written.
    """
    path = os.path.join(directory, STORE_FILE)
    data = read_whole(path, _MAX_BYTES, STORE_FILE)
    try:
        said = json.loads(data)
        check_seal(data, said[SEAL], path)
        name, version = said["store"], said["format"]
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
    """What is wrong with `store.json`; empty where nothing is, and where the directory has no such file."""
    try:
        _read_store_file(directory)
    except (OpenError, ReadFailedError, DamagedCheckpointError) as error:
        return str(error) if os.path.lexists(os.path.join(directory, STORE_FILE)) else ""
    return ""


def _stored_name(directory: str) -> str:
    """The name in `store.json`; empty where the file is missing or damaged."""
    try:
        return _read_store_file(directory)[0]
    except (OpenError, ReadFailedError, DamagedCheckpointError):
        return ""


def _most_common(records: Iterator[Record]) -> str:
    counted = Counter(record.store for record in records).most_common(1)
    return counted[0][0] if counted else ""


def _foreign(place: Place, record: Record, mine: str) -> ForeignCheckpointError:
    return ForeignCheckpointError(
        "the checkpoint was put here from another store, or under another step",
        where=place.path,
        expected=f"step {place.step} of the store {mine}",
        found=f"step {record.step} of the store {record.store}",
        remedy="open the store that it is from; ms.open reads what is in it by itself",
    )


def _inodes(path: str) -> set[tuple[int, int]]:
    try:
        with os.scandir(path) as entries:
            found = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return set()
    return {(one.st_dev, one.st_ino) for one in found}


def _key(path: str) -> _Key | None:
    try:
        return path, os.stat(path).st_ino
    except OSError:
        return None


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
