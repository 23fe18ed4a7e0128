"""Versions of a program, how requests hold one, and the gate that an in-place swap closes to wait for them.

A request holds its version through one object, an `Entry`. A version is free when all of its entries are gone.

An interrupt can arrive between any two instructions of a thread, also after the one that increments a counter and
before the `try` that would decrement it. So nothing here counts. An object that belongs to a frame stands for each
request and each lock holder, and disappears with that frame, whatever ends it. Weak references tell which exist.
"""

import functools
import threading
import time
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from mmap import mmap
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from modelstate.errors import (
    LiveTargetError,
    OptionError,
    QuarantinedError,
    SwapBusyError,
    VersionGoneError,
)
from modelstate.serve.targets import BufferDigests, Program
from modelstate.text_format import short_repr

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""The longest wait without a check, in case an interrupt has prevented the wake-up."""


class WeakHandle(Generic[T]):
    """A weak reference on which threads can wait until the object is gone."""

    __slots__ = ("_gone", "_ref")

    def __init__(self, target: T) -> None:
        # `SimpleQueue.put` is reentrant, so it can be called at any moment, as by the garbage collector.
        self._gone: SimpleQueue[object] = SimpleQueue()
        self._ref: weakref.ref[T] | None = weakref.ref(target, self._gone.put)

    def get(self) -> T | None:
        """The object, which the caller then keeps alive; None when it is gone."""
        ref = self._ref  # `forget` may drop it at any moment
        return None if ref is None else ref()

    @property
    def is_alive(self) -> bool:
        return self.get() is not None

    def forget(self) -> None:
        """Drops the object. From now on it counts as gone."""
        self._ref = None
        self._gone.put(None)

    def wait(self, deadline: float | None) -> bool:
        """Waits until the object is gone. Returns whether it is."""
        while self.is_alive:
            seconds = CHECK_SECONDS if deadline is None else min(deadline - time.monotonic(), CHECK_SECONDS)
            if seconds <= 0:
                return False
            self.wait_once(seconds)
        return True

    def wait_once(self, seconds: float) -> None:
        """Waits for a time, or less where the object goes earlier."""
        try:
            self._gone.get(timeout=seconds)
        except Empty:
            return
        self._gone.put(None)  # wakes the next waiting thread


def wait_all(handles: Iterable[WeakHandle["Entry"]], deadline: float | None) -> bool:
    """Waits until all objects are gone. Returns whether they are."""
    return all(handle.wait(deadline) for handle in handles)


class ConcurrentWeakSet(Generic[T]):
    """A set of weak references that any thread can iterate while others add to it, unlike `weakref.WeakSet`."""

    __slots__ = ("__weakref__", "_refs")

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        self._refs.add(weakref.ref(item, self._refs.discard))

    def __iter__(self) -> Iterator[T]:
        # A copy is made in one step. `tuple` allocates in the middle of its iteration, and up to Python 3.11 an
        # allocation may run the garbage collector, which discards references.
        for ref in self._refs.copy():
            item = ref()
            if item is not None:
                yield item


class Entry(functools.partial[Any]):
    """The callable that a request calls: the program of a version.

    A running call holds its entry in C, from before its first instruction until it returns, and in no variable of a
    Python frame. So neither an interrupt nor an error whose traceback is kept leaves a version in use.
    """

    version: "Version"

    @property
    def program(self) -> Program:
        return self.func  # type: ignore[return-value]  # `func` is a program


class Answer(NamedTuple):
    """The result of a request, and the id of the version that gave it."""

    value: Any
    version: int


class Version:
    """Weights that serve, have served or will serve: an id, their source, and the program that has them.

    The id 0 is that of a target with weights on meta, which serves no request.
    """

    __slots__ = ("__weakref__", "_entries", "buffer_digests", "id", "memory", "program", "source", "time")

    def __init__(self, number: int, program: Program, source: str, buffer_digests: BufferDigests) -> None:
        self.id = number
        self.program: Program | None = program
        """None once the version is retired; running requests may still hold the program."""
        self.source = source
        self.buffer_digests = buffer_digests
        """Digests of the buffers before the first request. Buffers that were carried over count as modified."""
        self.time = time.time()
        """Seconds since 1970 at which the version was made."""
        self.memory: Sequence[mmap] = ()
        """The memory that its weights were staged in, as far as it may be used again when the version is retired."""
        self._entries: set[WeakHandle[Entry]] = set()

    def entry(self, program: Program | None = None) -> Entry:
        """Returns a callable for the program. The version is in use as long as the entry exists."""
        program = self.program if program is None else program
        assert program is not None
        entry = Entry(program)
        entry.version = self
        for handle in self._entries.copy():
            if not handle.is_alive:
                self._entries.discard(handle)
        self._entries.add(WeakHandle(entry))
        return entry

    @property
    def programs(self) -> list[Program]:
        """Its program, and the programs that running requests of the version hold."""
        entries = [handle.get() for handle in self._entries.copy()]
        programs = [self.program, *(entry.program for entry in entries if entry is not None)]
        return [program for program in programs if program is not None]

    @property
    def users(self) -> tuple[WeakHandle[Entry], ...]:
        """The entries of the version: those of requests, and that of the gate while the version is current."""
        return tuple(self._entries.copy())

    def after_fork(self) -> None:
        """Drops all entries: the threads that hold them do not exist in the child, and would never release them."""
        self._entries = set()

    def __repr__(self) -> str:
        return f"<Version {self.id} of {self.source!r}>"


class PinContext:
    """The context of `Live.pin()`: it holds one version. Another thread than the one that entered may leave it."""

    __slots__ = ("__weakref__", "_open_entry", "_register", "entry")

    def __init__(self, open_entry: Callable[[], Entry], register: Callable[["PinContext"], None]) -> None:
        self._open_entry, self._register = open_entry, register
        self.entry: Entry | None = None
        """None outside the block."""

    def __enter__(self) -> "Pin":
        self._register(self)
        self.entry = self._open_entry()
        return Pin(self)

    def __exit__(self, *_: object) -> None:
        self.entry = None

    @property
    def version(self) -> Version | None:
        entry = self.entry
        return None if entry is None else entry.version


class Pin:
    """One version for several calls: the value of `with live.pin() as version`. It ends with its block.

    Attributes:
        id: the id of the version.

    Examples:
        >>> with live.pin() as version:
        ...     first = version(x)
        ...     second = version.generate(first)
    """

    __slots__ = ("_context", "id")

    def __init__(self, context: PinContext) -> None:
        assert context.version is not None
        self.id = context.version.id
        # Weak: only the block holds the version, and the block ends with its frame.
        self._context = weakref.ref(context)

    def __call__(self, *args: object, **named: object) -> Any:
        """Answers a request with the pinned version. Raises `VersionGoneError` after the block."""
        return self._entry()(*args, **named)

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the pinned version's module: `v.method("generate")(...)` is `v.generate(...)`.

        The version is in use until the call has ended; for a generator or coroutine function, until the generator or
        coroutine has ended or is dropped. A method of a compiled module runs as it was written, without compilation.

        Args:
            name: a method that the module's own class defines, or a submodule.

        Returns:
            A callable. It raises `VersionGoneError` after the block.

        Raises:
            AttributeError: the module has no such method.
            OptionError: every `nn.Module` has the method; it changes the module or exposes its weights.
            LiveTargetError: the target is an exported program or a compiled package.

        Examples:
            >>> with live.pin() as version:
            ...     ids = version.method("generate")(prompt)
        """
        method_of(self._entry().program, name)
        return functools.partial(self._call_method, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # protocols such as copying look for these
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self.method(name)
        except (OptionError, LiveTargetError) as error:
            raise AttributeError(str(error)) from error

    def _call_method(self, name: str, /, *args: object, **named: object) -> object:
        entry = self._entry()
        try:
            return _keep_in_use(entry, method_of(entry.program, name)(*args, **named))
        finally:
            del entry  # the traceback of an error keeps this frame

    def _entry(self) -> Entry:
        context = self._context()
        entry = None if context is None else context.entry
        if entry is None:
            raise VersionGoneError(
                "the pin of this version has ended",
                where=f"version {self.id}",
                remedy="call within the block of live.pin()",
            )
        return entry


class Method:
    """A method of the module that serves: the value of `Live.method`. Each call uses one version from start to end.

    Examples:
        >>> generate = live.method("generate")
        >>> ids = generate(prompt)
    """

    __slots__ = ("_name", "_pin")

    def __init__(self, pin: Callable[[], AbstractContextManager[Pin]], name: str) -> None:
        self._pin, self._name = pin, name

    def __call__(self, *args: object, **named: object) -> Any:
        """Calls the method of the current version, and raises what that method raises."""
        return self.answer(*args, **named).value

    def answer(self, *args: object, **named: object) -> Answer:
        """Calls the method, and returns its result with the id of the version that gave it."""
        with self._pin() as version:
            return Answer(version.method(self._name)(*args, **named), version.id)


def method_of(program: Program, name: str) -> Callable[..., object]:
    """Returns a method of a program's module. Raises as `Pin.method` does."""
    if not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or hasattr(nn.Module, name):
        raise OptionError(
            "this is not a method that requests can call",
            expected="a public method that the module's own class defines",
            found=short_repr(name),
            remedy="call the version itself for forward(); methods of nn.Module change the module",
        )
    module = program.module
    if module is None:
        raise LiveTargetError(
            "an exported or compiled program has no methods, only its call",
            found=short_repr(name),
            remedy="serve the module: modelstate.Live(module)",
        )
    method = getattr(module, name)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__}.{name} is not a method, it is of type {type(method).__name__}")
    return method  # type: ignore[no-any-return]


