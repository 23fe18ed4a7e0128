"""Reading many ranges: the plan covers every byte once, and carrying it out leaves nothing behind."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from modelstate.errors import ReadFailedError
from modelstate.io import system
from modelstate.io.engine import Block, Request, in_blocks, read_ranges
from modelstate.io.files import SourceFile
from modelstate.spec import ByteRange
from tests.faults import Request as SystemCall, count_threads, faulty_reads, wait_for_threads

FILE_BYTES = 96
ranges = st.builds(
    ByteRange, st.sampled_from(["a", "b"]), st.integers(0, FILE_BYTES // 2), st.integers(0, FILE_BYTES // 2)
)
block_limit, gap_limit = st.integers(1, 40), st.integers(0, 12)


def requests_for(sources: list[ByteRange], base: int = 1) -> list[Request]:
    """A request for each range, their places in memory one behind the other from `base` on."""
    made, address = [], base
    for source in sources:
        made.append(Request(source, address))
        address += source.nbytes
    return made


def plan(sources: list[ByteRange], block_bytes: int, gap_bytes: int) -> list[Block]:
    wanted = [(source, 1) for source in sources]
    return in_blocks(wanted, block_bytes, gap_bytes=gap_bytes, is_scattered=True)


def bytes_of(blocks: list[Block]) -> list[tuple[int, int, str, int]]:
    """For every byte that reaches memory: its range, its place in the range, and where it comes from."""
    return [
        (part.which, part.first + i, block.source.path, block.source.start + part.at + i)
        for block in blocks
        for part in block.parts
        for i in range(part.nbytes)
    ]


def overlap(sources: list[ByteRange]) -> bool:
    places = [(s.path, s.start + i) for s in sources for i in range(s.nbytes)]
    return len(set(places)) < len(places)


# The plan.


@pytest.mark.slow
@given(st.lists(ranges, max_size=12), block_limit, gap_limit)
def test_every_byte_of_every_range_is_read_once(sources: list[ByteRange], block_bytes: int, gap_bytes: int) -> None:
    wanted = [(which, i, s.path, s.start + i) for which, s in enumerate(sources) for i in range(s.nbytes)]
    assert sorted(bytes_of(plan(sources, block_bytes, gap_bytes))) == wanted


@pytest.mark.slow
@given(st.lists(ranges, max_size=12), block_limit, gap_limit)
def test_blocks_keep_their_limits(sources: list[ByteRange], block_bytes: int, gap_bytes: int) -> None:
    blocks = plan(sources, block_bytes, gap_bytes)
    if not overlap(sources):
        assert [block.source for block in blocks] == sorted(block.source for block in blocks)
    for block in blocks:
        assert 0 < block.wanted_bytes <= block.source.nbytes <= block_bytes
        ends = [0, *(part.at + part.nbytes for part in block.parts)]
        assert min(part.nbytes for part in block.parts) > 0
        assert all(0 <= part.at - end <= gap_bytes for part, end in zip(block.parts, ends, strict=False))
        assert (block.parts[0].at, ends[-1]) == (0, block.source.nbytes)


@pytest.mark.parametrize("step", [1, 2])
def test_a_block_has_no_more_parts_than_one_call_takes(step: int) -> None:
    blocks = plan([ByteRange("a", i * step, 1) for i in range(3000)], 1 << 20, 1)
    assert len(bytes_of(blocks)) == 3000
    assert 1000 < max(len(block.parts) * step for block in blocks) <= 1024
    assert len(blocks) == -(-3000 * step // 1023)


# Carrying it out.


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    paths = {name: tmp_path / name for name in "ab"}
    for salt, path in enumerate(paths.values()):
        path.write_bytes(bytes((i * 7 + salt * 101) % 256 for i in range(FILE_BYTES)))
    return {name: str(path) for name, path in paths.items()}


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No descriptor and no thread more than before."""
    before, threads = len(os.listdir("/proc/self/fd")), count_threads()
    yield
    assert len(os.listdir("/proc/self/fd")) == before
    wait_for_threads(threads)


