"""The gate through which requests get at the current version, and by which a swap in place has them wait."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from modelstate.errors import QuarantinedError, SwapBusyError, SwapTimeoutError
from modelstate.live.program import Program
from modelstate.live.turn import Turn
from modelstate.live.version import Entry, Pinned, Version
from modelstate.live.watched import LOOK_SECONDS, Bag, Watched, wait_all

_SLOW = "give more time with timeout_s=, or"


class _Shut(Entry):
    """Has requests wait for a swap in place, or refuses them."""

    is_open = False
    closing: "Watched[Closed] | None" = None
    """The swap. When it is gone the gate is open again, and whoever comes by sees to that."""
    undo: Callable[[], None] | None = None
    """Makes the weights whole, while they are being written over."""
    quarantine: str = ""
    """Why every request is refused, where that is so without the swap."""


class Closed:
    """A closed gate, as a context: within the block no request is running."""

    __slots__ = ("__weakref__", "_gate", "_timed", "_until", "_watched", "thread")

    def __init__(self, gate: "Gate", until: float | None, timed: AbstractContextManager[None]) -> None:
        self.thread = threading.get_ident()
        self._gate, self._until, self._timed = gate, until, timed
        self._watched = Watched(self)

    def __enter__(self) -> None:
        try:
            with self._timed:
                self._gate._close(self._watched, self._until)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._watched.forget()
        self._gate.mend()


class _Here(threading.local):
    """What this thread has pinned."""

    def __init__(self) -> None:
        self.pins: Bag[Pinned] = Bag()


class Gate:
    """Hands out the current version, and knows whether a version is in use.

    All that it knows is one attribute, `entry`: what a request calls. It is the program of a version, and whoever has
    it uses that version; nothing is counted, and no lock is taken. Whoever changes weights in place puts something else
    there, by which those that come wait, and waits until nobody has the entry that was there before.
    """

    def __init__(self, first: Version) -> None:
        self.entry = first.entry()
        self._known: Bag[Version] = Bag()
        self._known.add(first)
        self._here = _Here()
        self._mending = Turn()

    @property
    def current(self) -> Version:
        return self.entry.version

    @property
    def programs(self) -> int:
        """How many there are: those that are kept, and those of retired versions that requests have."""
        return len({id(program) for version in self._known for program in version.programs})

    def pinned(self) -> Pinned:
        """A version for several calls."""
        return Pinned(self._opened, self._here.pins.add)

    def holds(self, version: Version) -> bool:
        """Whether this thread has pinned the version, so that it must not wait for the version's requests."""
        return any(one.version is version for one in self._here.pins)

    def wait_until_left(self, program: Program, until: float | None) -> None:
        """Waits until no request has a program any more. Raises `SwapTimeoutError`.

        What this very thread has pinned would be waited for in vain.
        """
        for version in self._known:
            if not any(one is program for one in version.programs):
                continue
            in_vain = self.holds(version)
            if not wait_all(version.users, 0.0 if in_vain else until):
                raise SwapTimeoutError(
                    "requests of an earlier version did not end in time, and the new one needs what calls it",
                    where=f"version {version.id}",
                    found="requests under way" + (", one of them in this thread" if in_vain else ""),
                    remedy=f"{_SLOW} hold versions for a shorter time",
                )

    def flip(self, new: Version) -> Version:
        """Makes a version the current one, and returns the one before. A gate that is closed stays so."""
        before = self.entry
        self._known.add(new)
        if isinstance(before, _Shut) and before.closing is not None:
            self.entry = self._shut(new, before.closing)
        else:
            self.entry = new.entry()
        return before.version

    def closed(self, until: float | None, timed: AbstractContextManager[None]) -> Closed:
        """Within the block no request is running. Raises `SwapTimeoutError`, and then the gate is open.

        When the block ends, what has not been flipped is undone. Raises `QuarantinedError` where that fails.
        """
        return Closed(self, until, timed)

    def undone_by(self, undo: Callable[[], None]) -> None:
        """From here until the flip of a gate that is closed, the weights have to be made whole when it opens."""
        assert isinstance(self.entry, _Shut)
        self.entry.undo = undo

    @property
    def is_quarantined(self) -> bool:
        """Whether every request is refused."""
        return isinstance(self.entry, _Shut) and bool(self.entry.quarantine)

    def mend(self) -> None:
        """Opens a gate whose closing has ended, or is gone. Raises `QuarantinedError`."""
        entry = self.entry
        if not isinstance(entry, _Shut) or entry.closing is None or entry.closing.is_there:
            return
        with self._mending.taken(True, None):
            if self.entry is not entry:
                return
            if entry.undo is not None:
                try:
                    entry.undo()
                except QuarantinedError as error:
                    self.entry = self._shut(entry.version, None, str(error.found))
                    raise
            broken = entry.quarantine
            self.entry = self._shut(entry.version, None, broken) if broken else entry.version.entry()

    def forked(self) -> None:
        """In the child of a fork: what other threads had begun has ended, and they use nothing any more."""
        entry, pins = self.entry, list(self._here.pins)
        for version in self._known:
            version.forked()
        for pinned in pins:
            if pinned.entry is not None:
                pinned.entry = pinned.entry.version.entry(pinned.entry.func)  # type: ignore[arg-type]
        self._mending.forked()
        if not isinstance(entry, _Shut):
            self.entry = entry.version.entry()
        elif entry.closing is not None:
            closing = entry.closing.get()
            if closing is not None and closing.thread != threading.get_ident():
                entry.closing.forget()

    def _close(self, closing: "Watched[Closed]", until: float | None) -> None:
        self.mend()
        before = self.entry
        why = before.quarantine if isinstance(before, _Shut) else ""
        version = before.version
        del before  # this is one who has it
        self.entry = self._shut(version, closing, why)
        if not wait_all(version.users, until):
            raise SwapTimeoutError(
                "requests did not end in time; nothing has been changed",
                where=f"version {version.id}",
                found="requests under way",
                remedy=f"{_SLOW} swap with mode='available', which waits for nobody",
            )

    def _shut(self, version: Version, closing: "Watched[Closed] | None", why: str = "") -> _Shut:
        made = _Shut(self._when_open)
        made.version, made.closing, made.quarantine = version, closing, why
        return made

    def _when_open(self, *args: Any, **named: Any) -> Any:
        return self._opened()(*args, **named)

    def _opened(self) -> Entry:
        """What calls the current version, when there is one. Raises `QuarantinedError` and `SwapBusyError`."""
        while isinstance(entry := self.entry, _Shut):
            if entry.closing is None:
                raise QuarantinedError(
                    "no version can serve: a swap in place failed, and what it had changed could not be undone",
                    found=entry.quarantine,
                    remedy="swap in weights that are known to be good",
                )
            # Whoever has pinned the current version is waited for, and must not wait in turn. A pin of an older one
            # does not count: nobody waits for it, and the current weights may be half overwritten.
            own = [one for pin in self._here.pins if (one := pin.entry) is not None and one.version is entry.version]
            if own:
                return own[0]
            closed = entry.closing.get()
            if closed is None:
                self.mend()
                continue
            if closed.thread == threading.get_ident():
                raise SwapBusyError(
                    "the program was called from within a swap in place, for which all requests wait",
                    remedy="have a canary call the version that it is given, or swap with mode='available'",
                )
            del closed  # this is one who has it
            entry.closing.look(LOOK_SECONDS)
        return entry
