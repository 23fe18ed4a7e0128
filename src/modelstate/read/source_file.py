"""A file that is open for reading: every failure is one of our errors."""

import os
from types import TracebackType

from modelstate.errors import OpenError, ReadFailedError, SourceAccessError, SourceNotFoundError, TruncatedFileError
from modelstate.read import system
from modelstate.read.paths import NOT_FOUND, not_found, open_regular
from modelstate.read.stamp import note

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
