"""Whether a file is still the one whose header was read."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from modelstate.errors import ReadFailedError, SourceTypeError
from modelstate.read import system
from modelstate.read.paths import open_regular

_WHILE = "the file has changed while it was read"


class Stamp(NamedTuple):
    """What tells a file from another version of it, short of reading it."""

    nbytes: int
    modified_ns: int
    inode: int
    device: int


_noted: ContextVar[dict[str, Stamp] | None] = ContextVar("_noted", default=None)


@contextmanager
def noted() -> Iterator[dict[str, Stamp]]:
    """The stamps that files have when they are first opened within this context, before anything is read of them."""
    found: dict[str, Stamp] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(path: str, status: os.stat_result) -> None:
    """Takes down what a file is that has just been opened."""
    found = _noted.get()
    if found is not None:
        found.setdefault(path, _stamp(status))


def forget(path: str) -> None:
    """Has the next opening of a file count as the first one."""
    found = _noted.get()
    if found is not None:
        found.pop(path, None)


def stamps_of(paths: Iterable[str]) -> dict[str, Stamp]:
    """The stamps of files as they are now. Raises `ReadFailedError`."""
    try:
        return {path: _stamp(system.stat(path)) for path in paths}
    except OSError as error:
        raise ReadFailedError("the file is gone", found=error, remedy="open the checkpoint again") from error


def open_unchanged(path: str, expected: Stamp | None, flags: int = 0) -> int:
    """A descriptor of the file, for reading, opened with more `flags`.

    Raises `ReadFailedError` where it is not the file of the stamp.
    """
    try:
        descriptor, status = open_regular(path, flags)
    except (OSError, SourceTypeError) as error:
        raise ReadFailedError(
            "the file can no longer be opened",
            where=path,
            found=error.found if isinstance(error, SourceTypeError) else error,
            remedy="open the checkpoint again",
        ) from error
    found = _stamp(status)
    if expected is not None and found != expected:
        os.close(descriptor)
        raise _changed(path, expected, found, "the file has changed since it was opened")
    return descriptor


def check_unchanged(descriptor: int, path: str, expected: Stamp | None) -> None:
    """Raises `ReadFailedError` where the file is not what it was when `open_unchanged` opened it.

    To be called when all has been read and before the descriptor is closed: what a file was changed to while it was
    read may have been read in part. The name may have been given to another file meanwhile, which changes nothing.
    """
    try:
        found = _stamp(system.fstat(descriptor))
    except OSError as error:
        raise ReadFailedError("the file's size and time cannot be read", where=path, found=error) from error
    if expected is not None and found != expected:
        raise _changed(path, expected, found, _WHILE)


def check_mapped(path: str, expected: Stamp, nbytes: int) -> None:
    """The same for a file that is mapped, and has `nbytes` bytes now; only its name is left to ask for more."""
    try:
        found = _stamp(system.stat(path))
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise ReadFailedError("the file's size and time cannot be read", where=path, found=error) from error
    if found is None or (found.inode, found.device) != (expected.inode, expected.device):
        found = expected._replace(nbytes=nbytes)  # the name belongs to another file
    if found != expected:
        raise _changed(path, expected, found, _WHILE)


def _changed(path: str, expected: Stamp, found: Stamp, what: str) -> ReadFailedError:
    return ReadFailedError(
        what,
        where=path,
        expected=f"{expected.nbytes} bytes, modified at {expected.modified_ns} ns",
        found=f"{found.nbytes} bytes, modified at {found.modified_ns} ns"
        + (", another file under the same name" if found.inode != expected.inode else ""),
        remedy="open the checkpoint again, when nothing writes to it any more",
    )


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
