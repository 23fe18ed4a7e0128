"""Opens files that may come from untrusted places: paths, regular files only, fingerprints, bounded reads.

A `FileFingerprint` (size, time of modification, inode, device) is taken when a file is first opened. Every later open
of the same checkpoint compares it, so that bytes of two versions of a file are never mixed. A `SourceFile` reads the
headers of a file; the `OpenFiles` of a load are read by range (`modelstate.io.engine`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shlex
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

from modelstate.errors import (
    OPEN_AGAIN,
    OpenError,
    ReadFailedError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
    TruncatedFileError,
    keep_interrupt,
)
from modelstate.io import lease, system
from modelstate.io.memory import DIRECT_ALIGN_BYTES, HUGE_PAGE_BYTES, Buffer
from modelstate.io.system import Descriptor
from modelstate.process import ThreadValue
from modelstate.remote.location import is_remote, redacted_url
from modelstate.text_format import given_directories, note_given

if TYPE_CHECKING:  # every open of a local file would import what a URL needs
    from modelstate.remote.cache import Cache
    from modelstate.remote.file import RemoteFile

_LIMITS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or close some",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "raise the limit of memory (ulimit -v) or of maps (vm.max_map_count)",
}
"""What to do where the process or the system has reached a limit."""
NOT_FOUND = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""The errors of the operating system that mean that there is no file at a path."""

_URL = r"[A-Za-z][A-Za-z0-9+.-]+://"
_MISSPELT_URL = r"(?i)(s3|gs|az|https?|hf|file):/?(?=[^/])"
"""The beginning of a URL with too few slashes."""
_FILE = r"\.(safetensors|bin|pt|pth|ckpt|json)$"
"""The end of the name of a file, which no repository has."""
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_DOWNLOADS = {
    "s3": "aws s3 cp [--recursive] {url} .",
    "gs": "gcloud storage cp [-r] {url} .",
    "http": "curl -fLO {url}",
    "https": "curl -fLO {url}",
}
"""The command that downloads a URL, by its scheme."""
_HUB = r"hf://(?P<repository>[^/]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?"


def local_path(path: str) -> str:
    """Returns the absolute path, which stays valid when the working directory changes. Accepts `file://` URLs.

    `~` and `~USER` at the beginning stand for home directories.

    Raises `SourceTypeError` for any other URL, and for a string that cannot be a path.
    """
    given = path
    if re.match(_URL, path):
        scheme, _, rest = path.partition("://")
        lower, shown = scheme.lower(), redacted_url(path)
        if lower != "file" or rest.partition("/")[0] not in ("", "localhost"):
            download = _DOWNLOADS.get(lower, "").format(url=shlex.quote(shown))
            if hub := re.fullmatch(_HUB, path):
                words = ["hf", "download", hub["repository"], hub["file"] or ""]
                words += ["--revision", hub["revision"]] if hub["revision"] else []
                download = shlex.join(filter(None, words))
            remedy = f"download it first: {download}".rstrip(": ")
            if is_remote(f"{lower}://") and not is_remote(path):
                remedy = f"write {lower}:// in lower case"
            raise SourceTypeError(
                "URLs of this kind are not opened",
                where=shown,
                expected="a path, or a URL of s3://, gs://, az://, https://, http:// or hf://",
                found=f"a URL of {scheme}://",
                remedy=remedy,
            )
        path = unquote(urlsplit(path).path, errors="surrogateescape")
    elif (url := re.match(_MISSPELT_URL, path)) and not os.path.lexists(path.partition("/")[0]):
        scheme = url[1].lower()
        right = redacted_url(f"{scheme}://{'/' if scheme == 'file' else ''}{path[url.end() :]}")
        raise SourceTypeError(
            f"this is a misspelt URL, perhaps of {right}",
            remedy="write the URL as a str: pathlib.Path makes one slash of two. A path like this needs ./ before it",
        )
    try:
        is_path = path != "" and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        remedy = "give the path of a checkpoint; its URL is file:///DIRECTORY/FILE"
        raise SourceTypeError("this cannot be a path", where=repr(given[:80]), remedy=remedy)
    given, path = path, os.path.expanduser(path)
    try:
        # Normalizing `x/..` away would be wrong where x is a symbolic link.
        absolute = os.path.abspath(path) if ".." not in path.split(os.sep) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        what = "a relative path leads nowhere: the working directory has been removed"
        raise SourceTypeError(what, where=path, found=error, remedy="change to a directory that is there") from error
    if absolute != given or given_directories:
        note_given(absolute, given)
    return absolute


