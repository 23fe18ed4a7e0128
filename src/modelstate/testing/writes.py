"""Writes that fail: a full disk, an I/O error, a short write, an interrupt or a kill, at any one call of a save."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from modelstate.testing.faults import Faults, Request, first, path_of, replaced
from modelstate.write import system

CALLS = ("open", "fallocate", "pwritev", "fchmod", "fsync", "close", "replace", "link", "unlink", "mkdir", "rmdir")


@contextmanager
def faulty_writes(
    *,
    at: int | None = None,
    error: BaseException | type[BaseException] | None = None,
    short: int | None = None,
    before: Callable[[Request], object] | None = None,
) -> Iterator[Faults]:
    """Within this context the system calls by which checkpoints are saved can be made to fail.

    Without arguments it only counts them. They are `open` (of files that are written, and of directories), `fallocate`,
    `pwritev`, `fchmod`, `fsync`, `close`, `replace`, `link`, `unlink`, `mkdir` and `rmdir`, of all threads of the
    process. Contexts can be nested, as those of `faulty_reads`.

    Args:
        at: the number of the call that is meant, from 1; without it, all of them.
        error: raised instead of making the call: an `OSError`, as `OSError(errno.ENOSPC, "...")`, or a
            `KeyboardInterrupt`. A descriptor is closed before `close` raises, as Linux does.
        short: the most bytes that a `pwritev` writes, as on a disk that is nearly full.
        before: called with the `Request` before the call is made, in the thread that makes it: to look at the
            directory just then, to kill the process, to wait, or to raise.

    Raises `OptionError` for arguments that mean nothing.
    """
    faults = Faults(at, error, short, before)
    with replaced(system, _calls(faults)):
        yield faults


def _calls(faults: Faults) -> dict[str, Callable[..., Any]]:
    """The calls that are there now, by their names, each behind `faults.met`."""
    real = {name: getattr(system, name) for name in CALLS}

    def of_path(name: str) -> Callable[..., Any]:
        def call(path: str, *args: Any) -> Any:
            faults.met(name, os.fspath(path))
            return real[name](path, *args)

        return call

    def fallocate(descriptor: int, nbytes: int) -> None:
        faults.met("fallocate", path_of(descriptor), 0, nbytes)
        real["fallocate"](descriptor, nbytes)

    def pwritev(descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> Any:
        most = faults.met("pwritev", path_of(descriptor), offset, sum(len(buffer) for buffer in buffers))
        return real["pwritev"](descriptor, buffers if most is None else first(buffers, most), offset)

    def fchmod(descriptor: int, mode: int) -> None:
        faults.met("fchmod", path_of(descriptor))
        real["fchmod"](descriptor, mode)

    def fsync(descriptor: int) -> None:
        faults.met("fsync", path_of(descriptor))
        real["fsync"](descriptor)

    def close(descriptor: int) -> None:
        path = path_of(descriptor)
        try:
            faults.met("close", path)
        finally:
            real["close"](descriptor)

    paths = ("open", "replace", "link", "unlink", "mkdir", "rmdir")
    others: dict[str, Callable[..., Any]] = {
        "fallocate": fallocate,
        "pwritev": pwritev,
        "fchmod": fchmod,
        "fsync": fsync,
        "close": close,
    }
    return {**{name: of_path(name) for name in paths}, **others}