def read(sources: list[ByteRange], *, batch_bytes: int = 8, **options: Any) -> bytes:
    """What the ranges hold, one behind the other, read by the code under test."""
    memory = torch.full((sum(source.nbytes for source in sources) + 1,), 0xEE, dtype=torch.uint8)
    limits = {"batch_bytes": batch_bytes, "threads": 1, "files": {}}
    with nothing_left_behind():
        read_ranges(requests_for(sources, memory.data_ptr()), **(limits | options))
    assert memory[-1] == 0xEE
    return memory[:-1].numpy().tobytes()


def truth(sources: list[ByteRange]) -> bytes:
    return b"".join(Path(s.path).read_bytes()[s.start : s.start + s.nbytes] for s in sources)


@pytest.mark.slow
@given(st.data(), st.sampled_from([1, 3]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_read_is_what_is_in_the_file(files: dict[str, str], data: st.DataObject, threads: int) -> None:
    sources = [ByteRange(files[s.path], s.start, s.nbytes) for s in data.draw(st.lists(ranges, max_size=8))]
    heard: list[int] = []
    batch_bytes = data.draw(block_limit)
    assert read(sources, threads=threads, on_read=heard.append, batch_bytes=batch_bytes) == truth(sources)
    assert sum(heard) == sum(source.nbytes for source in sources)


@pytest.mark.parametrize("most", [1, 3, 10])
def test_calls_that_read_less_than_asked_go_on(files: dict[str, str], most: int) -> None:
    sources = [ByteRange(files["a"], 3, 7), ByteRange(files["a"], 12, 20), ByteRange(files["a"], 33, 1)]
    with faulty_reads(short=most) as faults:
        assert read(sources, batch_bytes=64) == truth(sources)
    assert [request.call for request in faults.requests].count("preadv") == -(-31 // most)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("on_read", [None, lambda _: None], ids=["unheard", "heard"])
def test_an_error_ends_the_read(files: dict[str, str], threads: int, on_read: Callable[[int], None] | None) -> None:
    def fail(request: SystemCall) -> None:
        if request.call == "preadv" and request.start == 8:
            raise OSError(5, "Input/output error")
        time.sleep(0.01)

    with faulty_reads(before=fail) as faults, nothing_left_behind():
        with pytest.raises(ReadFailedError, match="Input/output error") as caught:
            read([ByteRange(files["a"], 0, 96)], threads=threads, on_read=on_read)
        assert [request.call for request in faults.requests].count("preadv") < 12  # batches that had not begun never do
    assert caught.value.where == f"{files['a']}, byte 8"
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_ends_too_early(files: dict[str, str], threads: int) -> None:
    with nothing_left_behind(), pytest.raises(ReadFailedError, match="ends before the tensor does") as caught:
        read([ByteRange(files["a"], 80, 20)], threads=threads, batch_bytes=10)
    assert caught.value.where == f"{files['a']}, byte {FILE_BYTES}"
    assert caught.value.expected == "4 more bytes"


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_on_read_raises_comes_through(files: dict[str, str], threads: int, error: type[BaseException]) -> None:
    def on_read(_: int) -> None:
        raise error

    with nothing_left_behind(), pytest.raises(error):
        read([ByteRange(files["a"], 0, 90)], threads=threads, on_read=on_read)


def test_a_file_that_is_gone(files: dict[str, str], tmp_path: Path) -> None:
    sources = [ByteRange(files["a"], 0, 9), ByteRange(str(tmp_path / "gone"), 0, 9)]
    with nothing_left_behind(), pytest.raises(ReadFailedError, match="can no longer be opened") as caught:
        read(sources)
    assert caught.value.where == str(tmp_path / "gone")


def test_a_file_that_has_changed_is_not_read(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = {path: SourceFile(path).fingerprint for path in files.values()}
    Path(files["b"]).write_bytes(b"another")
    monkeypatch.setattr(system, "preadv", lambda *_: pytest.fail("read"))
    sources = [ByteRange(files["a"], 0, 9), ByteRange(files["b"], 0, 3)]
    with nothing_left_behind(), pytest.raises(ReadFailedError, match="has changed since it was opened") as caught:
        read(sources, files=stamps)
    assert caught.value.where == files["b"]
    assert "another file" not in caught.value.found
