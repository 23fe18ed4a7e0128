"""A Trainer of transformers that saves to a store, ends in time, and goes on where it was.

saving = StoreCallback(ms.Store("run", keep=3), deadline=ms.Deadline(hours=4))
trainer = Trainer(model, args, callbacks=[saving], ...)
saving.train(trainer)
"""

import dataclasses
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from modelstate.errors import (
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    OptionError,
    PackageError,
    SaveFailedWarning,
    StepNotFoundError,
)
from modelstate.objects.rng import RNG
from modelstate.store import records
from modelstate.store.background import PASSING, PendingSave, SavedStep
from modelstate.store.deadline import Deadline
from modelstate.store.reading import Step
from modelstate.store.records import read_record
from modelstate.store.retention import is_number
from modelstate.store.store import Store, newest_whole, problem_now

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as found:
    raise PackageError(
        "this needs transformers, which is not here", found=found, remedy='pip install "modelstate[transformers]"'
    ) from found

_STATE = "trainer_state"
_OWN = ("model", "optimizer", "scheduler", "rng", "scaler", _STATE)


class StoreCallback(TrainerCallback):  # type: ignore[misc]
    """Saves model, optimizer, scheduler, random generators and the Trainer's own state to a store.

    It takes the place of the Trainer's own checkpoints: where `save_strategy` and `save_steps` would have one written,
    a step of the store is; with `save_strategy="best"` both are. The step is saved before the next one begins, after
    what is evaluated and logged at it; the metrics of that evaluation go with it. The number of a step is the Trainer's
    `global_step`.

    Args:
        store: where it is saved to.
        deadline: when it is reached, or has received a signal, the run is saved and ends.
        objects: more of what `Store.save` takes, saved and restored with the rest: {"loader": ...}.
        block: as for `Store.save`; with False training goes on while a thread writes, but at the end of the run.

    A restored run is what it would have been, bit for bit, as long as what makes the batches draws nothing from the
    global random generators: the Trainer fetches those that it skips anew, as it does for its own checkpoints. One
    process trains: `OptionError` where several do.
    """

    def __init__(
        self,
        store: Store,
        *,
        deadline: Deadline | None = None,
        objects: Mapping[str, Any] | None = None,
        block: bool = True,
    ) -> None:
        if not isinstance(store, Store):
            raise OptionError("a StoreCallback saves to a store", expected="a modelstate.Store", found=repr(store)[:80])
        if taken := sorted(set(objects or {}) & set(_OWN)):
            raise OptionError("objects= has names that mean something else here", found=", ".join(taken))
        self.store, self.deadline, self.block = store, deadline, block
        self._objects = dict(objects or {})
        self._rng = RNG()
        self._trainer: Any = None
        self._restore: int | None = None
        self._rng_state: dict[str, Any] | None = None
        """What the generators have to be made when the first step after a restore begins."""
        self._replaced: set[int] = set()
        """Steps that are there and may be saved anew: damaged ones, and those behind a step that it went back to."""
        self._is_due = False
        self._saved_step = -1
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        self._looked_at = 0.0
        self._pending: PendingSave | None = None
        self._lost: Exception | None = None
        """Why the last save in the background failed, as long as nothing has been saved since."""
        self._is_done = False
        """Whether the step that was restored is the last one of the run."""

    # Training.

    def train(self, trainer: Any, *, step: Step | None = "latest", **options: Any) -> Any:
        """Goes on from a step of the store, or begins where there is none, and returns what `trainer.train` returns.

        Of the latest steps the newest one is taken that is whole; None begins anew. The Trainer skips the batches that
        it has had. Everything is restored, or nothing. Signals that the deadline takes are taken until it returns.
        Of a run that has had all its steps the last one is restored, and nothing is trained or saved.

        `options` are further arguments of `trainer.train`. Raises what `Store.restore` raises, and what a save raises;
        but where one in the background fails with an I/O error, or since the store's directory is not there any more,
        that is a `SaveFailedWarning`, and the next one saves all. The last one is waited for, and raises.
        """
        if self not in trainer.callback_handler.callbacks:
            raise OptionError("the Trainer does not have this callback", remedy="Trainer(..., callbacks=[saving])")
        if options.get("resume_from_checkpoint"):
            raise OptionError("resume_from_checkpoint= is of the Trainer's own checkpoints", remedy="step=")
        self._trainer = trainer
        self._restore = self._whole(step)
        try:
            with self.deadline or nullcontext(), self._resume_directory(trainer) as directory:
                output = trainer.train(resume_from_checkpoint=directory, **options)
            self.store.wait()
        finally:
            self._trainer, self._restore, self._rng_state, self._is_due = None, None, None, False
            self._replaced.clear()
        return output

    def _whole(self, step: Step | None) -> int | None:
        """The step to go on from, all of whose bytes have been compared with their digests."""
        self._replaced.clear()
        if step is None:
            return None
        if step == "latest":
            number = newest_whole(self.store, self._pass_over)
            if number is None and self.store.infos():
                raise StepNotFoundError(
                    "no checkpoint of the store is whole",
                    where=self.store.directory,
                    remedy="look at the disk, or train(trainer, step=None) to begin anew in another directory",
                )
            if number is None:
                return None
        elif problem := problem_now(self.store, step):
            raise DamagedCheckpointError("the checkpoint is damaged", where=f"step {step}", found=problem)
        else:
            number = step
        # Those behind the newest one are of a run that has been left: training has gone back before.
        self._replaced.update(info.step for info in self.store.infos() if info.step > number)
        return number

    def _pass_over(self, step: int, problem: str) -> None:
        self._replaced.add(step)
        warnings.warn(f"step {step} is passed over: {problem}", DamagedCheckpointWarning, stacklevel=5)

    @contextmanager
    def _resume_directory(self, trainer: Any) -> Iterator[str | None]:
        """What the Trainer takes for a checkpoint of its own: where it was, and no tensors.

        Those it gets from the store as soon as its optimizer is there, all at once.
        """
        if self._restore is None:
            yield None
            return
        info = next((info for info in self.store.infos() if info.step == self._restore), None)
        if info is None:
            raise StepNotFoundError(
                "the checkpoint has been taken away", where=self.store.directory, found=f"step {self._restore}"
            )
        entry = read_record(info.path).entries.get(_STATE)
        if entry is None:
            raise StepNotFoundError(
                "this step was not saved by a StoreCallback", where=info.path, expected=_STATE, found="no such object"
            )
        with (
            tempfile.TemporaryDirectory(prefix="modelstate-") as directory,
            # The Trainer loads no tensors of a model from what it takes for its checkpoint: there are none.
            _instead(trainer, "_load_from_checkpoint", lambda *_, **__: None),
            _instead(trainer, "get_batch_samples", partial(self._batches_left, trainer.get_batch_samples)),
        ):
            with open(os.path.join(directory, "trainer_state.json"), "w", encoding="utf-8") as file:
                json.dump(records.value_of(info.path, entry), file)
            yield directory

    # Events of the Trainer.

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Restores, where `train` has found something to go on from."""
        if args.world_size > 1:
            raise OptionError(
                "several processes train, and a StoreCallback knows how to save what one of them has",
                found=f"{args.world_size} processes",
                remedy="leave the callback out, and let the Trainer save",
            )
        self._saved_step, self._is_due, self._looked_at = -1, False, time.monotonic()
        self._pending, self._lost, self._is_done = None, None, False
        if self._restore is not None:
            self.store.restore(self._objects_of(state, given), self._restore, verify=False)
            self._saved_step = self._restore
            self._rng_state = self._rng.state_dict()
            self._is_done = state.global_step >= state.max_steps
            if self._is_done:
                # Within an epoch the Trainer would do another step before it looks: see `_batches_left`.
                control.should_training_stop = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Saves what is due: nothing of the epoch has been drawn yet."""
        self._save_if_due(state, given)
        if not _is_within_epoch(state):
            self._set_rng()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Saves what is due: what was to be evaluated and logged has been."""
        self._save_if_due(state, given)
        self._set_rng()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Ends the run in time, and notes that a step is to be saved."""
        now = time.monotonic()
        if self._pending is not None and self._pending.done:
            self._hear()
        if self.deadline is not None:
            self.deadline.stepped(now - self._looked_at)
            if self.deadline.reached:
                # What is evaluated now would take time that there may not be.
                control.should_training_stop, control.should_save, control.should_evaluate = True, True, False
        self._looked_at = now
        return self._take_over(state, control, given)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        if self._is_done:
            control.should_log = control.should_evaluate = control.should_save = False
        return self._take_over(state, control, given)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The Trainer has saved for a reason of its own, and has evaluated."""
        self._is_due = True
        self._save_if_due(state, given)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        numbers = {name: float(value) for name, value in (metrics or {}).items() if is_number(value)}
        self._metrics = state.global_step, numbers

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._save_if_due(state, given, is_last=True)
        self.store.wait()
        self._hear()
        if self._lost is not None:
            raise self._lost

    def _take_over(self, state: Any, control: Any, given: Mapping[str, Any]) -> Any:
        """Does what the Trainer would do next, or as soon as it has evaluated."""
        if control.should_save:
            control.should_save, self._is_due = False, True
        ends = control.should_training_stop or state.global_step >= state.max_steps
        if ends and not control.should_evaluate:
            # At the end of all the Trainer may put the best model in the place of this one.
            self._hear()
            self._is_due |= self._lost is not None
            self._save_if_due(state, given, is_last=True)
        return control

    def _batches_left(self, batches: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """What the Trainer is to do a step with: nothing where it has done all of them before."""
        return ([], None) if self._is_done else batches(*given, **more)

    def _set_rng(self) -> None:
        """Once after a restore: skipping batches has drawn from the generators."""
        if self._rng_state is not None:
            self._rng.load_state_dict(self._rng_state)
            self._rng_state = None

    # Saving.

    def _save_if_due(self, state: Any, given: Mapping[str, Any], is_last: bool = False) -> None:
        if not self._is_due:
            return
        self._is_due = False
        self._hear()  # it is waited for, as it would be by the store
        if state.global_step == self._saved_step:
            return
        if self._trainer is not None:
            self._trainer.store_flos()
        at, numbers = self._metrics
        objects, step = self._objects_of(state, given), state.global_step
        metrics = numbers if at == step else {}
        again = step in self._replaced
        if self.block or is_last:
            self._learn(self.store.save(step, objects, metrics=metrics, overwrite=again))
        else:
            try:
                self._pending = self.store.save(step, objects, metrics=metrics, overwrite=again, block=False)
            except PASSING as error:
                self._lose(step, error)
                return
        self._saved_step = step

    def _hear(self) -> None:
        """What has become of the save in the background. That it has failed does not end the training."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._learn(pending.result())
        except PASSING as error:
            self._lose(pending.step, error)

    def _lose(self, step: int, error: Exception) -> None:
        self._saved_step, self._lost = -1, error
        warnings.warn(f"step {step} was not saved: {error}", SaveFailedWarning, stacklevel=2)

    def _learn(self, saved: SavedStep) -> None:
        """How long saves take is what the deadline learns its margin from."""
        self._lost = None
        if self.deadline is not None:
            self.deadline.saved(saved.seconds)

    def _objects_of(self, state: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        found = {
            **self._objects,
            "model": given["model"],
            "optimizer": _inner(given["optimizer"], "optimizer", torch.optim.Optimizer),
            "scheduler": _inner(given["lr_scheduler"], "scheduler", object),
            "rng": self._rng,
            _STATE: self._state_of(state),
        }
        scaler = getattr(getattr(self._trainer, "accelerator", None), "scaler", None)
        return found if scaler is None else {**found, "scaler": scaler}

    def _state_of(self, state: Any) -> dict[str, Any]:
        """The Trainer's state as its JSON has it, with that of the other callbacks."""
        said = json.loads(json.dumps(dataclasses.asdict(state)))
        if self._trainer is not None:
            found: dict[str, list[Any]] = {}
            for one in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
                if isinstance(one, ExportableState):
                    found.setdefault(type(one).__name__, []).append(one.state())
            several = said["stateful_callbacks"]
            for name, states in found.items():
                several[name] = states if isinstance(several.get(name), list) else states[-1]
            said["stateful_callbacks"] = json.loads(json.dumps(several))
        return said  # type: ignore[no-any-return]


def _is_within_epoch(state: Any) -> bool:
    """Whether steps of the epoch that the Trainer begins have been done before."""
    epoch = state.epoch or 0.0
    return not math.isclose(epoch, round(epoch), abs_tol=1e-9)


def _inner(it: Any, name: str, kind: type) -> Any:
    """What accelerate has wrapped."""
    inner = getattr(it, name, None)
    is_wrapped = type(it).__module__.partition(".")[0] == "accelerate"
    return inner if is_wrapped and isinstance(inner, kind) else it


@contextmanager
def _instead(trainer: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """The Trainer calls this in place of a method of its own."""
    before = vars(trainer).get(name)
    setattr(trainer, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(trainer, name)
        else:
            setattr(trainer, name, before)
