"""`WriteAccess`: the right to change a store, which one process has at a time, and one thread of it."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from modelstate.errors import LockedError, ModelStateError, StoreMovedError
from modelstate.io.atomic import write_error
from modelstate.io.lock import check_directory
from modelstate.store.directory import StepIndex


class WriteAccess:
    """The right to change a store, of one process at a time, and of one thread of it.

    Args:
        index: the checkpoints of the store.
    """

    def __init__(self, index: StepIndex) -> None:
        self._index, self.lock = index, index.backend.lock
        self._in_use: os.stat_result | None = None
        """The directory of the last restore or save, which no other directory may replace."""
        self._pid, self._thread_lock = os.getpid(), threading.RLock()
        self._is_writing = False
        """Whether the thread that has the lock is writing: a signal handler runs in the same thread."""

    @contextmanager
    def exclusive(self, wait: bool = True) -> Iterator[bool]:
        """Keeps other threads from saving and pruning. Yields False where `wait` is false and another thread does."""
        if self._pid != os.getpid():  # a forked child lacks the thread that may hold the lock
            self._pid, self._thread_lock, self._is_writing = os.getpid(), threading.RLock(), False
        if not self._thread_lock.acquire(blocking=wait):
            yield False
            return
        try:
            if self._is_writing:
                raise LockedError(
                    "a save in this thread has been interrupted by another one, as by a signal's handler",
                    where=self._index.directory,
                    remedy="have the handler set a flag, and the loop save: see modelstate.Deadline",
                )
            self._is_writing = True
            try:
                yield True
            finally:
                self._is_writing = False
        finally:
            self._thread_lock.release()

    def acquire(self) -> str:
        """Creates the directory and locks it for this process, unless that is done. Returns the name of the store."""
        index = self._index
        with self.errors():
            if self.lock.held:
                try:
                    self.lock.confirm()
                    return index.ensure_name()
                except LockedError:
                    # The lock file was replaced. The lock is acquired again, unless another process has it.
                    self.lock.release()
            if self._in_use is not None:
                check_directory(index.directory, self._in_use)
            index.backend.make()
            try:
                self.lock.acquire()
            except LockedError as error:
                dist = sys.modules.get("torch.distributed")
                if dist is not None and dist.is_available() and dist.is_initialized():
                    error.remedy = (
                        "if the other writer is a rank of this run: Store(process_group=) for a save on all ranks, and "
                        f"prune(), pin() and unpin() on the first rank only; {error.remedy}"
                    )
                raise
            try:
                # Before anything is removed: a store of a newer version is refused here.
                store = index.ensure_name()
                self._in_use = index.backend.in_use()
                index.backend.clear(index.read_all)
                return store
            except BaseException:
                self.lock.release()
                raise

    def note_in_use(self) -> None:
        """Has a later `acquire` refuse a directory that has replaced the present one."""
        with suppress(OSError):
            self._in_use = self._index.backend.in_use()

    @contextmanager
    def errors(self, *name: str) -> Iterator[None]:
        """Raises `WriteFailedError` in place of an I/O error, or `StoreMovedError` where the directory was moved.

        `name` is the file or the directory, in that of the store, that is written; without it, the store is.
        """
        try:
            yield
        except OSError as error:
            try:
                self.lock.check_directory()
            except StoreMovedError as moved:
                raise moved from error
            if isinstance(error, ModelStateError):
                raise
            raise write_error(os.path.join(self._index.directory, *name), error) from error

    def release(self) -> None:
        """Unlocks the store for other processes."""
        self.lock.release()
        self._in_use = None
