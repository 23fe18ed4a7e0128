"""A model of what a disk may hold after a power cut, by the guarantees of a file system.

Bytes are safe once their file has been synced, and names once their directory has been synced. Everything else may be
in any state: each write is there in full, in part, as zeros, or missing, and the names of a directory are those after
any number of the changes since its last sync, in their order. Syncing a file does not make its name safe, although
many file systems do that.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from modelstate.io import system
from tests.faults import WRITE_CALLS, replaced


@dataclass(slots=True)
class _File:
    synced: bytes = b""
    unsynced: list[tuple[int, bytes | int]] = field(default_factory=list)
    """Writes since the last sync: the offset, and the bytes; for allocated space the number of bytes."""

    def content(self, draw: random.Random | None, everything: bool) -> bytes:
        """Returns the bytes of the file: with every write, with writes drawn by chance, or with synced ones only."""
        content = bytearray(self.synced)
        for start, data in self.unsynced:
            data = bytes(data) if isinstance(data, int) else data
            fate = "there" if everything else draw.choice(("there", "part", "zeros", "missing")) if draw else "missing"
            if isinstance(data, bytes) and fate == "part":
                data = data[: draw.randint(0, len(data))] if draw else data
            if fate == "missing" or not data:
                continue
            end = start + len(data)
            content.extend(bytes(max(0, end - len(content))))
            if any(data):
                content[start:end] = bytes(len(data)) if fate == "zeros" else data
        return bytes(content)


@dataclass(slots=True)
class _Change:
    """An atomic change of names: for each a directory, a name, and the entry that it gets; None removes the name."""

    names: list[tuple["_Directory", str, "_Entry | None"]]


@dataclass(slots=True, eq=False)
class _Directory:
    synced: dict[str, "_Entry"] = field(default_factory=dict)
    unsynced: list[_Change] = field(default_factory=list)

    def entries(self, count: int | None = None) -> dict[str, "_Entry"]:
        """Returns the entries after the first `count` changes since the last sync, or after all of them."""
        entries = dict(self.synced)
        for change in self.unsynced[:count]:
            for directory, name, entry in change.names:
                if directory is self and entry is not None:
                    entries[name] = entry
                elif directory is self:
                    entries.pop(name, None)
        return entries


_Entry = _File | _Directory
_Call = tuple[Any, ...]


class LossyDisk:
    """The record of what has been done to a directory. `lossy_disk` makes it."""

    calls: list[str]
    """The calls that changed something, or made it safe, in order."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.abspath(directory)
        self._before: dict[str, bytes | None] = {}
        for parent, directories, files in os.walk(self._path):
            self._before.update({os.path.join(parent, name): None for name in directories})
            self._before.update({path: Path(path).read_bytes() for path in (os.path.join(parent, n) for n in files)})
        self._inodes = {path: os.lstat(path).st_ino for path in self._before}
        self._done: list[_Call] = []
        self._open: dict[int, str] = {}
        self._lock = threading.RLock()
        self.calls = []

    def write(
        self, into: str | os.PathLike[str], point: int, keep: Literal["synced", "everything"] | int = "synced"
    ) -> None:
        """Creates a directory in a state that is possible after a power cut after the first `point` calls.

        Args:
            into: the path of the directory to create.
            point: the number of calls before the power cut.
            keep: "synced" for only what is safe, "everything" for everything that was written, or a number, the seed of
                a random choice of what is not safe.
        """
        draw = random.Random(keep) if isinstance(keep, int) else None
        root = _Replay(self._path, self._before, self._inodes).after(self._done[:point])
        _write(root, os.fspath(into), draw, keep == "everything")

    def _recorded(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any) -> object:
            with self._lock:
                is_new = name == "open_to_write" and not os.path.lexists(args[0])
                result = real(*args)
                self._record(name, args, result, is_new)
                return result

        return call

    def _record(self, name: str, args: Sequence[Any], result: Any, is_new: bool) -> None:
        if name == "close":
            self._open.pop(args[0], None)
        if name in ("close", "fchmod"):  # permissions are not recorded
            return
        if name in ("pwritev", "fallocate", "fsync"):
            number = self._open.get(args[0])
            if number is None:
                return
            more = (args[2], b"".join(map(bytes, args[1]))[:result]) if name == "pwritev" else args[1:]
            self._add(name, number, *more)
            return
        paths = [os.path.abspath(path) for path in args[: 2 if name in ("replace", "link") else 1]]
        if not all(path == self._path or path.startswith(os.path.join(self._path, "")) for path in paths):
            return
        if name == "open_to_write":
            self._open[result] = f"{result}.{len(self._done)}"
            self._add("open", self._open[result], paths[0], is_new)
        else:
            self._add(name, *paths)

    def _add(self, name: str, *args: object) -> None:
        self._done.append((name, *args))
        self.calls.append(f"{name} {os.path.basename(str(args[1] if name == 'open' else args[-1]))[:80]}")


