"""Files that are leased while they are read into memory whose old values are not kept."""

import fcntl
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from modelstate.errors import ReadFailedError
from modelstate.io import lease, page_cache, system
from modelstate.io.engine import Request, read_ranges
from modelstate.io.files import LocalFile, OpenFiles, SourceFile
from modelstate.io.page_cache import bring_into_cache, lease_files, look
from modelstate.spec import ByteRange
from tests.faults import faulty_reads
from tests.formats.files import cached_share, evict
from tests.io.test_lease import can_lease, writer

PAGE = mmap.PAGESIZE
SIZE = 40 * PAGE
BLOCK = 8 * PAGE
TOO_SHORT = "the kernel lets a writer wait for a shorter time than the read may take"


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
def leasing(path: Path) -> Iterator[OpenFiles]:
    with OpenFiles({str(path): SourceFile(str(path)).fingerprint}) as files:
        assert bring_into_cache(look(whole(path), files), files)
        assert lease_files(whole(path), files) == ""
        yield files


def read(path: Path, files: OpenFiles, memory: bytearray, threads: int = 2) -> None:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    requests = [Request(*whole(path), address)]
    read_ranges(requests, files=files, threads=threads, batch_bytes=BLOCK)


def until_one_waits(path: Path, process: subprocess.Popen[bytes], files: OpenFiles) -> None:
    """Until the process waits for the lease, or has ended without a need to."""
    file = files[str(path)]
    assert isinstance(file, LocalFile)
    while lease.is_intact(file.descriptor) and process.poll() is None:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ((lease, "filesystem_type", lambda _: 0x6969), "other machines may write to its file system"),
        ((lease, "safe_seconds", lambda: 1.0), TOO_SHORT),
        ((page_cache, "_BYTES_PER_SECOND", 1.0), TOO_SHORT),
    ],
)
def test_refusals(change: Any, refusal: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*change)
    with OpenFiles({}) as files:
        assert lease_files(whole(path), files) == refusal
    with path.open("r+b") as file:  # no lease is left
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def test_a_file_that_has_changed_is_not_leased(path: Path) -> None:
    fingerprints = {str(path): SourceFile(str(path)).fingerprint}
    os.utime(path, ns=(0, 0))
    files = OpenFiles(fingerprints)
    with pytest.raises(ReadFailedError, match="changed"):
        lease_files(whole(path), files)


def test_where_the_kernel_does_not_say_what_is_in_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "IS_LINUX", False)
    with OpenFiles({}) as files:
        assert not bring_into_cache(look(whole(path), files), files)


@pytest.mark.parametrize("kept", [0, SIZE // 2])
def test_what_the_page_cache_lacks_is_read(path: Path, kept: int) -> None:
    evict(path)
    with OpenFiles({}) as files, path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reads ahead
        file.read(kept)
        assert cached_share(path) == kept / SIZE
        assert bring_into_cache(look(whole(path), files), files)
    assert cached_share(path) == 1


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
