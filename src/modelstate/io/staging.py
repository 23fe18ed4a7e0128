"""Copies the tensors of a state to CPU memory at once; and allocates pinned memory.

Training may go on after the copy. A CUDA device copies from and to pinned memory by itself, at full speed.
`torch.empty(pin_memory=True)` lets the driver allocate small pages and pin each of them, and rounds the size up to a
power of two. Here huge pages are allocated by several threads, and then registered with the driver, which has a
512th of the pages to pin. `python -m bench --only gpu` measures what both take.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch

from modelstate.io import linux
from modelstate.io.engine import for_each, read_threads
from modelstate.io.memory import aligned, empty_cpu
from modelstate.process import deferred_signals
from modelstate.spec import contiguous_stride
from modelstate.torch_compat.private import copy_each


class StagingBuffer:
    """A buffer of CPU memory for copies of tensors: it grows to the largest state, and is pinned for CUDA."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The size of the buffer now."""
        return 0 if self._buffer is None else self._buffer.numel()

    @torch.inference_mode(False)
    @torch.no_grad()
    def copies(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns contiguous copies of plain tensors. The copies before are overwritten.

        Raises torch's error where there is not enough memory.
        """
        tensors = [tensor.detach() for tensor in tensors]
        copies = self._allocate(tensors)
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}

        def wait() -> None:
            for device in devices:
                torch.cuda.synchronize(device)

        wait()  # for what has been queued on all streams: the copies are on one of them
        try:
            if tensors:
                copy_each(copies, tensors, non_blocking=True)
        finally:
            wait()  # after an error too: the copies use memory that may be released then
        return copies

    def _allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += aligned(tensor.nbytes)
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        buffer = self._buffer
        if buffer is None or buffer.numel() < end or (device is not None and not buffer.is_pinned()):
            self._buffer = buffer = None  # released before the new one is allocated
            buffer = empty_cpu((max(end, 1),), torch.uint8) if device is None else pinned_memory(end, device)
            self._buffer = buffer
        storage = buffer.untyped_storage()
        return [
            torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                storage, start // tensor.itemsize, tuple(tensor.shape), contiguous_stride(tensor.shape)
            )
            for tensor, start in zip(tensors, starts, strict=True)
        ]


# Pinned memory.

_PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory is pinned for all devices of the process."""
_PIECE_BYTES = 8 << 20


def pinned_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns a byte tensor in pinned memory of exactly this size, which is not initialised.

    The memory is released when no tensor uses it any more: until then, the caller has to wait for the copies that it
    has queued. A process that is forked has zeros there, and nothing is pinned in it.

    Raises `RuntimeError` where the system, or a limit on pinned memory, does not allow for it.
    """
    memory = _registered(nbytes, device) if nbytes else None
    if memory is None:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _registered(nbytes: int, device: torch.device) -> ctypes.Array[ctypes.c_char] | None:
    """Returns memory that is registered with the driver until nothing refers to it any more, or the process ends."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    memory = (ctypes.c_char * nbytes).from_buffer(mapping)
    first = ctypes.addressof(memory)
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
        # Called before the memory is unmapped; a weak reference to the map itself is cleared only afterwards.
        weakref.finalize(memory, unregister).atexit = False
    return memory
