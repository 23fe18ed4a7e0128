"""What a save has written, and one that is still being written."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

from modelstate.errors import (
    ReadFailedError,
    SaveTimeoutError,
    SourceAccessError,
    StoreAccessError,
    WriteFailedError,
)
from modelstate.words import size

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
