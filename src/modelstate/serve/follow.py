"""`modelstate.follow`: swaps checkpoints that training saves to a store into a program that serves."""

from __future__ import annotations

import inspect
import math
import os
import random
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

from torch import nn

from modelstate.arguments import check_keywords, checked_call, invalid_option, seconds_of
from modelstate.background import AtExit, BackgroundTask
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import (
    ChecksumError,
    FollowWarning,
    LiveTargetError,
    ModelStateError,
    OptionError,
    ReadFailedError,
    SkippedCheckpointError,
    SourceNotFoundError,
    SwapBusyError,
)
from modelstate.formats.layers import trusts_known_patches
from modelstate.process import Stopped, stopped_by
from modelstate.remote.location import is_remote
from modelstate.serve.canary import Canary, prepared
from modelstate.serve.live import FOREIGN, Event, Live
from modelstate.store.directory import StepEntry, ages
from modelstate.store.record import ALL, damaged, short
from modelstate.store.retention import CheckpointInfo
from modelstate.store.store import Store
from modelstate.text_format import in_a_line
from modelstate.transaction.transaction import exclusive, has_exclusively

_T = TypeVar("_T")
_MAX_TRIES = 3

_ALWAYS_RETRIED = (SwapBusyError, ConnectionError, TimeoutError)
"""Errors that are independent of the checkpoint."""
_SOMETIMES_RETRIED = (ReadFailedError, MemoryError)
"""Errors that the checkpoint may cause, and that may be temporary; retried `_MAX_TRIES` times."""


class Swappable(Protocol):
    """A target of `follow`: a `Live`, or an object whose `swap` raises when it does not accept the weights."""

    def swap(self, source: Any, /) -> object: ...


@checked_call("ms.follow")
def follow(
    target: Live | Swappable,
    store: Store | str | os.PathLike[str],
    *,
    select: str = "latest",
    object: str = "model",
    poll_seconds: float = 5.0,
    on_error: Callable[[Exception], object] | None = None,
    on_swap: Callable[[Event], object] | None = None,
    background: bool = True,
    **options: object,
) -> Following:
    """Swaps each checkpoint that is saved to a store into a program that serves.

    What is read of a checkpoint is compared with its digests, and then swapped in. A checkpoint that is damaged, or
    that the swap refuses, is skipped: the next best one is taken, or the present version continues to serve. It is
    reported once, and not tried again. A checkpoint that has been deleted meanwhile is not reported. The version that
    serves is replaced only by a checkpoint that `select` prefers, so a rollback lasts until there is a newer
    checkpoint. Following writes nothing to the store, and does not need its lock.

    Args:
        target: A `Live`, or an object with `swap(path)`, which raises where it does not accept the checkpoint. After
            `TimeoutError`, `ConnectionError` and `SwapBusyError` the checkpoint is tried again at the next poll.
        store: A `Store`, whose cache is used, or its directory, which need not exist yet.
        select: "latest", the checkpoint that was saved last; "best:METRIC", the lowest; "best:METRIC:max", the highest.
        object: The object of a checkpoint that has the weights.
        poll_seconds: Seconds between two polls, up to a tenth more or less.
        on_error: Called with each error: a `SkippedCheckpointError`, with its cause, for each bad checkpoint. Any other
            error is retried, and reported once until a poll succeeds. An exception of the callback becomes an event.
            Without a callback, a `FollowWarning` reports the errors.
        on_swap: Called with the event of each checkpoint that is swapped in.
        background: Starts a thread that polls; False leaves that to `Following.poll`.
        options: Options for each swap, such as `canary=` and `rules=` of `Live.swap`. `check_finite=` and `verify=` are
            True here.

    Returns:
        A `Following`, which is a context manager that stops its thread.

    Raises:
        OptionError: An argument is invalid.
        LiveTargetError: The target has no method `swap`.
        UnsavableError: The path cannot be a store.
        CanaryError: The version that serves does not answer the inputs of the `Canary`, so no checkpoint could pass it.
        BackgroundCancelledError: The system starts no more threads.

    Examples:
        >>> with modelstate.follow(live, "runs/checkpoints", select="best:loss") as following:
        ...     following.wait(timeout_seconds=3600)
    """
    selection = _selection(select)
    _check_target(target, options)
    canary = options.get("canary")
    if isinstance(target, Live) and isinstance(canary, Canary) and target.version().id:
        prepared(canary, target)
    if type(object) is not str or not object:
        raise invalid_option("object", "must be the name of an object", object, expected="text, such as 'model'")
    poll_seconds = seconds_of("poll_seconds", poll_seconds, accepts_zero=False, most=threading.TIMEOUT_MAX)
    for name, callback in (("on_error", on_error), ("on_swap", on_swap)):
        if callback is not None and not callable(callback):
            raise invalid_option(name, "must be callable", callback, expected="a function, or None")
    # A separate instance: a store that also saves in the background would raise errors of its saves here.
    own_store = Store(store.directory, cache=store.index.cache) if isinstance(store, Store) else Store(store)
    if isinstance(target, Live):
        options = {"check_finite": True, "verify": True, **options}
    following = Following(target, own_store, selection, object, poll_seconds, on_error, on_swap, options)
    if background:
        following.start()
    return following


