"""From what a user gives as a path to a path, and what is wrong where it leads to nothing that can be read."""

import errno
import os
import re
import stat
from difflib import get_close_matches
from urllib.parse import urlsplit
from urllib.request import url2pathname

from modelstate.errors import SourceAccessError, SourceNotFoundError, SourceTypeError
from modelstate.read import system

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
