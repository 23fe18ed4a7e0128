"""`modelstate.follow`: swaps the checkpoints that training saves into a program that serves."""

import atexit
import inspect
import math
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

from modelstate.errors import (
    AppAccessError,
    AppAnswerError,
    FollowWarning,
    LiveTargetError,
    ModelStateError,
    OptionError,
    QuarantinedError,
    ReadFailedError,
    SkippedCheckpointError,
    SourceNotFoundError,
    SwapBusyError,
)
from modelstate.serve.canary import Canary
from modelstate.serve.live import Live
from modelstate.serve.report import Clock
from modelstate.store.retention import CheckpointInfo, ages, is_number
from modelstate.store.store import Store
from modelstate.text_format import in_a_line

_EVENTS = 1000


class FollowEvent(NamedTuple):
    """What has happened while a store was followed: a row of `Following.events`."""

    action: str
    """ "swapped"; "skipped", a bad checkpoint; "waiting", for what is tried again; "ended", by an error; "callback",
    which raised."""
    step: int | None
    """The checkpoint's; None where it is about none."""
    source: str
    """The path of the checkpoint, or of the store."""
    time: float
    """Seconds since 1970."""
    seconds: float
    """For verifying the checkpoint and swapping it in."""
    version: int | None = None
    """The version that serves since."""
    error: str = ""
    """The class and text of the error; empty where there was none."""