def _check_target(target: object, options: dict[str, object]) -> None:
    swap = getattr(target, "swap", None)
    if not callable(swap):
        raise LiveTargetError(
            "this object does not accept new weights",
            expected="a modelstate.Live, or an object with swap(path)",
            found=f"{type(target).__module__}.{type(target).__qualname__}",
            remedy="follow(live, store): the program comes first",
        )
    try:
        inspect.signature(swap).bind("", **options)
    except ValueError:
        return  # it has no signature, so the call will show
    except TypeError as error:
        parameters = [each for function in (follow, swap) for each in inspect.signature(function).parameters.values()]
        keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        check_keywords("ms.follow", options, keywords, FOREIGN)
        raise OptionError("swap does not accept these arguments", where=type(target).__name__, found=error) from error


Outcome = Literal["taken", "skipped", "later", "again"]
"""The result of trying a checkpoint. "later" waits for the next poll; "again" lists the store again at once."""


class Following:
    """A store that is followed: the value of `modelstate.follow`. Any thread may call every method.

    Examples:
        >>> following = modelstate.follow(live, "runs/checkpoints", background=False)
        >>> [event.action for event in following.poll()]
        ['swapped']
    """

    def __init__(
        self,
        target: Swappable,
        store: Store,
        selection: tuple[str | None, int],
        object: str,
        poll_seconds: float,
        on_error: Callable[[Exception], object] | None,
        on_swap: Callable[[Event], object] | None,
        options: dict[str, object],
    ) -> None:
        self._target, self._store, self._selection, self._object = target, store, selection, object
        self._poll_seconds, self._options = poll_seconds, options
        self._on_error, self._on_swap = on_error, on_swap
        self._events: deque[Event] = deque(maxlen=1000)
        self._events_of_poll: list[Event] = []
        self._taken: _Candidate | None = None
        self._refused: dict[tuple[str, float], int] = {}
        """The number of tries of each failed checkpoint, by path and time; none follows after `_MAX_TRIES`."""
        self._reported: set[tuple[str, int | None]] = set()
        """Errors, by class and step, that have been reported since the last successful poll."""
        self._polls = nn.Module()
        """What a poll has exclusively."""
        self._task: BackgroundTask[None] | None = None

    def __repr__(self) -> str:
        serves = "no checkpoint yet" if self._taken is None else f"step {self._taken.info.step}"
        return f"<Following {self._store.directory!r}: {serves}, {'running' if self.is_running else 'not running'}>"

    @property
    def step(self) -> int | None:
        """The step that was swapped in last; None before the first one."""
        return None if self._taken is None else self._taken.info.step

    @property
    def events(self) -> tuple[Event, ...]:
        """The last thousand events, the oldest first."""
        return tuple(self._events.copy())  # a copy is made in one step, and the thread appends events

    @property
    def is_running(self) -> bool:
        """Whether a thread polls the store."""
        return self._task is not None and not self._task.done

    def poll(self) -> tuple[Event, ...]:
        """Looks at the store once, in this thread.

        Returns:
            The events; none without a new checkpoint.

        Raises:
            OptionError: The target refuses the options of the swap.

        Examples:
            >>> following = modelstate.follow(live, "runs/checkpoints", background=False)
            >>> [event.action for event in following.poll()]
            ['swapped']
        """
        if has_exclusively(self._polls):
            return ()  # a callback has called this
        with exclusive(self._polls, timeout_seconds=math.inf):
            self._events_of_poll = []
            self._try_candidates()
            return tuple(self._events_of_poll)

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """Stops the thread. A checkpoint that is still being read is given up; a swap ends where it has read it.

        A serving app in another process goes on with a swap that it was asked for; its answer is not waited for.

        Args:
            timeout_seconds: Seconds to wait for the thread; None waits without limit.

        Returns:
            Whether the thread has ended. It has not after a timeout, or where the thread itself calls this.

        Examples:
            >>> following.stop(timeout_seconds=60)
            True
        """
        if self._task is not None:
            self._task.cancel(wait=False)
            if not self._task.is_current:
                self._task.wait(timeout_seconds)
        return not self.is_running

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until the thread has ended, by `stop` or by an error.

        Args:
            timeout_seconds: Seconds to wait; None waits without limit. The thread itself, in a callback, never waits.

        Returns:
            Whether the thread has ended.

        Examples:
            >>> following.wait(timeout_seconds=3600)
            False
        """
        return self._task is None or (not self._task.is_current and self._task.wait(timeout_seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The thread.

    def start(self) -> None:
        """Starts a daemon thread that polls at once, and then every `poll_seconds` seconds, unless one is running.

        Raises:
            BackgroundCancelledError: The system starts no more threads.

        Examples:
            >>> following = modelstate.follow(live, "runs/checkpoints", background=False)
            >>> following.start()
        """
        with exclusive(self._polls, timeout_seconds=math.inf):
            if self.is_running:
                return
            self._task = BackgroundTask(
                self._poll_until_cancelled, kind="follow", where=self._store.directory, at_exit=AtExit.CANCEL_LAST
            )
            self._task.start()

    def _poll_until_cancelled(self, task: BackgroundTask[None]) -> None:
        try:
            with stopped_by(lambda: task.is_cancelled):
                while not task.is_cancelled:
                    self.poll()
                    # The polls of programs that follow one store spread over time.
                    task.sleep(self._poll_seconds * random.uniform(0.9, 1.1))
        except Stopped:
            pass
        except BaseException as error:
            self._report("ended", None, self._store.directory, error)

    # A poll.

    def _try_candidates(self) -> None:
        outcome: Outcome = "again"
        while outcome == "again":
            candidates = self._candidates()
            if candidates is None:
                return
            outcome = "taken"
            for candidate in candidates:
                if self._task is not None and self._task.is_cancelled and self._task.is_current:
                    return
                if (outcome := self._take(candidate)) != "skipped":
                    break
        if outcome != "later":
            self._reported.clear()

    def _candidates(self) -> list[_Candidate] | None:
        """Returns the checkpoints that `select` prefers to the present one, best first; None for an unreadable store.

        Damaged checkpoints are among them, since opening them gives the reason.
        """
        directory = self._store.directory
        try:
            infos = self._store.infos()
            if not infos and not is_remote(directory) and not os.path.isdir(directory):
                raise SourceNotFoundError(
                    "the directory of the store does not exist; follow waits for it",
                    where=directory,
                    remedy="nothing, if training has not saved yet; otherwise check the path and its mount",
                )
        except Exception as error:
            self._wait_for(error, None, directory)
            return None
        metric, sign = self._selection
        if metric is None:
            ages_of = ages({info.step: info.serial if info.intact else None for info in infos})
            candidates = [_Candidate(ages_of[info.step], info) for info in infos]
        else:  # as in `Keep`, one without the metric, or with NaN, is left out; of equal ones the earlier is better
            values = [(info.metrics.get(metric, math.nan), info) for info in infos]
            candidates = [_Candidate((sign * value, -info.step), info) for value, info in values if value == value]
        taken = self._taken
        # Where the one that serves is gone, the numbers of new saves may be lower: training has gone on from before it.
        is_gone = taken is not None and metric is None and taken.key not in [each.key for each in candidates]
        return [
            candidate
            for candidate in sorted(candidates, key=lambda candidate: candidate.rank, reverse=True)
            if self._refused.get(candidate.key, 0) < _MAX_TRIES
            # Ranks of different stores cannot be compared.
            and (
                taken is None
                or candidate.info.store not in ("", taken.info.store)
                or candidate.rank > taken.rank
                or (is_gone and candidate.info.time > taken.info.time)
            )
        ]

    def _take(self, candidate: _Candidate) -> Outcome:
        info, index, started = candidate.info, self._store.index, time.perf_counter()
        is_live = isinstance(self._target, Live)

        def attempt(entry: StepEntry) -> tuple[str, Checkpoint]:
            # A `Live` verifies what it reads. Other targets get the path of files that have been verified.
            share = slice(0) if is_live else ALL
            with trusts_known_patches.replaced(True):
                return entry.place.path, entry.open_object(self._object, verify=True, share=share)

        try:
            (path, opened), _ = index.first_usable(info.step, attempt)
            with opened as checkpoint:
                if path != info.path:
                    return "again"  # the checkpoint was replaced after it was listed
                report = self._target.swap(checkpoint if is_live else checkpoint.source, **self._options)
        except OptionError:
            raise
        except Exception as error:
            failure = damaged(info.path, short(error)) if isinstance(error, ChecksumError) else error
            return self._failed(candidate, failure, time.perf_counter() - started)
        self._taken = candidate
        seconds, version = time.perf_counter() - started, getattr(report, "version", None)
        version = version if type(version) is int else None
        event = self._add(Event("swapped", version, info.path, time.time(), seconds, step=info.step))
        self._call(self._on_swap, event)
        return "taken"

    def _failed(self, candidate: _Candidate, error: Exception, seconds: float) -> Outcome:
        info, key = candidate.info, candidate.key
        if self._store.index.backend.is_gone(info.path):
            return "again"  # the checkpoint was deleted or replaced, so it is not bad
        # Another try may succeed after a failure of a disk or a network, or without memory.
        cause, is_at_fault = error.__cause__, not isinstance(error, _ALWAYS_RETRIED)
        is_io_error = isinstance(cause, OSError) and not isinstance(cause, ModelStateError | FileNotFoundError)
        may_be_temporary = is_io_error or isinstance(error, _SOMETIMES_RETRIED)
        tries = self._refused.get(key, 0) + is_at_fault
        self._refused[key] = tries if may_be_temporary or not is_at_fault else _MAX_TRIES
        if self._refused[key] < _MAX_TRIES:
            self._wait_for(error, info.step, info.path)
            return "later"
        skipped = SkippedCheckpointError(
            "a checkpoint is skipped",
            where=info.path,
            found=f"{type(error).__name__}: {in_a_line(str(error))}"[:2000],
            remedy="nothing, if a newer checkpoint is swapped in; this one is not tried again",
            step=info.step,
        )
        skipped.__cause__ = error
        self._report("skipped", info.step, info.path, skipped, seconds)
        return "skipped"

    def _wait_for(self, error: Exception, step: int | None, source: str) -> None:
        """Reports an error after which it is tried again, once until a poll succeeds."""
        key = type(error).__name__, step
        if key not in self._reported:
            self._reported.add(key)
            self._report("waiting", step, source, error)

    # Events and callbacks.

    def _report(self, action: str, step: int | None, source: str, error: BaseException, seconds: float = 0.0) -> None:
        # An event has only the text of an error: the traceback would keep the refused weights alive.
        self._add(Event(action, None, source, time.time(), seconds, _text(error), step))
        if self._on_error is not None and isinstance(error, Exception):
            self._call(self._on_error, error)
        else:
            _warn(_text(error))

    def _add(self, event: Event) -> Event:
        self._events.append(event)
        self._events_of_poll.append(event)
        return event

    def _call(self, callback: Callable[[_T], object] | None, argument: _T) -> None:
        try:
            if callback is not None:
                callback(argument)
        except Exception as failure:
            self._add(Event("callback", None, "", time.time(), 0.0, _text(failure)))
            _warn(f"a callback raised {_text(failure)}")


class _Candidate(NamedTuple):
    """A checkpoint that could be swapped in. The one with the higher rank is preferred."""

    rank: tuple[float, float]
    info: CheckpointInfo

    @property
    def key(self) -> tuple[str, float]:
        """What tells it from another checkpoint of its step."""
        return self.info.path, self.info.time


def _selection(select: object) -> tuple[str | None, int]:
    """Returns the metric that `select=` names, None for the time of saving, and its sign: -1 where the lowest is best.

    Raises `OptionError`.
    """
    match = re.fullmatch(r"latest|best:(.+?)(?::(min|max))?", select) if isinstance(select, str) else None
    if match is None:
        raise invalid_option(
            "select",
            "has an unknown value",
            select,
            expected='"latest", "best:METRIC" for the lowest, or "best:METRIC:max" for the highest',
        )
    return match[1], 1 if match[2] == "max" else -1


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _warn(text: str) -> None:
    with suppress(FollowWarning):  # with warnings as errors, an exception would end the thread
        warnings.warn(text, FollowWarning, stacklevel=2)
