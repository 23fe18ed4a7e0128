"""Saves in the background: the copy of the state that is written, the handle, the end of the process."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

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
"""What an I/O error comes through as, wherever in a save it was: it may be over when the next one begins."""


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint that is complete and durable. Made by `Store.save`."""

    step: int
    path: str
    """Its directory."""
    bytes_written: int
    bytes_linked: int
    """Of files that the checkpoint before has already; they take no more room."""
    staging_bytes: int
    """Memory that the state was copied to, which the store keeps for the next save; 0 where it blocked."""
    blocked_seconds: float
    """From the call to its return."""
    seconds: float
    """From the call until it was durable, old ones that nobody keeps not yet taken away."""
    pruned: tuple[int, ...]
    """Steps that were taken away afterwards."""

    def __str__(self) -> str:
        linked = f", {size(self.bytes_linked)} linked" if self.bytes_linked else ""
        return f"step {self.step}: {size(self.bytes_written)} written{linked} in {self.seconds:.3f} s, {self.path}"


class PendingSave:
    """A checkpoint that is being written by a thread. Made by `Store.save(block=False)`."""

    def __init__(self, step: int, staging_bytes: int, write: Callable[[], SavedStep]) -> None:
        self.step = step
        self.staging_bytes = staging_bytes
        """Memory that the state was copied to."""
        self._pid = os.getpid()
        self._saved: SavedStep | None = None
        self._error: BaseException | None = None
        self._write: Callable[[], SavedStep] | None = write
        self._over = threading.Event()
        self._begun = False
        self._claim, self._claimed = threading.Lock(), False

    def start(self) -> None:
        """Begins to write. Whatever interrupts it, either the thread does all of it, or nothing is done."""
        thread = threading.Thread(target=self._run, name=f"modelstate-save-{self.step}")
        try:
            self._begun = True
            _unheard.add(self)
            if not threading.main_thread().is_alive():
                self._run()  # the program is ending: nobody would wait for a thread
                return
            _watch_exit()
            # Not a daemon: the process waits for it before it ends.
            thread.start()
        except BaseException:
            if self._is_mine():
                self._write = None
                _unheard.discard(self)
                self._over.set()
            raise

    def _is_mine(self) -> bool:
        """Whether nobody else has taken it on himself to write, or to see to it that nobody does."""
        with self._claim:
            was, self._claimed = self._claimed, True
            return not was

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. In a forked child, which has not got the thread, it has."""
        return self._pid != os.getpid() or not self._begun or self._over.is_set()

    @property
    def is_reported(self) -> bool:
        """Whether somebody has got the error, if there is one."""
        return self not in _unheard

    @property
    def error(self) -> BaseException | None:
        """What went wrong; None as long as nothing has."""
        return self._error

    def result(self, timeout_s: float | None = None) -> SavedStep:
        """Waits until the checkpoint is durable. Raises what the write raised, and `SaveTimeoutError`."""
        if self._pid == os.getpid() and self._begun:
            self._over.wait(timeout_s)
        if not self.done:
            raise SaveTimeoutError(
                "the checkpoint is still being written",
                where=f"step {self.step}",
                expected=f"within {timeout_s} s",
                remedy="wait longer; it goes on",
            )
        if self._error is not None:
            _unheard.discard(self)
            raise self._error
        if self._saved is None:
            raise SaveTimeoutError("nobody here writes this checkpoint", where=f"step {self.step}")
        return self._saved

    def _run(self) -> None:
        if not self._is_mine():
            return
        assert self._write is not None
        try:
            self._saved = self._write()
            _unheard.discard(self)
        except BaseException as error:
            self._error = error
            if _said_at_exit == os.getpid():
                self._say_if_lost()  # nobody else will
        finally:
            self._write = None  # and with it the state, and the store
            self._over.set()

    def _say_if_lost(self) -> None:
        if self._pid == os.getpid():
            why = self._error or "the program ended before it was written"
            print(f"modelstate: step {self.step} was not saved: {why}", file=sys.stderr, flush=True)


_unheard: set[PendingSave] = set()
"""Those that are being written, and those that have failed and nobody knows it: kept until somebody does."""
_watching_exit = False
_watching_exit_of_child = 0
"""The process of multiprocessing that does."""
_said_at_exit = 0
"""The process of multiprocessing that has said what was lost."""


def _watch_exit() -> None:
    """Has the end of the program wait for what is being written, and say what was not.

    The wait comes before Python's own for its threads: after that no thread pool takes work any more, and a save that
    is still going on would fail.
    """
    global _watching_exit, _watching_exit_of_child
    if not _watching_exit:
        _watching_exit = True
        atexit.register(_say_what_was_lost)
        before_threads_are_joined: Any = threading._register_atexit  # type: ignore[attr-defined]
        before_threads_are_joined(_wait_for_all)
    if parent_process() is not None and _watching_exit_of_child != os.getpid():
        # Where they are forked, such processes end by os._exit, before which atexit is not asked.
        _watching_exit_of_child = os.getpid()
        Finalize(None, _end_child, exitpriority=-1000)


def _end_child() -> None:
    global _said_at_exit
    _wait_for_all()
    _said_at_exit = os.getpid()
    _say_what_was_lost()


def _wait_for_all() -> None:
    for pending in list(_unheard):
        if pending._pid == os.getpid():
            pending._over.wait()


def _say_what_was_lost() -> None:
    for pending in list(_unheard):
        pending._say_if_lost()
        _unheard.discard(pending)  # once is enough


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

    def copy(self, drafts: Iterable[SerializedState]) -> None:
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
    return empty_cpu((max(nbytes, 1),), torch.uint8)


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
