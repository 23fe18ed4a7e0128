"""Threads, signals, the garbage collector and the progress bar of this process.

Invariant: a function that starts threads returns or raises only when none of them writes to memory of the caller any
more, also when an interrupt arrives, since that memory may be freed afterwards. `start_threads` is the exception.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import ctypes
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TextIO, TypeVar

from modelstate.errors import keep_interrupt
from modelstate.forks import at_fork, is_forked

_Item = TypeVar("_Item")

Work = Callable[[threading.Event], None]
"""The function that each thread runs until there is no more work, or the event is set."""


class ThreadValue(threading.local, Generic[_Item]):
    """A value that each thread has for itself, and replaces within a block.

    Args:
        value: The value outside of such blocks.
    """

    def __init__(self, value: _Item) -> None:
        self.value = value  # called in each thread

    @contextmanager
    def replaced(self, value: _Item) -> Iterator[None]:
        """Within the block, this thread has another value."""
        before = self.value
        try:
            self.value = value  # within the `try`, so that an interrupt does not leave it
            yield
        finally:
            self.value = before


_stops = ThreadValue[tuple[Callable[[], bool], ...]](())
"""Of a thread that works for another one: what says that its work is to end."""
_computes = ThreadValue(False)
"""Whether this is a thread of `parallel_for` that uses torch."""
_POLL_SECONDS = 0.05
"""How often a thread that waits looks whether its work is still needed."""


def try_start(thread: threading.Thread) -> bool:
    """Starts a thread. Returns False where the system starts no more threads, or the program is ending."""
    try:
        thread.start()
    except RuntimeError as error:
        if "new thread" not in str(error):  # a signal handler has raised it
            raise
        return False
    return True


def start_threads(work: Callable[[], object], count: int = 1) -> int:
    """Starts threads, without waiting for them. Returns their number: smaller where the system starts no more.

    `threading.Thread` would wait for each thread to begin, which takes longer than to assign a hundred tensors.
    """
    for started in range(count):
        try:
            _thread.start_new_thread(work, ())
        except RuntimeError as error:
            if "new thread" not in str(error):  # a signal handler has raised it
                raise
            return started
    return count


def parallel_for(work: Work, threads: int, *, with_torch: bool = False, takes_part: bool = False) -> None:
    """Runs `work` in several threads at once, and waits for all of them; a single thread is the caller's own.

    The first exception of a thread, or an interrupt, sets the event, and is raised when all threads have ended. Where
    the system starts fewer threads, these do all the work; the caller's, where it starts none.

    Args:
        work: What each thread runs. The threads share the work, so that any number of them ends it.
        threads: The number of threads.
        with_torch: Whether `work` computes with torch. Then its operations are queued on the CUDA stream of the
            caller's thread. They start no threads of their own: they would compete with these threads, and wait for
            each other longer than they compute. Nor does such a call within another one. A single thread leaves torch
            its threads, which no thread here competes with: they halve the time of a check for infinite values where
            two cores are free.
        takes_part: Whether the caller's thread is one of the threads, for work that never waits for another machine.
            Otherwise all threads are new, and two of them may begin on the same processor: the second one was measured
            to wait there for 2 to 5 ms. The caller's thread does not take part where it may have to stop, or computes.
    """
    stop = threading.Event()
    # While the program ends, in a function of `atexit`, no threads can be started.
    is_nested = with_torch and _computes.value
    if threads <= 1 or is_nested or (with_torch and is_forked()) or not threading.main_thread().is_alive():
        work(stop)
        return
    running: list[None] = []
    outer = _stops.value
    ended: SimpleQueue[None] = SimpleQueue()
    errors: list[BaseException] = []
    set_torch_threads = _torch_setting() if with_torch else None

    def run() -> None:
        running.append(None)  # before it reads `stop`: the code that sets `stop` looks at `running` afterwards
        try:
            _stops.value = *outer, stop.is_set
            if set_torch_threads is not None:
                _computes.value = True
                set_torch_threads(1)
            if not stop.is_set():
                work(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            running.pop()
            ended.put(None)

    takes_part = takes_part and not with_torch and not outer
    try:
        started = start_threads(run, threads - takes_part)
        if set_torch_threads is not None and not started:  # OpenMP would end the process, which starts no threads
            before = set_torch_threads(1)
            try:
                work(stop)
            finally:
                set_torch_threads(before)
        elif takes_part or not started:
            work(stop)
        for _ in range(started):
            _wait_for_next(ended)
            if errors:
                raise errors[0]
    finally:
        stop.set()
        try:
            _wait_until_empty(running)
        finally:
            errors.clear()  # their tracebacks refer to this list


def _wait_for_next(ended: SimpleQueue[None]) -> None:
    """Waits until a thread ends. Raises `Stopped` where the work of this thread is to end."""
    while _stops.value:
        with suppress(Empty):
            return ended.get(timeout=_POLL_SECONDS)
        check_stopped()
    return ended.get()


def wait_for(event: threading.Event, until: float = float("inf")) -> bool:
    """Waits for an event, until a time of `time.monotonic`. Returns whether it has come.

    An interrupt ends it in the main thread. In a thread that works for another one, raises `Stopped` where its work is
    to end.
    """
    while not event.wait(max(min(_POLL_SECONDS, until - time.monotonic()), 0.0)):
        check_stopped()
        if time.monotonic() >= until:
            return False
    return True


def is_stopped() -> bool:
    """Whether this is a thread of `parallel_for` or `stopped_by` whose work is to end."""
    return any(is_stopped() for is_stopped in _stops.value)


def check_stopped() -> None:
    """Raises `Stopped` in a thread whose work is to end."""
    if is_stopped():
        raise Stopped


@contextmanager
def stopped_by(is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Within the block, what this thread waits for ends with `Stopped` as soon as a function returns True."""
    with _stops.replaced((*_stops.value, is_stopped)):
        yield