def not_found(path: str, given: str) -> SourceNotFoundError:
    """The error for a path at which there is no file; `given` is the path as the caller wrote it."""
    if os.path.islink(path):
        target, what = os.path.realpath(path), "this is a symbolic link to something that is not there"
        remedy = "finish the download, or mount what it points to"
        if os.path.islink(target):
            what = "this is a symbolic link that leads back to itself"
            remedy = "remove the link, and copy or link the file itself"
        return SourceNotFoundError(what, where=path, found=target, remedy=remedy)
    parent = os.path.dirname(path)
    while not os.path.exists(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    first_missing = path.removeprefix(parent).lstrip(os.sep).split(os.sep)[0]
    try:
        entries = sorted(os.listdir(parent))[:10_000]
    except OSError:
        entries = []
    close = [name for name in entries if _is_misspelling(first_missing, name)][:3]
    if close:
        remedy = "did you mean " + " or ".join(os.path.join(parent, name) for name in close) + "?"
    elif re.fullmatch(_REPOSITORY, given) and not re.search(_FILE, given) and not os.path.exists(os.path.dirname(path)):
        remedy = f'if this is a repository of huggingface.co: modelstate.open("hf://{given}")'
    else:
        remedy = "check the path, and the directory that it is relative to"
    found = f"the directory {parent} has no {first_missing}" if os.path.isdir(parent) else f"{parent} is a file"
    return SourceNotFoundError("there is no such file or directory", where=path, found=found, remedy=remedy)


_SUFFIXES = r"(?i)(\.(safetensors|bin|pt|pth|ckpt|tar))+(\.index\.json)?$"
_ANY_SUFFIX = rf"{_SUFFIXES}|\.[a-z]+$"
_LEAST_LETTERS = 5


def _is_misspelling(given: str, name: str) -> bool:
    """Whether a name is that of the same model: but for its suffix, for case and separators, or for one slip.

    A slip is a letter that is doubled or left out within the name, or two that are exchanged. Other letters and other
    numbers make the name of another model, such as bert and bart, or 7b and 13b.
    """
    if re.search(_ANY_SUFFIX, given) and not re.search(_SUFFIXES, name):
        return False
    one, other = (re.sub(r"[\W_]", "", re.sub(_ANY_SUFFIX, "", text)).lower() for text in (given, name))
    if one == other or max(len(one), len(other)) < _LEAST_LETTERS:
        return one == other != ""
    if re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return False
    shorter, longer = sorted((one, other), key=len)
    if len(shorter) < len(longer):
        return shorter in {longer[:at] + longer[at + 1 :] for at in range(1, len(longer) - 1)}
    return other in {one[:at] + one[at + 1] + one[at] + one[at + 2 :] for at in range(len(one) - 1)}


def cannot_open(path: str, given: str, error: OSError) -> SourceAccessError | SourceNotFoundError | ReadFailedError:
    """The error for a path that cannot be opened; `given` is the path as the caller wrote it."""
    if error.errno in NOT_FOUND:
        return not_found(path, given)
    if not isinstance(error, PermissionError):
        return read_failed("the file cannot be opened", path, error)
    try:
        status = os.stat(path)
        found = f"{stat.filemode(status.st_mode)}, owner {status.st_uid}"
    except OSError:
        found = str(error.strerror)
    return SourceAccessError(
        "the permission to read is missing",
        where=path,
        found=f"{found}; this process is user {os.geteuid()}",
        remedy=f"ask the owner for: chmod +r {shlex.quote(path)} (and +x on the directories above), or copy it as the "
        "owner",
    )


def mode_of(path: str) -> int:
    """Returns the type and the permissions of what is at a path; 0 where nothing can be found there.

    `os.path.isfile` drops an `OSError` or `ValueError` of a signal handler.
    """
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError) as error:
        keep_interrupt(error)
        return 0


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """Identifies a version of a file without reading it."""

    nbytes: int
    modified_ns: int
    inode: int
    device: int
    tag: str = ""
    """The ETag of an object outside this machine."""
    cache: Cache | None = field(default=None, compare=False)
    """Where what is read of this version is kept: the cache with which the file was opened."""
    is_remote: bool = False
    """Whether the file is outside this machine."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileFingerprint:
        """Returns the fingerprint of a file of this machine."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)

    def check(self, path: str, found: FileFingerprint) -> None:
        """Raises `ReadFailedError` where a file has another fingerprint."""
        if found != self:
            other = ", another file under the same name" if found.inode != self.inode else ""
            raise ReadFailedError(
                "the file has changed since it was opened",
                where=path,
                expected=f"{self.nbytes} bytes, modified at {self.modified_ns} ns",
                found=f"{found.nbytes} bytes, modified at {found.modified_ns} ns{other}",
                remedy=OPEN_AGAIN,
            )


