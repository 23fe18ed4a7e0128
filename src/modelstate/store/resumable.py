"""`modelstate.resumable`: a training loop that may be killed at any time."""

import inspect
import logging
import math
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from types import CodeType, FrameType
from typing import Any, Self

from modelstate.errors import OptionError, SaveFailedWarning
from modelstate.objects.loaders import checked_iterators
from modelstate.objects.objects import Kind, targets_of
from modelstate.planning.matching import nearest
from modelstate.store.background import PASSING, PendingSave, SavedStep
from modelstate.store.deadline import Deadline, now_seconds
from modelstate.store.retention import CheckpointInfo, Keep, check_metric, metric_value
from modelstate.store.store import RestoredStep, Store

_logger = logging.getLogger(__name__)
_RESTORING = tuple(inspect.signature(Store.restore).parameters)[2:]


class _Metrics(dict[str, float]):
    """Metrics of a loop, which are checked when they are set."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, metric_value(name, value))

    def setdefault(self, name: str, default: float = math.nan) -> float:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *given: Any, **named: Any) -> None:
        super().update({name: metric_value(name, value) for name, value in dict(*given, **named).items()})

    def __ior__(self, given: Any) -> Self:  # type: ignore[misc, override]
        self.update(given)
        return self


class Resumable:
    """The steps of a training run that are left, for one `for` loop. Made by `modelstate.resumable`.

    Attributes:
        start: the first step of this run, which is how many were done before it.
        done: how many steps are done now.
        stopped: why the loop ended before its last step; empty where it did not.
        restored: the `RestoredStep` that the run goes on from; None where nothing had to be restored.
        metrics: a dict of numbers that are saved with each checkpoint.
        store: the `Store` that the loop saves to.

        loop = ms.resumable("checkpoints", {"model": model}, steps=1000, save_every=100)
        for step in loop:
            loop.metrics["loss"] = train_step()
        print(loop.start, loop.done, loop.stopped or "all steps are done")
    """

    def __init__(
        self,
        store: Store,
        objects: Mapping[str, Any],
        steps: int,
        save_every: int,
        deadline: Deadline | None,
        block: bool,
        restored: RestoredStep | None,
        reached: CheckpointInfo | None,
        owns_store: bool,
    ) -> None:
        before = restored or reached
        self._restored = restored
        self._start = self._done = before.step if before is not None else 0
        self._stopped = ""
        self.metrics = before.metrics if before is not None else {}
        self._store, self._objects, self._steps = store, objects, steps
        self._save_every, self._deadline, self._block = save_every, deadline, block
        self._owns_store = owns_store
        self._is_first = True
        """Whether no step has been handed out yet."""
        self._compared_metrics: tuple[str, ...] = ()
        """The names of metrics that have been compared with the metric of `Keep(best=...)`."""
        self._is_metric_missed = False
        """Whether it has been logged that the metric of `Keep(best=...)` is not in the metrics."""
        self._saved_at = self.start if before is not None else -1
        self._reached_within: dict[str, int] = {}
        """How many steps loops over other stores, within steps of this one, have done to its objects."""
        self._pending: PendingSave | None = None
        self._step_began = 0.0
        self._looked_at = 0.0
        """When this loop, or one within its step, last looked at the deadline of both."""
        _newest[store.directory] = weakref.ref(self)
        self._caller: tuple[int, CodeType | None] = 0, None
        """The frame that has asked for the last step: its identity, which another one gets behind it, and its code."""
        self._stopped_within = ""
        """Why a loop within the last step was ended, so that the step is not done."""

    @property
    def start(self) -> int:
        """The first step of this run, which is how many steps were done before it."""
        return self._start

    @property
    def done(self) -> int:
        """How many steps are done; the number of the checkpoint that is saved now."""
        return self._done

    @property
    def stopped(self) -> str:
        """Why the loop ended before its last step, as text; empty where it did not."""
        return self._stopped

    @property
    def restored(self) -> RestoredStep | None:
        """What was restored, with the plain values among the objects.

        None where the store was empty, and where the objects are as new as the checkpoint: in the step of another loop
        that has them all, after an earlier loop over this store in it, or where the other loop was restored later.
        """
        return self._restored

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers by their names, which are saved with each checkpoint, as for `Keep(best=3, metric="loss")`.

        A value stays until it is replaced, also in a resumed run. `math.nan` stands for one that is not known yet.
        Setting a name that is no text, or a value that is no number, raises `OptionError`: of a tensor give
        `loss.item()`.
        """
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Mapping[str, float]) -> None:
        checked = _Metrics()
        checked.update(metrics)
        self._metrics = checked

    @property
    def store(self) -> Store:
        """The store that the loop saves to: the one that was given, or that of the path."""
        return self._store

    def __repr__(self) -> str:
        return f"<Resumable {self.done} of {self._steps} steps are done, {self._store!r}>"

    def __iter__(self) -> Iterator[int]:
        objects = (target.obj for target in targets_of(self._objects).values())
        with (
            self._deadline or nullcontext(),
            closing(self._store) if self._owns_store else nullcontext(),
            checked_iterators(objects),
        ):
            yield from self._all()

    def _all(self) -> Iterator[int]:
        around = _loops.around()
        self._check_is_newest()
        sharing = [loop._looked_at for loop in around if loop._deadline is self._deadline and loop.is_in_step()]
        self._look(around, since=max(sharing, default=None))
        if self.done < self._steps and self._stop() and _loops.last_stop >= self._deadline_start:
            return  # an earlier loop was stopped, so what this one would begin with is not there
        while self.done < self._steps and not self._stop():
            self._step_began = now_seconds()
            self._caller = _identity(sys._getframe(2))  # behind this generator and `__iter__`
            around.append(self)
            is_first, self._is_first = self._is_first, False
            if is_first and self._restored is not None:
                self._restored.rewind_generators()  # whatever was drawn since they were restored
            try:
                yield self.done
            finally:
                around.remove(self)
            self._check_is_newest()
            if self._stopped_within:
                self._stopped, self._stopped_within = self._stopped_within, ""
                self._hear()
                return
            self._done += 1
            self._note_misspelt_metric()
            self._look(around, since=self._looked_at)
            if self.done % self._save_every == 0 and self.done < self._steps:
                self._save(block=self._block)
                self._look(around)
            elif is_first and self.done < self._steps:
                # Optimizers and loaders have their state from the first step on.
                self._store.check_state(self._objects)
        if self.stopped:
            self._tell(around)
        self._save(block=True)
        self._store.wait()
        if not self.stopped:
            self._check_metric()
            for loop in around:
                if loop.has_all(self._objects):
                    loop._reached_within[self._store.directory] = self.done
        self._look(around)

    def _check_is_newest(self) -> None:
        """Raises `OptionError` where another loop has restored from the same store, and may have saved to it, since."""
        if _newest[self._store.directory]() is not self:
            raise OptionError(
                "another loop over the same store was made since, so that their steps would be mixed up",
                where=self._store.directory,
                remedy="give each loop a Store of its own, in a new directory: this one may have the steps of both",
            )

    def _look(self, around: "list[Resumable]", since: float | None = None) -> None:
        """Before the deadline is looked at: tells it for how long nobody has, and the loops around that it was."""
        now = time.perf_counter()
        if self._deadline is not None and since is not None:
            self._deadline.stepped(now - since)
        for loop in (*around, self):
            if loop._deadline is self._deadline:
                loop._looked_at = now

    @property
    def _deadline_start(self) -> float:
        return math.inf if self._deadline is None else self._deadline.start

    def _tell(self, around: "list[Resumable]") -> None:
        """Tells the loops in whose steps this one is that they are not done; but not of a time within the step."""
        _loops.last_stop = now_seconds()
        assert self._deadline is not None
        for loop in around:
            if self._deadline.is_by_signal or self._deadline.start < loop._step_began:
                loop._stopped_within = self.stopped

    def give_up(self) -> None:
        """Ends the background save, and closes the store for a newer loop, behind which this one cannot go on.

        An interpreter keeps the last error, and with it the loop that was left by it.
        """
        self._hear()
        self._store.close()

    def has_all(self, objects: Mapping[str, Any]) -> bool:
        """Whether all of the objects are among this loop's, and none is a plain value, which only a restore gives."""
        mine = {id(target.obj) for target in targets_of(self._objects).values()}
        return all(target.kind is not Kind.VALUE and id(target.obj) in mine for target in targets_of(objects).values())

    def is_as_new_as(self, info: CheckpointInfo, directory: str) -> bool:
        """Whether the objects of this loop, in its step, are as new as the newest checkpoint of another store."""
        restored = self._restored
        return self._reached_within.get(directory) == info.step or (restored is not None and restored.time >= info.time)

    def is_in_step(self) -> bool:
        """Whether who asked for the last step is still at it: an error may have ended that, and kept the frame.

        Where somebody between has asked, as a generator that passes the steps on, it is False all the same.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None and _identity(frame) != self._caller:
            frame = frame.f_back
        return frame is not None

    def _stop(self) -> bool:
        if self._pending is not None and self._pending.done:
            self._hear()
        self._stopped = self._deadline.reason if self._deadline is not None else ""
        return bool(self.stopped)

    def _save(self, *, block: bool) -> None:
        self._hear()  # it is waited for, as it would be by the store
        if self._saved_at == self.done:
            return
        self._note_metric()
        # A step that was left to go on from an earlier one is done again, and replaced.
        how: dict[str, Any] = {"metrics": dict(self._metrics), "overwrite": True}
        if block:
            self._learn(self._store.save(self.done, self._objects, **how))
        else:
            try:
                self._pending = self._store.save(self.done, self._objects, block=False, **how)
            except PASSING as error:
                self._lost(self.done, error)
                return
        self._saved_at = self.done

    def _note_metric(self) -> None:
        """Logs once that the metric which decides what is kept is not among the metrics."""
        keep = self._store.keep
        if keep is None or keep.metric is None or keep.metric in self._metrics or self._is_metric_missed:
            return
        self._is_metric_missed = True
        _logger.warning(
            "step %s is saved without the metric of Keep(best=%s, metric=%r): loop.metrics has %s",
            *(self.done, keep.best, keep.metric, ", ".join(map(repr, self._metrics)) or "nothing"),
        )

    def _note_misspelt_metric(self) -> None:
        """Logs a metric that was set under nearly the name of the metric which decides what is kept.

        Other metrics say nothing: the metric of `Keep(best=...)` may be set as late as in the step that is saved.
        """
        wanted = self._store.keep.metric if self._store.keep is not None else None
        if wanted is None or wanted in self._metrics or self._compared_metrics == (names := tuple(self._metrics)):
            return
        numbers = re.findall(r"\d+", wanted)  # top1 is not top5 misspelt
        alike = [name for name in names if re.findall(r"\d+", name) == numbers and name not in self._compared_metrics]
        self._compared_metrics = names
        if near := nearest(wanted, alike):
            _logger.warning(
                "step %s set loop.metrics[%r]: is it the metric of Keep(best=..., metric=%r), which has not been set?",
                *(self._done - 1, near, wanted),
            )

    def _check_metric(self) -> None:
        """Raises `OptionError` where no checkpoint has the metric by which the best ones would be chosen."""
        if self._is_metric_missed and self._store.keep is not None:
            check_metric(self._store.infos(), self._store.keep)

    def _hear(self) -> None:
        """What has become of the save in the background. That it has failed does not end the training."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._learn(pending.result())
        except PASSING as error:
            self._lost(pending.step, error)

    def _lost(self, step: int, error: Exception) -> None:
        self._saved_at = -1
        frame, level = sys._getframe(), 1
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame, level = frame.f_back, level + 1
        warnings.warn(f"step {step} was not saved: {error}", SaveFailedWarning, stacklevel=level)

    def _learn(self, saved: SavedStep) -> None:
        """How long saves take is what the deadline learns its margin from."""
        if self._deadline is not None:
            self._deadline.saved(saved.seconds)


