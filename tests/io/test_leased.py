"""Files that are leased while they are read into memory whose old values are not kept."""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
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
from tests.io.test_lease import can_lease

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


WRITERS = {
    "cut": "import os; os.truncate({path!r}, 100)",
    "cut to nothing": "open({path!r}, 'wb')",
    "overwritten": "open({path!r}, 'r+b').write(b'x' * 1000)",
    "replaced": "import os; open({path!r} + '.new', 'wb').write(b'x'); os.replace({path!r} + '.new', {path!r})",
}


def writer(name: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", WRITERS[name].format(path=str(path))])


def until_one_waits(path: Path, process: subprocess.Popen[bytes], files: LeasedFiles) -> None:
    """Until the process waits for the lease, or has ended without a need to."""
    while lease.is_intact(files[str(path)].descriptor) and process.poll() is None:
        time.sleep(0.001)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("block", [1, 2, 5])
def test_a_writer_waits_until_the_read_is_over(name: str, block: int, path: Path) -> None:
    memory, processes = bytearray(SIZE), []

    def before(request: object) -> None:
        reads.append(request)
        if len(reads) == block:
            processes.append(writer(name, path))
            until_one_waits(path, processes[0], files)

    reads: list[object] = []
    with leasing(path) as files:
        with faulty_reads(before=before):
            read(path, files, memory, threads=1)
        assert len(reads) == 5
        assert processes[0].poll() is None or name == "replaced"
    assert processes[0].wait(60) == 0
    assert memory == content()
    assert path.read_bytes() != content()


def test_no_lease_where_a_process_has_the_file_open_for_writing(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with path.open("r+b"), leased_files(whole(path), {}) as files:
        assert files.refusal == "a process has the file open for writing"
        assert not files
    assert len(os.listdir("/proc/self/fd")) == before


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


def test_an_error_at_every_read_in_turn(path: Path) -> None:
    for number in range(1, 6):
        memory = bytearray(SIZE)
        with leasing(path) as files, faulty_reads(at=number, error=OSError(errno.EIO, "bad sector")) as faults:
            read(path, files, memory)
        assert memory == content()
        assert [request.call for request in faults.requests].count("preadv") == 1


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


NO_SIGNAL = """
import signal, sys, time
from modelstate.io.leased import leased_files
from modelstate.spec import ByteRange

with leased_files([ByteRange(sys.argv[1], 0, 100)], {}) as files:
    assert not files.refusal
    print("leased", flush=True)
    sys.stdin.readline()
print("on", flush=True)
"""


@pytest.mark.slow
def test_no_signal_comes_to_the_process(path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", NO_SIGNAL, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "leased\n"
    process = writer("overwritten", path)
    time.sleep(0.2)
    assert process.poll() is None
    out, _ = child.communicate("\n", timeout=60)
    assert (child.returncode, out, process.wait(60)) == (0, "on\n", 0)


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


def test_threads_that_cannot_be_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    memory = bytearray(SIZE)
    with leasing(path) as files:
        read(path, files, memory)
    assert memory == content()


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


def test_an_error_while_a_file_is_brought_in(path: Path) -> None:
    evict(path)
    with faulty_reads() as clean:
        bring_into_cache(whole(path), {})
    reads = [request.number for request in clean.requests if request.call == "preadv"]
    if not reads:
        pytest.skip("this file system keeps its files in memory")
    evict(path)
    with faulty_reads(at=reads[0], error=OSError(errno.EIO, "bad sector")), pytest.raises(ReadFailedError):
        bring_into_cache(whole(path), {})


def test_what_does_not_fit_is_not_brought_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "most_to_read", lambda: SIZE - 1)
    evict(path)
    with faulty_reads() as faults:
        fits = bring_into_cache(whole(path), {})
    assert fits == ("preadv" not in {request.call for request in faults.requests} and not is_cold(path))


def is_cold(path: Path) -> bool:
    evict(path)
    return is_cold_range(*whole(path), {})
