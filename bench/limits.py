"""What the machine itself takes to move the bytes of a file: nothing that loads can be faster."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from bench import files
from bench.measure import Stages
from bench.models import QUICK, run, sizes_of, with_memory
from modelstate.io.system import resident

MEMCPY = "memcpy into touched memory"
FORWARD = "the forward alone"
TOUCHED = "preadv from the page cache into touched memory, {}"
TOUCHED_SMALL = "preadv from the page cache into touched small pages, {}"
SMALL = "preadv from the page cache into fresh small pages, {}"
CAST = "preadv from the page cache in blocks, cast to bfloat16 into fresh small pages, {}"
HUGE = "preadv from the page cache into fresh huge pages, {}"
RESIDENT = "mincore: which pages the page cache has, {}"
BUFFERED = "cold disk, buffered reads, {}"
DIRECT = "cold disk, O_DIRECT reads, {}"
_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 4096


def threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def memory(*, path: str) -> None:
    """Reports one stage a limit, each with its own seconds in the facts."""
    files.warm([Path(path)])
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Callable[[], float]] = {MEMCPY: lambda: _memcpy(os.stat(path).st_size)}
    for count in sorted({1, cores}):
        read = partial(_read, path, count)
        found[TOUCHED.format(threads(count))] = partial(read, huge=True, touched=True)
        found[TOUCHED_SMALL.format(threads(count))] = partial(read, huge=False, touched=True)
        found[SMALL.format(threads(count))] = partial(read, huge=False)
        found[CAST.format(threads(count))] = partial(_cast, path, count)
        found[HUGE.format(threads(count))] = partial(read, huge=True)
        found[RESIDENT.format(threads(count))] = partial(_resident, path, count)
    _report(found, os.stat(path).st_size)


def disk(*, path: str) -> None:
    """The same for a file that is taken out of the page cache before each read."""
    found: dict[str, Callable[[], float]] = {}
    for count in (2, 4, 8):
        read = partial(_read, path, count, huge=True, touched=True, cold=True)
        found[BUFFERED.format(threads(count))] = read
        found[DIRECT.format(threads(count))] = partial(read, flags=os.O_DIRECT)
    _report(found, os.stat(path).st_size)


def forward(*, quick: bool) -> None:
    """The first forward of a model whose weights are in memory."""
    with torch.inference_mode():
        run(with_memory("tiny", QUICK))
    model = with_memory("large", sizes_of(quick))
    stages = Stages()
    with torch.inference_mode():
        run(model)
    stages.end("ready")


def _report(limits: Mapping[str, Callable[[], float]], nbytes: int) -> None:
    stages = Stages()
    for name, measure in limits.items():
        moved = {} if name.startswith(RESIDENT.partition("{")[0]) else {"nbytes": nbytes}
        stages.end(name, seconds=measure(), **moved)


def _memcpy(nbytes: int) -> float:
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def _read(
    path: str,
    count: int,
    *,
    huge: bool,
    touched: bool = False,
    cold: bool = False,
    flags: int = 0,
) -> float:
    """The whole file by `count` threads into new memory, or into memory that has been written to before."""
    nbytes = os.stat(path).st_size
    room = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES  # O_DIRECT reads whole pages, beyond the end as well
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    if touched:
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    if cold:
        files.chill([Path(path)])
    descriptor = os.open(path, os.O_RDONLY | flags)
    view = memoryview(memory)

    def read(at: int, end: int) -> None:
        room = min(at + _CHUNK_BYTES, len(view))
        while at < end:
            at += os.preadv(descriptor, [view[at:room]], at) or _nothing_read()

    try:
        return _timed(read, nbytes, count)
    finally:
        os.close(descriptor)


def _resident(path: str, count: int) -> float:
    """What a load asks before it reads into memory whose old values are not kept."""
    nbytes = os.stat(path).st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _timed(lambda first, end: resident(descriptor, first, end - first), nbytes, count)
    finally:
        os.close(descriptor)


def _cast(path: str, count: int) -> float:
    """As a load does that nothing is asked of: no names, no checks, numbers as they come."""
    nbytes = os.stat(path).st_size // 4 * 4
    memory = mmap.mmap(-1, nbytes // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    target, own = torch.frombuffer(memory, dtype=torch.bfloat16), threading.local()
    descriptor = os.open(path, os.O_RDONLY)

    def cast(at: int, end: int) -> None:
        if not hasattr(own, "buffer"):
            torch.get_num_threads()  # the first call takes the number of the process, also after one has been set
            torch.set_num_threads(1)
            own.buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        if os.preadv(descriptor, [memoryview(own.buffer.numpy())[: end - at]], at) < end - at:
            _nothing_read()
        target[at // 4 : end // 4].copy_(own.buffer[: end - at].view(torch.float32))

    try:
        return _timed(cast, nbytes, count)
    finally:
        os.close(descriptor)


def _nothing_read() -> int:
    raise OSError("a thread could not read its part")


def _timed(do: Callable[[int, int], object], nbytes: int, count: int) -> float:
    """The seconds in which so many threads `do` all pieces, each from a byte to another."""
    chunks, lock, failed = iter(range(0, nbytes, _CHUNK_BYTES)), threading.Lock(), list[Exception]()

    def work() -> None:
        while not failed:
            with lock:
                at = next(chunks, None)
            if at is None:
                return
            try:
                do(at, min(at + _CHUNK_BYTES, nbytes))
            except Exception as error:
                failed.append(error)

    workers = [threading.Thread(target=work) for _ in range(count)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    if failed:
        raise failed[0]
    return seconds
