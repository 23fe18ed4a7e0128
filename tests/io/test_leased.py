"""Files that are leased while they are read into memory whose old values are not kept."""

import fcntl
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modelstate.errors import ReadFailedError
from modelstate.io import lease, leased, linux
from modelstate.io.engine import Request, read_ranges
from modelstate.io.files import current_fingerprints
from modelstate.io.leased import LeasedFiles, bring_into_cache, leased_files
from modelstate.io.prefetch import is_cold as is_cold_range
from modelstate.spec import ByteRange
from tests.faults import faulty_reads
from tests.formats.files import evict
from tests.io.test_lease import can_lease, writer

PAGE = mmap.PAGESIZE
SIZE = 40 * PAGE
BLOCK = 8 * PAGE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    if not can_lease(tmp_path):
        pytest.skip("the file system of the temporary directory has no leases")
    found = tmp_path / "x.bin"
    found.write_bytes(content())
    return found


def content(seed: int = 1) -> bytes:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.manual_seed(seed)).numpy().tobytes()


def whole(path: Path) -> list[ByteRange]:
    return [ByteRange(str(path), 0, SIZE)]


@contextmanager
def leasing(path: Path) -> Iterator[LeasedFiles]:
    with leased_files(whole(path), current_fingerprints([str(path)])) as files:
        assert files.refusal == ""
        yield files


def read(path: Path, files: LeasedFiles, memory: bytearray, threads: int = 2) -> None:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    requests = [Request(*whole(path), address)]
    read_ranges(requests, fingerprints={}, threads=threads, batch_bytes=BLOCK, leased=files)


def until_one_waits(path: Path, process: subprocess.Popen[bytes], files: LeasedFiles) -> None:
    """Until the process waits for the lease, or has ended without a need to."""
    while lease.is_intact(files[str(path)].descriptor) and process.poll() is None:
        time.sleep(0.001)


TOO_SHORT = "the kernel lets a writer wait for a shorter time than the read may take"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ((linux, "filesystem_type", lambda _: 0x6969), "other machines may write to its file system"),
        (
            (lease, "safe_seconds", lambda: 1.0),
            "the kernel lets a writer wait for a shorter time than the read may take",
        ),
        ((leased, "_BYTES_PER_SECOND", 1.0), TOO_SHORT),
        ((linux, "_mincore", None), "the page cache has not all of it"),
    ],
)
def test_refusals(
    change: tuple[object, str, object], refusal: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*change)
    with leased_files(whole(path), {}) as files:
        assert files.refusal == refusal
    with path.open("r+b") as file:  # no lease is left
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def test_a_file_that_has_changed_is_not_leased(path: Path) -> None:
    fingerprints = current_fingerprints([str(path)])
    os.utime(path, ns=(0, 0))
    with pytest.raises(ReadFailedError, match="changed"), leased_files(whole(path), fingerprints):
        pytest.fail("leased")


def test_pages_that_are_evicted_meanwhile_are_read_again(path: Path) -> None:
    memory = bytearray(SIZE)
    with leasing(path) as files:
        evict(path)
        with faulty_reads() as faults:
            read(path, files, memory)
    assert memory == content()
    assert {"preadv_cached"} <= {request.call for request in faults.requests} <= {"preadv_cached", "preadv"}


def test_a_writer_that_was_let_go_on_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The break time ends in the middle of the read, because the process was stopped."""
    monkeypatch.setattr(lease, "safe_seconds", lambda: 5.0)
    memory = bytearray(SIZE)
    with leasing(path) as files:
        process = writer("overwritten", path)
        until_one_waits(path, process, files)
        read(path, files, memory)
        files.check_unchanged()  # there was time
        assert memory == content()
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 6)
        with pytest.raises(ReadFailedError, match="let go on"):
            files.check_unchanged()
    process.wait(60)


def test_no_handler_of_this_process_is_called(path: Path) -> None:
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in (signal.SIGIO, signal.SIGURG)}
    try:
        with leasing(path) as files:
            process = writer("overwritten", path)
            until_one_waits(path, process, files)
        process.wait(60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert arrived == []


# What the page cache lacks.


def test_a_cold_file_is_brought_in(path: Path) -> None:
    cold, told = is_cold(path), list[int]()
    assert bring_into_cache(whole(path), {}, told.append)
    if cold:
        assert sum(told) == SIZE
        assert bring_into_cache(whole(path), {}, lambda _: pytest.fail("read again"))


def test_a_part_that_is_missing_is_brought_in(path: Path) -> None:
    evict(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    if linux.cached_share(descriptor, 0, SIZE) != 0:
        pytest.skip("this file system keeps its files in memory, or does not say")
    os.pread(descriptor, 1, 20 * PAGE)
    os.close(descriptor)
    told: list[int] = []
    assert bring_into_cache([ByteRange(str(path), 100, SIZE - 200)], {}, told.append)
    assert PAGE < sum(told) < SIZE - 200


def test_what_does_not_fit_is_not_brought_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "most_to_read", lambda: SIZE - 1)
    evict(path)
    with faulty_reads() as faults:
        fits = bring_into_cache(whole(path), {})
    assert fits == ("preadv" not in {request.call for request in faults.requests} and not is_cold(path))


def is_cold(path: Path) -> bool:
    evict(path)
    return is_cold_range(*whole(path), {})