class _Replay:
    """The state of a disk after calls."""

    def __init__(self, path: str, before: dict[str, bytes | None], inodes: dict[str, int]) -> None:
        self._path, self._root = path, _Directory()
        self._handles: dict[str, _Entry] = {}
        same: dict[int, _Entry] = {}
        for entry_path, content in before.items():
            directory, name = self._at(entry_path)
            entry: _Entry = _Directory() if content is None else _File(content)
            directory.synced[name] = same.setdefault(inodes[entry_path], entry)  # hard links share an entry

    def after(self, calls: Sequence[_Call]) -> _Directory:
        for name, *args in calls:
            getattr(self, f"_{name}")(*args)
        return self._root

    def _at(self, path: str) -> tuple[_Directory, str]:
        directory = self._root
        *parents, name = os.path.relpath(path, self._path).split(os.sep)
        for parent in parents:
            entry = directory.entries()[parent]
            assert isinstance(entry, _Directory)
            directory = entry
        return directory, name

    def _entry(self, path: str) -> _Entry:
        if path == self._path:
            return self._root
        directory, name = self._at(path)
        return directory.entries()[name]

    def _change(self, *names: tuple[str, _Entry | None]) -> None:
        change = _Change([(*self._at(path), entry) for path, entry in names])
        for directory in {id(directory): directory for directory, _, _ in change.names}.values():
            directory.unsynced.append(change)

    def _open(self, handle: str, path: str, is_new: bool) -> None:
        if is_new:
            self._change((path, _File()))
        self._handles[handle] = self._entry(path)

    def _file(self, handle: str) -> _File:
        file = self._handles[handle]
        assert isinstance(file, _File)
        return file

    def _pwritev(self, handle: str, start: int, data: bytes) -> None:
        self._file(handle).unsynced.append((start, data))

    def _fallocate(self, handle: str, nbytes: int) -> None:
        file = self._file(handle)
        if nbytes > len(file.content(None, True)):
            file.unsynced.append((nbytes - 1, 1))

    def _fsync(self, handle: str) -> None:
        entry = self._handles[handle]
        if isinstance(entry, _File):
            entry.synced = entry.content(None, True)
        else:
            entry.synced = entry.entries()
        entry.unsynced.clear()

    def _replace(self, source: str, target: str) -> None:
        entry = self._entry(source)
        directory, name = self._at(target)
        if directory.entries().get(name) is not entry:  # a rename to another link of the file does nothing
            self._change((source, None), (target, entry))

    def _link(self, source: str, target: str) -> None:
        self._change((target, self._entry(source)))

    def _unlink(self, path: str) -> None:
        self._change((path, None))

    def _mkdir(self, path: str) -> None:
        self._change((path, _Directory()))

    _rmdir = _unlink


@contextmanager
def lossy_disk(directory: str | os.PathLike[str]) -> Iterator[LossyDisk]:
    """Records what saves do to a directory, so that its possible states after a power cut can be created.

    The content of the directory at the beginning counts as safe. Only what modelstate writes is recorded. All data
    that is written is kept in memory.
    """
    disk = LossyDisk(os.fspath(directory))
    with replaced(system, {name: disk._recorded(name, getattr(system, name)) for name in WRITE_CALLS}):
        yield disk


def _write(directory: _Directory, path: str, draw: random.Random | None, everything: bool) -> None:
    os.mkdir(path)
    count = None if everything else draw.randint(0, len(directory.unsynced)) if draw else 0
    for name, entry in directory.entries(count).items():
        below = os.path.join(path, name)
        if isinstance(entry, _Directory):
            _write(entry, below, draw, everything)
            continue
        with open(below, "wb") as file:
            file.write(entry.content(draw, everything))