@contextmanager
def unstoppable() -> Iterator[None]:
    """Within the block, nothing that this thread waits for ends with `Stopped`: for a commit, and for what undoes."""
    with _stops.replaced(()):
        yield


class Stopped(BaseException):
    """Ends a thread whose result is no longer needed. Not an `Exception`, so that no error handler catches it."""


def _wait_until_empty(running: list[None]) -> None:
    """Waits until all threads that have begun have ended, also when interrupts arrive.

    A thread is in the list while it runs, also where an interrupt has kept its starter from counting it.
    """
    interrupt: BaseException | None = None
    while running:
        try:
            time.sleep(0.001)
        except BaseException as error:  # another Ctrl-C
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _torch_setting() -> Callable[[int], int]:
    """Returns a function that sets how many threads torch uses in the thread that calls it, and returns the number.

    It also sets the CUDA stream to that of this thread: a copy on the default stream of a new thread would not wait for
    what this thread has queued. `torch.set_num_threads` would change the number of threads that begin later, too.
    """
    import torch  # the command line uses this module without torch

    openmp = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)  # that of torch, which is loaded for all libraries
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if is_used else None

    def set_threads(number: int) -> int:
        before = torch.get_num_threads()  # the first call of a thread sets the number of the process
        if openmp is not None:
            openmp(number)
        if stream is not None:
            torch.cuda.set_stream(stream)
        return before

    return set_threads


