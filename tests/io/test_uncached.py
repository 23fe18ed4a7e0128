"""Reads past the page cache: the same bytes wherever they lie, also where the file system has no such reads."""

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelstate.errors import ReadFailedError
from modelstate.io import engine, linux
from modelstate.io.blocks import Block, Wanted, stream
from modelstate.io.engine import LocalFile, ReadStrategy, Request, can_read_uncached, coalesce, read_ranges
from modelstate.io.files import current_fingerprints
from modelstate.io.uncached import ALIGN_BYTES, BUFFER_BYTES, Piece, windows
from modelstate.spec import ByteRange
from tests.faults import Faults, faulty_reads
from tests.io.test_ranges import nothing_left_behind, requests_for, truth

FILE_BYTES = 3 * BUFFER_BYTES + 1234
runs = st.lists(st.tuples(st.booleans(), st.integers(1, 3 * ALIGN_BYTES)), min_size=1, max_size=8)


@pytest.mark.slow
@given(st.integers(0, 5 * ALIGN_BYTES), runs, st.integers(1, 4))
def test_windows_have_every_byte_once(start: int, run: list[tuple[bool, int]], blocks: int) -> None:
    pieces: list[Piece] = []
    wanted, address, at = [], 1, start
    for has_place, nbytes in run:
        pieces.append((address if has_place else None, nbytes))
        if has_place:
            wanted += list(zip(range(address, address + nbytes), range(at, at + nbytes), strict=True))
            address += nbytes
        at += nbytes
    most = blocks * ALIGN_BYTES
    found, behind = [], None
    for window in windows(start, pieces, most):
        assert window.start % ALIGN_BYTES == window.nbytes % ALIGN_BYTES == 0
        assert 0 < window.needed_bytes <= window.nbytes <= most
        assert behind in (None, window.start)  # none is read twice
        behind = window.start + window.nbytes
        for offset, place, nbytes in window.copies:
            assert 0 < nbytes <= window.needed_bytes - offset
            first = window.start + offset
            found += list(zip(range(place, place + nbytes), range(first, first + nbytes), strict=True))
    assert sorted(found) == sorted(wanted)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("uncached") / "bytes"
    path.write_bytes(torch.randint(256, (FILE_BYTES,), dtype=torch.uint8).numpy().tobytes())
    if not can_read_uncached(str(path), None):
        pytest.skip("no O_DIRECT on this file system, or no huge pages")
    return str(path)


