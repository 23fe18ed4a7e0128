"""A save in which one system call fails: the error says so, the old checkpoint is as it was, and nothing is left."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import WriteFailedError
from tests.faults import Request, count_threads, faulty_writes, wait_for_threads
from tests.objects.saves import KINDS, NAME, PAIRS, contents, save, version_at
from tests.sweeps import EXHAUSTIVE, sample

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES)


def descriptors() -> set[str]:
    return {path for name in os.listdir("/proc/self/fd") if (path := link(f"/proc/self/fd/{name}"))}


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def sweep(
    directory: Path,
    old: Callable[[], Any],
    new: Callable[[], Any],
    version_of: Callable[[Path], int] = version_at,
    **fault: Any,
) -> list[tuple[Request, Any]]:
    """Makes calls of a save fail in turn; returns what was raised at each. The directory begins anew each time."""
    old()
    with faulty_writes() as clean:
        new()
    found = []
    for request in sample(clean.requests, lambda request: request.call):
        for path in directory.iterdir():
            path.unlink()
        old()
        before, threads, opened = contents(directory), count_threads(), descriptors()
        raised: BaseException | None = None
        with faulty_writes(at=request.number, **fault) as faults:
            try:
                new()
            except BaseException as error:
                raised = error
        wait_for_threads(threads)
        assert descriptors() == opened
        assert faults.requests[request.number - 1].call == request.call
        found.append((request, raised))
        check(directory, before, request, raised, version_of)
    return found


def check(
    directory: Path,
    before: dict[str, bytes],
    request: Request,
    raised: BaseException | None,
    version_of: Callable[[Path], int],
) -> None:
    after = contents(directory)
    if isinstance(raised, OSError):
        assert isinstance(raised, WriteFailedError), request
        assert after == before, request
        return
    if raised is not None and after == before:
        return
    # Past the point from which the new one stands: nothing but what should have been taken away may be left.
    if raised is not None:
        assert isinstance(raised, KeyboardInterrupt), (request, raised)
    assert version_of(directory / NAME) == 2, request
    if request.call != "unlink":
        assert not [name for name in after if name.startswith(".")], request


FAULTS = [
    (old, new, OSError(number, os.strerror(number)))
    for index, (old, new) in enumerate(PAIRS)
    for number in (ERRORS if EXHAUSTIVE else ERRORS[index % 4 :][:1])
]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "error"), [*FAULTS, *((*pair, KeyboardInterrupt()) for pair in PAIRS)])
def test_every_call_may_fail(tmp_path: Path, old: str, new: str, error: BaseException) -> None:
    found = sweep(tmp_path, lambda: save(tmp_path, 1, old), lambda: save(tmp_path, 2, new), error=error)
    silent = {request.call for request, raised in found if raised is None}
    assert silent <= (set() if isinstance(error, KeyboardInterrupt) else {"close", "unlink"})
    assert sum(raised is not None for _, raised in found) > 8


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "interrupt"])
def test_the_torch_format(tmp_path: Path, error: BaseException) -> None:
    def save_version(version: int) -> None:
        ms.save({"version": version, "w": torch.full((100_000,), float(version))}, tmp_path / "x.pt")

    def version_of(_: Path) -> int:
        found = torch.load(tmp_path / "x.pt")
        assert torch.equal(found["w"], torch.full((100_000,), float(found["version"])))
        return int(found["version"])

    found = sweep(tmp_path, lambda: save_version(1), lambda: save_version(2), version_of, error=error)
    assert {request.call for request, raised in found if raised is None} <= {"unlink", "close"}


@pytest.mark.parametrize("short", [1, 7, 100])
@pytest.mark.parametrize("new", KINDS)
def test_short_writes(tmp_path: Path, new: str, short: int) -> None:
    with faulty_writes(short=short) as faults:
        save(tmp_path, 2, new)
    assert version_at(tmp_path / NAME) == 2
    assert sum(request.call == "pwritev" for request in faults.requests) > 1000 // short


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    with faulty_writes(short=0), pytest.raises(WriteFailedError, match="nothing was written"):
        save(tmp_path, 2, "file")
    assert not contents(tmp_path)


def test_a_file_system_without_preallocation_links_and_syncs_of_directories(tmp_path: Path) -> None:
    def refuse(request: Request) -> None:
        if request.call in ("fallocate", "link") or (request.call == "fsync" and os.path.isdir(request.path)):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    for version, kind in enumerate(("file", "shards", "file", "more")):
        with faulty_writes(before=refuse):
            save(tmp_path, version, kind)
        assert version_at(tmp_path / NAME) == version
        assert not [name for name in contents(tmp_path) if name.startswith(".")]
