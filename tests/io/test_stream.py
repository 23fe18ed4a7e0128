"""Streams of blocks: every byte once, each thread by itself, and an end to all of them."""

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from modelstate.io.engine import Block, Wait, block_buffers, in_blocks, stream
from modelstate.io.files import OpenFiles, SourceFile
from modelstate.process import parallel_for
from modelstate.spec import ByteRange
from tests.faults import count_threads, wait_for_threads

units = st.integers(1, 300)
wanted_ranges = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5000), st.integers(0, 900), units).map(
        lambda drawn: (ByteRange(*drawn[:3]), drawn[3])
    ),
    max_size=12,
)


@pytest.mark.slow
@given(wanted=wanted_ranges, block_bytes=st.integers(64, 1000))
def test_blocks_have_every_byte_once_in_whole_units(wanted: list[tuple[ByteRange, int]], block_bytes: int) -> None:
    blocks = in_blocks(wanted, block_bytes)
    parts = [(block.source, part) for block in blocks for part in block.parts]
    for which, (source, unit) in enumerate(wanted):
        mine = sorted((part.first, part.nbytes, part.at) for _, part in parts if part.which == which)
        assert [first for first, _, _ in mine] == [sum(each[1] for each in mine[:i]) for i in range(len(mine))]
        assert sum(nbytes for _, nbytes, _ in mine) == source.nbytes
        assert all(nbytes % unit == 0 for _, nbytes, _ in mine[:-1])
        assert all(at % unit == 0 for _, _, at in mine)
    for read, part in parts:
        source, _ = wanted[part.which]
        assert (read.path, read.start + part.at) == (source.path, source.start + part.first)
        assert part.at + part.nbytes <= read.nbytes
    for block in blocks:
        assert block.source.nbytes <= max(block_bytes, *(wanted[part.which][1] for part in block.parts))


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(index * 7 % 251 for index in range(300_000)))
    return str(path)


def streamed(path: str, threads: int, waits: bool = False, delay: float = 0.0) -> tuple[bytes, set[str]]:
    """What comes of a stream of three ranges of the file, and the threads that brought it."""
    wanted = [(ByteRange(path, *where), 4) for where in ((100_000, 120_000), (10, 40_000), (50_010, 40_000))]
    found = [bytearray(source.nbytes) for source, _ in wanted]
    told: list[float] = []
    names: set[str] = set()

    def take(block: Block, buffer: torch.Tensor) -> None:
        for part in block.parts:
            piece = bytes(buffer[part.at : part.at + part.nbytes].tolist())
            found[part.which][part.first : part.first + part.nbytes] = piece

    def consume(block: Block, buffer: torch.Tensor) -> Wait | None:
        names.add(threading.current_thread().name)
        time.sleep(delay)
        if not waits:
            take(block, buffer)
            return None
        return lambda: take(block, buffer)  # as a device does, which goes on while other blocks are read

    blocks = in_blocks(wanted, 9_000)
    buffers = block_buffers(blocks, threads)
    with OpenFiles({path: SourceFile(path).fingerprint}) as files:
        stream(blocks, buffers, consume, files=files, on_block=lambda block: told.append(block.wanted_bytes))
    assert sum(told) == 200_000
    content = Path(path).read_bytes()
    for (source, _), got in zip(wanted, found, strict=True):
        assert got == content[source.start : source.start + source.nbytes]
    return b"".join(found), names


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_is_streamed_is_what_is_in_the_file(threads: int, waits: bool, path: str) -> None:
    before = count_threads()
    _, names = streamed(path, threads, waits, delay=0.005)
    assert len(names) == threads
    wait_for_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_that_was_started_goes_on_after_an_error(threads: int, path: str) -> None:
    """A device that copies from a buffer, or to memory that is about to be freed."""
    started, ended, lock = list[int](), list[int](), threading.Lock()

    def consume(block: Block, buffer: torch.Tensor) -> Wait:
        with lock:
            number = len(started)
            started.append(number)
        return lambda: ended.append(number)

    def on_block(block: Block) -> None:
        if len(started) > 7:
            raise ValueError("cancelled")

    blocks = in_blocks([(ByteRange(path, 0, 200_000), 4)], 9_000)
    files = OpenFiles({path: SourceFile(path).fingerprint})
    with files, pytest.raises(ValueError, match="cancelled"):
        stream(blocks, block_buffers(blocks, threads), consume, files=files, on_block=on_block)
    assert sorted(ended) == started


def threads_of_a_new_thread() -> int:
    """The number of torch's threads in a thread that begins now."""
    seen = list[int]()
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("of_caller", [3, 2])
def test_the_threads_compute_alone_and_leave_the_setting_as_it_was(of_caller: int) -> None:
    before, seen, after = torch.get_num_threads(), list[int](), list[int]()

    def call() -> None:
        torch.get_num_threads()  # the first call of a thread sets its number
        torch.set_num_threads(of_caller)
        is_set.set()
        assert is_set_again.wait(60)
        parallel_for(lambda stop: seen.append(torch.get_num_threads()), 2, with_torch=True)
        after.append(torch.get_num_threads())

    is_set, is_set_again = threading.Event(), threading.Event()
    caller = threading.Thread(target=call)
    try:
        caller.start()
        assert is_set.wait(60)
        torch.set_num_threads(3)
        is_set_again.set()
        caller.join()
        assert (seen, after, torch.get_num_threads()) == ([1, 1], [of_caller], 3)
        assert threads_of_a_new_thread() == 3
    finally:
        torch.set_num_threads(before)


def test_a_nested_call_starts_no_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threads = set[threading.Thread]()

        def inner(_: threading.Event) -> None:
            threads.add(threading.current_thread())

        parallel_for(lambda _: parallel_for(inner, 4, with_torch=True), 2, with_torch=True)
        assert (len(threads), threads_of_a_new_thread()) == (2, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("with_torch", "takes_part"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_of_one_thread_stops_the_others(error: BaseException, with_torch: bool, takes_part: bool) -> None:
    numbers, begun, ended = iter(range(3)), list[int](), list[int]()

    def work(stop: threading.Event) -> None:
        begun.append(number := next(numbers))
        if number == 1:
            raise error
        assert stop.wait(60)
        ended.append(number)

    before = torch.get_num_threads()
    with pytest.raises(type(error)):
        parallel_for(work, 3, with_torch=with_torch, takes_part=takes_part)
    assert len(ended) == len(begun) - 1 > 0
    assert torch.get_num_threads() == before