class EventLog:
    """Keeps events and calls callbacks, which cannot stop anything by raising."""

    def __init__(
        self, on_error: Callable[[Exception], Any] | None, on_swap: Callable[[FollowEvent], Any] | None
    ) -> None:
        self._on_error, self._on_swap = on_error, on_swap
        self.events: deque[FollowEvent] = deque(maxlen=_EVENTS)
        self._collected: list[FollowEvent] = []

    @contextmanager
    def collected(self) -> Iterator[list[FollowEvent]]:
        """Gives a list that gets the events within the block."""
        found: list[FollowEvent] = []
        self._collected = found
        try:
            yield found
        finally:
            self._collected = []

    def swapped(self, step: int, source: str, seconds: float, version: int | None) -> None:
        """A checkpoint serves."""
        event = self._note(FollowEvent("swapped", step, source, time.time(), seconds, version))
        if self._on_swap is not None:
            self._call(self._on_swap, event)

    def error(self, action: str, step: int | None, source: str, error: BaseException, seconds: float = 0.0) -> None:
        """Something went wrong, and what is done about it."""
        self._note(FollowEvent(action, step, source, time.time(), seconds, None, _text(error)))
        if self._on_error is not None and isinstance(error, Exception):
            self._call(self._on_error, error)
        else:
            _warn(_text(error))

    def _note(self, event: FollowEvent) -> FollowEvent:
        # Of an error the text alone: its traceback would keep the weights that were refused.
        self.events.append(event)
        self._collected.append(event)
        return event

    def _call(self, callback: Callable[[Any], Any], given: FollowEvent | Exception) -> None:
        try:
            callback(given)
        except Exception as failure:
            self._note(FollowEvent("callback", None, "", time.time(), 0.0, None, _text(failure)))
            _warn(f"a callback raised {_text(failure)}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _warn(text: str) -> None:
    with suppress(FollowWarning):  # where warnings are errors, there is nobody here to get one
        warnings.warn(text, FollowWarning, stacklevel=2)


_BEST = "best:"
_MODES = ("min", "max")
Rank = tuple[float, float]
"""The higher one is wanted."""


class Candidate(NamedTuple):
    """A checkpoint that could be taken up."""

    rank: Rank
    info: CheckpointInfo

    def is_wanted_after(self, taken: "Candidate | None") -> bool:
        """Whether it is to replace the one that was taken; those of another store cannot be compared, and do."""
        if taken is None or (self.info.store and self.info.store != taken.info.store):
            return True
        return self.rank > taken.rank


@dataclass(frozen=True, slots=True)
class Selection:
    """What `select=` says."""

    metric: str | None = None
    """None goes by when checkpoints were saved."""
    highest: bool = False

    def ranked(self, infos: Iterable[CheckpointInfo]) -> list[Candidate]:
        """The checkpoints that could be taken, the most wanted one first; damaged ones too, for reading says why.

        As with `Keep`, one without the metric, or with NaN, is none of the best, and of equal ones the earlier is.
        """
        several = list(infos)
        found = _by_age(several) if self.metric is None else self._by_metric(several, self.metric)
        return sorted(found, key=lambda candidate: candidate.rank, reverse=True)

    def _by_metric(self, infos: list[CheckpointInfo], metric: str) -> list[Candidate]:
        values = [(info.metrics.get(metric, math.nan), info) for info in infos]
        sign = 1 if self.highest else -1
        return [Candidate((sign * value, -info.step), info) for value, info in values if value == value]


def _by_age(infos: list[CheckpointInfo]) -> list[Candidate]:
    ranks = ages({info.step: info.serial if info.intact else None for info in infos})
    return [Candidate(ranks[info.step], info) for info in infos]


def selection(text: object) -> Selection:
    """What `select=` means: "latest", "best:loss" for the lowest, "best:accuracy:max" for the highest.

    Raises `OptionError`.
    """
    if text == "latest":
        return Selection()
    if isinstance(text, str) and text.startswith(_BEST):
        metric, colon, mode = text.removeprefix(_BEST).rpartition(":")
        if not colon or mode not in _MODES:
            metric, mode = text.removeprefix(_BEST), "min"
        if metric:
            return Selection(metric, mode == "max")
    raise OptionError(
        "select= says which checkpoint is wanted",
        expected='"latest", "best:METRIC" for the lowest, or "best:METRIC:max" for the highest',
        found=repr(text),
    )


_TRIES = 3
_MOST_REFUSED = 10_000
_MOST_WORDS = 2000
_EXIT_SECONDS = 2.0
"""How long the end of the program waits for each look that is under way."""

_TRIED_AGAIN = (SwapBusyError, ConnectionError, TimeoutError)
"""What has nothing to do with the checkpoint."""
_TRIED_SOME_TIMES = (ReadFailedError, MemoryError, AppAnswerError)
"""What may have to do with it, and may be over soon."""
_ENDS = (OptionError, AppAccessError)
"""What no checkpoint could change."""

Outcome = Literal["taken", "skipped", "later", "again"]
"""Of trying a checkpoint; with "again" the store has to be looked at again, now."""


class Swappable(Protocol):
    """What takes new weights: a `Live`, or anything with a `swap` that raises when it does not take them."""

    def swap(self, source: Any, /) -> object: ...


class Following:
    """A store that is being followed. Made by `modelstate.follow`; every method may be called from any thread."""

    def __init__(
        self,
        target: Swappable,
        store: Store,
        *,
        selection: Selection,
        object: str,
        poll_s: float,
        on_error: Callable[[Exception], Any] | None,
        on_swap: Callable[[FollowEvent], Any] | None,
        options: dict[str, Any],
    ) -> None:
        self._target, self._store, self._selection, self._object = target, store, selection, object
        self._poll_s, self._options = poll_s, options
        self._telling = EventLog(on_error, on_swap)
        self._taken: Candidate | None = None
        self._refused: dict[tuple[str, float], int] = {}
        """Checkpoints by path and time, with how often they were tried; from `_TRIES` on they are not any more."""
        self._waits_for: set[tuple[str, int | None]] = set()
        """What has been reported since all was well."""
        self._looks = threading.RLock()
        self._is_looking = False
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        serves = "nothing taken up" if self._taken is None else f"step {self._taken.info.step}"
        return f"<Following {self._store.directory!r}: {serves}, {'running' if self.is_running else 'not running'}>"

    @property
    def step(self) -> int | None:
        """The step that was taken up last; None before the first one."""
        return None if self._taken is None else self._taken.info.step

    @property
    def events(self) -> tuple[FollowEvent, ...]:
        """What has happened, the oldest first: the last thousand events."""
        return tuple(self._telling.events)

    @property
    def is_running(self) -> bool:
        """Whether a thread looks from time to time."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> tuple[FollowEvent, ...]:
        """Looks once, now, in this thread, and returns what has happened; nothing where there was nothing new.

        Raises `OptionError` and `AppAccessError`, which no other checkpoint would change; all else is an event.
        """
        with self._looks:
            if self._is_looking:
                return ()  # called by a callback, within a look
            self._is_looking = True
            try:
                with self._telling.collected() as happened:
                    self._look()
            finally:
                self._is_looking = False
            return tuple(happened)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread. A swap that is under way comes to its end first.

        Returns whether the thread has ended; it has not where that took longer than `timeout_s`, or where the thread
        itself calls this.
        """
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        return not self.is_running

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the thread has ended, by `stop` or by an error, and returns whether it has."""
        if self._thread is not None:
            self._over.wait(timeout_s)
        return not self.is_running or self._over.is_set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The thread.

    def start(self) -> None:
        """Looks now, and from time to time, in a thread that does not keep the process alive; one at the most."""
        if self.is_running:
            return
        self._thread = threading.Thread(target=self._run, name="modelstate-follow", daemon=True)
        _running.add(self)
        _watch_exit()
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.poll()
                self._stopping.wait(self._poll_s)
        except BaseException as error:
            self._telling.error("ended", None, self._store.directory, error)
        finally:
            _running.discard(self)
            self._over.set()

    @property
    def _is_to_end(self) -> bool:
        return self._stopping.is_set() and threading.current_thread() is self._thread

    # A look.

    def _look(self) -> None:
        while True:
            candidates = self._candidates()
            outcome: Outcome = "skipped"
            for candidate in candidates or ():
                if self._is_to_end:
                    return
                outcome = self._take(candidate)
                if outcome != "skipped":
                    break
            if outcome == "again":
                continue
            if outcome != "later" and candidates is not None:
                self._waits_for.clear()
            return

    def _candidates(self) -> list[Candidate] | None:
        """What is wanted rather than what was taken, the most wanted first. None where the store cannot be read."""
        directory = self._store.directory
        try:
            infos = self._store.infos()
            if not infos and not os.path.isdir(directory):
                raise SourceNotFoundError(
                    "the directory of the store is not there; it is waited for",
                    where=directory,
                    remedy="nothing, if training has not saved yet; else look at the path, or at what is mounted there",
                )
        except Exception as error:
            self._wait_for(error, None, directory)
            return None
        return [
            one
            for one in self._selection.ranked(infos)
            if one.is_wanted_after(self._taken) and self._refused.get(_key(one), 0) < _TRIES
        ]

    def _take(self, candidate: Candidate) -> Outcome:
        info, clock = candidate.info, Clock()
        try:
            with self._store.open(self._object, info.step, verify=True) as checkpoint:
                if os.path.dirname(checkpoint.source) != info.path:
                    return "again"  # it has been replaced since it was listed
                # A `Live` reads the very files that were verified, or none. Others get a path.
                source = checkpoint if isinstance(self._target, Live) else checkpoint.source
                done = self._target.swap(source, **self._options)
        except _ENDS:
            raise
        except Exception as error:
            return self._failed(candidate, error, clock.seconds)
        self._taken = candidate
        self._telling.swapped(info.step, info.path, clock.seconds, _version(done))
        return "taken"

    def _failed(self, candidate: Candidate, error: Exception, seconds: float) -> Outcome:
        info, key = candidate.info, _key(candidate)
        if not os.path.isdir(info.path):
            return "again"  # it has been taken away, or replaced: that is not its fault
        if isinstance(error, _TRIED_AGAIN):
            self._wait_for(error, info.step, info.path)
            return "later"
        tries = self._refused[key] = self._refused.get(key, 0) + 1
        if tries < _TRIES and _may_be_over_soon(error):
            self._wait_for(error, info.step, info.path)
            return "later"
        self._refused[key] = _TRIES
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        skipped = SkippedCheckpointError(
            "a checkpoint is skipped",
            where=info.path,
            found=f"{type(error).__name__}: {in_a_line(str(error))}"[:_MOST_WORDS],
            remedy="nothing, if the next one is well; it is not tried again",
            step=info.step,
        )
        skipped.__cause__ = error
        self._telling.error("skipped", info.step, info.path, skipped, seconds)
        if isinstance(error, QuarantinedError):
            self._taken = None  # nothing serves: an older one is better
            return "again"
        return "skipped"

    def _wait_for(self, error: Exception, step: int | None, source: str) -> None:
        what = type(error).__name__, step
        if what not in self._waits_for:
            self._waits_for.add(what)
            self._telling.error("waiting", step, source, error)


def follow(
    target: Live | Swappable,
    store: Store | str | os.PathLike[str],
    *,
    select: str = "latest",
    object: str = "model",
    poll_s: float = 5.0,
    on_error: Callable[[Exception], Any] | None = None,
    on_swap: Callable[[FollowEvent], Any] | None = None,
    background: bool = True,
    **options: Any,
) -> Following:
    """Has a program that serves take up each checkpoint that is saved to a store.

    A checkpoint is read in full and compared with its digests, then it is swapped in. One that is damaged, or that the
    swap refuses, is skipped: the next best one is taken, or what serves goes on. It is reported once, and not tried
    again; one that has been taken away meanwhile is not reported. What serves is replaced by what is wanted rather than
    it, never by less, so that a rollback stays until there is a newer checkpoint. Nothing is written to the store, and
    its lock is not needed.

    Args:
        target: a `Live`, or anything with `swap(path)`, which raises where it does not take what is there. What it
            raises of `TimeoutError`, `ConnectionError` and `SwapBusyError` is not the checkpoint's fault: it is tried
            again at the next look.
        store: a `Store`, or the directory of one, which need not be there yet.
        select: "latest", the one that was saved last; or "best:METRIC", the lowest, and "best:METRIC:max", the highest.
        object: which object of a checkpoint has the weights.
        poll_s: seconds between two looks.
        on_error: called with what went wrong: a `SkippedCheckpointError`, whose cause says why, for each bad
            checkpoint; anything else is waited for and tried again, and reported once until all is well. What it
            raises is an event. Without it, a `FollowWarning` says the same.
        on_swap: called with the event of each checkpoint that is taken up.
        background: False makes no thread: then only `Following.poll` looks.
        options: for each swap, as `canary=` and `rules=` of `Live.swap`.

    Raises `OptionError`, `LiveTargetError` for what takes no weights, `SaveTargetError` for what can be no store, and
    `CanaryError` where what serves does not answer the inputs of a `Canary`: no checkpoint would get past it.
    """
    chosen = selection(select)
    _check_target(target, options)
    canary = options.get("canary")
    if isinstance(target, Live) and isinstance(canary, Canary):
        canary.prepared(target)
    if type(object) is not str or not object:
        raise OptionError("object= is the name of an object", expected="text, as 'model'", found=repr(object))
    if not is_number(poll_s) or not 0 < poll_s < threading.TIMEOUT_MAX:
        raise OptionError("poll_s= is a number of seconds", expected="above 0", found=repr(poll_s))
    for name, callback in (("on_error", on_error), ("on_swap", on_swap)):
        if callback is not None and not callable(callback):
            raise OptionError(f"{name}= is called", expected="a function, or None", found=repr(callback))
    # One of its own: a store that saves as well would have its errors raised here.
    mine = Store(store.directory if isinstance(store, Store) else store)
    following = Following(
        target,
        mine,
        selection=chosen,
        object=object,
        poll_s=float(poll_s),
        on_error=on_error,
        on_swap=on_swap,
        options=options,
    )
    if background:
        following.start()
    return following


def _check_target(target: object, options: dict[str, Any]) -> None:
    swap = getattr(target, "swap", None)
    if not callable(swap):
        raise LiveTargetError(
            "this takes no new weights",
            expected="a modelstate.Live, or an object with swap(path)",
            found=f"{type(target).__module__}.{type(target).__qualname__}",
            remedy="follow(live, store): the program comes first",
        )
    try:
        inspect.signature(swap).bind("", **options)
    except TypeError as error:
        raise OptionError("these arguments are not for swap", where=type(target).__name__, found=error) from error
    except ValueError:
        pass  # no signature: calling it will tell


def _key(candidate: Candidate) -> tuple[str, float]:
    return candidate.info.path, candidate.info.time


def _version(done: object) -> int | None:
    found = getattr(done, "version", None)
    return found if type(found) is int else None


def _may_be_over_soon(error: BaseException) -> bool:
    """Whether it is worth while to try again: a disk or a network that does not answer, or no memory."""
    cause = error.__cause__
    is_input = isinstance(cause, OSError) and not isinstance(cause, ModelStateError | FileNotFoundError)
    return isinstance(error, _TRIED_SOME_TIMES) or is_input


_running: "weakref.WeakSet[Following]" = weakref.WeakSet()
_watching_exit = False


def _watch_exit() -> None:
    global _watching_exit
    if not _watching_exit:
        _watching_exit = True
        atexit.register(_stop_all)


def _stop_all() -> None:
    """A thread that computes while the interpreter goes away could take the process down with it."""
    several = list(_running)
    for following in several:
        following._stopping.set()
    for following in several:
        following.stop(_EXIT_SECONDS)
