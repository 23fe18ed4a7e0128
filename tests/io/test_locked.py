"""Copies from maps of held files whose pages are locked in memory."""

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from modelstate.io import engine, held, linux, locked
from modelstate.io.blocks import Block, Wanted, in_blocks
from modelstate.io.engine import Request, Rows
from modelstate.io.files import current_fingerprints
from modelstate.io.held import held_files
from modelstate.io.locked import LockedFiles
from modelstate.io.prefetch import look_ahead
from modelstate.spec import ByteRange
from modelstate.torch_compat import private
from tests.faults import Request as SystemCall
from tests.faults import faulty_reads
from tests.formats.files import evict
from tests.io.test_held import BLOCK, PAGE, SIZE, content, until_one_waits, whole, writer
from tests.io.test_lease import can_lease


@pytest.fixture(autouse=True)
def small_files_are_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not can_lease(tmp_path):
        pytest.skip("the file system of the temporary directory has no leases")
    monkeypatch.setattr(locked, "LEAST_BYTES", 1)
    for module in (locked, held):
        monkeypatch.setattr(module, "LEAST_COPIED_BYTES", 1)
    monkeypatch.setattr(locked, "_MOST_WINDOW_BYTES", BLOCK)
    monkeypatch.setattr(locked, "_LEAST_WINDOW_BYTES", PAGE)
    monkeypatch.setattr(locked, "_LEAST_PIECE_BYTES", 1)
    monkeypatch.setattr(locked, "_PAGES_BYTES", PAGE)
    monkeypatch.setattr(locked, "_SAMPLE_BYTES", PAGE)
    monkeypatch.setattr(locked, "_COPY_SPEED", 1)
    monkeypatch.setattr(locked, "_CAST_SPEED", 1)


