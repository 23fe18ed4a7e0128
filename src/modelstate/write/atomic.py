"""A file that is there in full, on the disk, or not at all.

It is written beside its place under a name of its own, synced, renamed, and the directory is synced: whoever opens the
path sees the old file or the new one, also after a crash. Maps of the old file keep showing it. A symbolic link is
replaced, not followed, so no other file ever changes. A process that is killed leaves its unfinished file behind, as
`.NAME.*.unfinished`; the next one that writes to the path takes it away. Whether its writer lives, a lock on the file
tells, which goes with its process.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from modelstate.errors import SaveTargetError, TargetExistsError
from modelstate.write import system
from modelstate.write.files import Output, new_file, sync_directory, write_errors

SUFFIX = ".unfinished"
_BEGINNING_BYTES = 200
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@contextmanager
def atomic_file(path: str, *, overwrite: bool) -> Iterator[Output]:
    """A file to write to, which comes to be at the path when the block ends, and does not when it raises.

    Raises `TargetExistsError` where something is at the path that may not be replaced, `SaveTargetError` where it is
    no file, and `WriteFailedError` for an I/O error, which takes away what was written.
    """
    check(path, overwrite=overwrite)
    with write_errors(path):
        clear(path)
        with unfinished_file(path) as output:
            yield output
            output.sync()
            put_durably(output.path, path, overwrite)


@contextmanager
def unfinished_file(path: str) -> Iterator[Output]:
    """A new file beside a path. As long as it is open, nobody takes it for what a killed process has left."""
    with new_file(_beside(path)) as output:
        with suppress(OSError):  # where there are no locks, nobody gets one, and nothing is taken away
            fcntl.flock(output.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield output


def _beside(path: str) -> str:
    """A new name beside a path."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{_beginning(name)}.{secrets.token_hex(6)}{SUFFIX}")


def clear(path: str) -> None:
    """Takes away what those have left beside a path that were killed."""
    directory, name = os.path.split(path)
    prefix = f".{_beginning(name)}."
    with suppress(OSError):
        for name in os.listdir(directory or "."):
            middle = name.removeprefix(prefix).removesuffix(SUFFIX)
            if name == f"{prefix}{middle}{SUFFIX}" and len(middle) == 12:
                _take_away_if_dead(os.path.join(directory, name))


def _take_away_if_dead(path: str) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


def _beginning(name: str) -> str:
    """As much of a name as leaves room for more: file systems count bytes."""
    return name.encode("utf-8", "surrogateescape")[:_BEGINNING_BYTES].decode("utf-8", "ignore")


def check(path: str, *, overwrite: bool) -> None:
    """Raises what keeps a file from being put at the path, before anything is written."""
    if os.path.isdir(path) or (os.path.exists(path) and not os.path.isfile(path)):
        kind = "a directory" if os.path.isdir(path) else "no ordinary file"
        raise SaveTargetError("a file cannot be put here", where=path, found=kind, remedy="give the path of a file")
    if not overwrite and os.path.lexists(path):
        raise _exists(path)


def put_durably(beside: str, path: str, overwrite: bool) -> None:
    """Puts a finished file in its place; where that cannot be made durable, what was there is put back."""
    there = os.path.lexists(path)
    kept = _beside(path) if there else None
    if kept is not None:
        try:
            system.link(path, kept)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            kept = None
    try:
        put(beside, path, overwrite)
        try:
            sync_directory(os.path.dirname(path))
        except BaseException:
            with suppress(OSError):
                if kept is not None:
                    system.replace(kept, path)
                elif not there:
                    system.unlink(path)
            raise
    finally:
        if kept is not None:
            _take_away(kept)


def put(beside: str, path: str, overwrite: bool) -> None:
    """Renames a finished file to its place. It is durable when the directory has been synced."""
    if overwrite:
        system.replace(beside, path)
        return
    try:
        # Unlike a rename, a link never replaces what somebody else has put there meanwhile.
        system.link(beside, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check(path, overwrite=False)
        system.replace(beside, path)
        return
    _take_away(beside)


def _take_away(path: str) -> None:
    with suppress(OSError):
        system.unlink(path)


def _exists(path: str) -> TargetExistsError:
    return TargetExistsError(
        "something is there already", where=path, remedy="take another path, or overwrite=True to replace it"
    )
