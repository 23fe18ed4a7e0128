"""Fresh memory in huge pages, as long as these are fast."""

import mmap
import re
import struct
from pathlib import Path

import pytest
import torch

from modelstate.io import memory

LAYOUT = [(torch.Size([3 << 20]), None, torch.float32)]


def has_small_pages(tensor: torch.Tensor) -> bool:
    """Whether the kernel was told to give this memory no huge pages."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("no /proc: the kernel does not say what it does with memory")
    inside = False
    for line in smaps.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return " nh" in line
    raise AssertionError("the memory is nowhere")


def pages_there(tensor: torch.Tensor) -> int:
    """Of the memory of a tensor, the pages that the kernel has given to it."""
    pagemap, size = Path("/proc/self/pagemap"), mmap.PAGESIZE
    if not pagemap.exists():
        pytest.skip("no /proc: the kernel does not say which pages are there")
    with pagemap.open("rb", buffering=0) as file:
        file.seek(tensor.data_ptr() // size * 8)
        entries = file.read(tensor.nbytes // size * 8)
    return sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", entries))


def test_one_page_is_tried() -> None:
    (fresh,) = memory.fresh_tensors(LAYOUT, memory.HugePagePolicy(2))
    there = pages_there(fresh)
    if not there:
        pytest.skip("a kernel that cannot be asked for a page")
    assert there <= (2 << 20) // mmap.PAGESIZE  # as many as there are in a huge one


def test_the_page_that_is_tried_is_a_huge_one() -> None:
    """The first that begins at a multiple of its size, wherever the memory begins."""
    asked: list[tuple[int, int]] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            asked.append((torch.frombuffer(self, dtype=torch.uint8).data_ptr() + start, length))

    arenas = [Watched(-1, (4 << 20) + extra * mmap.PAGESIZE) for extra in range(1, 5)]
    for arena in arenas:
        memory._seconds_to_fault(arena)
    assert [(address % (2 << 20), length) for address, length in asked] == [(0, mmap.PAGESIZE)] * 4


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_page_is_noticed_before_the_rest_is_used(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_seconds_to_fault", lambda arena: 0.01 if slow else 0.0001)
    watch = memory.HugePagePolicy(2)
    first, second = (memory.fresh_tensors(LAYOUT, watch)[0] for _ in range(2))
    assert [has_small_pages(first), has_small_pages(second)] == [slow, slow]


def test_where_later_pages_are_slow_the_memory_before_them_gets_small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0001, 0.01])
    monkeypatch.setattr(memory, "_seconds_to_fault", lambda arena: next(seconds))
    watch = memory.HugePagePolicy(2)
    first, second, third = (memory.fresh_tensors(LAYOUT, watch)[0] for _ in range(3))
    assert [has_small_pages(one) for one in (first, second, third)] == [True, True, True]


@pytest.mark.parametrize(("seconds", "small"), [(1.0, True), (1e-6, False)])
def test_a_slow_read_is_noticed_on_the_way(seconds: float, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_seconds_to_fault", lambda arena: 0.0)
    now = 0.0
    monkeypatch.setattr(memory.time, "perf_counter", lambda: now)
    watch = memory.HugePagePolicy(2)
    (fresh,) = memory.fresh_tensors(LAYOUT, watch)
    watch.on_read(1)
    now += seconds
    watch.on_read(memory._SAMPLE_BYTES)
    assert has_small_pages(fresh) == small
