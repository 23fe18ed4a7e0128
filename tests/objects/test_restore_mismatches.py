"""What was saved and the objects do not match: names, kinds, parameters and rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.problems import ProblemKind
from tests.objects.nets import trained
from tests.store.training import Model, Positions, Saved, state_of


def test_objects_that_were_not_saved_and_objects_that_are_not_there() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = Saved({"model": model, "ema": other, "step": 3})
    with pytest.raises(errors.ObjectStateError, match="extra") as caught:
        saved.restore({"model": model, "extra": other, "step": 0})
    assert "ema" in str(caught.value)
    with pytest.raises(errors.ObjectStateError, match="ema, step"):
        saved.restore({"model": model})
    restored = saved.restore({"model": model, "extra": other}, allow_missing=["ext*"], allow_unexpected=["ema", "step"])
    assert (restored.missing, restored.unexpected, len(restored)) == (("extra",), ("ema", "step"), 0)


@pytest.mark.parametrize(
    ("given", "kind"), [(nn.Linear(2, 2), "module"), (Positions(), "stateful"), (torch.Generator(), "generator")]
)
def test_another_kind_than_what_was_saved(given: Any, kind: str) -> None:
    with pytest.raises(errors.ObjectStateError, match=kind) as caught:
        Saved({"it": 3}).restore({"it": given})
    assert "value" in caught.value.expected
    with pytest.raises(errors.ObjectStateError):
        Saved({"it": given}).restore({"it": None})


def test_patterns_have_to_be_of_use_somewhere() -> None:
    model = nn.Linear(2, 2)
    saved = Saved({"model": model})
    for option in ("allow_missing", "allow_unexpected"):
        with pytest.raises(errors.PlanError) as caught:
            saved.restore({"model": model}, **{option: ["emma"]})  # type: ignore[arg-type]
        assert [problem.kind for problem in caught.value.problems] == [ProblemKind.IDLE_PATTERN]


def test_parameters_that_are_new_or_no_longer_trained() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    optimizer = trained(model, model.parameters())
    saved = Saved({"model": model, "optimizer": optimizer})
    fewer = torch.optim.Adam([*model["body"].parameters()])
    objects = {"model": model, "optimizer": fewer}
    with pytest.raises(errors.PlanError, match=r"optimizer.model.head.weight"):
        saved.restore(objects)
    saved.restore(objects, allow_unexpected=["optimizer.model.head.*"])
    assert (
        state_of(objects)["optimizer"]["state"]["model.body.bias"]
        == state_of({"model": model, "optimizer": optimizer})["optimizer"]["state"]["model.body.bias"]
    )
    more = nn.ModuleDict({"new": nn.Linear(2, 2), **model})
    objects = {"model": more, "optimizer": torch.optim.Adam(more.parameters())}
    new = ["model.new.*"]
    with pytest.raises(errors.PlanError, match=r"model.new.bias: nothing was saved"):
        saved.restore(objects, allow_missing=new)
    saved.restore(objects, allow_missing=[*new, "optimizer.model.new.*"])


def test_a_state_that_is_none_is_refused_also_beside_patterns_for_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = trained(model, model.parameters())
    source = {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": 3}}
    with pytest.raises(errors.OptimizerStateError, match="not the state of an optimizer"):
        ms.restore({"model": model, "optimizer": optimizer}, source, allow_missing=["optimizer.model.*"])


@pytest.mark.parametrize("by", ["path", "names", "schema"])
def test_rules_for_a_module_and_its_optimizer(by: str) -> None:
    old = nn.ModuleDict({"qkv": nn.Linear(2, 6), "b": nn.Linear(2, 2)})
    optimizer, other = trained(old, old.parameters()), nn.Linear(2, 2)
    saved = Saved({"model": old, "other": other, "optimizer": optimizer})
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q", "k", "v", "c", "d")})
    split: list[Any] = [ms.rules.Split("qkv.weight", ["q.weight", "k.weight", "v.weight"])]
    split += [
        ms.rules.Split("qkv.bias", ["q.bias", "k.bias", "v.bias"]),
        ms.rules.Rename("b.*", "c.*"),
        ms.rules.Fill("d.*", 0.0),
    ]
    rules: Any = {"model": split}
    if by == "schema":
        rules = {
            "model": ms.rules.Schema("1", [ms.rules.Migration("2", split)], recognise={"1": lambda it: "b.bias" in it})
        }
    elif by == "names":
        parts = [(part, [f"model.{one}.{part}" for one in "qkv"]) for part in ("weight", "bias")]
        rules = [ms.rules.Split(f"model.qkv.{part}", names) for part, names in parts]
        rules += [ms.rules.Rename("model.b.*", "model.c.*"), ms.rules.Fill("model.d.*", 0.0)]
    fresh = torch.optim.Adam(model.parameters())
    objects = {"model": model, "other": nn.Linear(2, 2), "optimizer": fresh}
    saved.restore(objects, rules=rules, allow_missing=["optimizer.model.d.*"])
    assert torch.equal(model["k"].weight, old["qkv"].weight[2:4])
    assert torch.equal(fresh.state[model["k"].weight]["exp_avg"], optimizer.state[old["qkv"].weight]["exp_avg"][2:4])
    assert torch.equal(fresh.state[model["c"].bias]["exp_avg"], optimizer.state[old["b"].bias]["exp_avg"])
    assert torch.equal(objects["other"].weight, other.weight)  # type: ignore[arg-type]
    assert not model["d"].weight.any()


def test_rules_that_cannot_be() -> None:
    model = nn.Linear(2, 2)
    saved = Saved({"model": model})
    with pytest.raises(errors.OptionError, match="not a restored module"):
        saved.restore({"model": model}, rules={"emma": [ms.rules.Prefix(strip="a")]})
    with pytest.raises(errors.RuleError, match="version of the checkpoint is unknown"):
        saved.restore({"model": model}, rules=ms.rules.Schema("1", []))
    with pytest.raises(errors.PlanError) as caught:
        saved.restore({"model": model}, rules={"model": [ms.rules.Prefix(strip="emma.")]})
    assert "in model.*" in str(caught.value)
    with pytest.raises(errors.PlanError) as caught:
        saved.restore({"model": model}, rules={"model": [ms.rules.Split("weight", ["a"], sizes=[9])]})
    assert ProblemKind.BAD_RULE in [problem.kind for problem in caught.value.problems]


def test_an_optimizer_with_parameters_of_nobody() -> None:
    model, optimizer = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    for function in (Saved, Saved({"model": model, "opt": torch.optim.SGD(model.parameters())}).restore):
        with pytest.raises(errors.OptimizerStateError, match=r"opt: .*no names(.|\n)*2 of 2(.|\n)*add the module"):
            function({"model": model, "opt": optimizer})


# Which objects can be saved, and under which names.


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "..", 3, None, "a\n", "a\0", "\ud800", "a\\b"])
@pytest.mark.parametrize("nested", [False, True])
def test_names_that_no_file_can_have(name: Any, nested: bool) -> None:
    objects = {name: nn.Linear(2, 2)}
    with pytest.raises(errors.OptionError, match="not a name"):
        Saved({"above": objects} if nested else objects)


def test_what_is_no_mapping_of_objects() -> None:
    model = nn.Linear(2, 2)
    for wrong in (model, [model], None, nn.ModuleDict()):
        with pytest.raises(errors.OptionError, match="from names to objects"):
            Saved(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="list") as caught:
        Saved({"models": [1, model]})
    assert "Linear" in caught.value.found
    endless: dict[str, Any] = {"model": model}
    endless["again"] = endless
    with pytest.raises(errors.OptionError, match=r"at most 200 bytes(.|\n)*holds itself"):
        Saved(endless)


@pytest.mark.parametrize("make", [Model, Positions])
def test_an_object_that_raises_when_it_is_asked(make: Callable[[], Any]) -> None:
    it = make()

    def state_dict() -> None:
        raise ZeroDivisionError

    it.state_dict = state_dict
    with pytest.raises(errors.ObjectStateError, match=r"it: .*asked for its state(.|\n)*ZeroDivisionError"):
        Saved({"it": it})
