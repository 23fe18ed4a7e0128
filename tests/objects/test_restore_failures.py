"""After an error or an interrupt in `restore_objects`, everything is as it was."""

from typing import Any

import pytest
import torch
from torch import nn

from modelstate import errors
from modelstate.objects.parts import Part
from modelstate.objects.restore import restore_objects
from tests.objects.nets import trained
from tests.store.training import Positions, Random, Run, everything, kept


class Failing(Positions):
    """Fails in the middle of its `load_state_dict`, as long as it is told to."""

    fails: type[BaseException] | None = ZeroDivisionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(-1)
        if type(self).fails is not None and state["at"] != self.at:
            self.half = True
            raise type(self).fails("in the middle")
        super().load_state_dict(state)


def broken(path: str, saved: dict[str, Part]) -> None:
    """Makes what was saved for one object such that it does not fit."""
    tree = saved[path].tree
    if path in ("model", "head", "averaged.ema"):
        name = next(iter(tree))
        tree[name] = torch.zeros(9, 9, 9)
    elif path == "optimizer":
        name = next(iter(tree["state"]))
        tree["state"][name]["exp_avg"] = torch.zeros(9, 9)
    elif path == "generator":
        saved[path] = Part("generator", torch.zeros(3, dtype=torch.uint8))
    elif path in ("rng", "scaler"):
        tree.clear()
    elif path == "scheduler":
        saved[path] = Part("stateful", [1, 2])
    else:
        del tree["seen"]


RAISED = {
    "model": errors.PlanError,
    "head": errors.PlanError,
    "averaged.ema": errors.PlanError,
    "optimizer": errors.PlanError,
    "scheduler": errors.ObjectStateError,
    "scaler": errors.ObjectStateError,
    "loader": errors.ObjectStateError,
    "generator": errors.ObjectStateError,
    "rng": errors.ObjectStateError,
}


@pytest.mark.parametrize("path", RAISED)
def test_whichever_object_fails_nothing_has_changed(path: str) -> None:
    run = Run()
    run.train(2)
    saved = kept(run.objects)
    run.train(2)
    broken(path, saved)
    before = everything(run.objects)
    with pytest.raises(RAISED[path]) as caught:
        restore_objects(run.objects, saved)
    assert path in str(caught.value)
    assert everything(run.objects) == before


@pytest.mark.parametrize("fails", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_object_that_fails_in_the_middle(fails: type[BaseException]) -> None:
    run = Run()
    run.loader = Failing()
    Failing.fails = None
    run.train(2)
    saved = kept(run.objects)
    run.train(2)
    before = everything(run.objects)
    Failing.fails = fails
    with pytest.raises(errors.ObjectStateError if fails is ZeroDivisionError else fails):
        restore_objects(run.objects, saved)
    assert everything(run.objects) == before


def test_code_of_an_object_that_looks_at_the_model_sees_the_new_values_and_can_be_undone() -> None:
    class Watching(Positions):
        fails = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.sum = model.weight.sum().item()
            with torch.no_grad():
                model.bias.add_(1)
                for values in optimizer.state.values():
                    values["exp_avg"].add_(1)
            if self.fails and state["at"] == 0:
                raise ValueError

    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    watching = Watching()
    objects = {"model": model, "optimizer": optimizer, "watching": watching}
    saved = kept(objects)
    with torch.no_grad():
        model.weight.add_(1)
    watching.sum, watching.fails, watching.at = 0.0, True, 1
    before = everything(objects)
    with pytest.raises(errors.ObjectStateError):
        restore_objects(objects, saved)
    watching.fails = False
    assert everything(objects) == before
    restore_objects(objects, saved)
    assert watching.sum == saved["model"].tree["weight"].sum().item()


@pytest.mark.parametrize("holds", [False, True])
def test_what_an_object_does_to_others_before_it_fails(holds: bool) -> None:
    """To tensors and entries of the optimizer from before, to torch's generator; and a module that holds them."""

    class Meddling(Positions):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["at"] != self.at:
                values["exp_avg"].add_(1)
                values["new"] = 1
                del optimizer.param_groups[0]["lr"]
                torch.rand(3)
                raise ValueError

    model = nn.Linear(3, 3)
    optimizer = trained(model, model.parameters())
    if holds:
        model.holds = [optimizer]  # type: ignore[assignment]
    values = optimizer.state[model.weight]
    meddling = Meddling()
    objects = {"model": model, "optimizer": optimizer, "meddling": meddling}
    saved = kept({"model": model, "optimizer": optimizer, "meddling": meddling})
    trained(model, model.parameters())
    meddling.at = 3
    before, moments, random = everything(objects), values["exp_avg"].clone(), torch.get_rng_state()
    with pytest.raises(errors.ObjectStateError, match="meddling"):
        restore_objects(objects, saved)
    assert everything(objects) == before
    assert torch.equal(values["exp_avg"], moments)
    assert torch.equal(torch.get_rng_state(), random)


def test_objects_may_keep_and_change_what_they_are_given() -> None:
    class Keeping(Positions):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]
            self.seen.append(state.pop("at"))

    saved = {"it": Part("stateful", {"at": 1, "seen": []})}
    for _ in range(2):
        it = Keeping()
        restore_objects({"it": it}, saved)
        assert it.seen == [1]


def test_asking_for_states_draws_no_numbers() -> None:
    class Drawing(Positions):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

    objects = {"loader": Drawing(), "rng": Random()}
    torch.manual_seed(2)
    saved = kept(objects)
    follows = torch.rand(2)
    broken("loader", saved)
    before = torch.get_rng_state()
    with pytest.raises(errors.ObjectStateError):
        restore_objects(objects, saved)
    assert torch.equal(torch.get_rng_state(), before)
    saved["loader"].tree["seen"] = []
    restore_objects(objects, saved)
    assert torch.equal(torch.rand(2), follows)
    state = torch.get_rng_state()
    restore_objects({"loader": Drawing()}, {"loader": saved["loader"]})
    assert torch.equal(torch.get_rng_state(), state)


class NoCopy(Positions):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": (one for one in ())}


class NoReturn(Positions):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(1)
        raise ZeroDivisionError


def test_objects_that_cannot_be_undone_say_so() -> None:
    with pytest.raises(errors.ObjectStateError, match=r"loader: its state cannot be copied"):
        restore_objects({"loader": NoCopy()}, {"loader": Part("stateful", {})})
    with pytest.raises(errors.RollbackError, match=r"loader: its load_state_dict does not take what"):
        restore_objects({"loader": NoReturn()}, {"loader": Part("stateful", {})})
