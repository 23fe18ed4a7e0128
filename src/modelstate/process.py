"""Threads, forks, signals and the garbage collector of this process."""

import _thread
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

_Item = TypeVar("_Item")

Work = Callable[[threading.Event], None]
"""What each thread does, until there is no more of it or the event is set."""


def run_detached(work: Callable[[], None]) -> None:
    """Has a thread do what nobody waits for, and that helps but need not be done.

    `threading.Thread` would wait for the thread to begin, which takes longer than to place a hundred tensors.
    """
    with suppress(RuntimeError):  # there are no more threads, or the program is ending
        _thread.start_new_thread(work, ())


def parallel_for(work: Work, threads: int, *, with_torch: bool = False) -> None:
    """Has so many threads `work` at once, and waits for all of them; with one it is the caller's.

    Where they compute `with_torch`, its operations do not start threads of their own: theirs and ours would get in each
    other's way, and wait for each other more than they compute.

    The first error of one of them, or an interrupt, sets the event, and comes through when they have ended: the memory
    that they write to may be gone afterwards.
    """
    stop = threading.Event()
    # A program that is ending, in a function of `atexit`, gets no new threads.
    if threads <= 1 or (with_torch and _is_forked) or not threading.main_thread().is_alive():
        work(stop)
        return
    running: list[None] = []
    alone = _Alone(threads) if with_torch else None

    def run() -> None:
        running.append(None)  # before looking at `stop`: who sets that looks here afterwards
        try:
            if alone is not None and not stop.is_set():
                alone.enter()
            work(stop)
        finally:
            running.pop()

    pool = ThreadPoolExecutor(threads, "modelstate-work")
    try:
        waiting = [pool.submit(run) for _ in range(threads)]
        if alone is not None:
            alone.wait()
        for one in as_completed(waiting):
            one.result()
    finally:
        stop.set()
        try:
            if alone is not None:
                alone.give_up()
            _wait_until_empty(running)
        finally:
            if alone is not None:
                alone.end()
            pool.shutdown(cancel_futures=True)


class Stopped(BaseException):
    """Ends a thread that fetches what nobody waits for any more; nothing that catches errors may take it for one."""


def prefetch_one(
    items: Iterable[_Item],
    fetch: Callable[[_Item, Callable[[], None]], None],
    use: Callable[[_Item], None],
    *,
    is_fetched: Callable[[_Item], bool],
) -> None:
    """Has each of the items used by the caller's thread, in their order, after it was fetched by another one.

    While one is used, the next one that has to be fetched is. Items are taken from `items` by the caller's thread, none
    when more than one that was fetched has not been used and let go of: they can bring memory of their own.
    `fetch` also gets a function that raises where the thread had better end, to be called between pieces of its work.

    The first error, or an interrupt, comes through when the thread has ended.
    """
    if not threading.main_thread().is_alive():  # the program is ending, and no pool takes work any more
        for item in items:
            if is_fetched(item):
                fetch(item, lambda: None)
            use(item)
        return
    stop, running = threading.Event(), list[None]()

    def run(item: _Item) -> None:
        running.append(None)  # before looking at `stop`: who sets that looks here afterwards
        try:
            check()
            fetch(item, check)
        except BaseException as error:
            if not stop.is_set():
                raise
            error.__traceback__ = None  # nobody will hear of it, and its frames keep everything alive
        finally:
            running.pop()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    pool, waiting = ThreadPoolExecutor(1, "modelstate-ahead"), iter(items)

    def begin() -> tuple[list[_Item], Future[None] | None]:
        taken = []
        for item in waiting:
            taken.append(item)
            if is_fetched(item):
                return taken, pool.submit(run, item)
        return taken, None

    try:
        now, coming = begin()
        while now:
            for item in now[:-1]:
                use(item)
            if coming is not None:
                coming.result()
            following, coming = begin()
            use(now[-1])
            now = following
    finally:
        stop.set()
        try:
            _wait_until_empty(running)
        finally:
            pool.shutdown(cancel_futures=True)


