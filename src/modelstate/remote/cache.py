"""`Cache`: blocks of remote files on a disk of this machine, so that a second load of a version reads no bytes of it.

A block is a file of its own: a digest of its place and its bytes, then at most `BLOCK_BYTES` bytes. It is written to a
temporary name and renamed, so that any number of processes share a directory without locks: a reader gets a whole block
or none, and a block that another process removes while it is read stays readable. A block that does not match its
digest counts as missing.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from modelstate.arguments import check_integer
from modelstate.errors import CacheWarning, OptionError
from modelstate.remote.location import CACHE_BLOCK_BYTES as BLOCK_BYTES
from modelstate.text_format import short_repr

_LAYOUT = "modelstate-blocks-1"
"""The directory below that of the user: nothing outside it is ever removed."""
_VERSION_NAME = re.compile(r"[0-9a-f]{32}")
_DIGEST_BYTES = 16
_LEAST_BYTES = 2 * BLOCK_BYTES
"""The least size of a cache: one of the size of a block has no room for a block with its digest."""
_CHECKS = 16
"""The size of the cache is looked at each time that a process has written this share of it."""


class Cache:
    """A directory that keeps what is read of remote checkpoints, for all processes of a machine.

    Every open still asks the server for the version of each file, in one request, and so for the right to read it. The
    rest is read from the directory where it has blocks of this version; the least recently used blocks are removed.
    Files without a strong ETag are not kept. A directory that cannot be written, or is full, is no error of a load: it
    gives one `CacheWarning`, and the load reads from the server.

    A checkpoint is read through the cache with which it was opened, whatever other caches its URL is opened with.
    Caches with the same directory share its blocks, and each of them keeps to its own size when it writes.

    Args:
        directory: Where the blocks are. It is made when it is needed, with access for this user only.
        max_bytes: The most bytes that the blocks may take, 2 MiB at the least. Each process looks when it has
            written a sixteenth of it, so several processes at once can exceed it by that much each.

    Raises:
        OptionError: An argument is invalid.

    Examples:
        >>> cache = modelstate.Cache("/scratch/modelstate", max_bytes=200 << 30)
        >>> report = modelstate.load(model, "s3://bucket/run/model.safetensors", cache=cache)
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = 64 << 30) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise OptionError("a cache is a directory", expected="a path", found=short_repr(directory))
        check_integer("max_bytes", max_bytes, least=_LEAST_BYTES)
        self.directory, self.max_bytes = Path(os.path.abspath(os.path.expanduser(directory))), max_bytes
        self._blocks = self.directory / _LAYOUT
        self._lock = threading.Lock()
        self._unchecked_bytes = max_bytes  # look at the size before the first block is written
        self._has_failed = False

    def __repr__(self) -> str:
        return f"Cache({str(self.directory)!r}, max_bytes={self.max_bytes})"

    def read(self, version: str, index: int, nbytes: int) -> bytes | None:
        """Returns a block of a version, which has `nbytes` bytes; None where the cache lacks it."""
        path = self._path(version, index)
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read(_DIGEST_BYTES + nbytes + 1) or b""
        except OSError:
            return None
        data = content[_DIGEST_BYTES:]
        if len(data) != nbytes or _digest(version, index, data) != content[:_DIGEST_BYTES]:
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # another process has removed it, or the directory is read-only
            os.utime(path)
        return data

    def has(self, version: str, index: int) -> bool:
        """Whether there is a block, which may be damaged."""
        return os.path.exists(self._path(version, index))  # False where it may not be looked at

    def write(self, version: str, index: int, data: bytes) -> None:
        """Keeps a block. Gives a `CacheWarning` where that fails, and keeps nothing from then on."""
        if self._has_failed:
            return
        path = self._path(version, index)
        unfinished = path.with_name(f".{index}-{secrets.token_hex(6)}")
        content = _digest(version, index, data) + data
        try:
            with self._lock:  # one block at a time: each finds the room that the one before it has left
                self._unchecked_bytes += len(content)
                if self._unchecked_bytes >= self.max_bytes // _CHECKS:
                    if not self._makes_room(len(content)):
                        return
                    self._unchecked_bytes = 0
                self._make(path.parent)
                try:
                    with open(unfinished, "xb", buffering=0) as file:
                        if file.write(content) != len(content):
                            raise OSError("the disk is full")
                    unfinished.replace(path)
                except BaseException:
                    with suppress(OSError):
                        unfinished.unlink()
                    raise
        except FileNotFoundError:
            pass  # another process has removed the last block of the version, and its directory
        except OSError as error:
            with self._lock:
                has_failed, self._has_failed = self._has_failed, True
            if not has_failed:
                warnings.warn(f"nothing more is kept in {self}: {error}", CacheWarning, stacklevel=2)

    def _make(self, version: Path) -> None:
        """Makes the directory of a version. Raises `OSError`, but not `FileNotFoundError`, where that fails."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            for directory in (self.directory, self._blocks, version):  # `parents=True` ignores the mode
                with suppress(FileExistsError):  # `exist_ok=True` raises where the directory is removed meanwhile
                    directory.mkdir(mode=0o700)
        except FileNotFoundError as error:  # such as below /proc
            raise OSError(f"the directory cannot be made: {error}") from error

    def _path(self, version: str, index: int) -> Path:
        return self._blocks / version / str(index)

    def _makes_room(self, nbytes: int) -> bool:
        """Removes the oldest blocks until a new one, and what is written before the next call, fits too.

        Returns whether it fits.
        """
        most = self.max_bytes - self.max_bytes // _CHECKS - nbytes
        found = sorted(self._found())
        excess = sum(nbytes for _, nbytes, _ in found) - most
        for _, nbytes, path in found:
            if excess <= 0:
                break
            with suppress(OSError):
                os.unlink(path)
                excess -= nbytes
            with suppress(OSError):  # it has other blocks
                os.rmdir(os.path.dirname(path))
        return excess <= 0

    def _found(self) -> Iterator[tuple[float, int, str]]:
        """When each block was used, its size and its path. What killed processes have left counts as blocks."""
        with suppress(FileNotFoundError):
            for version in [entry.path for entry in os.scandir(self._blocks) if _VERSION_NAME.fullmatch(entry.name)]:
                with suppress(FileNotFoundError, NotADirectoryError):
                    for entry in os.scandir(version):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime, status.st_size, entry.path


def check_cache(cache: object) -> None:
    """Raises `OptionError` for an argument `cache=` that is given, and not a cache."""
    if not isinstance(cache, Cache):
        raise OptionError(
            "cache= must be a modelstate.Cache", found=short_repr(cache), remedy="cache=modelstate.Cache(directory)"
        )


def _digest(version: str, index: int, data: bytes) -> bytes:
    """The digest of a block, in which its place is, so that a block is not taken for another one."""
    digest = xxhash.xxh3_128(f"{version}/{index}\0".encode())
    digest.update(data)
    return digest.digest()
