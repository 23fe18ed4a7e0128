"""Versions, and how requests have them."""

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from modelstate.errors import VersionGoneError
from modelstate.live.buffers import Marks
from modelstate.live.program import Program
from modelstate.live.watched import Watched, wait_all


class Entry(functools.partial[Any]):
    """What a request calls: the program of a version, or what has the request wait.

    A call of it has it from before its first step until it is over, in C, and in no variable of any frame: so neither
    an interrupt nor an error whose traceback somebody keeps leaves a version in use.
    """

    version: "Version"
    is_open: bool = True


class Version:
    """Weights that serve, have served, or will: an id, where they come from, and the program that has them."""

    __slots__ = ("__weakref__", "_users", "id", "marks", "program", "source", "time")

    def __init__(self, number: int, program: Program, source: str, marks: Marks) -> None:
        self.id = number
        self.program: Program | None = program
        """None when it is retired: then only the requests have it that are under way."""
        self.source = source
        self.marks = marks
        """What its buffers were before its first request; what was carried over counts as changed."""
        self.time = time.time()
        """Seconds since 1970, when it was made."""
        self._users: set[Watched[Entry]] = set()

    def entry(self, program: Program | None = None) -> Entry:
        """What calls its program. As long as anybody has it, the version is in use."""
        program = self.program if program is None else program
        assert program is not None
        made = Entry(program)
        made.version = self
        for one in tuple(self._users):
            if not one.is_there:
                self._users.discard(one)
        self._users.add(Watched(made))
        return made

    @property
    def programs(self) -> list[Program]:
        """What it has, or requests have of it."""
        entries = [one.get() for one in tuple(self._users)]
        found = [self.program, *(one.func for one in entries if one is not None)]
        return [one for one in found if one is not None]  # type: ignore[misc]  # a program is what the entry was made of

    @property
    def users(self) -> tuple[Watched[Entry], ...]:
        """Of whom it is free when they have gone; the gate is one of them while the version is the current one."""
        return tuple(self._users)

    def retire(self) -> None:
        """Lets go of the program: it goes with the last request that has it."""
        program, self.program = self.program, None
        if program is not None and wait_all(self.users, 0.0):
            program.end()

    def forked(self) -> None:
        """In the child of a fork: whoever else used it is not there any more, and yet never lets go of it."""
        self._users = set()

    def __repr__(self) -> str:
        return f"<Version {self.id} of {self.source!r}>"


class Pinned:
    """A version for several calls, as a context. The block may be left by another thread than has entered it."""

    __slots__ = ("__weakref__", "_note", "_take", "entry")

    def __init__(self, take: Callable[[], Entry], note: Callable[["Pinned"], None]) -> None:
        self._take, self._note = take, note
        self.entry: Entry | None = None
        """None outside of the block."""

    def __enter__(self) -> "Pin":
        self._note(self)
        self.entry = self._take()
        return Pin(self)

    def __exit__(self, *_: object) -> None:
        self.entry = None

    @property
    def version(self) -> Version | None:
        entry = self.entry
        return None if entry is None else entry.version


class Pin:
    """One version over several calls: what `Live.pin()` gives. It ends with its block."""

    __slots__ = ("_pinned", "id")

    def __init__(self, pinned: Pinned) -> None:
        assert pinned.version is not None
        self.id = pinned.version.id
        """The version's."""
        self._pinned = weakref.ref(pinned)  # the block alone has the version, and goes with the frame that it is in

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Serves with the pinned version. Raises `VersionGoneError` behind the block."""
        return self._entry()(*args, **named)

    @property
    def _program(self) -> Any:
        return self._entry().func

    def _entry(self) -> Entry:
        pinned = self._pinned()
        entry = None if pinned is None else pinned.entry
        if entry is None:
            raise VersionGoneError(
                "the pin of this version has ended",
                where=f"version {self.id}",
                remedy="call within the block of live.pin()",
            )
        return entry
