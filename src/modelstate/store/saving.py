"""What a save has written, and one that is still being written."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from modelstate.errors import SaveTimeoutError
from modelstate.words import size


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
        self.is_reported = False
        """Whether somebody has got the error, if there is one."""
        self._write = write
        # Not a daemon: the process waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name=f"modelstate-save-{step}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. In a forked child, which has not got the thread, it has."""
        return self._pid != os.getpid() or not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What went wrong; None as long as nothing has."""
        return self._error

    def result(self, timeout_s: float | None = None) -> SavedStep:
        """Waits until the checkpoint is durable. Raises what the write raised, and `SaveTimeoutError`."""
        if self._pid == os.getpid():
            self._thread.join(timeout_s)
        if not self.done:
            raise SaveTimeoutError(
                "the checkpoint is still being written",
                where=f"step {self.step}",
                expected=f"within {timeout_s} s",
                remedy="wait longer; it goes on",
            )
        if self._error is not None:
            self.is_reported = True
            raise self._error
        if self._saved is None:
            raise SaveTimeoutError("another process writes this checkpoint", where=f"step {self.step}")
        return self._saved

    def _run(self) -> None:
        try:
            self._saved = self._write()
        except BaseException as error:
            self._error = error
        finally:
            del self._write