@pytest.fixture(params=["one thread", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "read_threads", lambda: 3 if request.param == "threads" else 1)


@pytest.fixture
def by_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "_can_lock_all", lambda *_: False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.bin"
    found.write_bytes(content())
    return found


def locked_bytes() -> int:
    """What this process has locked."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmLck:"))


@contextmanager
def locking(path: Path) -> Iterator[LockedFiles]:
    with held_files(whole(path), current_fingerprints([str(path)])) as files:
        assert files.refusal == ""
        yield files.locked
    assert locked_bytes() == 0


def requests_into(memory: bytearray, path: Path, extents: Sequence[tuple[int, int]]) -> list[Request]:
    """Requests of extents (start and length), each to the same place in memory as in the file."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return [Request(ByteRange(str(path), start, nbytes), address + start) for start, nbytes in extents]


def random_extents(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    cuts = sorted({0, SIZE, *(rng.randrange(SIZE) for _ in range(rng.choice([1, 5, 40])))})
    extents = [(start, end - start) for start, end in pairwise(cuts) if rng.random() < 0.8]
    rng.shuffle(extents)
    return extents


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("as_a_whole", [True, False], ids=["as a whole", "by windows"])
def test_all_that_is_requested_is_copied_and_nothing_else(as_a_whole: bool, path: Path) -> None:
    for seed in range(8):
        memory, expected = bytearray(SIZE), bytearray(SIZE)
        for start, nbytes in random_extents(seed):
            expected[start : start + nbytes] = content()[start : start + nbytes]
        with pytest.MonkeyPatch.context() as patch:
            if not as_a_whole:
                patch.setattr(locked, "_can_lock_all", lambda *_: False)
            with locking(path) as files, faulty_reads() as seen:
                assert locked_bytes() == (SIZE if as_a_whole else 0)
                assert files.copy(requests_into(memory, path, random_extents(seed))) == []
        assert memory == expected
        assert {request.call for request in seen.requests} == (set() if as_a_whole else {"mlock"})
        assert all(request.nbytes <= BLOCK for request in seen.requests)


@pytest.mark.usefixtures("threads", "by_windows")
def test_what_cannot_be_locked_is_left(path: Path) -> None:
    whole_file, other = [(0, SIZE)], bytearray(SIZE)
    for start in range(0, SIZE, BLOCK):
        memory = bytearray(SIZE)

        def bad(request: object, start: int = start) -> None:
            if getattr(request, "start", 0) == start and getattr(request, "call", "") == "mlock":
                raise OSError(errno.ENOMEM, "a page cannot be read")

        with locking(path) as files:
            files.copy(requests_into(other, path, [(BLOCK, BLOCK)]))  # the first call takes samples
            with faulty_reads(before=bad):
                left = files.copy(requests_into(memory, path, whole_file))
        assert [(request.source.start, request.source.nbytes) for request in left] == [(start, BLOCK)]
        expected = bytearray(content())
        expected[start : start + BLOCK] = bytes(BLOCK)
        assert memory == expected


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_file_is_locked_as_a_whole_or_not_at_all(number: int, path: Path) -> None:
    memory = bytearray(SIZE)
    with faulty_reads() as clean, locking(path):
        assert locked_bytes() == SIZE
    locks = [request.number for request in clean.requests if request.call == "mlock"]
    assert len(locks) == 3  # two samples
    with faulty_reads(at=locks[number - 1], error=OSError(errno.ENOMEM, "limit")), locking(path) as files:
        assert locked_bytes() == 0
        assert files.copy(requests_into(memory, path, [(0, SIZE)])) == []
    assert memory == content()


@pytest.mark.parametrize(
    ("limit", "most"), [(2 * SIZE, SIZE), (BLOCK, BLOCK - PAGE), (2 * PAGE, PAGE), (PAGE, 0), (0, 0)]
)
def test_locks_fit_into_the_limit(limit: int, most: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "read_threads", lambda: 1)
    monkeypatch.setattr(linux, "lockable_bytes", lambda: limit)
    memory = bytearray(SIZE)
    with faulty_reads() as seen, locking(path) as files:
        assert locked_bytes() == (SIZE if most == SIZE else 0)
        left = files.copy(requests_into(memory, path, [(0, SIZE)]))
    assert max((request.nbytes for request in seen.requests if request.call == "mlock"), default=0) == most
    assert (memory == content()) == (left == []) == (most > 0)


def test_where_the_limit_is_too_small_for_all_threads_one_has_all_of_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked, "read_threads", lambda: 3)
    monkeypatch.setattr(locked, "_LEAST_WINDOW_BYTES", BLOCK)
    monkeypatch.setattr(linux, "lockable_bytes", lambda: 2 * BLOCK)
    memory, threads = bytearray(SIZE), set[int]()
    with locking(path) as files, faulty_reads(before=lambda _: threads.add(threading.get_ident())):
        assert files.copy(requests_into(memory, path, [(0, SIZE)])) == []
    assert memory == content()
    assert threads == {threading.get_ident()}


def test_a_file_that_is_not_in_the_page_cache_is_not_locked_as_a_whole(path: Path) -> None:
    evict(path)
    descriptor = os.open(path, os.O_RDONLY)
    if linux.cached_share(descriptor, 0, SIZE) == 1:
        pytest.skip("this file system keeps its files in memory, or does not say")
    os.close(descriptor)
    fingerprints = current_fingerprints([str(path)])
    assert not locked.can_lock_all(fingerprints)
    with held_files(whole(path), fingerprints) as files:
        assert locked_bytes() == 0
        assert files.refusal == ""
    assert locked.can_lock_all(fingerprints)  # it has been brought in
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 8 * PAGE, 2 * PAGE, os.POSIX_FADV_DONTNEED)
    with held_files(whole(path), fingerprints) as files:
        assert locked_bytes() == SIZE  # a few pages were missing
    with held_files(whole(path), fingerprints, look=look_ahead(fingerprints)):
        assert locked_bytes() == 0  # what was looked at is read


