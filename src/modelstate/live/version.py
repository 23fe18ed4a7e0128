"""Versions, and how requests have them."""

import functools
import time
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from modelstate.errors import LiveTargetError, OptionError, VersionGoneError
from modelstate.live.buffers import Marks
from modelstate.live.program import Program
from modelstate.live.report import Answer
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
