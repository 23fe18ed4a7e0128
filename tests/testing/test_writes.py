"""`faulty_writes` and `lossy_disk`, on writes that are known."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import OptionError, WriteFailedError
from modelstate.io import system
from modelstate.testing import faulty_reads, faulty_writes
from modelstate.testing.faults import WRITE_CALLS
from tests.lossy_disk import lossy_disk


def save(path: Path) -> None:
    ms.save({"a": torch.ones(4)}, path)


def test_without_arguments_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    before = {name: getattr(system, name) for name in WRITE_CALLS}
    with faulty_writes() as faults, faulty_reads() as reads:
        save(path)
    assert not reads.requests
    assert {name: getattr(system, name) for name in WRITE_CALLS} == before
    assert [request.number for request in faults.requests] == list(range(1, len(faults.requests) + 1))
    written = [request for request in faults.requests if request.call == "pwritev"]
    assert sum(request.nbytes for request in written) == path.stat().st_size
    assert min(request.start for request in written) == 0
    (renamed,) = [request for request in faults.requests if request.call == "replace"]
    assert renamed.path == written[0].path
    assert [request.path for request in faults.requests if request.call == "fsync"] == [renamed.path, str(tmp_path)]


def test_errors_hooks_and_short_writes(tmp_path: Path) -> None:
    save(tmp_path / "x")  # its mode is kept, by a call more
    with faulty_writes() as clean:
        save(tmp_path / "x")
    number = [request.call for request in clean.requests].index("pwritev") + 1
    with faulty_writes(at=number, error=OSError(errno.EIO, "broken")) as faults, pytest.raises(WriteFailedError):
        save(tmp_path / "x")
    assert faults.requests[number - 1].call == "pwritev"
    seen: list[str] = []
    with faulty_writes(before=lambda request: seen.append(request.call), short=3) as faults:
        save(tmp_path / "x")
    assert seen == [request.call for request in faults.requests]
    assert seen.count("pwritev") > 50
    assert ms.open(tmp_path / "x").tensor("a").tolist() == [1.0] * 4


def test_a_descriptor_is_closed_all_the_same(tmp_path: Path) -> None:
    descriptor = system.open_to_write(str(tmp_path / "x"), os.O_RDWR | os.O_CREAT)
    with faulty_writes(error=OSError(errno.EIO, "broken")), pytest.raises(OSError, match="broken"):
        system.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_arguments_that_mean_nothing() -> None:
    for bad in ({"at": 0}, {"error": 3}, {"short": -1}, {"before": 3}):
        with pytest.raises(OptionError), faulty_writes(**bad):  # type: ignore[arg-type]
            pass


def write(path: Path, *data: tuple[int, bytes], sync: bool = False, reserve: int = 0) -> None:
    descriptor = system.open_to_write(str(path), os.O_RDWR | os.O_CREAT)
    system.fallocate(descriptor, reserve)
    for start, some in data:
        system.pwritev(descriptor, [some], start)
    if sync:
        system.fsync(descriptor)
    system.close(descriptor)


def sync(directory: Path) -> None:
    descriptor = system.open_to_write(str(directory), os.O_RDONLY)
    system.fsync(descriptor)
    system.close(descriptor)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def possible(tmp_path: Path, what: Callable[[Path], Any]) -> tuple[dict[str, bytes], dict[str, bytes], list[Any]]:
    """What is safe, what was asked for, and everything that some seeds give, after calls on a directory with a file."""
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_bytes(b"OLD!")
    with lossy_disk(root) as disk:
        what(root)
    for keep in ("synced", "everything", *range(60)):
        disk.write(tmp_path / str(keep), len(disk.calls), keep)  # type: ignore[arg-type]
    assert files(tmp_path / "everything") == files(root)
    found = [files(tmp_path / str(seed)) for seed in range(60)]
    unique = [one for index, one in enumerate(found) if one not in found[:index]]
    disk.write(tmp_path / "nothing", 0, 3)
    assert files(tmp_path / "nothing") == {"old": b"OLD!"}
    return files(tmp_path / "synced"), files(tmp_path / "everything"), unique


def test_what_is_synced_is_safe(tmp_path: Path) -> None:
    def what(root: Path) -> None:
        write(root / "new", (0, b"abcd"), sync=True)
        sync(root)

    safe, _, drawn = possible(tmp_path, what)
    assert safe == {"old": b"OLD!", "new": b"abcd"}
    assert drawn == [safe]


def test_names_and_bytes_that_are_not(tmp_path: Path) -> None:
    safe, _, drawn = possible(tmp_path, lambda root: write(root / "new", (0, b"abcd")))
    assert safe == {"old": b"OLD!"}
    assert {None, b"", b"abcd", bytes(4), b"ab"} <= {one.get("new") for one in drawn}


def test_space_that_was_set_aside(tmp_path: Path) -> None:
    safe, _, drawn = possible(tmp_path, lambda root: write(root / "new", (0, b"abcd"), reserve=8))
    assert safe == {"old": b"OLD!"}
    assert {None, b"", b"abcd", b"abcd" + bytes(4), bytes(8)} <= {one.get("new") for one in drawn}


def test_a_file_synced_without_its_name_and_a_name_without_its_file(tmp_path: Path) -> None:
    safe, _, drawn = possible(tmp_path, lambda root: write(root / "new", (0, b"abcd"), sync=True))
    assert safe == {"old": b"OLD!"}
    assert {one.get("new") for one in drawn} == {None, b"abcd"}


def test_bytes_that_are_overwritten(tmp_path: Path) -> None:
    safe, _, drawn = possible(tmp_path, lambda root: write(root / "old", (1, b"xy")))
    assert safe == {"old": b"OLD!"}
    assert {one["old"] for one in drawn} == {b"OLD!", b"Oxy!", b"OxD!", b"O\0\0!"}


def test_names_change_in_their_order(tmp_path: Path) -> None:
    def what(root: Path) -> None:
        system.link(str(root / "old"), str(root / "kept"))
        write(root / "beside", (0, b"NEW"), sync=True)
        system.replace(str(root / "beside"), str(root / "old"))
        system.unlink(str(root / "kept"))

    safe, _, drawn = possible(tmp_path, what)
    old = {"old": b"OLD!"}
    steps = [old, {**old, "kept": b"OLD!"}, {**old, "kept": b"OLD!", "beside": b"NEW"}]
    steps += [{"old": b"NEW", "kept": b"OLD!"}, {"old": b"NEW"}]
    assert safe == old
    assert sorted(map(str, map(sorted, (one.items() for one in drawn)))) == sorted(
        str(sorted(one.items())) for one in steps
    )


def test_directories(tmp_path: Path) -> None:
    def what(root: Path) -> None:
        system.mkdir(str(root / "sub"))
        write(root / "sub" / "x", (0, b"x"), sync=True)
        sync(root / "sub")
        system.replace(str(root / "sub"), str(root / "step"))
        sync(root)
        system.replace(str(root / "step" / "x"), str(root / "x"))
        system.rmdir(str(root / "step"))

    safe, everything, drawn = possible(tmp_path, what)
    assert safe == {"old": b"OLD!", "step/x": b"x"}
    assert everything == {"old": b"OLD!", "x": b"x"}
    assert safe in drawn
    assert everything in drawn