@pytest.mark.usefixtures("by_windows")
def test_slow_locks_small_pieces_and_rows_are_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(SIZE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    rows = Rows(ByteRange(str(path), 0, 10), address, 5, 100, 10)
    requests = requests_into(memory, path, [(0, SIZE)])
    with locking(path) as files:
        assert files.copy([rows, *requests]) == [rows]
    monkeypatch.setattr(locked, "_LEAST_PIECE_BYTES", SIZE)
    with locking(path) as files:
        left = files.copy(requests)
        assert sum(request.source.nbytes for request in left if isinstance(request, Request)) == SIZE
    monkeypatch.setattr(locked, "_COPY_SPEED", 1e30)
    with locking(path) as files:
        assert files.copy(requests) == requests
    monkeypatch.setattr(locked, "is_forked", lambda: True)
    with locking(path) as files:
        assert files.copy(requests) == requests


def test_nothing_is_copied_while_a_writer_waits(path: Path) -> None:
    memory = bytearray(SIZE)
    with held_files(whole(path), current_fingerprints([str(path)])) as files:
        requests = requests_into(memory, path, [(0, SIZE)])
        process = writer("cut", path)
        until_one_waits(path, process, files)
        left = files.locked.copy(requests)
        assert sum(request.source.nbytes for request in left) == SIZE
        assert memory == bytes(SIZE)
    assert process.wait(60) == 0


@pytest.mark.usefixtures("by_windows")
def test_a_window_in_whose_copy_a_writer_was_let_go_on_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "read_threads", lambda: 1)
    memory, processes, now = bytearray(SIZE), [], time.monotonic

    def before(request: SystemCall) -> None:
        if request.start == BLOCK and not processes:
            processes.append(writer("overwritten", path))
            until_one_waits(path, processes[0], files)
            monkeypatch.setattr(time, "monotonic", lambda: now() + 60)

    with held_files(whole(path), current_fingerprints([str(path)])) as files:
        files.locked.copy(requests_into(memory, path, [(0, 1)]))  # the first call takes samples
        with faulty_reads(before=before):
            left = files.locked.copy(requests_into(memory, path, [(0, SIZE)]))
    assert [request.source.start for request in left] == list(range(BLOCK, SIZE, BLOCK))
    assert processes[0].wait(60) == 0


