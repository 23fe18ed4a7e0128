"""Opens files that may come from elsewhere: paths, regular files, fingerprints, bounded reads."""

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from modelstate.errors import (
    OpenError,
    ReadFailedError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
    TruncatedFileError,
)
from modelstate.io import system

NOT_FOUND = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors of the system that mean that no file is at a path."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DOWNLOADS = {
    "s3": "aws s3 cp [--recursive] {url} .",
    "gs": "gcloud storage cp [-r] {url} .",
    "hf": "hf download {rest}",
    "http": "curl -fLO {url}",
    "https": "curl -fLO {url}",
}


def local_path(given: str) -> str:
    """The absolute path, so that it means the same when the working directory changes. `file://` is one too.

    Raises `SourceTypeError` for a URL of another kind, and for what can be no path.
    """
    if "\0" in given or not given:
        raise SourceTypeError("this can be no path", where=repr(given[:80]), remedy="give the path of a checkpoint")
    try:
        os.fsencode(given)
    except UnicodeEncodeError as error:
        raise SourceTypeError("this can be no path", where=repr(given[:80]), found=error) from error
    if _URL.match(given):
        url = urlsplit(given)
        if url.scheme.lower() != "file" or url.netloc not in ("", "localhost"):
            how = _DOWNLOADS.get(url.scheme.lower(), "")
            raise SourceTypeError(
                "a URL is not opened here",
                where=given,
                expected="a path",
                found=f"a URL of {url.scheme}://",
                remedy=f"download it first: {how.format(url=given, rest=url.netloc + url.path)}".rstrip(": "),
            )
        given = url2pathname(url.path)
    # Taking `x/..` away would be wrong where x is a symbolic link.
    return os.path.abspath(given) if ".." not in given.split(os.sep) else os.path.join(os.getcwd(), given)


