"""Where the checkpoints of a store are: a directory of this machine, or a prefix of a bucket (`store/bucket.py`).

The store decides what is saved, kept and removed; a backend makes it so. A directory has

store.json                   the name of the store
.lock                        the lock of the process that writes
step-000000100/              a checkpoint, complete and durable under this name
    checkpoint.json          its record, written last, which describes all of it but its tensors
    model.safetensors.index.json, model-<digest>.safetensors
step-000000100.1/            the same step, saved again: the highest number is the valid one
.step-000000200.<random>.unfinished/    a checkpoint that is being written or removed
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import NamedTuple

from modelstate.errors import WriteFailedError
from modelstate.formats.manifest import digest
from modelstate.formats.safetensors import FileLayout, Written, write
from modelstate.formats.sharded import SUFFIX
from modelstate.io import system
from modelstate.io.atomic import atomic_file, make_directory, new_file, sync_directory, write_new_file
from modelstate.io.files import NOT_FOUND
from modelstate.io.lock import WriterLock
from modelstate.store.record import RECORD_FILE, FileRecord

STORE_FILE = "store.json"
PIN_FILE = "pinned"
DATA = "data"
"""The directory of a bucket's store that has the files of all checkpoints."""
_STEP = re.compile(r"step-(\d{9,18})(?:\.(\d{1,9}))?")
_UNFINISHED = re.compile(r"\.step-\d+(?:\.\d+)?\.[0-9a-f]{12}\.unfinished")


class Place(NamedTuple):
    """The directory of a checkpoint."""

    step: int
    revision: int
    """The higher one is the later one of a step. 0 in a directory where the step has been saved once."""
    path: str
    files: str
    """The directory of the files with its tensors."""


def name_of(step: int, revision: int) -> str:
    """Returns the name of a step's directory."""
    return f"step-{step:09d}" + (f".{revision}" if revision else "")


def unfinished_name(step: int) -> str:
    """Returns a new name for a directory that is being written or removed."""
    return f".step-{step:09d}.{os.urandom(6).hex()}.unfinished"


