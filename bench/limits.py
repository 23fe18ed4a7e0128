"""What the machine itself takes to move the bytes of a file: nothing that loads can be faster."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench import files
from modelstate.cli.measure import Stages

MEMCPY = "memcpy into touched memory"
FORWARD = "the forward alone"
TOUCHED = "preadv from the page cache into touched memory, {}"
TOUCHED_SMALL = "preadv from the page cache into touched small pages, {}"
SMALL = "preadv from the page cache into fresh small pages, {}"
HUGE = "preadv from the page cache into fresh huge pages, {}"
BUFFERED = "cold disk, buffered reads, {}"
DIRECT = "cold disk, O_DIRECT reads, {}"
_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 4096


def threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def memory(path: str) -> None:
    """Reports one stage a limit, each with its own seconds in the facts."""
    files.warm([Path(path)])
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Callable[[], float]] = {MEMCPY: lambda: _memcpy(os.stat(path).st_size)}
    for count in sorted({1, cores}):
        found[TOUCHED.format(threads(count))] = lambda n=count: _read(path, n, huge=True, touched=True)
        found[TOUCHED_SMALL.format(threads(count))] = lambda n=count: _read(path, n, huge=False, touched=True)
        found[SMALL.format(threads(count))] = lambda n=count: _read(path, n, huge=False)
        found[HUGE.format(threads(count))] = lambda n=count: _read(path, n, huge=True)
    _report(found, os.stat(path).st_size)


def disk(path: str) -> None:
    """The same for a file that is taken out of the page cache before each read."""
    found: dict[str, Callable[[], float]] = {}
    for count in (2, 4, 8):
        found[BUFFERED.format(threads(count))] = lambda n=count: _read(path, n, huge=True, touched=True, cold=True)
        found[DIRECT.format(threads(count))] = lambda n=count: _read(
            path, n, huge=True, touched=True, cold=True, flags=os.O_DIRECT
        )
    _report(found, os.stat(path).st_size)


def _report(limits: Mapping[str, Callable[[], float]], nbytes: int) -> None:
    stages = Stages()
    for name, measure in limits.items():
        stages.end(name, seconds=measure(), nbytes=nbytes)


def _memcpy(nbytes: int) -> float:
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def _read(path: str, count: int, *, huge: bool, touched: bool = False, cold: bool = False, flags: int = 0) -> float:
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
    try:
        return _timed(descriptor, memoryview(memory), nbytes, count)
    finally:
        os.close(descriptor)


def _timed(descriptor: int, view: memoryview, nbytes: int, count: int) -> float:
    chunks, lock, read = iter(range(0, nbytes, _CHUNK_BYTES)), threading.Lock(), [0]

    def work() -> None:
        while True:
            with lock:
                at = next(chunks, None)
            if at is None:
                return
            end, room = min(at + _CHUNK_BYTES, nbytes), min(at + _CHUNK_BYTES, len(view))
            while at < end:
                got = os.preadv(descriptor, [view[at:room]], at)
                if not got:
                    return
                at += got
                with lock:
                    read[0] += got

    workers = [threading.Thread(target=work) for _ in range(count)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    if read[0] < nbytes:
        raise OSError("a thread could not read its part")
    return seconds