class _Alone:
    """Threads in which operations of torch use no others.

    The number of threads is each thread's own, but torch also gives the last one that was set to threads that are new.
    So it is put back when all have set theirs, and nobody else does the same meanwhile.
    """

    def __init__(self, threads: int) -> None:
        self._begun = threading.Barrier(threads + 1)
        self._lock = _lock
        self._lock.acquire()
        self._has_lock = True
        self._before = torch.get_num_threads()

    def enter(self) -> None:
        torch.get_num_threads()  # the first call takes the number of the process, also after one has been set
        torch.set_num_threads(1)
        self._begun.wait()

    def wait(self) -> None:
        """Waits for all of them."""
        self._begun.wait()
        self.end()

    def give_up(self) -> None:
        """Lets those go on that wait for others, or are about to, where not all have come."""
        if self._has_lock:
            self._begun.abort()

    def end(self) -> None:
        """Puts the number back, once."""
        if self._has_lock:
            torch.set_num_threads(self._before)
            self._has_lock = False
            self._lock.release()


_fork_safe: list[tuple[threading.Lock, Callable[[int], None] | None]] = []
_acquired: list[threading.Lock] = []


def fork_safe_lock(in_child: Callable[[int], None] | None = None) -> threading.Lock:
    """A lock for the state of a Python module, which is held for moments: a fork waits until it is free.

    So a forked child finds it free, and what it guards complete. `in_child` is called in the child, while it has the
    lock, with the number of its only thread (`threading.get_ident`): it takes back what other threads had begun, which
    do not go on there.
    """
    lock = threading.Lock()
    _fork_safe.append((lock, in_child))
    return lock


class cached_attribute(Generic[_Item]):
    """A method that is called once for each object, as of `functools.cached_property`, and has no lock.

    Up to Python 3.11 that one has a lock which all objects share, and which is held in a child that is forked while
    another thread computes a value.
    """

    def __init__(self, compute: Callable[[Any], _Item]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> _Item:
        # Called once: what it leaves in the object's own attributes comes before it.
        value = vars(instance)[self._name] = self._compute(instance)
        return value


def _before_fork() -> None:
    for lock, _ in _fork_safe:
        lock.acquire()
        _acquired.append(lock)


def _after_fork_in_parent() -> None:
    while _acquired:
        _acquired.pop().release()


def _after_fork_in_child() -> None:
    global _is_forked
    _is_forked = True
    here = threading.get_ident()
    for _, in_child in _fork_safe:
        if in_child is not None:
            in_child(here)
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
_lock = fork_safe_lock()
_is_forked = False
"""A forked process lacks the threads that torch counts on: there only what the caller has set is known to work."""


def _wait_until_empty(running: list[None]) -> None:
    """Waits for what has begun, whatever comes meanwhile.

    Not by joining the threads: one whose start was interrupted is nowhere to be found, and one whose `join` was
    interrupted is taken for ended.
    """
    interrupt: BaseException | None = None
    while running:
        try:
            time.sleep(0.001)
        except BaseException as error:  # another Ctrl-C
            interrupt = error
    if interrupt is not None:
        raise interrupt


_quiet: dict[int, int] = {}
"""The requests for it, of loads in several threads at once, each with the number of its thread."""
_collected_before = True


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switches the cyclic garbage collector off for a while, where it is on.

    There is nothing for it to find in tables of tensors, and with torch imported each of its passes over all objects
    of the process costs more than the table.
    """
    wish = object()
    try:
        try:
            _switch_off(id(wish))
            yield
        finally:
            _switch_back(id(wish))
    except BaseException:
        _switch_back(id(wish))  # an interrupt may have come before the first time
        raise


def _switch_off(wish: int) -> None:
    global _collected_before
    with _collector_lock:
        if not _quiet:
            _collected_before = gc.isenabled()
        _quiet[wish] = threading.get_ident()
        gc.disable()


def _switch_back(wish: int) -> None:
    with _collector_lock:
        _forget([wish])


def _forget(wishes: Iterable[int]) -> None:
    known = [wish for wish in wishes if wish in _quiet]
    if known and len(known) == len(_quiet) and _collected_before:
        gc.enable()
    for wish in known:
        del _quiet[wish]


def _in_child(thread: int) -> None:
    _forget([wish for wish, owner in _quiet.items() if owner != thread])


_collector_lock = fork_safe_lock(_in_child)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Puts off the Python handlers of all signals, Ctrl-C among them, to the end of the block.

    Python runs them in the main thread only, so in other threads there is nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    handlers = {number: handler for number in _HANDLED if callable(handler := _handler_of(number))}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        try:
            _install(handlers)
        except BaseException:
            _install(handlers)  # the first that was put back has been called
            raise
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


def _install(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_handler_of = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
"""Without a look for the member of an enumeration, which takes twenty times as long, and there are 60 signals."""
_HANDLED: list[int] = sorted({int(number) for number in signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP})
