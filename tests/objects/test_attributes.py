"""Attributes: which can be saved, and how they are set together or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import described_module
from tests.objects.nets import Lenient, Load, Net, Plain, saved_as, stock, with_values

# Attributes.


def test_a_property_that_raises(load: Load) -> None:
    class Raising(Plain):
        @property
        def p(self) -> Any:
            raise KeyError("not yet")

        @p.setter
        def p(self, value: Any) -> None:
            self.taken = value

    ms.extra_state("p")(Raising)
    model = Raising()
    with pytest.raises(errors.ExtraStateError, match=r"Raising\.p[^!]*not yet"):
        model.state_dict()
    load(model, {**Plain().state_dict(), "_extra_state": saved_as("Raising", p=3)})
    assert model.taken == 3


def test_an_attribute_that_is_not_there() -> None:
    model = Net()
    del model.p
    with pytest.raises(errors.ExtraStateError, match=r"Net\.p"):
        model.state_dict()


class Bare(Plain):
    """With a name that is neither in the class nor in the instance."""


ms.extra_state("p")(Bare)


@pytest.mark.parametrize("kind", ["parameter", "submodule", "buffer", "hidden buffer", "buffer of None"])
def test_what_torch_keeps_itself(kind: str) -> None:
    model = Bare()
    if kind == "parameter":
        model.p = nn.Parameter(torch.ones(1))
    elif kind == "submodule":
        model.p = nn.Linear(1, 1)
    else:
        model.register_buffer("p", None if "None" in kind else torch.ones(1), persistent="hidden" not in kind)
    says = "persistent=True" if "hidden" in kind else "take it out of the declaration"
    with pytest.raises(errors.ExtraStateError, match=says):
        model.state_dict()
    with pytest.raises(errors.ExtraStateError, match=says):
        model.set_extra_state(saved_as("Bare", p=1))


def test_a_parameter_that_torch_does_not_keep() -> None:
    model = Bare()
    model.__dict__["p"] = nn.Parameter(torch.ones(1))
    with pytest.raises(errors.ExtraStateError, match="register it, or have its values in a plain tensor"):
        model.state_dict()


class Watched(Plain):
    """Properties and slots: one setter has an effect, another one refuses."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.slot = 1
        self.plain = 1
        self.set_to: Any = 1

    @property
    def prop(self) -> Any:
        return self.set_to

    @prop.setter
    def prop(self, value: Any) -> None:
        self.set_to = value

    @property
    def fussy(self) -> Any:
        return 1

    @fussy.setter
    def fussy(self, value: Any) -> None:
        if value != 1:
            raise RuntimeError("not with me")


ms.extra_state("plain", "slot", "prop", "fussy")(Watched)


def test_properties_and_slots(load: Load) -> None:
    model, made = with_values(Watched(), plain=2, slot=3, prop=4), Watched()
    load(made, model.state_dict())
    assert (made.plain, made.slot, made.set_to) == (2, 3, 4)
    assert "slot" not in made.__dict__


def test_a_setter_that_refuses_undoes_those_before_it(tmp_path: Path) -> None:
    state = Watched().state_dict()
    state["_extra_state"] = saved_as("Watched", plain=2, slot=3, prop=4, fussy=5)
    model = Watched()
    for one in (stock, ms.load_state_dict, ms.load):
        with pytest.raises((errors.ExtraStateError, errors.PlanError), match="not with me"):
            one(model, state)
        assert (model.plain, model.slot, model.set_to) == (1, 1, 1)


def test_tensors_go_where_the_module_is() -> None:
    """Shown with the meta device, to which nobody loads: what is there on meta counts for nothing."""
    net = with_values(Net(), p=torch.ones(2))
    state = net.state_dict()
    made = with_values(Net(), p=torch.ones(2, device="meta"))
    made.load_state_dict(state)
    assert made.p.device.type == "cpu"
    with ms.skeleton():
        skeleton = Net()
    ms.load(skeleton, state)
    assert torch.equal(skeleton.p, torch.ones(2))


def test_a_load_that_fails_later_leaves_every_extra_state_alone() -> None:
    model = nn.ModuleDict({"a": with_values(Net(3), p=[1]), "b": Lenient(), "c": nn.Linear(2, 2)})
    state = model.state_dict()
    state["a._extra_state"] = with_values(Net(9), p=[2]).state_dict()["_extra_state"]
    del state["b._extra_state"], state["c.bias"]
    was = described_module(model)
    for one in (ms.load_state_dict, ms.load):
        with pytest.raises(RuntimeError, match="bias"):
            one(model, state)
        assert described_module(model) == was
        assert (model["a"].epoch, model["a"].p) == (3, [1])
