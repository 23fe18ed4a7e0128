"""Files that are held while they are read into memory whose old values are not kept."""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modelstate.errors import ReadFailedError
from modelstate.io import held, lease, linux, memory, prefetch
from modelstate.io.blocks import Block, Wanted, stream
from modelstate.io.engine import ReadStrategy, Request, read_ranges
from modelstate.io.files import current_fingerprints
from modelstate.io.held import HeldFiles, held_files
from modelstate.io.prefetch import CacheLook, bring_into_cache
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
def holding(path: Path) -> Iterator[HeldFiles]:
    with held_files(whole(path), current_fingerprints([str(path)])) as files:
        assert files.refusal == ""
        yield files


def read(path: Path, files: HeldFiles, memory: bytearray, threads: int = 2) -> None:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    requests = [Request(*whole(path), address)]
    read_ranges(requests, fingerprints={}, threads=threads, batch_bytes=BLOCK, held=files)


WRITERS = {
    "cut": "import os; os.truncate({path!r}, 100)",
    "cut to nothing": "open({path!r}, 'wb')",
    "overwritten": "open({path!r}, 'r+b').write(b'x' * 1000)",
    "replaced": "import os; open({path!r} + '.new', 'wb').write(b'x'); os.replace({path!r} + '.new', {path!r})",
}


def writer(name: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", WRITERS[name].format(path=str(path))])


def until_one_waits(path: Path, process: subprocess.Popen[bytes], files: HeldFiles) -> None:
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
    with holding(path) as files:
        with faulty_reads(before=before):
            read(path, files, memory, threads=1)
        assert len(reads) == 5
        assert processes[0].poll() is None or name == "replaced"
    assert processes[0].wait(60) == 0
    assert memory == content()
    assert path.read_bytes() != content()


def test_no_lease_where_a_process_has_the_file_open_for_writing(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with path.open("r+b"), held_files(whole(path), {}) as files:
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
        ((held, "_BYTES_PER_SECOND", 1.0), TOO_SHORT),
        ((linux, "_mincore", None), "the page cache has not all of it"),
    ],
)
def test_refusals(
    change: tuple[object, str, object], refusal: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*change)
    with held_files(whole(path), {}) as files:
        assert files.refusal == refusal
    with path.open("r+b") as file:  # no lease is left
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def test_a_file_that_has_changed_is_not_held(path: Path) -> None:
    fingerprints = current_fingerprints([str(path)])
    os.utime(path, ns=(0, 0))
    with pytest.raises(ReadFailedError, match="changed"), held_files(whole(path), fingerprints):
        pytest.fail("held")


def test_pages_that_are_evicted_meanwhile_are_read_again(path: Path) -> None:
    memory = bytearray(SIZE)
    with holding(path) as files:
        evict(path)
        with faulty_reads() as faults:
            read(path, files, memory)
    assert memory == content()
    assert {"preadv_cached"} <= {request.call for request in faults.requests} <= {"preadv_cached", "preadv"}


def test_an_error_at_every_read_in_turn(path: Path) -> None:
    for number in range(1, 6):
        memory = bytearray(SIZE)
        with holding(path) as files, faulty_reads(at=number, error=OSError(errno.EIO, "bad sector")) as faults:
            read(path, files, memory)
        assert memory == content()
        assert [request.call for request in faults.requests].count("preadv") == 1


def test_a_block_that_cannot_be_read_at_all_keeps_its_old_bytes(path: Path) -> None:
    def broken(request: object) -> None:
        if getattr(request, "start", 0) == 2 * BLOCK:
            raise OSError(errno.EIO, "bad sector")

    memory = bytearray(b"o" * SIZE)
    with holding(path) as files:
        with faulty_reads(before=broken), pytest.raises(ReadFailedError, match="bad sector"):
            read(path, files, memory)
        assert set(files.failed) == {ByteRange(str(path), 2 * BLOCK, BLOCK)}
    bad = slice(2 * BLOCK, 3 * BLOCK)
    expected = bytearray(content())
    expected[bad] = b"o" * BLOCK
    assert memory == expected


def test_a_writer_that_was_let_go_on_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The break time ends in the middle of the read, because the process was stopped."""
    monkeypatch.setattr(lease, "safe_seconds", lambda: 5.0)
    memory = bytearray(SIZE)
    with holding(path) as files:
        process = writer("overwritten", path)
        until_one_waits(path, process, files)
        read(path, files, memory)  # there is time
        assert memory == content()
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 6)
        with pytest.raises(ReadFailedError, match="let go on"):
            read(path, files, memory)
        assert sum(extent.nbytes for extent in files.failed) >= SIZE
    process.wait(60)


NO_SIGNAL = """
import signal, sys, time
from modelstate.io.held import held_files
from modelstate.spec import ByteRange

with held_files([ByteRange(sys.argv[1], 0, 100)], {}) as files:
    assert not files.refusal
    print("held", flush=True)
    sys.stdin.readline()
