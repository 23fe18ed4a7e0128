"""Requests that an interrupt ends at once, whatever the server does.

The functions of obstore that block cannot be interrupted. So requests run as coroutines in one thread, and the caller
waits for an event: where an interrupt arrives (Ctrl-C), or another thread fails, the coroutine is cancelled, which
closes the connection, and nothing is sent again.

What is undone after an interrupt needs requests, too. `cleanup` bounds the time that is waited for them: they go on
while the process does.
"""

from __future__ import annotations

import atexit
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from modelstate.forks import at_fork, fork_safe_lock
from modelstate.process import ThreadValue, is_stopped, try_start, unstoppable, wait_for

if TYPE_CHECKING:
    import asyncio

    from obstore import BytesStream

_CLEANUP_SECONDS = 0.5
"""How long an interrupt waits for the requests that undo what it has ended."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_LAST_SECONDS = 1.0
"""How long the end of the process waits for threads of the client."""

_loop: asyncio.AbstractEventLoop | None = None
_handing_over: set[int] = set()
"""The threads of the client that are giving a result to the loop."""


def _forget_loop() -> None:
    """Its thread does not exist in a process that was forked."""
    global _loop
    _loop = None
    _handing_over.clear()


at_fork(in_child=_forget_loop)
_lock = fork_safe_lock()
_until = ThreadValue(float("inf"))
"""The time until which a thread waits for requests: one that cleans up after an interrupt does not wait for long."""


def call(
    function: Callable[_Parameters, Awaitable[_Result]], *args: _Parameters.args, **options: _Parameters.kwargs
) -> _Result:
    """Calls an asynchronous function of the client, and waits for its result.

    Args:
        function: The function.
        args: Its arguments, whose memory may be used for a moment after an interrupt.
        options: Its arguments by name.

    Raises:
        obstore.exceptions.GenericError: The time for cleaning up after an interrupt has passed.

    What the function raises passes through.
    """
    import asyncio  # here, and not for every program that reads local files only

    ended = threading.Event()
    until = _until.value

    async def run() -> _Result:
        return await function(*args, **options)

    if (loop := _running_loop()) is None:
        return asyncio.run(run())
    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        future.add_done_callback(lambda _: ended.set())
        if not wait_for(ended, until):
            from obstore.exceptions import GenericError

            raise GenericError("the request has not ended within the time after an interrupt")
        return future.result()
    except BaseException:
        if until == float("inf"):  # what cleans up goes on
            future.cancel()
        raise
    finally:
        del future  # it refers to an error, whose traceback refers to this frame


def chunks(stream: BytesStream) -> Iterator[bytes]:
    """Yields the parts of a body as they arrive."""
    with suppress(StopAsyncIteration):
        while True:
            yield call(stream.__anext__)


RETRIES = 5
"""How often a request is repeated after an answer of 5xx, a connection that is reset, or a body that is cut short."""
FIRST_WAIT, LONGEST_WAIT = timedelta(milliseconds=100), timedelta(seconds=5)
"""The waits before the first and before the last repetition. Each is twice the one before, with jitter."""


def wait_to_retry(tries: int) -> None:
    """Waits before a request is repeated that was repeated so often. Raises `Stopped` as `pause` does."""
    pause(min(FIRST_WAIT * 2.0**tries, LONGEST_WAIT).total_seconds() * random.uniform(0.5, 1))


def repeated(
    request: Callable[[], _Result], is_passing: Callable[[Exception], bool], times: int | None = None
) -> _Result:
    """Calls a function; again, at most `RETRIES` times or so many, after an error that may not come again."""
    for tries in range(RETRIES if times is None else times):
        try:
            return request()
        except Exception as error:
            if not is_passing(error):
                raise
        wait_to_retry(tries)
    return request()


def pause(seconds: float) -> None:
    """Waits. Raises `Stopped` where the work of this thread is to end."""
    wait_for(threading.Event(), time.monotonic() + seconds)


@contextmanager
def cleanup() -> Iterator[None]:
    """Bounds the time that is waited for all requests of the block, where an interrupt, or `cancel`, is being handled.

    An error is no interrupt: what it leaves is removed with the patience of any other request.
    """
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, Exception) and not is_stopped()):
        yield
        return
    with _until.replaced(min(_until.value, time.monotonic() + _CLEANUP_SECONDS)), unstoppable():
        yield


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs requests, in a thread that ends with the process; None where no thread can be started."""
    import asyncio

    global _loop
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            setattr(loop, "call_soon_threadsafe", _noting(loop.call_soon_threadsafe))  # noqa: B010
            if not try_start(threading.Thread(target=loop.run_forever, name="modelstate-requests", daemon=True)):
                loop.close()
                return None
            _loop = loop
        return _loop


def _noting(hand_over: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function of a loop by which threads of the client give it a result, so that the process can wait for them.

    The loop may have the result before the function returns. Where Python ends meanwhile, it ends the thread, and the
    client aborts the process.
    """

    def noted(*args: object, **options: object) -> _Result:
        thread = threading.get_ident()
        _handing_over.add(thread)
        try:
            return hand_over(*args, **options)
        finally:
            _handing_over.discard(thread)

    return noted


@atexit.register
def _wait_for_client() -> None:
    """Waits for threads of the client that would abort the process."""
    end = time.monotonic() + _LAST_SECONDS
    while _handing_over and time.monotonic() < end:
        time.sleep(0.001)
