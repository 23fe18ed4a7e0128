"""A transformers Trainer saves to a store, ends in time, and goes on as if nothing had been."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import (
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    ObjectStateError,
    OptionError,
    PlanError,
    SaveFailedWarning,
    StepNotFoundError,
    TargetExistsError,
)
from modelstate.io import system
from tests.programs import run_program
from tests.store.common import flip

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")
# Its trainer is imported in functions: it takes two seconds, which each worker would spend on the collection.


def store_callback(*arguments: Any, **options: Any) -> Any:
    from modelstate.integrations.transformers import StoreCallback

    return StoreCallback(*arguments, **options)


def callback(event: str, call: Callable[[int], object]) -> Any:
    """Returns a callback of the trainer that calls a function with the number of the step."""
    from transformers import TrainerCallback

    def called(self: object, args: Any, state: Any, control: Any, **_: Any) -> None:
        call(state.global_step)

    return type("Callback", (TrainerCallback,), {event: called})()


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.body(x)
        loss = (out - labels).square().mean()
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "logits": out}


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    x = torch.tensor([[row, row % 3, 1.0, 0.0] for row in rows]) / 10
    return {"x": x, "labels": x.sum(1, keepdim=True)}


def stop_at(number: int) -> Any:
    """Returns a callback that raises before a step, as a machine that goes away."""

    def stop(step: int) -> None:
        if step == number:
            raise KeyboardInterrupt

    return callback("on_step_begin", stop)


def trainer_of(folder: Path, saving: Any, model: nn.Module | None = None, more: Any = (), **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, **options}
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=0.05,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
        **given,
    )
    callbacks = [*([saving] if saving is not None else []), *more]
    return Trainer(
        model or Net(),
        arguments,
        data_collator=collate,
        train_dataset=list(range(20)),
        eval_dataset=list(range(8)),
        callbacks=callbacks,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Net:
    model = Net()
    trainer_of(tmp_path_factory.mktemp("whole"), None, model, save_strategy="no").train()
    return model


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_it_saves_in_place_of_the_trainer(tmp_path: Path, uninterrupted: Net) -> None:
    store, model = ms.Store(tmp_path / "run"), Net()
    saving = store_callback(store)
    output = saving.train(trainer_of(tmp_path, saving, model))
    assert output.global_step == 15
    assert store.steps() == (3, 6, 9, 12, 15)
    assert not list((tmp_path / "trainer").glob("checkpoint-*"))
    assert model.losses == uninterrupted.losses
    assert_equal(model, uninterrupted)
    assert ms.load(Net(), store.open("model", 15)).coverage == 1.0
    assert set(store.verify().values()) == {""}


@pytest.mark.parametrize(
    ("stop", "background", "options", "at"),
    [(4, True, {}, 3), (5, False, {"save_steps": 1}, 5), (7, False, {"save_strategy": "epoch"}, 5)],
)
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_been(
    tmp_path: Path, uninterrupted: Net, stop: int, background: bool, options: dict[str, Any], at: int
) -> None:
    first = Net()
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store, background=background)
        with pytest.raises(KeyboardInterrupt):
            saving.train(trainer_of(tmp_path, saving, first, [stop_at(stop)], **options))
    with ms.Store(tmp_path / "run") as store:
        assert store.latest() == at
        saving, model = store_callback(store, background=background), Net()
        trainer = trainer_of(tmp_path, saving, model, **options)
        output = saving.train(trainer)
    assert output.global_step == 15
    assert first.losses[:at] + model.losses == uninterrupted.losses
    assert_equal(model, uninterrupted)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 15


def test_a_signal_saves_and_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signalled = callback("on_step_begin", lambda step: step == 7 and os.kill(os.getpid(), signal.SIGTERM))
    first, second = Net(), Net()
    with ms.Store(tmp_path / "run") as store:
        deadline = ms.Deadline(hours=None)
        saving = store_callback(store, deadline=deadline)
        output = saving.train(trainer_of(tmp_path, saving, first, [signalled]))
        assert output.global_step == 8
        assert "SIGTERM" in deadline.reason
        assert store.steps() == (3, 6, 8)
        assert signal.getsignal(signal.SIGTERM) is before
        saving = store_callback(store, deadline=ms.Deadline(hours=None, since="now"))
        assert saving.train(trainer_of(tmp_path, saving, second)).global_step == 15
    assert len(first.losses) + len(second.losses) == 15


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path, uninterrupted: Net) -> None:
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store)
        with pytest.raises(KeyboardInterrupt):
            saving.train(trainer_of(tmp_path, saving, None, [stop_at(7)]))
        for path in Path(store.infos()[-1].path).glob("model-*.safetensors"):
            flip(path)
        with pytest.raises(DamagedCheckpointError):
            saving.train(trainer_of(tmp_path, saving), step=6)
        model = Net()
        with pytest.warns(DamagedCheckpointWarning, match="step 6 is passed over"):
            saving.train(trainer_of(tmp_path, saving, model))
        assert model.losses == uninterrupted.losses[3:]
        assert set(store.verify().values()) == {""}


def test_a_run_that_went_back_and_was_killed_goes_on(tmp_path: Path, uninterrupted: Net) -> None:
    first, second = Net(), Net()
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store, background=True)
        saving.train(trainer_of(tmp_path, saving))
        with pytest.raises(KeyboardInterrupt):
            saving.train(trainer_of(tmp_path, saving, first, [stop_at(8)]), step=3)
    with ms.Store(tmp_path / "run") as store:
        assert (store.latest(), store.steps()) == (6, (3, 6, 9, 12, 15))
        saving = store_callback(store, background=True)
        saving.train(trainer_of(tmp_path, saving, second))
        assert first.losses[:3] + second.losses == uninterrupted.losses[3:]
        assert (store.latest(), store.steps()) == (15, (3, 6, 9, 12, 15))
        with pytest.raises(TargetExistsError):
            saving.train(trainer_of(tmp_path, saving), step=None)


@pytest.mark.parametrize(
    ("options", "accumulation"),
    [({"max_steps": 8}, 1), ({"max_steps": 10}, 2), ({"max_steps": 8, "save_strategy": "epoch"}, 2)],
)
def test_a_run_that_is_done_trains_and_saves_nothing_more(
    tmp_path: Path, options: dict[str, Any], accumulation: int
) -> None:
    given = {**options, "gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"}
    first, last = Net(), options["max_steps"]
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store)
        saving.train(trainer_of(tmp_path, saving, first, **given))
        infos = store.infos()
        for _ in range(2):
            saving, model = store_callback(store), Net()
            trainer = trainer_of(tmp_path, saving, model, **given)
            output = saving.train(trainer)
            assert (output.global_step, trainer.state.global_step) == (last, last)
            assert output.metrics["train_steps_per_second"] == 0
            assert model.losses == []
            assert_equal(model, first)
            assert store.infos() == infos
            assert not {"get_batch_samples", "_load_from_checkpoint"} & set(vars(trainer))
        # A longer run goes on from there, and a shorter one is done as well.
        assert saving.train(trainer_of(tmp_path, saving, **{**given, "max_steps": last + 1})).global_step == last + 1
        model = Net()
        assert saving.train(trainer_of(tmp_path, saving, model, **{**given, "max_steps": 3})).global_step == last + 1
        assert model.losses == []
        assert store.latest() == last + 1


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["mkdir", "fsync"])
def test_a_save_in_the_background_that_fails_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Net, call: str
) -> None:
    model, real = Net(), getattr(system, call)
    full_disk = callback("on_step_end", lambda step: monkeypatch.setattr(system, call, full if step == 6 else real))
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store, background=True)
        waits = callback("on_step_begin", lambda _: store._pending is not None and store._pending.wait(60))
        with pytest.warns(SaveFailedWarning, match="(?s)step 6 was not saved: .*No space left") as caught:
            # The disk is full until the save of step 6 has ended.
            saving.train(trainer_of(tmp_path, saving, model, [full_disk, waits]))
        assert len([one for one in caught if one.category is SaveFailedWarning]) == 1
        assert store.steps() == (3, 9, 12, 15)
        assert model.losses == uninterrupted.losses
        assert set(store.verify().values()) == {""}


def test_other_callbacks_and_objects_of_ones_own(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    counter = Counter()
    counter.count = 3
    options: Any = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store, objects={"counter": counter})
        stopping = EarlyStoppingCallback(100)
        with pytest.raises(KeyboardInterrupt):
            saving.train(trainer_of(tmp_path, saving, None, [stopping, stop_at(4)], **options))
        counter.count = 5
        trainer = trainer_of(tmp_path, saving, None, [EarlyStoppingCallback(100), stop_at(4)], **options)
        with pytest.raises(KeyboardInterrupt):
            saving.train(trainer)
        assert counter.count == 3
        state = trainer.state.stateful_callbacks
        assert state["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 100
        other = store_callback(store, objects={"another": Counter(), "counter": counter})
        with pytest.raises(ObjectStateError):
            other.train(trainer_of(tmp_path, other))


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with ms.Store(tmp_path / "run") as store:
        saving = store_callback(store)
        with pytest.raises(KeyboardInterrupt):
            saving.train(trainer_of(tmp_path, saving, None, [stop_at(4)]))
        other, before = Net(5), Net(5)
        with pytest.raises(PlanError):
            saving.train(trainer_of(tmp_path, saving, other))
        assert_equal(other, before)
        store.save(100, {"model": other})
        with pytest.raises(StepNotFoundError, match="StoreCallback"):
            saving.train(trainer_of(tmp_path, saving))
        assert store.steps() == (3, 100)


def test_wrong_arguments(tmp_path: Path) -> None:
    store = ms.Store(tmp_path / "run")
    saving = store_callback(store)
    for wrong in (
        lambda: store_callback("run"),
        lambda: store_callback(store, objects={"model": Net()}),
        lambda: saving.train(trainer_of(tmp_path, None)),
        lambda: saving.train(trainer_of(tmp_path, saving), resume_from_checkpoint="x"),
    ):
        with pytest.raises(OptionError):
            wrong()
    with pytest.raises(StepNotFoundError):
        saving.train(trainer_of(tmp_path, saving), step=3)
    assert not (tmp_path / "run").exists()


def test_a_library_that_is_not_there() -> None:
    code = """
import importlib, sys
import modelstate as ms
for library in ("lightning", "transformers"):
    sys.modules[library] = None
    try:
        importlib.import_module(f"modelstate.integrations.{library}")
    except ms.errors.PackageError as error:
        print(error)
"""
    done = run_program(code)
    for library in ("lightning", "transformers"):
        assert f'pip install "modelstate[{library}]"' in done.stdout
