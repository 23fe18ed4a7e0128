"""The system calls that change a disk: all of `write` and `store` make them through here, under their own names.

Callers look them up in this module at each call, so that `modelstate.testing` can put others in their places.
"""

import os
from collections.abc import Sequence


def open(path: str, flags: int, mode: int = 0o666) -> int:
    """`os.open`, of files that are written and of directories that are synced."""
    return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), mode)


def fallocate(descriptor: int, nbytes: int) -> None:
    """`os.posix_fallocate` from the beginning of the file; nothing where there is no such call."""
    if hasattr(os, "posix_fallocate") and nbytes:
        os.posix_fallocate(descriptor, 0, nbytes)


def pwritev(descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
    """`os.pwritev`."""
    return os.pwritev(descriptor, buffers, offset)


def fchmod(descriptor: int, mode: int) -> None:
    """`os.fchmod`."""
    os.fchmod(descriptor, mode)


def fsync(descriptor: int) -> None:
    """`os.fsync`."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """`os.close`."""
    os.close(descriptor)


def replace(source: str, target: str) -> None:
    """`os.replace`."""
    os.replace(source, target)


def link(source: str, target: str) -> None:
    """`os.link`, never through a symbolic link."""
    os.link(source, target, follow_symlinks=False)


def unlink(path: str) -> None:
    """`os.unlink`."""
    os.unlink(path)


def mkdir(path: str, mode: int = 0o777) -> None:
    """`os.mkdir`."""
    os.mkdir(path, mode)


def rmdir(path: str) -> None:
    """`os.rmdir`."""
    os.rmdir(path)