def not_found(path: str, given: str) -> SourceNotFoundError:
    """The error for a path at which there is nothing."""
    if os.path.islink(path):
        if _is_loop(path):
            return SourceNotFoundError(
                "this is a symbolic link that leads back to itself",
                where=path,
                found=f"a link to {os.readlink(path)}",
                remedy="remove the link, and copy or link the file itself",
            )
        return SourceNotFoundError(
            "this is a symbolic link to something that is not there",
            where=path,
            found=os.path.realpath(path),
            remedy="finish the download, or mount what it points to",
        )
    parent = os.path.dirname(path)
    while not os.path.exists(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    close = _nearest(parent, path.removeprefix(parent).lstrip(os.sep).split(os.sep)[0])
    home = os.path.expanduser(given)
    if given.startswith("~") and os.path.exists(home):
        remedy = f"the shell expands ~ and Python does not: {home}"
    elif close:
        remedy = "did you mean " + " or ".join(os.path.join(parent, name) for name in close) + "?"
    elif _REPOSITORY.fullmatch(given) and not os.path.exists(os.path.dirname(path)):
        remedy = f"if this is a repository of huggingface.co, open what this prints: hf download {given}"
    else:
        remedy = "check the path, and the directory that it is relative to"
    there = "the directory" if os.path.isdir(parent) else "the file"
    return SourceNotFoundError(
        "there is no such file or directory", where=path, found=f"{there} {parent} is there", remedy=remedy
    )


def no_access(path: str, error: Exception) -> SourceAccessError:
    """The error for what may not be read."""
    try:
        status = os.stat(path)
        found = f"{stat.filemode(status.st_mode)}, owner {status.st_uid}; this process is user {os.geteuid()}"
    except OSError:
        found = f"{getattr(error, 'strerror', '') or error}; this process is user {os.geteuid()}"
    return SourceAccessError(
        "the permission to read is missing",
        where=path,
        found=found,
        remedy=f"ask the owner for: chmod +r {path} (and +x on the directories above), or copy it as the owner",
    )


def open_regular(path: str, flags: int = 0) -> tuple[int, os.stat_result]:
    """Opens a regular file for reading. Every file that may come from elsewhere is opened here.

    Opening a pipe waits for a writer, and reading a device may never end: anything but a regular file is refused before
    a byte of it is read.

    Args:
        path: The file. Symbolic links are followed.
        flags: Flags of `os.open`, in addition to those for reading.

    Returns:
        A descriptor, which the caller closes, and the status of the file.

    Raises:
        SourceTypeError: The path names a pipe, a socket, a device or a directory.
        OSError: The file cannot be opened.
    """
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = system.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        descriptor = system.open(path, flags)  # a write lease of another process, which only regular files have
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device without a driver
            raise special_file(path, os.stat(path).st_mode) from error
        raise
    try:
        status = system.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise special_file(path, status.st_mode)
        os.set_blocking(descriptor, True)  # some file systems fetch archived data only for blocking reads
        return descriptor, status
    except BaseException:
        os.close(descriptor)
        raise


def _is_loop(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


_SPECIAL = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
}


def special_file(path: str, mode: int) -> SourceTypeError:
    """The error for a path that must name a regular file, and names something else."""
    kind = _SPECIAL.get(stat.S_IFMT(mode), "something else")
    return SourceTypeError(
        "a checkpoint is read at many places, so it must be a file",
        where=path,
        expected="a regular file",
        found=kind,
        remedy="give the path of a file" if stat.S_ISDIR(mode) else "write what comes through it to a file first",
    )


def _nearest(directory: str, name: str) -> list[str]:
    try:
        return get_close_matches(name, sorted(os.listdir(directory))[:10_000], n=3)
    except OSError:
        return []


_WHILE = "the file has changed while it was read"


class FileFingerprint(NamedTuple):
    """What tells a file from another version of it, short of reading it."""

    nbytes: int
    modified_ns: int
    inode: int
    device: int


_noted: ContextVar[dict[str, FileFingerprint] | None] = ContextVar("_noted", default=None)


@contextmanager
def noted() -> Iterator[dict[str, FileFingerprint]]:
    """The stamps that files have when they are first opened within this context, before anything is read of them."""
    found: dict[str, FileFingerprint] = {}
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


def stamps_of(paths: Iterable[str]) -> dict[str, FileFingerprint]:
    """The stamps of files as they are now. Raises `ReadFailedError`."""
    try:
        return {path: _stamp(system.stat(path)) for path in paths}
    except OSError as error:
        raise ReadFailedError("the file is gone", found=error, remedy="open the checkpoint again") from error


def open_unchanged(path: str, expected: FileFingerprint | None, flags: int = 0) -> int:
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


def check_unchanged(descriptor: int, path: str, expected: FileFingerprint | None) -> None:
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


def check_mapped(path: str, expected: FileFingerprint, nbytes: int) -> None:
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


def _changed(path: str, expected: FileFingerprint, found: FileFingerprint, what: str) -> ReadFailedError:
    return ReadFailedError(
        what,
        where=path,
        expected=f"{expected.nbytes} bytes, modified at {expected.modified_ns} ns",
        found=f"{found.nbytes} bytes, modified at {found.modified_ns} ns"
        + (", another file under the same name" if found.inode != expected.inode else ""),
        remedy="open the checkpoint again, when nothing writes to it any more",
    )


def _stamp(status: os.stat_result) -> FileFingerprint:
    return FileFingerprint(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


MAX_STRUCTURE_BYTES = 2**31
"""More than any table of contents has; it keeps a sparse file from being read into memory."""
_AT_ONCE_BYTES = 1 << 16


class SourceFile:
    """Reads exact pieces of a file. Use it as a context."""

    start = 0
    """Where it begins, in bytes from the beginning of the file at `path`."""

    def __init__(self, path: str) -> None:
        """Opens a regular file.

        Raises:
            SourceNotFoundError: There is no file, or a symbolic link leads to none.
            SourceTypeError: A pipe, a socket, a device or a directory.
            SourceAccessError: The permission to read is missing.
            ReadFailedError: Any other error of the system.
        """
        self.path = path
        try:
            self._descriptor, status = open_regular(path)
        except PermissionError as error:
            raise SourceAccessError("the file may not be read", where=path, remedy=f"chmod u+r {path}") from error
        except OSError as error:
            if error.errno not in NOT_FOUND:
                raise ReadFailedError("the file cannot be opened", where=path, found=error) from error
            if os.path.islink(path):
                raise not_found(path, path) from error
            raise SourceNotFoundError("there is no such file", where=path) from error
        note(path, status)
        self.nbytes = status.st_size

    def __enter__(self) -> "SourceFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, start: int, nbytes: int, what: str, most_bytes: int = MAX_STRUCTURE_BYTES) -> bytes:
        """Exactly `nbytes` bytes; `TruncatedFileError` where the file ends before, `OpenError` above `most_bytes`."""
        if start + nbytes > self.nbytes:
            raise self.truncated(what, start + nbytes)
        if nbytes > most_bytes:
            raise OpenError(
                f"{what} is larger than any checkpoint's",
                where=self.path,
                expected=f"at most {most_bytes:,} bytes",
                found=f"{nbytes:,} bytes",
            )
        try:
            found = system.pread_fully(self._descriptor, nbytes, start)
        except OSError as error:
            raise ReadFailedError(f"{what} cannot be read", where=self.path, found=error) from error
        if len(found) < nbytes:
            raise self.truncated(what, start + nbytes)
        return found

    def section(self, start: int, nbytes: int, what: str) -> "Section":
        """A part of the file as a file; `TruncatedFileError` where the file ends before."""
        if start + nbytes > self.nbytes:
            raise self.truncated(what, start + nbytes)
        return Section(self, start, nbytes)

    def truncated(self, what: str, end: int) -> TruncatedFileError:
        """The error for a file that should reach to `end`."""
        return TruncatedFileError(
            f"the file ends within {what}",
            where=self.path,
            expected=f"at least {end} bytes",
            found=f"{self.nbytes} bytes",
            remedy=CUT_SHORT,
        )


def read_whole(path: str, most_bytes: int, what: str) -> bytes:
    """All of a small regular file. Raises what `SourceFile` raises, and `OpenError` for more than `most_bytes`."""
    with SourceFile(path) as file:
        return file.read(0, file.nbytes, what, most_bytes)


class Section(SourceFile):
    """A run of bytes of an open file, read as if it were a file of its own. It closes nothing."""

    def __init__(self, file: SourceFile, start: int, nbytes: int) -> None:
        self.path = file.path
        self.start = file.start + start
        self.nbytes = nbytes
        self._file, self._within = file, start
        self._all = file.read(start, nbytes, "a part of the file") if nbytes <= _AT_ONCE_BYTES else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def read(self, start: int, nbytes: int, what: str, most_bytes: int = MAX_STRUCTURE_BYTES) -> bytes:
        """As of a file; what is small was read already."""
        if start + nbytes > self.nbytes:
            raise self.truncated(what, start + nbytes)
        if self._all is None:
            return self._file.read(self._within + start, nbytes, what, most_bytes)
        return self._all[start : start + nbytes]


CUT_SHORT = "the copy, the download or the save was cut short: compare the size with the original, and copy it again"
