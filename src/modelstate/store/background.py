"""Saves in the background: the copy of the state, the handle of the save, and the wait at the end of the process."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.util import Finalize

import torch

from modelstate.errors import ReadFailedError, SaveTimeoutError, SourceAccessError, StoreAccessError, WriteFailedError
from modelstate.formats.safetensors import nbytes_of
from modelstate.formats.serialize import SerializedState
from modelstate.io.engine import read_threads
from modelstate.io.memory import empty_cpu
from modelstate.process import parallel_for
from modelstate.spec import contiguous_stride
from modelstate.text_format import size

PASSING = (WriteFailedError, ReadFailedError, StoreAccessError, SourceAccessError)
"""The errors that an I/O error becomes, wherever in a save it happens. The next save may succeed."""


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


class PendingSave:
    """A save that runs in a thread: the result of `Store.save(background=True)`.

    Attributes:
        step: the number of the checkpoint.
        staging_bytes: the memory that the state was copied to.

    Example:
        >>> pending = store.save(1000, {"model": model}, background=True)
        >>> pending.result().step
        1000
    """

    def __init__(self, step: int, staging_bytes: int, write: Callable[[], SavedStep]) -> None:
        self.step = step
        self.staging_bytes = staging_bytes
        self._pid = os.getpid()
        self._saved: SavedStep | None = None
        self._error: BaseException | None = None
        self._write: Callable[[], SavedStep] | None = write
        self._finished = threading.Event()
        self._is_started = False
        self._claim_lock, self._is_claimed = threading.Lock(), False

    def start(self) -> None:
        """Starts the thread. Where it is interrupted, the thread does all of the save, or nothing is written."""
        thread = threading.Thread(target=self._run, name=f"modelstate-save-{self.step}")
        try:
            self._is_started = True
            _unreported.add(self)
            if not threading.main_thread().is_alive():
                self._run()  # the program is ending, and would not wait for a thread
                return
            _watch_exit()
            # Not a daemon thread, so that the process waits for it before it ends.
            thread.start()
        except BaseException:
            if self._claim():
                self._write = None
                _unreported.discard(self)
                self._finished.set()
            raise

    def _claim(self) -> bool:
        """Returns true to the first caller only: the thread, which then writes, or `start`, which then cancels it."""
        with self._claim_lock:
            was_claimed, self._is_claimed = self._is_claimed, True
            return not was_claimed

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error; true in a forked child, which has no such thread."""
        return self._pid != os.getpid() or not self._is_started or self._finished.is_set()

    @property
    def is_reported(self) -> bool:
        """Whether the save succeeded, or its error was raised."""
        return self not in _unreported

    @property
    def error(self) -> BaseException | None:
        """The error of the save; None where there is none so far."""
        return self._error

    def result(self, timeout_seconds: float | None = None) -> SavedStep:
        """Waits until the checkpoint is durable, and returns it.

        Args:
            timeout_seconds: the most seconds to wait; None waits until the end.

        Raises:
            SaveTimeoutError: The checkpoint is not durable in time, or this process is a fork and does not write it.

        The error of the save is raised too.

        Example:
            >>> pending.result(timeout_seconds=60).path
            'checkpoints/step-000001000'
        """
        if self._pid == os.getpid() and self._is_started:
            self._finished.wait(timeout_seconds)
        if not self.done:
            raise SaveTimeoutError(
                "the checkpoint is still being written",
                where=f"step {self.step}",
                expected=f"within {timeout_seconds} s",
                remedy="wait longer; it goes on",
            )
        if self._error is not None:
            _unreported.discard(self)
            raise self._error
        if self._saved is None:
            raise SaveTimeoutError("this process does not write this checkpoint", where=f"step {self.step}")
        return self._saved

    def _run(self) -> None:
        if not self._claim():
            return
        assert self._write is not None
        try:
            self._saved = self._write()
            _unreported.discard(self)
        except BaseException as error:
            self._error = error
            if _reported_at_exit == os.getpid():
                self._report_if_lost()  # the report of all lost saves was printed before
        finally:
            self._write = None  # releases the state and the store
            self._finished.set()

    def _report_if_lost(self) -> None:
        if self._pid == os.getpid():
            reason = self._error or "the program ended before it was written"
            print(f"modelstate: step {self.step} was not saved: {reason}", file=sys.stderr, flush=True)


_unreported: set[PendingSave] = set()
"""Saves that are being written, and saves that failed and whose error was not raised yet."""
_watching_exit = False
_child_with_finalizer = 0
"""The id of this process, where it is one of multiprocessing and has the finalizer."""
_reported_at_exit = 0
"""The id of this process, where it is one of multiprocessing and has reported the lost saves."""


def _watch_exit() -> None:
    """Makes the end of the program wait for saves that are being written, and report those that failed.

    The wait comes before Python's own wait for threads: after that no thread pool accepts work, and a save that is
    still running would fail.
    """
    global _watching_exit, _child_with_finalizer
    if not _watching_exit:
        _watching_exit = True
        atexit.register(_report_lost)
        threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
    if parent_process() is not None and _child_with_finalizer != os.getpid():
        # A forked process of multiprocessing ends by os._exit, which does not run atexit.
        _child_with_finalizer = os.getpid()
        Finalize(None, _finish_child, exitpriority=-1000)


def _finish_child() -> None:
    global _reported_at_exit
    _wait_for_all()
    _reported_at_exit = os.getpid()
    _report_lost()


def _wait_for_all() -> None:
    for pending in list(_unreported):
        if pending._pid == os.getpid():
            pending._finished.wait()


def _report_lost() -> None:
    for pending in list(_unreported):
        pending._report_if_lost()
        _unreported.discard(pending)


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
