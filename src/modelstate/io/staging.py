"""Copies the tensors of a state to CPU memory at once, with several threads; and allocates pinned memory.

Training may go on after the copy. A CUDA device copies from and to pinned memory by itself, at full speed.
`torch.empty(pin_memory=True)` lets the driver allocate small pages and pin each of them, and rounds the size up to a
power of two. Here huge pages are allocated by several threads, and then registered with the driver, which has a
512th of the pages to pin. `python -m bench --only gpu` measures what both take.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import accumulate

import torch

from modelstate.io import system
from modelstate.io.engine import for_each, read_threads
from modelstate.io.memory import Buffer, aligned, empty_cpu
from modelstate.process import deferred_signals
from modelstate.torch_compat.private import copy_each

_BLOCK_BYTES = 4 << 20
_PAIRS_AT_ONCE = 16


class StagingBuffer:
    """A buffer of CPU memory for copies of tensors: it grows to the largest state, and is pinned for CUDA."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The size of the buffer now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def copies(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns contiguous copies of plain tensors. The copies before are overwritten.

        Raises torch's error where there is not enough memory.
        """
        tensors = list(tensors)
        *starts, end = accumulate((aligned(tensor.nbytes) for tensor in tensors), initial=0)
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        buffer = self._buffer
        if buffer is None or buffer.numel() < end or (device is not None and not buffer.is_pinned()):
            self._buffer = buffer = None  # released before the new one is allocated
            buffer = empty_cpu((max(end, 1),), torch.uint8) if device is None else pinned_memory(end, device)
            self._buffer = buffer
        with torch.inference_mode(False), torch.no_grad():
            copies = [
                buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for tensor, start in zip(tensors, starts, strict=True)
            ]
            pairs = [pair for each in zip(tensors, copies, strict=True) for pair in _pieces(*each)]
        _copy(pairs, {tensor.device for tensor in tensors if tensor.device.type == "cuda"})
        return copies


_Pair = tuple[torch.Tensor, torch.Tensor]


def _copy(pairs: list[_Pair], devices: Iterable[torch.device]) -> None:
    """Copies tensors with several threads. Each thread takes pieces of at most a few megabytes."""
    jobs = [pairs[at : at + _PAIRS_AT_ONCE] for at in range(0, len(pairs), _PAIRS_AT_ONCE)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy_job(job: list[_Pair]) -> None:
        sources, targets = zip(*job, strict=True)
        copy_each(targets, sources, non_blocking=True)

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    wait()  # for what has been queued on all streams: the copies are on one of them
    try:
        for_each(jobs, [copy_job] * min(read_threads(), len(jobs)), with_torch=True)
    finally:
        wait()  # after an error too: the copies use memory that may be released then


def _pieces(tensor: torch.Tensor, copy: torch.Tensor) -> list[_Pair]:
    if tensor.nbytes <= _BLOCK_BYTES or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return [(tensor.detach(), copy)]
    step = _BLOCK_BYTES // tensor.itemsize
    return [*zip(torch.split(tensor.detach().view(-1), step), torch.split(copy.view(-1), step), strict=True)]


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
    if nbytes and (buffer := _registered(nbytes, device)) is not None:
        return torch.frombuffer(buffer.view, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Pinned(Buffer):
    """Memory that is registered with the driver until nothing refers to it any more, or the process ends."""

    unregister: Callable[[], object] | None = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.unregister is not None and not is_finalizing():
            self.unregister()


def _registered(nbytes: int, device: torch.device) -> _Pinned | None:
    try:
        # The device goes on with the pages that it has pinned: a write after a fork must not copy them to others.
        buffer = _Pinned(nbytes, system.Advice.HUGEPAGE, system.Advice.WIPEONFORK)
    except OSError:
        return None
    first = buffer.address

    def populate(at: int) -> None:
        system.madvise(first + at, min(_PIECE_BYTES, nbytes - at), system.Advice.POPULATE_WRITE)

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
        buffer.unregister = unregister
    return buffer