def read(sources: list[ByteRange], *, threads: int = 2, batch_bytes: int = 8 << 20) -> bytes:
    """What the ranges hold, one behind the other, in memory that begins and ends anywhere."""
    memory = torch.full((sum(source.nbytes for source in sources) + 2,), 0xEE, dtype=torch.uint8)
    requests, paths = requests_for(sources, memory.data_ptr() + 1), {source.path for source in sources}
    with nothing_left_behind():
        read_ranges(
            requests,
            threads=threads,
            fingerprints=current_fingerprints(paths),
            uncached=paths,
            batch_bytes=batch_bytes,
        )
    assert memory[0] == memory[-1] == 0xEE
    return memory[1:-1].numpy().tobytes()


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, FILE_BYTES - 1), st.integers(0, BUFFER_BYTES + 5000)), max_size=6),
    st.sampled_from([1, 4]),
    st.sampled_from([5000, 1 << 20, 8 << 20]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_read_is_what_is_in_the_file(
    path: str, places: list[tuple[int, int]], threads: int, batch_bytes: int
) -> None:
    sources = [ByteRange(path, start, min(nbytes, FILE_BYTES - start)) for start, nbytes in places]
    with faulty_reads() as faults:
        found = read(sources, threads=threads, batch_bytes=batch_bytes)
    assert found == truth(sources)
    assert all(one.start % ALIGN_BYTES == one.nbytes % ALIGN_BYTES == 0 for one in faults.requests)


@pytest.mark.parametrize("nbytes", [1, 511, 4095, 4096, 4097, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1])
def test_files_of_any_size(path: str, nbytes: int, tmp_path: Path) -> None:
    content = Path(path).read_bytes()[:nbytes]
    other = tmp_path / "other"
    other.write_bytes(content)
    assert read([ByteRange(str(other), 0, nbytes)]) == content
    assert read([ByteRange(str(other), nbytes - 1, 1)]) == content[-1:]


@pytest.mark.slow
def test_many_small_ranges(path: str) -> None:
    sources = [ByteRange(path, 7 + 1501 * i, 1 + i % 90) for i in range(800)]
    assert read(sources) == truth(sources)


def test_what_has_not_reached_the_disk_yet(path: str, tmp_path: Path) -> None:
    other = tmp_path / "dirty"
    other.write_bytes(b"a" * BUFFER_BYTES)
    with other.open("r+b") as file:
        file.seek(100_001)
        file.write(b"bcd")
    assert read([ByteRange(str(other), 99_999, 6)]) == b"aabcda"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("short", [1, 1000, 4096, 5000, BUFFER_BYTES - 1])
def test_reads_that_come_short_go_on(path: str, short: int, threads: int) -> None:
    nbytes = 20_000 if short == 1 else FILE_BYTES - 77
    sources = [ByteRange(path, 77, nbytes)]
    with faulty_reads(short=short):
        assert read(sources, threads=threads) == truth(sources)


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_system_without_it(path: str, call: str, number: int, threads: int) -> None:
    """It says so when the file is opened, or when it is read."""
    refused = 0

    def refuse(request: Any) -> None:
        nonlocal refused
        if request.call == call == "open" and refused == 0:
            refused += 1
            raise OSError(number, os.strerror(number))
        if request.call == call == "preadv" and any(map(is_open_uncached, os.listdir("/proc/self/fd"))):
            refused += 1
            raise OSError(number, os.strerror(number))

    def is_open_uncached(descriptor: str) -> bool:
        try:
            is_uncached = fcntl.fcntl(int(descriptor), fcntl.F_GETFL) & os.O_DIRECT
            return os.readlink(f"/proc/self/fd/{descriptor}") == path and bool(is_uncached)
        except OSError:
            return False

    sources = [ByteRange(path, 5, FILE_BYTES - 5)]
    with faulty_reads(before=refuse):
        assert read(sources, threads=threads, batch_bytes=1 << 20) == truth(sources)
    assert refused


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_error_that_stays_is_one(path: str, call: str, number: int) -> None:
    def fail(request: Any) -> None:
        if request.call == call:
            raise OSError(number, os.strerror(number))

    with nothing_left_behind(), faulty_reads(before=fail), pytest.raises(ReadFailedError) as caught:
        read([ByteRange(path, 5, FILE_BYTES - 5)])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number
    assert path in str(caught.value.where)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_ends_too_early(path: str, threads: int) -> None:
    with pytest.raises(ReadFailedError, match="ends before the tensor does") as caught:
        read([ByteRange(path, FILE_BYTES - 100, 5000)], threads=threads)
    assert caught.value.where == f"{path}, byte {FILE_BYTES}"
    assert caught.value.expected == "4900 more bytes"


def no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "O_DIRECT", 0)


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(engine, "Buffer", fail)
    monkeypatch.setattr(engine, "Buffer", fail)


@pytest.mark.parametrize("lack", [no_flag, no_memory])
def test_where_it_cannot_be_done(
    path: str, lack: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(monkeypatch)
    assert not can_read_uncached(path, None)
    sources = [ByteRange(path, 4097, FILE_BYTES - 5000)]
    assert read(sources) == truth(sources)


def test_a_file_that_is_gone_or_another_one_cannot_be_read_so(path: str, tmp_path: Path) -> None:
    assert not can_read_uncached(str(tmp_path / "gone"), None)
    (stamp,) = current_fingerprints([path]).values()
    assert can_read_uncached(path, stamp)
    assert not can_read_uncached(path, replace(stamp, nbytes=1))


def test_the_descriptor_reads_past_the_page_cache(path: str) -> None:
    file = LocalFile(path, None, uncached=True)
    try:
        assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
        file.use_page_cache()
        assert not fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        file.close()


def test_streams(path: str) -> None:
    wanted = [Wanted(ByteRange(path, *where), 4) for where in ((3_000_001, 2_500_000), (9, 40), (50, 1_000_000))]
    found = [bytearray(one.source.nbytes) for one in wanted]

    def consume(block: Block, buffer: torch.Tensor) -> None:
        for part in block.parts:
            piece = buffer[part.at : part.at + part.nbytes].numpy().tobytes()
            found[part.which][part.first : part.first + part.nbytes] = piece

    faults: Faults
    with nothing_left_behind(), faulty_reads() as faults:
        stream(
            wanted,
            consume,
            strategy=ReadStrategy(3, 300_000, uncached=frozenset([path])),
            fingerprints=current_fingerprints([path]),
            on_block=lambda block, seconds: None,
        )
    assert [bytes(one) for one in found] == [truth([one.source]) for one in wanted]
    assert all(one.start % ALIGN_BYTES == 0 for one in faults.requests if one.call == "preadv")


def test_a_request_of_nothing_is_no_call(path: str) -> None:
    assert coalesce([Request(ByteRange(path, 3, 0), 1)], batch_bytes=10, gap_bytes=10) == []
    assert list(windows(3, [])) == []