def _keep_in_use(entry: Entry, result: object) -> object:
    """Wraps a generator or coroutine, so that it holds the version until it ends; returns other results unchanged."""
    if isinstance(result, types.GeneratorType):
        return _generator(entry, result)
    if isinstance(result, types.CoroutineType):
        return _coroutine(entry, result)
    if isinstance(result, types.AsyncGeneratorType):
        return _async_generator(entry, result)
    return result


def _generator(entry: Entry, generator: Generator[object, object, object]) -> Generator[object, object, object]:
    try:
        return (yield from generator)
    finally:
        del entry


async def _coroutine(entry: Entry, coroutine: Coroutine[object, object, object]) -> object:
    try:
        return await coroutine
    finally:
        del entry


async def _async_generator(entry: Entry, generator: AsyncGenerator[object, object]) -> AsyncGenerator[object, object]:
    """Does what `yield from` does, which async generators do not have: passes on what is sent and thrown."""
    step = generator.asend(None)
    try:
        while True:
            try:
                value = await step
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                raise
            except BaseException as error:
                step = generator.athrow(error)
            else:
                step = generator.asend(sent)
    finally:
        try:
            await generator.aclose()
        finally:
            del entry


class ClosedEntry(Entry):
    """The entry of a closed gate: a request that calls it waits for the swap in place, or is refused."""

    drain: "WeakHandle[DrainGuard] | None" = None
    """The swap that closed the gate. When it is gone, the next thread at the gate reopens it."""
    undo: Callable[[], None] | None = None
    """Restores the weights, while a swap overwrites them."""
    quarantine: str = ""
    """The reason why every request is refused when no swap is under way; empty where requests are served."""


