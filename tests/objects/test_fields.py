"""`extra_state`: attributes in state dicts, through torch's tools and ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.problems import Problem, ProblemKind
from tests.objects.nets import Lenient, Load, Net, Own, Plain, deep, saved_as

# What is saved is what is loaded.


@pytest.mark.parametrize("nest", [lambda inner: inner, deep], ids=["at the root", "nested"])
def test_values_come_back(load: Load, nest: Callable[[nn.Module], nn.Module]) -> None:
    net = Net()
    net.p, net.epoch = {"a": torch.arange(3.0), "b": [None, 1.5, "x", b"y", True]}, 351
    model, made = nest(net), nest(Net())
    assert getattr(load(made, model.state_dict()), "coverage", 1.0) == 1.0
    found = next(m for m in made.modules() if isinstance(m, Net))
    assert found.epoch == 351
    assert torch.equal(found.p["a"], torch.arange(3.0))
    assert found.p["b"] == [None, 1.5, "x", b"y", True]
    assert torch.equal(found.linear.weight, net.linear.weight)


def test_what_is_saved_is_plain_and_a_snapshot() -> None:
    net = Net()
    net.p = [torch.zeros(2), {"a": 1}]
    state = net.state_dict()
    saved = state["_extra_state"]
    assert (saved["modelstate"], saved["class"], saved["version"]) == (1, "Net", 1)
    assert set(saved["values"]) == {"p", "epoch"}
    assert "base" not in saved
    net.p[0].add_(1)
    net.p[1]["a"] = 2
    made = Net()
    made.load_state_dict(state)
    assert torch.equal(made.p[0], torch.zeros(2))
    assert made.p[1] == {"a": 1}


def test_the_compiled_and_the_wrapped(load: Load) -> None:
    net = Net(5)
    compiled = torch.compile(Net(), backend="eager")
    load(compiled, {f"_orig_mod.{name}": value for name, value in net.state_dict().items()})
    assert compiled.epoch == 5
    wrapped = nn.DataParallel(Net())
    load(wrapped, {f"module.{name}": value for name, value in net.state_dict().items()})
    assert wrapped.module.epoch == 5
    made = Net()
    ms.load(made, compiled.state_dict(), rules=[ms.rules.Prefix(strip="_orig_mod.")])
    assert made.epoch == 5


# Checkpoints from before.


@pytest.mark.parametrize("wrap", ["", "module."])
def test_a_checkpoint_from_before_loads_strictly(load: Load, wrap: str) -> None:
    old, model = deep(Plain()), deep(Lenient())
    if wrap:
        old, model = nn.ModuleDict({"module": old}), nn.ModuleDict({"module": model})
    load(model, old.state_dict())
    found = next(m for m in model.modules() if isinstance(m, Lenient))
    assert found.p == "as built"
    assert torch.equal(found.weight, torch.ones(2))


def test_the_plan_lists_nothing_missing() -> None:
    plan = ms.plan(deep(Lenient()), deep(Plain()).state_dict())
    assert plan.ok
    assert plan.notes == ("1 extra states that the checkpoint lacks, as their classes allow: 0.body.1._extra_state",)
    assert ms.plan(deep(Lenient()), deep(Lenient()).state_dict()).notes == ()
    assert ms.load_state_dict(deep(Lenient()), deep(Plain()).state_dict()).missing_keys == []


def test_what_is_not_optional_is_missing_as_for_torch(load: Load) -> None:
    state = Net().state_dict()
    del state["_extra_state"]
    model = Net(3)
    with pytest.raises(RuntimeError, match="_extra_state"):
        load(model, state)
    assert model.epoch == 3
    assert Problem(ProblemKind.MISSING, "_extra_state") in ms.plan(Net(), state).problems
    report = ms.load(model, state, allow_missing=["_extra_state"])
    assert model.epoch == 3
    assert report.coverage < 1
    assert model.load_state_dict(state, strict=False).missing_keys == ["_extra_state"]


@pytest.fixture
def later() -> type[nn.Module]:
    @ms.extra_state("p", "history", defaults={"history": [1]})
    class Later(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.p: Any = None
            self.history = [2]

    return Later


def test_a_default_is_for_a_name_that_is_missing(load: Load, later: type[nn.Module]) -> None:
    model, state = later(), Plain().state_dict()
    load(model, {**state, "_extra_state": saved_as(p=3)})
    assert (model.p, model.history) == (3, [1])
    model.history.append(2)
    load(model, {**state, "_extra_state": saved_as(p=3)})
    assert model.history == [1]
    with pytest.raises(RuntimeError, match="_extra_state"):
        load(model, state)  # there is no default for p


def test_defaults_for_all_names_allow_all_to_be_missing(load: Load) -> None:
    @ms.extra_state("epoch", defaults={"epoch": 0})
    class Counted(Plain):
        epoch = 5

    model = Counted()
    load(model, Plain().state_dict())
    assert model.epoch == 0


# Declared from outside.


def test_a_class_that_cannot_be_edited(load: Load) -> None:
    class Foreign(Plain):
        epoch = 0

    existing = Foreign()
    old = existing.state_dict()
    assert ms.extra_state("epoch", optional=True)(Foreign) is Foreign
    existing.epoch = 4
    made = Foreign()
    load(made, deep(existing)[0]["body"][1].state_dict())
    assert made.epoch == 4
    load(made, old)
    assert made.epoch == 4
    ms.extra_state("epoch", optional=True)(Foreign)  # as when a cell of a notebook is run again
    for other in ({"optional": False}, {"version": 2}, {"defaults": {"epoch": 1}}, {"upgrade": max}):
        with pytest.raises(errors.OptionError, match="already"):
            ms.extra_state("epoch", **{"optional": True, **other})(Foreign)
    with pytest.raises(errors.OptionError, match="'epoch'"):
        ms.extra_state("more")(Foreign)


# What is declared wrongly is refused at once.


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "no names": ((), {}),
    "no parentheses": ((Plain,), {}),
    "a list of names": ((["p", "q"],), {}),
    "a name twice": (("p", "p"), {}),
    "no identifier": (("a.b",), {}),
    "an empty name": (("",), {}),
    "a private one of Python's": (("__dict__",), {}),
    "optional by name": (("p",), {"optional": ["p"]}),
    "version 0": (("p",), {"version": 0}),
    "version 1.0": (("p",), {"version": 1.0}),
    "version True": (("p",), {"version": True}),
    "a default for another name": (("p",), {"defaults": {"q": 1}}),
    "defaults that are no mapping": (("p",), {"defaults": ["p"]}),
    "an upgrade that is no function": (("p",), {"upgrade": 3}),
}


@pytest.mark.parametrize(("names", "options"), WRONG.values(), ids=WRONG)
def test_arguments_that_mean_nothing(names: Any, options: Any) -> None:
    with pytest.raises(errors.OptionError):
        ms.extra_state(*names, **options)
    cls = type("Mine", (nn.Module,), {})
    with pytest.raises(errors.OptionError):
        ms.extra_state(*names, **options)(cls)
    assert not [name for name in vars(cls) if "state" in name]


@pytest.mark.parametrize("cls", [int, nn.Module, 3, None, Plain(), dict], ids=repr)
def test_what_is_no_class_of_modules(cls: Any) -> None:
    with pytest.raises(errors.OptionError, match=r"subclass of torch\.nn\.Module"):
        ms.extra_state("p")(cls)
    with pytest.raises(errors.OptionError, match=r"subclass of torch\.nn\.Module"):
        ms.extra_state("p")(cls)


@pytest.mark.parametrize("half", ["get_extra_state", "set_extra_state"])
def test_half_of_the_methods(half: str) -> None:
    cls = type("Half", (Plain,), {half: vars(Own)[half]})
    with pytest.raises(errors.OptionError, match=half):
        ms.extra_state("p")(cls)


def test_a_name_of_a_base_class() -> None:
    with pytest.raises(errors.OptionError, match="a base class has declared"):
        ms.extra_state("epoch")(type("Again", (Net,), {}))
