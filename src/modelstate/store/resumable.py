"""`modelstate.resumable`: the steps of a training loop that may be killed at any time and started again.

A thread runs one loop at a time. A loop within another loop's step is refused: its restore would undo what the outer
loop has done to the objects since.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

from modelstate.arguments import check_integer, check_keywords, checked_call, invalid_option
from modelstate.distributed.agreement import Agreement, Digest, agreement_of
from modelstate.errors import (
    OptionError,
    ReadFailedError,
    SaveFailedWarning,
    SourceAccessError,
    StoreMovedError,
    WriteFailedError,
)
from modelstate.objects.objects import targets_of, tensors_within
from modelstate.objects.stateful import checked_iterators
from modelstate.process import ThreadValue
from modelstate.store.deadline import Deadline, now_seconds
from modelstate.store.directory import warn_caller
from modelstate.store.retention import Keep, check_metric, metric_value
from modelstate.store.saving import SavedStep
from modelstate.store.store import PendingSave, RestoredStep, Store
from modelstate.text_format import short_repr

_logger = logging.getLogger(__name__)
_RESTORE_OPTIONS = tuple(inspect.signature(Store.restore).parameters)[2:]


_PASSING = (WriteFailedError, ReadFailedError, StoreMovedError, SourceAccessError)
"""The errors that an I/O error becomes, wherever in a save it happens. The next save may succeed."""


class LoopSaver:
    """The saves of a training loop. An I/O error of a save in the background is a warning, and the loop goes on.

    Args:
        store: the store to save to.
        deadline: gets the times of the saves, for its margin.
        saved_step: the step that the run was restored from; -1 where it was not.

    Attributes:
        lost: the error of the last save in the background; None where it succeeded.
    """

    def __init__(self, store: Store, deadline: Deadline | None, saved_step: int = -1) -> None:
        self._store, self._deadline, self._saved_step = store, deadline, saved_step
        self._pending: PendingSave | None = None
        self.lost: Exception | None = None

    def save(
        self, step: int, objects: Mapping[str, object], *, metrics: dict[str, float], overwrite: bool, background: bool
    ) -> None:
        """Saves a step as `Store.save` does, unless it has been saved. Waits for the save in the background before."""
        self.collect()
        if step == self._saved_step:
            return
        if not background:
            self._note_saved(self._store.save(step, objects, metrics=metrics, overwrite=overwrite))
        else:
            try:
                self._pending = self._store.save(step, objects, metrics=metrics, overwrite=overwrite, background=True)
            except _PASSING as error:
                self._warn_lost(step, error)
                return
        self._saved_step = step

    def collect(self, *, wait: bool = True) -> None:
        """Takes the result of the save in the background. Without `wait`, only where it has ended."""
        pending = self._pending
        if pending is None or not (wait or pending.done):
            return
        self._pending = None
        try:
            self._note_saved(pending.result())
        except _PASSING as error:
            self._warn_lost(pending.step, error)

    def _note_saved(self, saved: SavedStep) -> None:
        self.lost = None
        if self._deadline is not None:
            self._deadline.saved(saved.seconds)

    def _warn_lost(self, step: int, error: Exception) -> None:
        self._saved_step, self.lost = -1, error
        warn_caller(f"step {step} was not saved: {error}", SaveFailedWarning)


class Resumable:
    """The remaining steps of a training run, for one `for` loop: the result of `modelstate.resumable`.

    Attributes:
        start: the first step of this run, which is the number of steps that were done before it.
        done: how many steps are done now, which is the number of the next checkpoint.
        stopped: why the loop ended before its last step, as text; empty where it did not.
        restored: the `RestoredStep` that the run goes on from. None where the store was empty.
        metrics: a dict of numbers that are saved with each checkpoint.
        store: the `Store` that the loop saves to.

    Examples:
        >>> loop = ms.resumable("checkpoints", {"model": model}, steps=1000, save_every=100)
        >>> for step in loop:
        ...     loop.metrics["loss"] = train_step()
        >>> print(loop.start, loop.done, loop.stopped or "all steps are done")
        0 1000 all steps are done
    """

    def __init__(
        self,
        store: Store,
        objects: Mapping[str, object],
        steps: int,
        save_every: int,
        deadline: Deadline | None,
        background: bool,
        restored: RestoredStep | None,
        owns_store: bool,
    ) -> None:
        self.restored = restored
        self.start = self.done = restored.step if restored is not None else 0
        self.stopped = ""
        self.metrics: dict[str, float] = dict(restored.metrics) if restored is not None else {}
        """Numbers by name that are saved with each checkpoint, and checked after each step. A value stays until it is
        replaced, also in a resumed run. `math.nan` stands for a value that is not known yet."""
        self.store, self._objects, self._steps = store, objects, steps
        self._save_every, self._deadline, self._background = save_every, deadline, background
        self._owns_store = owns_store
        self._agreement = store._agreement(objects, "modelstate.resumable")
        """The ranks that step, save and stop together."""
        self._is_first = True
        """Whether no step has been yielded yet."""
        self._saver = LoopSaver(store, deadline, saved_step=self.start if restored is not None else -1)
        self._checked_at = 0.0
        """When this loop last checked its deadline."""
        _newest[store.directory] = weakref.ref(self)

    def __repr__(self) -> str:
        return f"<Resumable {self.done} of {self._steps} steps are done, {self.store!r}>"

    def __iter__(self) -> Iterator[int]:
        objects = (target.obj for target in targets_of(self._objects).values())
        with (
            self._deadline or nullcontext(),
            closing(self.store) if self._owns_store else nullcontext(),
            checked_iterators(objects),
        ):
            yield from self._run()

    def _run(self) -> Iterator[int]:
        _check_no_outer(self.store)
        self._check_is_newest()
        self._checked_at = time.perf_counter()
        deadline_start = math.inf if self._deadline is None else self._deadline.start
        if self.done < self._steps and self._stop() and _loops.last_stop >= deadline_start:
            return  # an earlier loop of the program was stopped, and this one may need the result of that
        while self.done < self._steps and not self._stop():
            is_first, self._is_first = self._is_first, False
            if is_first and self.restored is not None:
                self.restored.rewind_generators()  # undoes draws since the restore
            with _loops.replaced(True):
                yield self.done
            self._check_is_newest()
            self.done += 1
            for name, value in self.metrics.items():
                metric_value(name, value)
            now = time.perf_counter()
            if self._deadline is not None:
                self._deadline.stepped(now - self._checked_at)
            self._checked_at = now
            if self.done % self._save_every == 0 and self.done < self._steps:
                self._save(background=self._background)
                self._checked_at = time.perf_counter()
            elif is_first and self.done < self._steps:
                # Optimizers and loaders have state only after the first step, so it is checked again.
                self.store._check_state(self._objects, self._agreement)
        if self.stopped:
            _loops.last_stop = now_seconds()
        self._save(background=False)
        self.store.wait()
        keep = self.store.keep
        if not self.stopped and keep is not None and keep.metric is not None and keep.metric not in self.metrics:
            check_metric(self.store.infos(), keep)

    def _check_is_newest(self) -> None:
        """Raises `OptionError` where a later loop uses the same store, and may have saved to it."""
        if _newest[self.store.directory]() is not self:
            raise OptionError(
                "another loop over the same store was made since, so that their steps would be mixed up",
                where=self.store.directory,
                remedy="give each loop a Store of its own, in a new directory: this one may have the steps of both",
            )

    def _stop(self) -> bool:
        """Whether the deadline of this rank, or of another one, is reached."""
        self._saver.collect(wait=False)
        self.stopped = ""
        if self._deadline is None:
            return False
        own = self._deadline.reason if self._deadline.reached else ""
        for rank, reason in enumerate(self._agreement.texts("stopping", own)):
            if reason:
                self.stopped = reason if rank == self._agreement.position else f"rank {rank}: {reason}"
                return True
        return False

    def _save(self, *, background: bool) -> None:
        # Where training went back to an earlier checkpoint, the later ones are replaced.
        self._saver.save(self.done, self._objects, metrics=dict(self.metrics), overwrite=True, background=background)


class _Loops(ThreadValue[bool]):
    """Whether a loop of this thread is in a step."""

    last_stop = -math.inf
    """When a loop was last stopped before its last step, in seconds since the machine started."""


_loops = _Loops(False)
_newest: dict[str, weakref.ref[Resumable]] = {}
"""The loop over each directory that was made last."""


def _check_no_outer(store: Store) -> None:
    """Raises `OptionError` within a step of another loop of this thread."""
    if _loops.value:
        raise OptionError(
            "a loop within another loop's step: restoring its objects would undo steps of the outer loop",
            where=store.directory,
            expected="one loop over all steps",
            remedy="give the number of all steps to one loop: epoch, batch = divmod(step, steps_per_epoch)",
        )


def _agreement(*arguments: object) -> Agreement:
    for store in arguments:
        if isinstance(store, Store):
            return store._agreement(arguments, "modelstate.resumable")
    return agreement_of(tensors_within(arguments), call="modelstate.resumable")


@checked_call("ms.resumable", within=lambda *args, **options: _agreement(*args, *options.values()).phase("beginning"))
def resumable(
    store: Store | str | os.PathLike[str],
    objects: Mapping[str, object],
    *,
    steps: int,
    save_every: int,
    keep: Keep | int | None = None,
    deadline: Deadline | None = None,
    background: bool = True,
    **restoring: Any,
) -> Resumable:
    """Returns the remaining steps of a training run, for a `for` loop that may be killed and started again.

    Restores the objects from the newest checkpoint that is whole, if there is one, and yields the number of each
    remaining step, from 0 to `steps - 1`. It saves between the steps: after every `save_every` of them, after the last
    one, and when the deadline is near or a signal has come. Then the loop ends, and `stopped` says why. The number of a
    checkpoint is the number of steps that are done.

    A loop that is left by `break` or an exception saves nothing more. Of the loops over a store, only the one that was
    made last goes on. A loop within another loop's step is refused.

    Random generators among the objects are set when the objects are restored, and again before the first step: random
    numbers that are drawn between this call and the loop do not change the steps.

    This call checks that the objects can be saved and the directory can be written to. The objects are checked again
    after the first step, when optimizers and loaders have their state. Nothing is checked where all steps are done.

    On several ranks, as of a model that is sharded, all ranks call it and run the loop. They take the same steps, and
    the deadline of one rank, or a signal to it, ends the loop on all of them. The metrics are those of the first rank.

    A data loader that a resumed run would iterate in another way is a `ResumeWarning`: one with persistent workers that
    start in a step, and one among the objects that is left in the middle of its data.

    Args:
        store: a `Store`, or the path of its directory. The store of a path is closed when the loop ends.
        objects: as `Store.save` takes them: everything that the training depends on, with random generators and data
            loaders.
        steps: the number of steps of the run.
        save_every: the number of steps between two checkpoints.
        keep: the checkpoints that stay, as in `Store`; only for a path.
        deadline: when to stop.
        background: True goes on when the state has been copied to memory, and a thread writes it; False waits until
            each checkpoint is durable. The loop always waits for the last checkpoint.
        restoring: options of `Store.restore`.

    Returns:
        The loop; its attributes are `start`, `done`, `stopped`, `restored`, `metrics` and `store`. It is logged (level
        INFO) that a run goes on from a checkpoint.

    Raises:
        OptionError: An argument cannot be used; or a loop of this thread is in a step; or, in the loop, a later
            loop uses the same store; or the loop ends and no checkpoint has the metric of `Keep(best=...)`.
        DistributedError: The ranks have different arguments.
        RankLostError: A rank did not take part in time.

    This call raises what `Store.restore` and `Store.check` raise, and the loop raises what `Store.save` raises. An I/O
    error, or a directory that does not exist any more, in a save that the loop does not wait for is a
    `SaveFailedWarning`, and the next save writes everything.

    Examples:
        >>> objects = {"model": model, "optimizer": optimizer, "rng": ms.RNG()}
        >>> for step in ms.resumable("checkpoints", objects, steps=1000, save_every=100, keep=3):
        ...     train_step()
    """
    agreement = _agreement(store, objects)
    options = steps, save_every, background, deadline is not None
    with agreement.collective():
        with agreement.phase("beginning", lambda: [Digest.of("the arguments", f"{steps=}, {save_every=}", options)]):
            for name, value in (("steps", steps), ("save_every", save_every)):
                check_integer(name, value, least=1)
            if deadline is not None and not isinstance(deadline, Deadline):
                raise invalid_option("deadline", "must be a Deadline", deadline, expected="a modelstate.Deadline")
            check_keywords("ms.resumable", restoring, _RESTORE_OPTIONS)  # now, not when there is something to restore
            is_path = not isinstance(store, Store)
            if not is_path and keep is not None:
                remedy = "give it to the Store: keep=..."
                raise OptionError("keep= is only for the path of a store", found=short_repr(keep), remedy=remedy)
            store = store if isinstance(store, Store) else Store(store, keep=keep)
            _check_no_outer(store)
            earlier = _newest.get(store.directory, lambda: None)()
            if earlier is not None and earlier.store is not store:
                # A loop that was left by an exception stays alive: the interpreter keeps the exception and its frames.
                earlier._saver.collect()
                earlier.store.close()
        has_steps = agreement.decided("looking for the latest step", lambda: bool(store.infos()))
        restored = None
        if has_steps:
            restored = store.restore(objects, **restoring)
            done, saved_at = restored.step, time.strftime("%F %T", time.localtime(restored.time))
            _logger.info("going on from step %s of %s, saved %s, in %s", done, steps, saved_at, store.directory)
            if done > steps:
                text = "steps=%s is less than the %s steps that are done already, in %s: no step is left"
                _logger.warning(text, steps, done, store.directory)
        if restored is None or restored.step < steps:
            try:
                store.check(objects)
            except BaseException:
                if is_path:
                    store.close()  # the traceback keeps the store alive, and with it the lock of the directory
                raise
    return Resumable(store, objects, steps, save_every, deadline, background, restored, is_path)
