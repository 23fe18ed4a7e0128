"""Saves the run of a transformers Trainer to a store, stops it in time, and resumes it.

>>> saving = StoreCallback(ms.Store("run", keep=3), deadline=ms.Deadline(hours=4))
>>> trainer = Trainer(model, args, callbacks=[saving])
>>> saving.train(trainer)
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from modelstate.arguments import is_number
from modelstate.errors import (
    OptionError,
    PackageError,
    StepNotFoundError,
)
from modelstate.objects.rng import RNG
from modelstate.store.deadline import Deadline
from modelstate.store.directory import Step
from modelstate.store.record import read_record
from modelstate.store.resumable import LoopSaver
from modelstate.store.store import Store
from modelstate.text_format import short_repr
from modelstate.torch_compat.modules import MethodOverride, Overrides

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise PackageError(
        "this needs transformers, which is not here", found=error, remedy='pip install "modelstate[transformers]"'
    ) from error

_STATE = "trainer_state"
_OWN_NAMES = ("model", "optimizer", "scheduler", "rng", "scaler", _STATE)


class StoreCallback(TrainerCallback):  # type: ignore[misc]
    """Saves model, optimizer, scheduler, random generators and the Trainer's own state to a store.

    It replaces the Trainer's own checkpoints: where `save_strategy` and `save_steps` ask for one, a step of the store
    is saved; with `save_strategy="best"` both are. A step is saved before the next one begins, after the evaluation and
    logging at it; the metrics of that evaluation are saved with it. The number of a step is the Trainer's
    `global_step`.

    A restored run computes what the uninterrupted one would have, bit for bit, as long as making the batches draws
    nothing from the global random generators: the Trainer makes the batches that it skips again, as it does for its own
    checkpoints. Only one process may train; several raise `OptionError`.

    Args:
        store: The store to save to.
        deadline: The run is saved and ends when the deadline is reached.
        objects: Further objects, as `Store.save` takes them, to save and restore with the rest: {"loader": ...}.
        background: As in `Store.save`. With True training goes on while a thread writes; the last save always blocks.

    Raises:
        OptionError: `store` is not a `Store`, or `objects` has a name that the callback uses.

    Examples:
        >>> saving = StoreCallback(ms.Store("run", keep=3), deadline=ms.Deadline(hours=4))
        >>> trainer = Trainer(model, args, callbacks=[saving])
        >>> saving.train(trainer)
    """

    def __init__(
        self,
        store: Store,
        *,
        deadline: Deadline | None = None,
        objects: Mapping[str, object] | None = None,
        background: bool = False,
    ) -> None:
        if not isinstance(store, Store):
            raise OptionError(
                "a StoreCallback saves to a store", expected="a modelstate.Store", found=short_repr(store)
            )
        if taken := sorted(set(objects or {}) & set(_OWN_NAMES)):
            raise OptionError("objects= has names that are reserved", found=", ".join(taken))
        self.store, self.deadline, self.background = store, deadline, background
        self._objects = dict(objects or {})
        self._rng = RNG()
        self._trainer: Trainer | None = None
        self._restore: int | None = None
        self._rng_state: dict[str, object] | None = None
        """The state that the generators get when the first step after a restore begins."""
        self._replaced: set[int] = set()
        """Existing steps that may be replaced: damaged ones, and those after the step that the run went back to."""
        self._is_due = False
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        self._checked_at = 0.0
        self._saver = LoopSaver(store, deadline)
        self._is_done = False
        """Whether the restored step is the last one of the run."""

    # Training.

    def train(self, trainer: Trainer, *, step: Step | None = "latest", **options: object) -> object:
        """Trains from a step of the store on, or from the beginning where the store is empty.

        Everything is restored, or nothing. The Trainer skips the batches that it has had. The signals of the deadline
        are handled until the call returns. Where all steps of the run are done, the last one is restored, and nothing
        is trained or saved.

        Args:
            trainer: The Trainer, which has this callback.
            step: The step to go on from; "latest" takes the newest one that is whole, None begins anew.
            options: Further arguments of `trainer.train`.

        Returns:
            The result of `trainer.train`.

        Raises:
            OptionError: The Trainer does not have this callback, or `resume_from_checkpoint` is given.
            StepNotFoundError: There is no such step, or none that is whole.
            DamagedCheckpointError: The step is not what was saved.
            NewerManifestError: A newer version of modelstate wrote the step.
            ReadFailedError: The step cannot be read now.

        It raises what `Store.restore` and `Store.save` raise. An I/O error, or a directory that does not exist any
        more, in a save in the background is a `SaveFailedWarning`, and the next save writes everything. The last save
        is waited for, and raises its error.

        Examples:
            >>> output = saving.train(trainer)
            >>> output.global_step
            1000
        """
        if self not in trainer.callback_handler.callbacks:
            raise OptionError("the Trainer does not have this callback", remedy="Trainer(..., callbacks=[saving])")
        if options.get("resume_from_checkpoint"):
            raise OptionError("resume_from_checkpoint= is for the Trainer's own checkpoints", remedy="step=")
        self._trainer = trainer
        self._restore = self._whole_step(step)
        try:
            with self.deadline or nullcontext(), self._resume_directory(trainer) as directory:
                output = trainer.train(resume_from_checkpoint=directory, **options)
            self.store.wait()
        finally:
            self._trainer, self._restore, self._rng_state, self._is_due = None, None, None, False
            self._replaced.clear()
        return output

    def _whole_step(self, step: Step | None) -> int | None:
        """Returns the step to go on from, after all of its bytes were compared with their digests."""
        self._replaced.clear()
        if step is None:
            return None
        self.store.wait()
        try:
            save, skipped = self.store.index.first_usable(step, self.store.index.whole)
        except StepNotFoundError:
            if step != "latest" or self.store.infos():
                raise
            return None
        # Higher steps are of an abandoned run: training went back to an earlier step.
        number = save.place.step
        self._replaced.update(skipped, (info.step for info in self.store.infos() if info.step > number))
        return number

    @contextmanager
    def _resume_directory(self, trainer: Trainer) -> Iterator[str | None]:
        """Makes a directory that the Trainer accepts as its own checkpoint: with its state, and without tensors.

        `on_train_begin` restores the tensors from the store, when the Trainer has built its optimizer.
        """
        if self._restore is None:
            yield None
            return
        info = next((info for info in self.store.infos() if info.step == self._restore), None)
        if info is None:
            raise StepNotFoundError(
                "the checkpoint has been removed", where=self.store.directory, found=f"step {self._restore}"
            )
        entry = read_record(info.path).entries.get(_STATE)
        if entry is None:
            raise StepNotFoundError(
                "this step was not saved by a StoreCallback", where=info.path, expected=_STATE, found="no such object"
            )
        with (
            tempfile.TemporaryDirectory(prefix="modelstate-") as directory,
            Overrides(
                # The directory has no tensors of a model for the Trainer to load.
                MethodOverride(trainer, "_load_from_checkpoint", lambda *_, **__: None),
                # It gets no batches where all steps of the run are done.
                MethodOverride(
                    trainer,
                    "get_batch_samples",
                    lambda stock, *args, **options: ([], None) if self._is_done else stock(*args, **options),
                ),
            ).used(),
        ):
            with open(os.path.join(directory, "trainer_state.json"), "w", encoding="utf-8") as file:
                json.dump(entry.decode(info.path), file)
            yield directory

    # Events of the Trainer.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restores the step that `train` goes on from."""
        if args.world_size > 1:
            raise OptionError(
                "several processes train, and a StoreCallback knows how to save what one of them has",
                found=f"{args.world_size} processes",
                remedy="leave the callback out, and let the Trainer save",
            )
        self._is_due, self._is_done, self._checked_at = False, False, time.monotonic()
        self._saver = LoopSaver(self.store, self.deadline, -1 if self._restore is None else self._restore)
        if self._restore is not None:
            self.store.restore(self._objects_of(state, kwargs), self._restore, verify=False)
            self._rng_state = self._rng.state_dict()
            self._is_done = state.global_step >= state.max_steps
            if self._is_done:
                # Within an epoch the Trainer would still do a step: see `_batch_samples`.
                control.should_training_stop = True

    def on_epoch_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Saves a step that is due, before the epoch draws random numbers."""
        self._save_if_due(state, kwargs)
        epoch = state.epoch or 0.0
        if math.isclose(epoch, round(epoch), abs_tol=1e-9):  # else steps of this epoch were done before the restore
            self._set_rng()

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Saves a step that is due, after its evaluation and logging."""
        self._save_if_due(state, kwargs)
        self._set_rng()

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Stops the run where the deadline is reached, and notes that a step is to be saved."""
        now = time.monotonic()
        self._saver.collect(wait=False)
        if self.deadline is not None:
            self.deadline.stepped(now - self._checked_at)
            if self.deadline.reached:
                # An evaluation may take more time than is left.
                control.should_training_stop, control.should_save, control.should_evaluate = True, True, False
        self._checked_at = now
        return self._take_over(state, control, kwargs)

    def on_epoch_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        if self._is_done:
            control.should_log = control.should_evaluate = control.should_save = False
        return self._take_over(state, control, kwargs)

    def on_save(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Saves a step where the Trainer has saved for a reason of its own, after its evaluation."""
        self._is_due = True
        self._save_if_due(state, kwargs)

    def on_evaluate(
        self,
        args: object,
        state: TrainerState,
        control: object,
        metrics: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        numbers = {name: float(value) for name, value in (metrics or {}).items() if is_number(value)}
        self._metrics = state.global_step, numbers

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._save_if_due(state, kwargs, is_last=True)
        self.store.wait()
        self._saver.collect()
        if self._saver.lost is not None:
            raise self._saver.lost

    def _take_over(self, state: TrainerState, control: TrainerControl, kwargs: Mapping[str, object]) -> object:
        """Takes over the save that the Trainer is about to do. The last one is done now, unless it evaluates first."""
        if control.should_save:
            control.should_save, self._is_due = False, True
        ends = control.should_training_stop or state.global_step >= state.max_steps
        if ends and not control.should_evaluate:
            # Now, because at the end the Trainer may load the best model in place of this one.
            self._saver.collect()
            self._is_due |= self._saver.lost is not None
            self._save_if_due(state, kwargs, is_last=True)
        return control

    def _set_rng(self) -> None:
        """Restores the generators once after a restore, since skipping batches has drawn from them."""
        if self._rng_state is not None:
            self._rng.load_state_dict(self._rng_state)
            self._rng_state = None

    # Saving.

    def _save_if_due(self, state: TrainerState, kwargs: Mapping[str, object], is_last: bool = False) -> None:
        if not self._is_due:
            return
        self._is_due = False
        if self._trainer is not None:
            self._trainer.store_flos()
        metrics_step, metrics = self._metrics
        objects, step = self._objects_of(state, kwargs), state.global_step
        if metrics_step != step:
            metrics = {}
        background = self.background and not is_last
        self._saver.save(step, objects, metrics=metrics, overwrite=step in self._replaced, background=background)

    def _objects_of(self, state: TrainerState, kwargs: Mapping[str, object]) -> dict[str, object]:
        objects = {
            **self._objects,
            "model": kwargs["model"],
            "optimizer": _unwrapped(kwargs["optimizer"], "optimizer", torch.optim.Optimizer),
            "scheduler": _unwrapped(kwargs["lr_scheduler"], "scheduler", object),
            "rng": self._rng,
            _STATE: self._state_of(state),
        }
        scaler = getattr(getattr(self._trainer, "accelerator", None), "scaler", None)
        return objects if scaler is None else {**objects, "scaler": scaler}

    def _state_of(self, state: TrainerState) -> dict[str, object]:
        """Returns the Trainer's state as in its JSON file, with the states of the other callbacks."""
        content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(state)))
        if self._trainer is not None:
            by_class: dict[str, list[object]] = {}
            for part in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
                if isinstance(part, ExportableState):
                    by_class.setdefault(type(part).__name__, []).append(part.state())
            stateful = content["stateful_callbacks"]
            for name, states in by_class.items():
                stateful[name] = states if isinstance(stateful.get(name), list) else states[-1]
            content["stateful_callbacks"] = json.loads(json.dumps(stateful))
        return content


def _unwrapped(value: object, name: str, kind: type) -> object:
    """Returns the object in the attribute `name` of a wrapper of accelerate; another object as it is."""
    inner = getattr(value, name, None)
    is_wrapper = type(value).__module__.partition(".")[0] == "accelerate"
    return inner if is_wrapper and isinstance(inner, kind) else value