class LocalBackend:
    """A directory of this machine, or of a network file system. `Bucket` has the same methods.

    Methods raise `OSError` where I/O fails. Those that read are for any process at any time; those that write are for
    the holder of the lock.
    """

    is_lazy = False
    """Whether a checkpoint that is listed is complete, so that its record is read only where it is asked for."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.lock = WriterLock(directory)

    def places(self) -> list[Place]:
        """Returns every revision of every step, in order."""
        every = []
        for name in os.listdir(self._directory):
            if match := _STEP.fullmatch(name):
                path = os.path.join(self._directory, name)
                place = Place(int(match[1]), int(match[2] or 0), path, path)
                if name == name_of(place.step, place.revision):
                    every.append(place)
        return sorted(every)

    def identity(self, path: str) -> object:
        """Returns what changes where a checkpoint is replaced; None where there is no record at the path."""
        try:
            status = os.stat(os.path.join(path, RECORD_FILE))
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns  # a new file may get the inode of a removed one

    def contents(self, path: str) -> object:
        """Returns a number that changes where a file of a checkpoint is replaced or written to; None where none is."""
        with suppress(OSError), os.scandir(path) as files:
            statuses = [(file.name, file.stat()) for file in files if file.name != PIN_FILE]
            return hash(frozenset((name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in statuses))
        return None

    def is_gone(self, path: str) -> bool:
        """Whether there is no checkpoint at a path where one was listed."""
        return not os.path.lexists(path)  # what is not a directory stays, and is damaged

    def is_pinned(self, place: Place) -> bool:
        """Whether a checkpoint stays, whatever the rules of the store say."""
        try:
            os.lstat(os.path.join(place.path, PIN_FILE))
        except OSError as error:
            return error.errno not in NOT_FOUND  # with another error it may be pinned: it is not removed
        return True

    def problem_of(self, place: Place, files: Mapping[str, FileRecord]) -> str:
        """Returns which file is missing or has another size, as far as that is known without reading it.

        Raises `OSError` where that cannot be found out.
        """
        for name, file in files.items():
            try:
                status = os.stat(os.path.join(place.path, name))
            except OSError as error:
                if error.errno not in NOT_FOUND:
                    raise
                return f"{name}: {error.strerror}"
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != file.nbytes:
                return f"{name} has {status.st_size:,} bytes, not {file.nbytes:,}"
        return ""

    def is_untouched(self, path: str, record: FileRecord) -> bool:
        """Whether a file is as it was written, as far as that is known without reading it."""
        with suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            return (status.st_size, status.st_mtime_ns) == (record.nbytes, record.mtime_ns)
        return False

    def make(self) -> None:
        """Creates the place of the store."""
        make_directory(self._directory)

    def probe(self) -> None:
        """Writes a little, as a save does, and removes it."""
        beside, renamed = (os.path.join(self._directory, unfinished_name(0)) for _ in range(2))
        try:
            system.mkdir(beside)
            write_new_file(os.path.join(beside, RECORD_FILE), b"{}\n")
            sync_directory(beside)
            system.replace(beside, renamed)
            sync_directory(self._directory)
        finally:
            for path in (beside, renamed):
                _remove(path)

    def free_bytes(self) -> int | None:
        """Returns the bytes that are free; None where there is no limit."""
        space = os.statvfs(self._directory)
        return space.f_bavail * space.f_frsize

    def write_name(self, text: bytes) -> None:
        """Writes the file with the name of the store."""
        with atomic_file(os.path.join(self._directory, STORE_FILE), overwrite=True) as output:
            output.append(text)

    def serial(self, last: int) -> int:
        """Returns the number of the next save, where `last` is the highest one of the checkpoints."""
        return last + 1

    def new_step(self, name: str, step: int, serial: int, revisions: Sequence[Place]) -> NewDirectory:
        """Begins a checkpoint. `name` is an `unfinished_name`, `revisions` are the checkpoints of the same step."""
        return NewDirectory(self._directory, name, step, revisions)

    def set_pin(self, place: Place, pinned: bool) -> None:
        """Pins a checkpoint, or undoes that. Does nothing where it is so already."""
        path = os.path.join(place.path, PIN_FILE)
        if pinned:
            with suppress(FileExistsError):
                write_new_file(path, b"")
        else:
            with suppress(FileNotFoundError):
                system.unlink(path)
        sync_directory(place.path)

    def discard(self, removed: Sequence[Place], names: Set[str], kept: Callable[[], Set[str] | None]) -> None:
        """Removes checkpoints, so that a reader never sees a part of one.

        Args:
            removed: the checkpoints.
            names: the names of their files.
            kept: returns the names of the files of all others; None where a record cannot be read.
        """
        renamed, first_error = [], None
        for place in removed:
            beside = os.path.join(self._directory, unfinished_name(place.step))
            try:
                system.replace(place.path, beside)
                renamed.append(beside)
            except OSError as error:  # one that cannot be removed, such as a mount point, must not keep the others
                first_error = first_error or error
        if renamed:
            sync_directory(self._directory)
        for path in renamed:
            _remove(path)
        if first_error is not None:
            raise first_error

    def clear(self, kept: Callable[[], Set[str] | None]) -> None:
        """Removes what killed saves and prunes have left, and ignores errors.

        `kept` returns the names of the files of all checkpoints; None where a record cannot be read.
        """
        with suppress(OSError):
            for name in os.listdir(self._directory):
                if _UNFINISHED.fullmatch(name):
                    _remove(os.path.join(self._directory, name))


class NewDirectory:
    """A checkpoint that is written under a temporary name and renamed, so that it is complete where it is visible.

    `NewObjects` of a bucket has the same methods, and a `path`: the directory of the checkpoint while it is written.
    """

    def __init__(self, directory: str, name: str, step: int, revisions: Sequence[Place]) -> None:
        replaced = max(revisions, default=None)
        self._directory, self.path = directory, os.path.join(directory, name)
        self._final = os.path.join(directory, name_of(step, 0 if replaced is None else replaced.revision + 1))
        self._count = 0
        mode = 0o777
        if replaced is not None:
            with suppress(OSError):
                mode = os.stat(replaced.path).st_mode & 0o777 | stat.S_IRWXU  # it may have been made read-only
        system.mkdir(self.path, mode)

    def write_text(self, name: str, text: bytes) -> tuple[str, FileRecord]:
        """Writes a small file. Returns its name, which begins with the given one without its suffixes."""
        path = os.path.join(self.path, name)
        write_new_file(path, text)
        return name, _record_of(path, text)

    def begin(self, key: str) -> str:
        """Returns the path of a file that is about to be written, with tensors of an object."""
        self._count += 1
        return os.path.join(self.path, f".{self._count}{SUFFIX}")  # no object has such a name

    def write(self, path: str, planned: FileLayout) -> Written:
        """Writes such a file, with this process alone."""
        with new_file(path) as output:
            return write(output, planned)

    def finish(self, path: str, key: str, written: Written, nbytes: int) -> tuple[str, FileRecord]:
        """Gives such a file its name, which has a digest of its content. Returns the name."""
        name = f"{key}-{written.content[:16]}{SUFFIX}"
        system.replace(path, os.path.join(self.path, name))
        return name, _record_of(os.path.join(self.path, name), written.header)

    def link(self, file: str) -> bool:
        """Makes a file of an earlier checkpoint a file of this one. Returns False where this is not possible."""
        try:
            system.link(file, os.path.join(self.path, os.path.basename(file)))
        except OSError:
            return False  # the file system has no links, or the file has too many
        return True

    def unlink(self, name: str) -> None:
        """Undoes `link`."""
        system.unlink(os.path.join(self.path, name))

    def commit(self, text: bytes, files: Set[str], pinned: bool, check: Callable[[], object]) -> str:
        """Makes the checkpoint visible and durable with its record. Returns its path.

        Args:
            text: The record.
            files: The names of the files that it has.
            pinned: Whether the checkpoint is pinned.
            check: Called right before it becomes visible; may raise.
        """
        if pinned:
            write_new_file(os.path.join(self.path, PIN_FILE), b"")
        write_new_file(os.path.join(self.path, RECORD_FILE), text)
        sync_directory(self.path)
        check()
        # Some file systems lock out writers of one machine only.
        if missing := {*files, RECORD_FILE}.difference(os.listdir(self.path)):
            raise WriteFailedError(
                "files of the checkpoint were removed while it was written",
                where=self._final,
                found=f"without {', '.join(sorted(missing))}",
                remedy="check whether another program writes to the store: on some network file systems, the lock "
                "keeps out only other processes of the same machine",
            )
        system.replace(self.path, self._final)
        try:
            sync_directory(self._directory)
        except BaseException:
            system.replace(self._final, self.path)
            raise
        return self._final

    def discard(self) -> None:
        """Removes what was written, unless the checkpoint has been committed."""
        _remove(self.path)


def _record_of(path: str, head: bytes) -> FileRecord:
    """Returns the record of a file that was written, with this head. Raises `OSError`."""
    status = os.stat(path)
    return FileRecord(status.st_size, status.st_mtime_ns, len(head), digest(head))


def _remove(path: str) -> None:
    """Removes a directory of a store with all that is in it, and ignores errors; of a symbolic link only the link."""
    with suppress(OSError):
        if os.path.islink(path) or not os.path.isdir(path):
            system.unlink(path)
            return
        with suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # of a read-only directory no file can be removed
        for name in os.listdir(path):
            _remove(os.path.join(path, name))
        system.rmdir(path)