@pytest.mark.usefixtures("by_windows")
def test_the_end_of_a_window_unlocks_no_page_of_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "read_threads", lambda: 2)
    both, copy_each, left = threading.Barrier(2, timeout=60), private.copy_each, list[int]()

    def slow(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_each(targets, sources)
        both.wait()  # both windows are locked, and their ends lie in one page
        before = locked_bytes()
        if both.wait() == 0:  # this window ends last
            until = time.monotonic() + 60
            while locked_bytes() == before and time.monotonic() < until:
                time.sleep(0.001)
            left.append(locked_bytes())

    monkeypatch.setattr(private, "copy_each", slow)
    memory = bytearray(SIZE)
    with locking(path) as files:
        assert files.copy(requests_into(memory, path, [(100, 2 * BLOCK)])) == []
    assert left == [BLOCK + PAGE]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("unit", [1, 4, 12])
def test_blocks_are_consumed_from_the_map(unit: int, path: Path) -> None:
    runs = [(3, 900), (1000, 5000), (6100, 7000)]
    extents = [ByteRange(str(path), start * unit, nbytes * unit) for start, nbytes in runs]
    wanted = [Wanted(extent, unit) for extent in extents]
    blocks, done, lock = in_blocks(wanted, 2 * PAGE), list[Block](), threading.Lock()
    seen = {which: bytearray(extent.nbytes) for which, extent in enumerate(extents)}
    failed = set[int]()

    def consume(block: Block, buffer: torch.Tensor) -> None:
        with lock:
            if not failed:
                failed.add(1)
                raise MemoryError
        for which, first, nbytes, at in block.parts:
            assert (buffer.data_ptr() + at) % min(unit, 4) == 0
            seen[which][first : first + nbytes] = buffer[at : at + nbytes].numpy().tobytes()

    with locking(path) as files:
        files.stream(wanted, blocks, consume, lambda block, _: done.append(block), min(unit, 4))
        left = [block for block in blocks if block not in done]
        assert left
        files.stream(wanted, left, consume, lambda block, _: done.append(block), min(unit, 4))
    assert sorted(done, key=blocks.index) == blocks
    for which, extent in enumerate(extents):
        assert seen[which] == content()[extent.start : extent.start + extent.nbytes]


def test_a_block_that_begins_before_the_last_one_is_consumed_from_its_place(path: Path) -> None:
    # The last rows of one range, then another one that overlaps them and has rows too long for the same block.
    wanted = [Wanted(ByteRange(str(path), 0, BLOCK + 128), 64), Wanted(ByteRange(str(path), BLOCK - 640, BLOCK), BLOCK)]
    blocks, seen = in_blocks(wanted, BLOCK), [bytearray(entry.source.nbytes) for entry in wanted]
    assert len(blocks) == 3

    def consume(block: Block, buffer: torch.Tensor) -> None:
        for which, first, nbytes, at in block.parts:
            seen[which][first : first + nbytes] = buffer[at:][:nbytes].numpy().tobytes()

    with locking(path) as files:
        files.stream(wanted, blocks, consume, lambda *_: None, 4)
    for (_, start, nbytes), found in zip((entry.source for entry in wanted), seen, strict=True):
        assert found == content()[start : start + nbytes]


def test_elements_that_are_not_aligned_in_the_file_are_left(path: Path) -> None:
    wanted = [Wanted(ByteRange(str(path), 2, PAGE), 4)]
    with locking(path) as files:
        files.stream(
            wanted,
            in_blocks(wanted, PAGE),
            lambda *_: pytest.fail("consumed"),
            lambda *_: pytest.fail("done"),
            4,
        )


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(5))).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "device", "as_a_whole"),
    [
        *((dtype, "cpu", as_a_whole) for dtype in (torch.float32, torch.bfloat16) for as_a_whole in (True, False)),
        (torch.bfloat16, "meta", True),
    ],
    ids=str,
)
def test_a_load_is_right_whatever_call_fails(
    dtype: torch.dtype, device: str, as_a_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not as_a_whole:
        monkeypatch.setattr(locked, "_can_lock_all", lambda *_: False)
    monkeypatch.setattr(engine, "_BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(locked, "_MOST_WINDOW_BYTES", 1 << 18)
    path = tmp_path / "x.safetensors"
    weights = {name: torch.randn(value.shape) for name, value in model().state_dict().items()}
    weights["0.weight"][3, 3] = 3.4e38  # infinite in bfloat16
    save_file(weights, path)
    expected = {name: value.to(dtype) for name, value in weights.items()}
    with faulty_reads() as clean:
        report = ms.load(model(dtype).to(device), path, dtype=dtype)
    calls = [request.call for request in clean.requests]
    assert "mlock" in calls
    assert not [call for call in calls[calls.index("mlock") :] if "read" in call]
    infinite = [note for note in report.notes if "became infinite" in note]
    assert len(infinite) == (dtype is torch.bfloat16)
    for number in range(1, len(calls) + 1):
        target = model(dtype).to(device)
        before = {name: value.clone() for name, value in target.state_dict().items()}
        with faulty_reads(at=number, error=OSError(errno.EIO, os.strerror(errno.EIO))):
            try:
                again = ms.load(target, path, dtype=dtype)
            except ms.ModelStateError:
                now = before
            else:
                now = expected
                assert [note for note in again.notes if "became infinite" in note] == infinite
        for name, value in target.state_dict().items():
            assert value.is_meta if now[name].is_meta else torch.equal(value, now[name])
        assert locked_bytes() == 0


def test_with_in_place_false_no_file_is_mapped(tmp_path: Path) -> None:
    path, target = tmp_path / "x.safetensors", model(torch.bfloat16)
    weights = {name: torch.randn(value.shape) for name, value in target.state_dict().items()}
    save_file(weights, path)
    with faulty_reads() as seen:
        ms.load(target, path, dtype=torch.bfloat16, in_place=False)
    assert "mlock" not in {request.call for request in seen.requests}
    assert all(torch.equal(value, weights[name].bfloat16()) for name, value in target.state_dict().items())