class DrainGuard:
    """A context in which the gate is closed and no request runs.

    Entering raises `SwapBusyError`; the gate is open then. At the end of the block, a swap that has not flipped is
    undone, which raises `QuarantinedError` where it fails.
    """

    __slots__ = ("__weakref__", "_deadline", "_gate", "_handle", "_timed", "thread")

    def __init__(self, gate: "VersionGate", deadline: float | None, timed: AbstractContextManager[None]) -> None:
        self.thread = threading.get_ident()
        self._gate, self._deadline, self._timed = gate, deadline, timed
        self._handle = WeakHandle(self)

    def __enter__(self) -> None:
        try:
            with self._timed:
                self._gate._close(self._handle, self._deadline)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._handle.forget()
        self._gate.reopen()


class _PinsOfThread(threading.local):
    def __init__(self) -> None:
        self.contexts: ConcurrentWeakSet[PinContext] = ConcurrentWeakSet()


_SLOW = "give more time with timeout_seconds=, or"


class VersionGate:
    """Hands out the current version, and finds out whether a version is in use.

    Its state is one attribute, `entry`, which requests call. A request holds the entry of its version, so no counter
    and no lock is needed. A swap in place replaces the entry by a `ClosedEntry`, at which new requests wait, and waits
    until no request holds the entry that it replaced.
    """

    def __init__(self, first: Version) -> None:
        self.entry = first.entry() if first.id else self._closed_entry(first, None, "weights on meta, without values")
        self._versions: ConcurrentWeakSet[Version] = ConcurrentWeakSet()
        self._versions.add(first)
        self._pins = _PinsOfThread()
        self._reopen_lock = SwapLock()

    @property
    def current(self) -> Version:
        return self.entry.version

    @property
    def programs(self) -> int:
        """The number of programs: those of kept versions, and those of retired versions that requests still hold."""
        return len({id(program) for version in self._versions if version.id for program in version.programs})

    def pinned(self) -> PinContext:
        """Returns a context that holds one version for several calls."""
        return PinContext(self._open_entry, self._pins.contexts.add)

    def holds(self, version: Version) -> bool:
        """Whether this thread has pinned the version, so that it must not wait for the version's requests."""
        return any(context.version is version for context in self._pins.contexts)

    def flip(self, new: Version) -> Version:
        """Makes a version the current one, and returns the previous one. A closed gate stays closed."""
        previous = self.entry
        self._versions.add(new)
        if isinstance(previous, ClosedEntry) and previous.drain is not None:
            self.entry = self._closed_entry(new, previous.drain)
        else:
            self.entry = new.entry()
        return previous.version

    def register_undo(self, undo: Callable[[], None]) -> None:
        """From here until the flip, `undo` restores the weights before the closed gate opens."""
        assert isinstance(self.entry, ClosedEntry)
        self.entry.undo = undo

    @property
    def serves_none(self) -> bool:
        """Whether every request is refused."""
        return isinstance(self.entry, ClosedEntry) and bool(self.entry.quarantine)

    def reopen(self) -> None:
        """Opens a closed gate whose swap has ended or is gone. Raises `QuarantinedError`."""
        entry = self.entry
        if not isinstance(entry, ClosedEntry) or entry.drain is None or entry.drain.is_alive:
            return
        with SwapLockGuard(self._reopen_lock, True, None):
            if self.entry is not entry:
                return
            if entry.undo is not None:
                try:
                    entry.undo()
                except QuarantinedError as error:
                    self.entry = self._closed_entry(entry.version, None, str(error.found))
                    raise
            quarantine = entry.quarantine
            self.entry = self._closed_entry(entry.version, None, quarantine) if quarantine else entry.version.entry()

    def after_fork(self) -> None:
        """In the child of a fork, drops the requests, pins and swaps of threads that do not exist there."""
        entry, contexts = self.entry, list(self._pins.contexts)
        for version in self._versions:
            version.after_fork()
        for context in contexts:
            if context.entry is not None:
                context.entry = context.entry.version.entry(context.entry.program)
        self._reopen_lock.after_fork()
        if not isinstance(entry, ClosedEntry):
            self.entry = entry.version.entry()
        elif entry.drain is not None:
            guard = entry.drain.get()
            if guard is not None and guard.thread != threading.get_ident():
                entry.drain.forget()

    def _close(self, drain: WeakHandle[DrainGuard], deadline: float | None) -> None:
        previous = self.entry
        quarantine = previous.quarantine if isinstance(previous, ClosedEntry) else ""
        version = previous.version
        del previous  # this reference would keep the version in use
        self.entry = self._closed_entry(version, drain, quarantine)
        if not wait_all(version.users, deadline):
            raise SwapBusyError(
                "requests did not end in time; nothing has been changed",
                where=f"version {version.id}",
                found="requests under way",
                remedy=f"{_SLOW} swap with mode='available', which does not wait for requests",
            )

    def _closed_entry(
        self, version: Version, drain: WeakHandle[DrainGuard] | None, quarantine: str = ""
    ) -> ClosedEntry:
        entry = ClosedEntry(lambda *args, **named: self._open_entry()(*args, **named))
        entry.version, entry.drain, entry.quarantine = version, drain, quarantine
        return entry

    def _open_entry(self) -> Entry:
        """Waits until the gate is open, and returns its entry.

        Raises `VersionGoneError` before the first weights, `QuarantinedError` and `SwapBusyError`.
        """
        while isinstance(entry := self.entry, ClosedEntry):
            if not entry.version.id:
                raise VersionGoneError(
                    "nothing serves yet: the target has no weights before the first swap",
                    found=entry.quarantine,
                    remedy="swap in a checkpoint first: live.swap(source), or modelstate.follow(live, store)",
                )
            if entry.drain is None:
                raise QuarantinedError(
                    "no version can serve: a swap in place failed, and its changes could not be undone",
                    found=entry.quarantine,
                )
            # The swap waits for pins of the current version, so their threads must not wait for the swap. A pin of an
            # older version does not count: no swap waits for it, and the current weights may be half overwritten.
            own = [
                pinned
                for context in self._pins.contexts
                if (pinned := context.entry) is not None and pinned.version is entry.version
            ]
            if own:
                return own[0]
            guard = entry.drain.get()
            if guard is None:
                self.reopen()
                continue
            if guard.thread == threading.get_ident():
                raise SwapBusyError(
                    "the program was called within a swap in place, and all requests wait for that swap",
                    remedy="call the version that the canary gets as its argument, or swap with mode='available'",
                )
            del guard  # this reference would keep the swap alive
            entry.drain.wait_once(CHECK_SECONDS)
        return entry


