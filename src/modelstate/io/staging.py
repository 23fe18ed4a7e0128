"""Copies the tensors of a state to CPU memory at once, with several threads, so that training may go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from modelstate.io.engine import for_each, read_threads
from modelstate.io.memory import empty_cpu
from modelstate.io.pinned import pinned_memory
from modelstate.spec import contiguous_stride

_ALIGN = 64
_BLOCK_BYTES = 4 << 20


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
        copies = self._allocate(tensors)
        _copy_all(tensors, copies)
        return copies

    def _allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        buffer = self._buffer
        if buffer is None or buffer.numel() < end or (device is not None and not buffer.is_pinned()):
            self._buffer = buffer = None  # released before the new one is allocated
            buffer = empty_cpu((max(end, 1),), torch.uint8) if device is None else pinned_memory(end, device)
            self._buffer = buffer
        storage = buffer.untyped_storage()
        with torch.inference_mode(False):
            return [
                torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                    storage, start // tensor.itemsize, tuple(tensor.shape), contiguous_stride(tensor.shape)
                )
                for tensor, start in zip(tensors, starts, strict=True)
            ]


def _copy_all(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copies tensors with several threads. Each thread takes pieces of at most a few megabytes."""
    jobs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    total = 0
    devices: set[torch.device] = set()
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor.device.type == "cuda":
            devices.add(tensor.device)
        for pair in _pieces(tensor, copy):
            if total >= _BLOCK_BYTES:
                jobs.append([])
                total = 0
            jobs[-1].append(pair)
            total += pair[1].nbytes

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy_job(job: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for source, target in job:
            target.copy_(source, non_blocking=source.device.type == "cuda")

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    wait()  # for what has been queued on all streams: the copies are on one of them
    try:
        for_each(jobs, [copy_job] * min(read_threads(), len(jobs)), with_torch=True)
    finally:
        wait()  # after an error too: the copies use memory that may be released then


def _pieces(tensor: torch.Tensor, copy: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    nbytes = tensor.nbytes
    if nbytes <= _BLOCK_BYTES or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return [(tensor.detach(), copy)]
    step = _BLOCK_BYTES // tensor.itemsize
    with torch.inference_mode(False):
        source, target = tensor.detach().view(-1), copy.view(-1)
    return [(source[at : at + step], target[at : at + step]) for at in range(0, tensor.numel(), step)]
