"""Memory that a state is copied to, so that training may go on while it is written; used again by every save."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from modelstate.read.fresh import fresh
from modelstate.read.ranges import read_threads
from modelstate.read.workers import work_together
from modelstate.spec import contiguous_stride
from modelstate.write.draft import Draft
from modelstate.write.safetensors import nbytes_of

_ALIGN = 64
_BLOCK_BYTES = 4 << 20


class Staging:
    """One buffer of CPU memory, as large as the largest state so far; pinned where a device copies to it."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def copy(self, drafts: Iterable[Draft]) -> None:
        """Copies the tensors of the drafts, and puts the copies in their places.

        What was copied before is gone. Raises what torch raises where memory is lacking; then nothing is replaced.
        """
        made = list(drafts)
        tensors = [tensor for one in made for tensor in one.live.values()]
        copies = self._room_for(tensors)
        _copy_all(tensors, copies)
        remaining = iter(copies)
        for one in made:
            one.tensors = {name: next(remaining) for name in one.tensors}

    def _room_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-nbytes_of(tensor) // _ALIGN) * _ALIGN
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        there = self._buffer
        if there is None or there.numel() < end or (pinned and not there.is_pinned()):
            self._buffer = None  # before the next one is made
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True) if pinned else _memory(end)
        assert self._buffer is not None
        storage = self._buffer.untyped_storage()
        with torch.inference_mode(False):
            return [
                torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                    storage, start // tensor.itemsize, tuple(tensor.shape), contiguous_stride(tensor.shape)
                )
                for tensor, start in zip(tensors, starts, strict=True)
            ]


def _memory(nbytes: int) -> torch.Tensor:
    return fresh((max(nbytes, 1),), torch.uint8)


def _copy_all(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Several threads, of which each takes a piece of at most a few megabytes at a time."""
    jobs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    total = 0
    devices: set[Any] = set()
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor.device.type != "cpu":
            devices.add(tensor.device)
        for pair in _pieces(tensor, copy):
            if total >= _BLOCK_BYTES:
                jobs.append([])
                total = 0
            jobs[-1].append(pair)
            total += nbytes_of(pair[1])
    waiting, lock = iter(jobs), threading.Lock()

    def work(stop: threading.Event) -> None:
        with torch.inference_mode(False), torch.no_grad():
            while not stop.is_set():
                with lock:
                    job = next(waiting, None)
                if job is None:
                    return
                for source, target in job:
                    target.copy_(source, non_blocking=source.device.type == "cuda")

    work_together(work, min(read_threads(), len(jobs)), with_torch=True)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _pieces(tensor: torch.Tensor, copy: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    nbytes = nbytes_of(tensor)
    if nbytes <= _BLOCK_BYTES or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return [(tensor.detach(), copy)]
    step = _BLOCK_BYTES // tensor.itemsize
    with torch.inference_mode(False):
        source, target = tensor.detach().view(-1), copy.view(-1)
    return [(source[at : at + step], target[at : at + step]) for at in range(0, tensor.numel(), step)]