class _Loops(threading.local):
    """The loops of a thread."""

    last_stop = -math.inf
    """When one was ended before its last step, in seconds since the machine started."""

    def around(self) -> list[Resumable]:
        """Those that are in a step, the outer ones first."""
        made: list[Resumable] = self.__dict__.setdefault("in_a_step", [])
        return made


def _identity(frame: FrameType) -> tuple[int, CodeType | None]:
    return id(frame), frame.f_code


_loops = _Loops()
_newest: dict[str, "weakref.ref[Resumable]"] = {}
"""Which loop over each store was made last."""


def resumable(
    store: Store | str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    steps: int,
    save_every: int,
    keep: Keep | int | None = None,
    deadline: Deadline | None = None,
    block: bool = False,
    **restoring: Any,
) -> Resumable:
    """The steps of a training run that are not done yet, for a `for` loop that may be killed and started again.

    Restores the objects from the newest checkpoint that is whole, if there is one, and gives the number of each step
    that is left, from 0 to `steps - 1`. Between the steps it saves: after every `save_every` of them, after the last
    one, and when the deadline is near or a signal has come, after which the loop ends and `stopped` says why. The
    number of a checkpoint is how many steps are done. A loop that is left by `break` or an exception saves nothing
    more. So does one in a step of which another loop was ended before its last step: that step is not done. (But where
    the other one's deadline began within the step, it is only the end of the step.) Of the loops over a store only the
    one that was made last goes on.

    Random generators among the objects are set when the objects are restored, and once more when the first step is
    handed out: what draws random numbers between this call and the loop does not change the steps.

    Whether the objects can be saved and the directory can be written to is found out here, and again for the objects
    after the first step, when optimizers and loaders have their state. Not where all steps are done.

    A data loader that a resumed run would iterate in another way is a `ResumeWarning`: one with persistent workers that
    start in a step, and one among the objects that begins anew in the middle of its data.

    Args:
        store: where the checkpoints are: a `Store`, or the path of its directory. The store of a path is closed when
            the loop ends.
        objects: as `Store.save` takes them; all that the training draws on: generators, and where the data is.
        steps: how many the run has.
        save_every: after how many of them it saves.
        keep: for a path: which checkpoints stay, as `Store` takes it.
        deadline: says when to end.
        block: whether the loop waits until a checkpoint is durable; else it goes on when the state has been copied. The
            last one is always waited for.
        restoring: what `Store.restore` takes.

    Returns:
        The loop; its attributes are `start`, `done`, `stopped`, `restored`, `metrics` and `store`. That a run goes on
        from a checkpoint is logged (level INFO).

    Raises what `Store.restore` and `Store.check` raise, here, and what `Store.save` raises, in the loop; but where a
    save that the loop does not wait for fails with an I/O error, in looking at the store or in writing to it, or since
    the directory is not there any more, that is a `SaveFailedWarning`, and the next one saves all. `OptionError` where
    the loop ends and no checkpoint has the metric of `Keep(best=...)`.

        objects = {"model": model, "optimizer": optimizer, "rng": ms.RNG()}
        for step in ms.resumable("checkpoints", objects, steps=1000, save_every=100, keep=3):
            train_step()
    """
    for name, value in (("steps", steps), ("save_every", save_every)):
        if type(value) is not int or value < 1:
            raise OptionError(f"{name}= is a number of steps", expected="an int, 1 or more", found=repr(value))
    if deadline is not None and not isinstance(deadline, Deadline):
        raise OptionError("deadline= says when to end", expected="a modelstate.Deadline", found=repr(deadline))
    is_path = not isinstance(store, Store)
    if not is_path and keep is not None:
        raise OptionError("keep= is for the path of a store", found=repr(keep), remedy="give it to the Store: keep=...")
    store = store if isinstance(store, Store) else Store(store, keep=keep)
    if any(loop._store.directory == store.directory and loop.is_in_step() for loop in _loops.around()):
        raise OptionError(
            "a loop within another one's step, of the same store, in which their steps would be mixed up",
            where=store.directory,
            remedy="give each loop a Store of its own, in another directory",
        )
    for name in restoring:  # now, not when there is something to restore
        if name not in _RESTORING:
            raise OptionError(
                "no option of Store.restore, which takes the further ones",
                expected=nearest(name, _RESTORING) or ", ".join(_RESTORING),
                found=name,
            )
    earlier = _newest.get(store.directory, lambda: None)()
    if earlier is not None and earlier.store is not store:
        earlier.give_up()
    restored, reached = None, _reached(store, objects)
    if reached is None and store.infos():
        restored = store.restore(objects, **restoring)
        _log_resume(restored, store, steps)
    before = restored or reached
    if before is None or before.step < steps:
        store.check(objects)
    return Resumable(store, objects, steps, save_every, deadline, block, restored, reached, is_path)


def _reached(store: Store, objects: Mapping[str, Any]) -> CheckpointInfo | None:
    """The newest checkpoint, where the objects need not be restored from it, as a loop around has them as new.

    Else what the loop around has done to them since would be undone.
    """
    around = _loops.around()
    newest = next((info for info in reversed(store.infos(by_age=True)) if info.intact), None) if around else None
    if newest is None:
        return None
    is_as_new = any(loop.is_as_new_as(newest, store.directory) and loop.has_all(objects) for loop in around)
    return newest if is_as_new else None


def _log_resume(restored: RestoredStep, store: Store, steps: int) -> None:
    when = time.strftime("%F %T", time.localtime(restored.time))
    _logger.info("going on from step %s of %s, saved %s, in %s", restored.step, steps, when, store.directory)
    if restored.step > steps:
        _logger.warning(
            "steps=%s is less than the %s steps that are done already, in %s: no step is left",
            *(steps, restored.step, store.directory),
        )
