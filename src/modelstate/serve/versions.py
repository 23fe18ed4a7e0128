"""Versions of a program, how requests hold one, and the gate by which an in-place swap waits for them."""

import functools
import threading
import time
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from modelstate.errors import (
    LiveTargetError,
    OptionError,
    QuarantinedError,
    SwapBusyError,
    SwapTimeoutError,
    VersionGoneError,
)
from modelstate.serve.buffers import BufferDigests
from modelstate.serve.report import Answer
from modelstate.serve.sync import LOOK_SECONDS, Bag, SwapLock, WeakHandle, wait_all
from modelstate.serve.target import Program


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

    def __init__(self, number: int, program: Program, source: str, marks: BufferDigests) -> None:
        self.id = number
        self.program: Program | None = program
        """None when it is retired: then only the requests have it that are under way."""
        self.source = source
        self.marks = marks
        """What its buffers were before its first request; what was carried over counts as changed."""
        self.time = time.time()
        """Seconds since 1970, when it was made."""
        self._users: set[WeakHandle[Entry]] = set()

    def entry(self, program: Program | None = None) -> Entry:
        """What calls its program. As long as anybody has it, the version is in use."""
        program = self.program if program is None else program
        assert program is not None
        made = Entry(program)
        made.version = self
        for one in tuple(self._users):
            if not one.is_there:
                self._users.discard(one)
        self._users.add(WeakHandle(made))
        return made

    @property
    def programs(self) -> list[Program]:
        """What it has, or requests have of it."""
        entries = [one.get() for one in tuple(self._users)]
        found = [self.program, *(one.func for one in entries if one is not None)]
        return [one for one in found if one is not None]  # type: ignore[misc]  # a program is what the entry was made of

    @property
    def users(self) -> tuple[WeakHandle[Entry], ...]:
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

    def method(self, name: str) -> Callable[..., Any]:
        """A method of the pinned version's module: `v.method("generate")(...)`, which is `v.generate(...)`.

        The version is in use until the call has ended; where the method is a generator or a coroutine function, until
        that has ended or is dropped. A compiled module runs the method as it was written, and compiles nothing.

        Args:
            name: the name of a method that the module's class defines, or of a submodule.

        Raises `AttributeError` for another name; `OptionError` for methods that every `nn.Module` has, which change
        the module or hand out its weights; `LiveTargetError` where an exported or compiled program is served.
        """
        _method_of(self._entry().func, name)
        return functools.partial(self._called, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # what protocols look for
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self.method(name)
        except (OptionError, LiveTargetError) as error:
            raise AttributeError(str(error)) from error

    def _called(self, name: str, /, *args: Any, **named: Any) -> Any:
        entry = self._entry()
        try:
            return _held(entry, _method_of(entry.func, name)(*args, **named))
        finally:
            del entry  # the traceback of an error keeps this frame

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


class Method:
    """A method of the module that serves: what `Live.method` gives. Each call has one version from begin to end."""

    __slots__ = ("_name", "_pin")

    def __init__(self, pin: Callable[[], AbstractContextManager[Pin]], name: str) -> None:
        self._pin, self._name = pin, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the method of the current version returns. It raises what the method raises."""
        return self.answer(*args, **named).value

    def answer(self, *args: Any, **named: Any) -> Answer:
        """The same, with the id of the version that gave the answer."""
        with self._pin() as version:
            return Answer(version.method(self._name)(*args, **named), version.id)


def _method_of(program: Any, name: str) -> Callable[..., Any]:
    """A method of the module that a program is."""
    if not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or hasattr(nn.Module, name):
        raise OptionError(
            "this is no method that requests can call",
            expected="a public method that the module's own class defines",
            found=repr(name),
            remedy="call the version itself for forward(); methods of nn.Module change the module",
        )
    module = program.module
    if module is None:
        raise LiveTargetError(
            "an exported or compiled program has no methods, only its call",
            found=repr(name),
            remedy="serve the module: modelstate.Live(module)",
        )
    method = getattr(module, name)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__}.{name} is no method, it is of type {type(method).__name__}")
    return method  # type: ignore[no-any-return]


def _held(entry: Entry, result: Any) -> Any:
    """What a method has returned; where that has yet to run, it has the version in use until it ends."""
    if isinstance(result, types.GeneratorType):
        return _generator(entry, result)
    if isinstance(result, types.CoroutineType):
        return _coroutine(entry, result)
    if isinstance(result, types.AsyncGeneratorType):
        return _async_generator(entry, result)
    return result


def _generator(entry: Entry, made: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    try:
        return (yield from made)
    finally:
        del entry


async def _coroutine(entry: Entry, made: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await made
    finally:
        del entry


async def _async_generator(entry: Entry, made: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
    try:
        async for value in made:
            yield value
    finally:
        try:
            await made.aclose()
        finally:
            del entry


_SLOW = "give more time with timeout_s=, or"


class _Shut(Entry):
    """Has requests wait for a swap in place, or refuses them."""

    is_open = False
    closing: "WeakHandle[ClosedEntry] | None" = None
    """The swap. When it is gone the gate is open again, and whoever comes by sees to that."""
    undo: Callable[[], None] | None = None
    """Makes the weights whole, while they are being written over."""
    quarantine: str = ""
    """Why every request is refused, where that is so without the swap."""


class ClosedEntry:
    """A closed gate, as a context: within the block no request is running."""

    __slots__ = ("__weakref__", "_gate", "_timed", "_until", "_watched", "thread")

    def __init__(self, gate: "VersionGate", until: float | None, timed: AbstractContextManager[None]) -> None:
        self.thread = threading.get_ident()
        self._gate, self._until, self._timed = gate, until, timed
        self._watched = WeakHandle(self)

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


class VersionGate:
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
        self._mending = SwapLock()

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

    def closed(self, until: float | None, timed: AbstractContextManager[None]) -> ClosedEntry:
        """Within the block no request is running. Raises `SwapTimeoutError`, and then the gate is open.

        When the block ends, what has not been flipped is undone. Raises `QuarantinedError` where that fails.
        """
        return ClosedEntry(self, until, timed)

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

    def _close(self, closing: "WeakHandle[ClosedEntry]", until: float | None) -> None:
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

    def _shut(self, version: Version, closing: "WeakHandle[ClosedEntry] | None", why: str = "") -> _Shut:
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
