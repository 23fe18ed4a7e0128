"""Saves in the background: the copy of the state, and the handle of the save."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from modelstate.background import AtExit, BackgroundTask
from modelstate.formats.safetensors import nbytes_of
from modelstate.formats.serialize import SerializedState
from modelstate.io.engine import read_threads
from modelstate.io.memory import empty_cpu
from modelstate.process import parallel_for
from modelstate.spec import contiguous_stride
from modelstate.text_format import size


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint that is complete and durable: the result of `Store.save`.

    Example:
        >>> saved = store.save(1000, {"model": model})
        >>> saved.step, saved.pruned
        (1000, ())
    """

    step: int
    path: str
    """The directory of the checkpoint."""
    bytes_written: int
    bytes_linked: int
    """Bytes of files that are links to those of the checkpoint before; they take no more space."""
    staging_bytes: int
    """Memory that the state was copied to, which the store keeps for the next save; 0 for a save that blocked."""
    blocked_seconds: float
    """From the call of `Store.save` to its return."""
    seconds: float
    """From the call of `Store.save` until the checkpoint was durable, without the pruning after it."""
    pruned: tuple[int, ...]
    """Steps that were removed afterwards."""

    def __str__(self) -> str:
        linked = f", {size(self.bytes_linked)} linked" if self.bytes_linked else ""
        return f"step {self.step}: {size(self.bytes_written)} written{linked} in {self.seconds:.3f} s, {self.path}"


class PendingSave(BackgroundTask[SavedStep]):
    """A save that runs in a thread: the result of `Store.save(background=True)`.

    Attributes:
        step: the number of the checkpoint.
        staging_bytes: the memory that the state was copied to.

    Example:
        >>> pending = store.save(1000, {"model": model}, background=True)
        >>> pending.result().step
        1000
    """

    def __init__(self, step: int, staging_bytes: int, write: Callable[[Callable[[], None]], SavedStep]) -> None:
        """Takes a function that writes; its argument raises where the save was cancelled."""
        super().__init__(
            lambda task: write(task.check),
            kind="save",
            where=f"step {step}",
            at_exit=AtExit.FINISH,
            failure=f"step {step} was not saved",
        )
        self.step, self.staging_bytes = step, staging_bytes


_ALIGN = 64
_BLOCK_BYTES = 4 << 20


class Staging:
    """A buffer of CPU memory for the copy of a state: it grows to the largest one, and is pinned for CUDA."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The size of the buffer now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def copy(self, states: Iterable[SerializedState]) -> None:
        """Copies the tensors of the states, and replaces them by the copies. The copies before are overwritten.

        Raises torch's error where there is not enough memory; then no tensor is replaced.
        """
        states = list(states)
        tensors = [tensor for state in states for tensor in state.live.values()]
        copies = self._allocate(tensors)
        _copy_all(tensors, copies)
        remaining = iter(copies)
        for state in states:
            state.tensors = {name: next(remaining) for name in state.tensors}

    def _allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-nbytes_of(tensor) // _ALIGN) * _ALIGN
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        buffer = self._buffer
        if buffer is None or buffer.numel() < end or (pinned and not buffer.is_pinned()):
            self._buffer = buffer = None  # released before the new one is allocated
            if pinned:
                buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True)
            else:
                buffer = empty_cpu((max(end, 1),), torch.uint8)
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
    """Copies with several threads, each of which takes pieces of at most a few megabytes."""
    jobs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    total = 0
    devices: set[torch.device] = set()
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

    parallel_for(work, min(read_threads(), len(jobs)), with_torch=True)
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