def read_failed(
    what: str,
    where: str,
    error: Exception,
    remedy: str = "look at the disk, or at the network that the file comes over, and try again",
) -> ReadFailedError:
    """Returns the error for a file that cannot be read. Where a limit is the cause, it has a remedy of its own."""
    remedy = _LIMITS.get(getattr(error, "errno", None) or 0, remedy)
    return ReadFailedError(what, where=where, found=getattr(error, "found", error), remedy=remedy)


def fingerprint_of(path: str, descriptor: int | None = None) -> FileFingerprint:
    """Returns the fingerprint of an open file, or without a descriptor that of the file at a path.

    Raises `FileNotFoundError` where there is no file at the path, and `ReadFailedError` for other errors.
    """
    try:
        return FileFingerprint.of(system.stat(path) if descriptor is None else system.fstat(descriptor))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise read_failed("the file's size and time cannot be read", path, error) from error


# Open files.


class LocalFile:
    """An open file of this machine. A `RemoteFile` has the same methods.

    Every file that may come from an untrusted place is opened here. Opening a pipe waits for a writer, and reading a
    device may never end, so anything but a regular file is refused before a byte of it is read.

    Args:
        path: The file. Symbolic links are followed.

    Raises:
        SourceTypeError: The path names a pipe, a socket, a device or a directory.
        OSError: The file cannot be opened.
    """

    leased_at: float | None = None
    """When the read lease was taken; None without one."""
    _direct: Descriptor | None = None
    """The file once more, with O_DIRECT."""

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
        try:
            self.descriptor = Descriptor.of(system.open, path, flags | os.O_NONBLOCK)
        except BlockingIOError:
            # A write lease of another process, which only regular files have.
            self.descriptor = Descriptor.of(system.open, path, flags)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device without a driver
                raise _special_file(path, os.stat(path).st_mode) from error
            raise
        try:
            self.status = system.fstat(self.descriptor)
            if not stat.S_ISREG(self.status.st_mode):
                raise _special_file(path, self.status.st_mode)
            os.set_blocking(self.descriptor, True)  # some file systems fetch archived data only for blocking reads
        except BaseException:
            self.descriptor.close()
            raise
        self.fingerprint = FileFingerprint.of(self.status)

    def read(self, start: int, nbytes: int) -> bytes:
        """Reads a part of the headers. Returns fewer bytes where the file ends. Raises `ReadFailedError`."""
        data = b""
        try:
            # One call may return less than was asked for.
            while len(data) < nbytes and (
                piece := system.pread(self.descriptor, nbytes - len(data), start + len(data))
            ):
                data += piece
        except OSError as error:
            raise self._failed(start + len(data), error) from error
        return data

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads from `offset` on into the buffers, one after the other, and returns the number of bytes, 0 at the end.

        What the page cache does not return at once of a leased file is read again. Raises `ReadFailedError`.
        """
        with suppress(OSError):  # which the usual call has again
            if self.leased_at is not None:
                count = system.preadv_cached(self.descriptor, buffers, offset)
            else:
                count = 0 if self._direct is None else self._read_window(self._direct, buffers, offset)
            if count:
                return count
        try:
            return system.preadv(self.descriptor, buffers, offset)
        except OSError as error:
            raise self._failed(offset, error) from error

    def _failed(self, offset: int, error: OSError) -> ReadFailedError:
        return read_failed("reading failed", f"{self.path}, byte {offset}", error)

    def skip_page_cache(self, windows: list[Buffer]) -> bool:
        """Lets large reads go past the page cache. Returns whether the file system may have this.

        `windows` are the buffers for it, which files share: a thread that finds none allocates one.
        """
        if system.O_DIRECT and self._direct is None:
            with suppress(OSError):
                again = f"/proc/self/fd/{int(self.descriptor)}"
                self._direct = Descriptor.of(system.open, again, os.O_RDONLY | system.O_DIRECT)
                self._windows = windows
        return self._direct is not None

    def _read_window(self, direct: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads whole pages of the file into a huge page, and copies what is asked for. Returns its length, or 0."""
        wanted, start = sum(map(len, buffers)), offset // DIRECT_ALIGN_BYTES * DIRECT_ALIGN_BYTES
        if wanted < _LEAST_DIRECT_BYTES:
            return 0
        try:
            window = self._windows.pop()
        except IndexError:
            window = Buffer(HUGE_PAGE_BYTES)
        pages = -(-(offset + wanted - start) // DIRECT_ALIGN_BYTES)
        end = system.preadv(direct, [window.view[: pages * DIRECT_ALIGN_BYTES]], start)
        at = offset - start
        for buffer in buffers:
            if at >= end:
                break
            nbytes = min(len(buffer), end - at)
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), window.address + at, nbytes)
            at += nbytes
        self._windows.append(window)
        return max(at - (offset - start), 0)

    def lease(self) -> str:
        """Takes a read lease. Returns an empty string, or the reason why there is none.

        Raises `ReadFailedError` where the file has changed since it was opened.
        """
        refusal = lease.hold_for_now(self.descriptor) if self.status.st_nlink else lease.NAMELESS
        if not refusal:
            self.leased_at = time.monotonic()
            self.fingerprint.check(self.path, fingerprint_of(self.path, self.descriptor))
        return refusal

    def release(self) -> None:
        """Releases the lease, if there is one: a writer that waits goes on."""
        if self.leased_at is not None:
            self.leased_at = None
            lease.release(self.descriptor)

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where the file has changed since it was opened.

        A leased file has not changed before a writer has waited for too long.
        """
        if self.leased_at is None:
            # After the last read and before the file is closed: a change during the read may have been read in part.
            self.fingerprint.check(self.path, fingerprint_of(self.path, self.descriptor))
        elif not lease.is_intact(self.descriptor) and time.monotonic() - self.leased_at > lease.safe_seconds():
            raise ReadFailedError(
                "a process that waited to write to the file was let go on before the read was over",
                where=self.path,
                expected=f"at most {lease.safe_seconds():.0f} seconds",
                remedy=OPEN_AGAIN,
            )

    def close(self) -> None:
        """Closes the file, and releases its lease."""
        self.release()
        if self._direct is not None:
            self._direct.close()
        self.descriptor.close()


_KINDS = {"d": "a directory", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a block device"}
"""By the letter of `stat.filemode`."""


def _special_file(path: str, mode: int) -> SourceTypeError:
    """The error for a path that names something else than a regular file; `mode` is its `st_mode`."""
    return SourceTypeError(
        "a checkpoint is read at many places, so it must be a file",
        where=path,
        expected="a regular file",
        found=_KINDS.get(stat.filemode(mode)[0], "something else"),
        remedy="give the path of a file" if stat.S_ISDIR(mode) else "write what comes through it to a file first",
    )


RangeFile: TypeAlias = "LocalFile | RemoteFile"


def open_unchanged(path: str, fingerprint: FileFingerprint | None) -> LocalFile:
    """Opens a file of this machine. Raises `ReadFailedError` where it does not match the fingerprint."""
    try:
        file = LocalFile(path)
    except (OSError, SourceTypeError) as error:
        raise read_failed("the file can no longer be opened", path, error, "open the checkpoint again") from error
    if fingerprint is not None and file.fingerprint != fingerprint:
        file.close()
        fingerprint.check(path, file.fingerprint)
    return file


class OpenFiles:
    """Files, each opened at its first use. A context manager, whose end closes them.

    A file without a fingerprint is one of this machine. Of more files than `system.most_open`, the first ones are
    closed, and opened again at their next use.

    Args:
        fingerprints: What each file must be, by path.
        kept: Files that are open already, by path. They are taken out of it.
    """

    def __init__(self, fingerprints: Mapping[str, FileFingerprint], kept: dict[str, LocalFile] | None = None) -> None:
        self.fingerprints, self._kept = fingerprints, {} if kept is None else kept
        self._files: dict[str, RangeFile] = {}
        self._left: set[str] = set()
        """The files that had to make room."""
        self._lock = threading.Lock()

    def __getitem__(self, path: str) -> RangeFile:
        """Returns a file. Raises `ReadFailedError` where it does not match its fingerprint."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                known, file = self.fingerprints.get(path), self._kept.pop(path, None)
                if known is not None and known.is_remote:
                    from modelstate.remote.file import ObjectVersion, RemoteFile

                    file = RemoteFile(path, ObjectVersion(known.nbytes, known.modified_ns, known.tag), known.cache)
                elif file is None or file.fingerprint != known:
                    self._make_room()
                    file = open_unchanged(path, known)
                self._files[path] = file
            return file

    def _make_room(self) -> None:
        """Lets a file go where many are open: one that is not used yet, or the first one without a lease."""
        local = {path: file for path, file in self._files.items() if isinstance(file, LocalFile)}
        if len(local) + len(self._kept) < system.most_open():
            return
        if self._kept:
            self._kept.popitem()[1].close()
        elif (first := next((path for path, file in local.items() if file.leased_at is None), None)) is not None:
            self._left.add(first)
            del self._files[first]  # a thread that is reading it has a reference, which keeps it open

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a file has changed since it was opened."""
        for file in self._files.values():
            file.check_unchanged()
        for path in self._left:
            open_unchanged(path, self.fingerprints.get(path)).close()

    def release(self) -> None:
        """Releases the leases: a writer that waits goes on."""
        for file in self._files.values():
            if isinstance(file, LocalFile):
                file.release()

    def close(self) -> None:
        """Closes the files. The next use of a file opens it again."""
        for files in (self._kept, self._files):
            while files:
                files.popitem()[1].close()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_kept = ThreadValue[dict[str, LocalFile] | None](None)


@contextmanager
def kept_open() -> Iterator[dict[str, LocalFile]]:
    """Within the block, a `SourceFile` of this thread leaves its file open; yields these files by their paths."""
    kept = dict[str, LocalFile]()
    try:
        with _kept.replaced(kept):
            yield kept
    except BaseException:  # whose traceback may live on
        OpenFiles({}, kept).close()
        raise


HEAD_BYTES = 4096
"""The bytes of the beginning of a file by which its format is found."""
MAX_STRUCTURE_BYTES = 2**31
"""More than the header of any checkpoint has; the limit keeps a sparse file from being read into memory."""
_AT_ONCE_BYTES = 1 << 16
_LEAST_DIRECT_BYTES = 256 << 10
"""Less is read from the page cache, which reads ahead."""


class SourceFile:
    """Reads exact pieces of a file. Use it as a context manager.

    The fingerprint is from before the first read. What is read later under it is of the same version of the file.

    Attributes:
        head: The first `HEAD_BYTES` of the file, or all of a smaller one.
    """

    start = 0
    """The offset of this object's first byte, in bytes from the beginning of the file at `path`."""
    _data = b""
    """Its first bytes, which have been read."""

    def __init__(self, path: str) -> None:
        """Opens a regular file.

        Raises:
            SourceNotFoundError: There is no file, or the target of a symbolic link is missing.
            SourceTypeError: The path names a pipe, a socket, a device or a directory.
            SourceAccessError: The permission to read is missing.
            ReadFailedError: Every other error of the operating system.
            TruncatedFileError: The file has become shorter since.
        """
        self.path = path
        self._file: RangeFile
        if "://" in path and is_remote(path):
            from modelstate.remote.file import opened

            self._file = opened(path)
            nbytes, modified_ns, tag = self._file.version
            self.fingerprint = FileFingerprint(nbytes, modified_ns, 0, 0, tag, self._file.cache, True)
        else:
            try:
                self._file = LocalFile(path)
            except OSError as error:
                raise cannot_open(path, path, error) from error
            self.fingerprint = self._file.fingerprint
        self.nbytes = self.fingerprint.nbytes
        try:
            self.head = self._data = self.read(0, min(self.nbytes, HEAD_BYTES), "its beginning")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        kept = _kept.value
        if (
            kept is None
            or not isinstance(self._file, LocalFile)
            or self.path in kept
            or len(kept) >= system.most_open()
        ):
            self._file.close()
        else:
            kept[self.path] = self._file

    def read(self, start: int, nbytes: int, what: str, most_bytes: int = MAX_STRUCTURE_BYTES) -> bytes:
        """Reads exactly `nbytes` bytes; `what` names them in errors.

        Raises `TruncatedFileError` where the file ends before, and `OpenError` for more than `most_bytes`.
        """
        if start + nbytes > self.nbytes:
            raise self.truncated(what, start + nbytes)
        if nbytes > most_bytes:
            raise OpenError(
                f"{what} is larger than any checkpoint's",
                where=self.path,
                expected=f"at most {most_bytes:,} bytes",
                found=f"{nbytes:,} bytes",
            )
        if start + nbytes <= len(self._data):
            return self._data[start : start + nbytes]
        data = self._file.read(self.start + start, nbytes)
        if len(data) < nbytes:
            raise self.truncated(what, start + nbytes)
        return data

    def section(self, start: int, nbytes: int, what: str) -> SourceFile:
        """A part of the file as a file of its own, which is not closed. A small part is read at once.

        Raises `TruncatedFileError` where the file ends before.
        """
        if start + nbytes > self.nbytes:
            raise self.truncated(what, start + nbytes)
        data = self.read(start, nbytes if nbytes <= _AT_ONCE_BYTES else HEAD_BYTES, what)
        part = copy(self)
        part.start, part.nbytes, part.head, part._data = self.start + start, nbytes, data[:HEAD_BYTES], data
        return part

    def truncated(self, what: str, end: int) -> TruncatedFileError:
        """The error for a file that ends before the offset `end`."""
        return TruncatedFileError(
            f"the file ends within {what}",
            where=self.path,
            expected=f"at least {end} bytes",
            found=f"{self.nbytes} bytes",
        )


def read_whole(path: str, most_bytes: int, what: str) -> bytes:
    """Reads a small regular file. Raises what `SourceFile` raises, and `OpenError` for more than `most_bytes`."""
    with SourceFile(path) as file:
        return file.read(0, file.nbytes, what, most_bytes)