print("on", flush=True)
"""


@pytest.mark.slow
def test_no_signal_comes_to_the_process(path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", NO_SIGNAL, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    process = writer("overwritten", path)
    time.sleep(0.2)
    assert process.poll() is None
    out, _ = child.communicate("\n", timeout=60)
    assert (child.returncode, out, process.wait(60)) == (0, "on\n", 0)


def test_no_handler_of_this_process_is_called(path: Path) -> None:
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in (signal.SIGIO, signal.SIGURG)}
    try:
        with holding(path) as files:
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
    with holding(path) as files:
        read(path, files, memory)
    assert memory == content()


def test_a_block_whose_consumer_fails_is_consumed_again(path: Path) -> None:
    failed, seen = set[int](), bytearray(SIZE)
    lock = threading.Lock()

    def consume(block: Block, buffer: torch.Tensor) -> None:
        for part in block.parts:
            with lock:
                if part.first not in failed:
                    failed.add(part.first)
                    raise MemoryError
            seen[part.first : part.first + part.nbytes] = buffer[part.at : part.at + part.nbytes].numpy().tobytes()

    done: list[int] = []
    with holding(path) as files:
        stream(
            [Wanted(*whole(path), 1)],
            consume,
            strategy=ReadStrategy(2, BLOCK),
            fingerprints={},
            on_block=lambda block, _: done.append(block.wanted_bytes),
            held=files,
        )
    assert seen == content()
    assert sum(done) == SIZE


def test_block_buffers_are_used_again_and_not_all_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LEAST_POOLED_BYTES", 1)
    monkeypatch.setattr(memory, "_spare", memory.MemoryPool())
    monkeypatch.setattr(memory, "_spare_bytes", 2 * BLOCK)

    def addresses(threads: int) -> set[int]:
        seen = set[int]()
        with holding(path) as files:
            stream(
                [Wanted(*whole(path), 1)],
                lambda _, buffer: seen.add(buffer.data_ptr()),
                strategy=ReadStrategy(threads, BLOCK),
                fingerprints={},
                on_block=lambda *_: None,
                held=files,
            )
        return seen

    assert addresses(1) == addresses(1)
    addresses(4)
    assert 0 < memory._spare.kept_bytes <= 2 * BLOCK


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


@pytest.mark.parametrize("begins", [True, False], ids=["ahead", "when asked"])
def test_a_look_finds_what_is_missing(path: Path, begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_LOOK_BYTES", 8 * PAGE)
    if not is_cold(path):
        pytest.skip("this file system keeps its files in memory, or does not say")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, 1, 20 * PAGE)
    look = CacheLook({str(path): descriptor})
    os.close(descriptor)
    if begins:
        look.begin()
    missing = look.missing([ByteRange(str(path), 100, SIZE - 200)])
    assert sum(span.nbytes for span in missing) == SIZE - 200 - PAGE
    assert all(span.start + span.nbytes <= 20 * PAGE or span.start >= 21 * PAGE for span in missing)
    told: list[int] = []
    assert bring_into_cache([ByteRange(str(path), 100, SIZE - 200)], {}, told.append, look)
    assert sum(told) >= SIZE - 200 - PAGE


def test_only_what_was_missing_is_looked_at_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_cold(path):
        pytest.skip("this file system keeps its files in memory, or does not say")
    looked_at: list[int] = []
    resident = linux.PageMap.resident

    def counted(self: linux.PageMap, first: int, end: int) -> bytes | None:
        looked_at.append(end - first)
        return resident(self, first, end)

    monkeypatch.setattr(linux.PageMap, "resident", counted)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 20 * PAGE, 0)
        os.pread(file.fileno(), SIZE, 21 * PAGE)
        look = CacheLook({str(path): file.fileno()})
    told: list[int] = []
    assert bring_into_cache(whole(path), {}, told.append, look)
    assert sum(told) == PAGE
    assert sum(looked_at) == SIZE + PAGE


def test_what_was_cached_at_a_look_may_be_gone_after_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.read_bytes()
    with open(path, "rb") as file:
        look = CacheLook({str(path): file.fileno()})
    assert not look.missing(whole(path))
    if not is_cold(path):
        pytest.skip("this file system keeps its files in memory, or does not say")
    monkeypatch.setattr(prefetch, "_RECENT_SECONDS", -1.0)
    told: list[int] = []
    assert bring_into_cache(whole(path), {}, told.append, look)
    assert sum(told) == SIZE


def test_a_range_beyond_the_end_of_the_file_is_missing(path: Path) -> None:
    path.read_bytes()
    with open(path, "rb") as file:
        look = CacheLook({str(path): file.fileno()})
    beyond = ByteRange(str(path), SIZE - PAGE, 2 * PAGE)
    assert look.missing([beyond]) == [beyond]


@pytest.mark.parametrize(("evicted", "evictions", "reads"), [(4, 1, 1), (4, 2, 2), (4, 9, 2), (20, 1, 0)], ids=str)
def test_what_is_evicted_while_the_rest_is_read_is_read_again(
    path: Path, evicted: int, evictions: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_cold(path):
        pytest.skip("this file system keeps its files in memory, or does not say")
    look_again, told = CacheLook.still_lacks, list[int]()

    def evicts(look: CacheLook, spans: Iterable[ByteRange]) -> bool:
        nonlocal evictions
        if evictions:
            evictions -= 1
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 8 * PAGE, evicted * PAGE, os.POSIX_FADV_DONTNEED)
        return look_again(look, spans)

    monkeypatch.setattr(CacheLook, "still_lacks", evicts)
    assert bring_into_cache(whole(path), {}, told.append) == (evictions == 0 and reads > 0)
    assert sum(told) == SIZE + reads * evicted * PAGE


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
    monkeypatch.setattr(prefetch, "most_to_read", lambda: SIZE - 1)
    monkeypatch.setattr(prefetch, "LEAST_BYTES", 1)  # for less, the system is not asked
    evict(path)
    with faulty_reads() as faults:
        fits = bring_into_cache(whole(path), {})
    assert fits == ("preadv" not in {request.call for request in faults.requests} and not is_cold(path))


def is_cold(path: Path) -> bool:
    evict(path)
    return prefetch.is_cold(*whole(path))


def test_a_file_of_another_user_of_which_the_kernel_does_not_tell(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert not bring_into_cache(whole(path), {})
