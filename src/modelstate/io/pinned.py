"""Allocates pinned memory: a CUDA device copies from and to it by itself, at the full speed of the bus.

`torch.empty(pin_memory=True)` lets the driver allocate small pages and pin each of them, and rounds the size up to a
power of two. Here huge pages are allocated by several threads, and then registered with the driver, which has a
512th of the pages to pin. `python -m bench --only gpu` measures what both take.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from modelstate.io import linux
from modelstate.io.engine import for_each, read_threads
from modelstate.io.memory import HUGE_PAGE_BYTES
from modelstate.process import deferred_signals

if TYPE_CHECKING:
    import torch

_PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory is pinned for all devices of the process."""
_PIECE_BYTES = 8 << 20


def pinned_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns a byte tensor in pinned memory of exactly this size, which is not initialised.

    The memory is released when no tensor uses it any more: until then, the caller has to wait for the copies that it
    has queued. A process that is forked has zeros there, and nothing is pinned in it.

    Raises `RuntimeError` where the system, or a limit on pinned memory, does not allow for it.
    """
    import torch

    mapping = _registered(nbytes + HUGE_PAGE_BYTES, device) if nbytes else None
    if mapping is None:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=_offset(mapping))


class _Mapping(mmap.mmap):
    """Memory that is registered with the driver until nothing refers to it any more, or the process ends."""

    unregister: Callable[[], object] | None = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.unregister is not None and not is_finalizing():
            self.unregister()


def _offset(mapping: mmap.mmap) -> int:
    """Where the first huge page begins."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES


def _registered(size: int, device: torch.device) -> _Mapping | None:
    import torch

    try:
        mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    offset = _offset(mapping)
    first, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + offset, size - HUGE_PAGE_BYTES
    # The device goes on with the pages that it has pinned: a write after a fork must not copy them to others.
    for advice in (linux.Advice.HUGEPAGE, linux.Advice.WIPEONFORK):
        linux.madvise(first, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, advice)

    def populate(at: int) -> None:
        linux.madvise(first + at, min(_PIECE_BYTES, nbytes - at), linux.Advice.POPULATE_WRITE)

    pieces = range(0, nbytes, _PIECE_BYTES)
    for_each(pieces, [populate] * min(read_threads(), len(pieces)))
    cuda, process = torch.cuda.cudart(), os.getpid()  # type: ignore[no-untyped-call]
    on_device = partial(torch.cuda.device, device)  # a call on another device would take memory of it

    def unregister() -> None:
        if os.getpid() == process:
            with on_device():
                cuda.cudaHostUnregister(first)

    with deferred_signals(), on_device():  # an interrupt in between would leave memory registered that is gone
        if int(cuda.cudaHostRegister(first, nbytes, _PORTABLE)):
            with suppress(RuntimeError):  # the next call of torch would raise the error
                torch.zeros(1, device=device)
            return None
        mapping.unregister = unregister
    return mapping