class SwapLock:
    """Serializes swaps: a second swap waits, or does not take place.

    The oldest live guard in a queue holds the lock. No separate state says so, which an interrupt could leave wrong.
    """

    def __init__(self) -> None:
        self.queue: list[WeakHandle[SwapLockGuard]] = []

    def check_not_nested(self) -> None:
        """Raises `SwapBusyError` where this thread already holds the lock, or waits for it."""
        # No local variable refers to a guard here: the traceback of the error would keep the guard alive.
        threads = {guard.thread for handle in tuple(self.queue) for guard in (handle.get(),) if guard is not None}
        if threading.get_ident() in threads:
            raise SwapBusyError(
                "a swap was called from within a swap, by its canary or by code of the model",
                remedy="call it when that one has ended",
            )

    def after_fork(self) -> None:
        """Drops the guards of threads that do not exist in the child of a fork."""
        this_thread = threading.get_ident()
        self.queue = [
            handle for handle in self.queue if (guard := handle.get()) is not None and guard.thread == this_thread
        ]


class SwapLockGuard:
    """A context in which this thread holds a lock: until the block ends, or the guard is gone.

    It yields False, and the lock is not held, where `wait` is false and another thread holds it. Entering raises
    `SwapBusyError` and `SwapBusyError`.
    """

    __slots__ = ("__weakref__", "_handle", "_lock", "_timeout_seconds", "_wait", "thread")

    def __init__(self, lock: SwapLock, wait: bool, timeout_seconds: float | None) -> None:
        self.thread = threading.get_ident()
        self._lock, self._wait, self._timeout_seconds = lock, wait, timeout_seconds
        self._handle = WeakHandle(self)

    def __enter__(self) -> bool:
        try:
            self._lock.check_not_nested()
            deadline = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
            queue = self._lock.queue
            queue.append(self._handle)
            while (first := queue[0]) is not self._handle:
                if not first.is_alive:
                    with suppress(ValueError):
                        queue.remove(first)
                elif not self._wait:
                    self.__exit__()
                    return False
                elif not first.wait(deadline):
                    raise SwapBusyError(
                        "another swap did not end in time", remedy="give more time with timeout_seconds="
                    )
            return True
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):
            self._lock.queue.remove(self._handle)
        self._handle.forget()