class cached_attribute(Generic[_Item]):
    """A method that is called once for each object, like `functools.cached_property`, but without a lock.

    Up to Python 3.11, `cached_property` has a lock that all objects share. A child that is forked while another thread
    computes a value would never get it. Here two threads may both compute a value; both get that of the first one.
    """

    def __init__(self, compute: Callable[..., _Item]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> _Item:
        # Called once: Python finds the attribute of the instance first from then on.
        value: _Item = vars(instance).setdefault(self._name, self._compute(instance))
        return value


# The garbage collector.

_pausing, _in_pause = dict[object, int](), dict[object, int]()
"""The thread of each pause of the collector: several may load at once. It leaves the second dict when it may be on."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector, where it is enabled.

    Tables of tensors contain no garbage, and with torch imported each pass over all objects of the process costs more
    than the table.
    """
    if not (gc.isenabled() or _pausing):
        yield
        return
    thread, pause = threading.get_ident(), object()
    # Python lets an interrupt in at calls alone: none comes between these lines.
    _in_pause[pause] = _pausing[pause] = thread
    try:
        gc.disable()
        yield
    finally:
        del _pausing[pause]
        try:
            if not _pausing:
                gc.enable()
        finally:
            del _in_pause[pause]


def _end_pauses_of_others() -> None:
    was_in_pause, thread = bool(_in_pause), threading.get_ident()
    for pauses in (_pausing, _in_pause):
        for pause in [pause for pause, of_thread in pauses.items() if of_thread != thread]:
            del pauses[pause]
    if was_in_pause and not _pausing:
        gc.enable()


at_fork(in_child=_end_pauses_of_others)


# Signals.

_SIGNALS: list[int] = sorted({int(number) for number in signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP})


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Defers the Python handlers of all signals, Ctrl-C among them, to the end of the block.

    Yields a function. It calls the handlers of the signals that have arrived so far, and raises what a handler raises.

    Python runs the handlers in the main thread only, so in other threads there is nothing to defer. `_signal` is the
    part of `signal` without the lookup of enum members. That takes twenty times as long, and drops a `ValueError` of a
    handler.
    """
    if threading.get_ident() != threading.main_thread().ident:  # `current_thread` may catch what a handler raises
        yield lambda: None
        return
    handlers = {number: handler for number in _SIGNALS if callable(handler := _signal.getsignal(number))}
    arrived: list[int] = []

    def handle(number: int) -> None:
        handlers[number](number, sys._getframe())  # its own frame, as `is_interrupt` expects

    def deliver() -> None:
        with ExitStack() as calls:  # each handler, also where another one raises
            for number in reversed(dict.fromkeys(arrived)):
                calls.callback(handle, number)
            arrived.clear()

    def restore() -> None:
        for number, handler in handlers.items():
            _signal.signal(number, handler)

    try:
        for number in handlers:
            _signal.signal(number, lambda number, _: arrived.append(number))
        yield deliver
    finally:
        try:
            restore()
        except BaseException:
            restore()  # a handler that was restored first has raised
            raise
        finally:
            if arrived:
                deliver()


_BAR_DELAY_SECONDS = 0.5


@contextmanager
def progress_bar(wanted: bool | None, total_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """A block with a progress bar on stderr, whose value is a function that adds a number of bytes to it.

    The bar shows bytes, bytes per second and the time left.

    Args:
        wanted: True shows the bar at once, False never. None shows it on a terminal after half a second.
        total_bytes: The number of bytes in all.
        what: The activity, such as "loading".
    """
    if not (is_terminal(sys.stderr) if wanted is None else wanted):
        yield lambda _: None
        return
    shown_from = time.monotonic() + (_BAR_DELAY_SECONDS if wanted is None else 0.0)
    done, bar = 0, None

    def advance(nbytes: int) -> None:
        nonlocal done, bar
        done += nbytes
        if bar is None and time.monotonic() >= shown_from:
            from rich import progress
            from rich.console import Console

            columns = progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()
            bar = progress.Progress(
                progress.TextColumn(what), *columns, progress.TimeRemainingColumn(), console=Console(stderr=True)
            )
            bar.add_task(what, total=total_bytes)
            with suppress(RuntimeError):  # its thread cannot be started: it is drawn at the end only
                bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        advance(0)
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def is_terminal(stream: TextIO) -> bool:
    """Whether a standard stream is a terminal. A program may have closed it, or replaced it by another object."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError, OSError) as error:
        keep_interrupt(error)
        return False
