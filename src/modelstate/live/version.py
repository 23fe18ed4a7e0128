"""Versions, and the gate through which requests get at the current one."""

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelstate.errors import QuarantinedError, SwapBusyError, SwapTimeoutError, VersionGoneError
from modelstate.live.buffers import Marks
from modelstate.live.program import Program


class Version:
    """Weights that serve, have served, or will: an id, where they come from, and the program that has them."""

    __slots__ = ("__weakref__", "_pins", "_threads", "id", "marks", "program", "retired", "source", "time")

    def __init__(self, number: int, program: Program, source: str, marks: Marks) -> None:
        self.id = number
        self.program: Program | None = program
        """None when it is retired and the last request has ended: then its weights are gone."""
        self.source = source
        self.marks = marks
        """What its buffers were before its first request; what was carried over counts as changed."""
        self.time = time.time()
        """Seconds since 1970, when it was made."""
        self._pins = 0
        self._threads: dict[int, int] = {}
        """How many blocks of `pinned` each thread has entered and nobody has left."""
        self.retired = False

    def end(self) -> None:
        """Lets go of the program."""
        if self.program is not None:
            self.program.end()
            self.program = None

    def __repr__(self) -> str:
        return f"<Version {self.id} of {self.source!r}>"


class Pin:
    """One version over several calls: what `Live.pin()` gives. It ends with its block."""

    __slots__ = ("_program", "id")

    def __init__(self, version: Version) -> None:
        self.id = version.id
        """The version's."""
        self._program = version.program

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Serves with the pinned version. Raises `VersionGoneError` behind the block."""
        if self._program is None:
            raise VersionGoneError(
                "the pin of this version has ended",
                where=f"version {self.id}",
                remedy="call within the block of live.pin()",
            )
        return self._program(*args, **named)

    def end(self) -> None:
        """Lets go of the version."""
        self._program = None


class Gate:
    """Hands out the current version, and knows who has which.

    One lock for a counter: a request holds it for the time of an addition, before and after its call. Whoever changes
    weights in place closes the gate: then those that come wait, and those that are in are waited for.
    """

    def __init__(self, first: Version) -> None:
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._current = first
        self._known: weakref.WeakSet[Version] = weakref.WeakSet([first])
        """All that are there; those that requests have are among them."""
        self._closed = False
        self._closer: int | None = None
        """The thread that has closed it."""
        self._quarantine = ""

    @property
    def current(self) -> Version:
        return self._current

    @property
    def programs(self) -> int:
        """How many there are: those that are kept, and those of retired versions that requests have."""
        with self._lock:
            return len({id(version.program) for version in self._known if version.program is not None})

    def enter(self) -> Version:
        """The current version, which stays until `leave`. Raises `QuarantinedError` and `SwapBusyError`."""
        with self._lock:
            if self._closed or self._quarantine:
                self._wait_open()
            version = self._current
            version._pins += 1
            return version

    def leave(self, version: Version) -> None:
        """Ends what `enter` began. The last one out of a retired version frees it."""
        with self._lock:
            version._pins -= 1
            if not version._pins:
                if version.retired:
                    version.end()
                self._moved.notify_all()

    @contextmanager
    def pinned(self) -> Iterator[Pin]:
        """A version for several calls. The block may be left by another thread than the one that has entered it."""
        version, thread = self.enter(), threading.get_ident()
        try:
            with self._lock:
                version._threads[thread] = version._threads.get(thread, 0) + 1
            pin = Pin(version)
            try:
                yield pin
            finally:
                pin.end()
        finally:
            with self._lock:
                left = version._threads.pop(thread, 1) - 1
                if left:
                    version._threads[thread] = left
            self.leave(version)

    def holds(self, version: Version) -> bool:
        """Whether this thread has pinned the version, so that it must not wait for the version's requests."""
        return threading.get_ident() in version._threads

    def wait_until_left(self, program: Program, until: float | None) -> None:
        """Waits until no request has a program any more. Raises `SwapTimeoutError`.

        What this very thread has pinned would be waited for in vain.
        """
        with self._lock:
            for version in [one for one in self._known if one.program is program]:
                in_vain = self.holds(version)
                if not self._wait_free(version, time.monotonic() if in_vain else until):
                    raise SwapTimeoutError(
                        "requests of an earlier version did not end in time, and the new one needs what calls it",
                        where=f"version {version.id}",
                        found=f"{version._pins} under way" + (", one of them in this thread" if in_vain else ""),
                        remedy="give more time with timeout_s=, or hold versions for a shorter time",
                    )

    def flip(self, new: Version) -> Version:
        """Makes a version the current one, and returns the one before."""
        with self._lock:
            before, self._current = self._current, new
            self._known.add(new)
            self._quarantine = ""
            return before

    def wait_until_free(self, version: Version, until: float | None) -> bool:
        """Waits until no request has the version. Returns whether that is so."""
        with self._lock:
            return self._wait_free(version, until)

    def retire(self, version: Version) -> None:
        """Lets go of a version's weights, now or when its last request ends."""
        with self._lock:
            version.retired = True
            if not version._pins:
                version.end()

    @contextmanager
    def closed(self, until: float | None) -> Iterator[None]:
        """Within the block no request is running. Raises `SwapTimeoutError`, and then the gate is open."""
        try:
            with self._lock:
                self._closed, self._closer = True, threading.get_ident()
                if not self._wait_free(self._current, until):
                    raise SwapTimeoutError(
                        "requests did not end in time; nothing has been changed",
                        where=f"version {self._current.id}",
                        found=f"{self._current._pins} under way",
                        remedy="give more time with timeout_s=, or swap with mode='available', which waits for nobody",
                    )
            yield
        finally:
            self._closed, self._closer = False, None
            with self._lock:
                self._moved.notify_all()

    def quarantine(self, why: str) -> None:
        """From now on every request is refused, until a version is made the current one."""
        with self._lock:
            self._quarantine = why

    @property
    def is_quarantined(self) -> bool:
        """Whether every request is refused."""
        return bool(self._quarantine)

    def _wait_free(self, version: Version, until: float | None) -> bool:
        while version._pins:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._moved.wait(left)
        return True

    def _wait_open(self) -> None:
        # Whoever has pinned the current version is waited for, and must not wait in turn. A pin of an older one does
        # not count: nobody waits for it, and the current weights may be half overwritten.
        while self._closed and not self.holds(self._current):
            if self._closer == threading.get_ident():
                raise SwapBusyError(
                    "the program was called from within a swap in place, for which all requests wait",
                    remedy="have a canary call the version that it is given, or swap with mode='available'",
                )
            self._moved.wait()
        if self._quarantine:
            raise QuarantinedError(
                "no version can serve: a swap in place failed, and what it had changed could not be undone",
                found=self._quarantine,
                remedy="swap in weights that are known to be good",
            )
