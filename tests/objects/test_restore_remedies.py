"""The remedies in errors of a restore are right: what they propose restores everything."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.errors import OptionError, PlanError
from tests.objects.nets import restored_from
from tests.store.training import everything


class Headed(nn.Module):
    def __init__(self, head: str, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        setattr(self, head, nn.Linear(4, width))
        setattr(self, f"{head}_norm", nn.LayerNorm(width))


def headed(head: str, width: int = 4, optimizers: int = 1) -> dict[str, Any]:
    model = Headed(head, width)
    of: dict[str, Any] = {"model": model}
    for number in range(optimizers):
        of[f"optimizer{number}"] = optimizer = torch.optim.Adam(list(model.parameters())[number::optimizers])
        sum(param.sum() for param in model.parameters()).backward()
        optimizer.step()
    return of


def proposed(remedy: str) -> dict[str, list[str]]:
    found = re.findall(r"(allow_\w+)=(\[.*?\])", remedy)
    return {option: ast.literal_eval(patterns) for option, patterns in found if "'" in patterns}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_models_and_optimizers_have_their_problems_in_one_error_with_patterns_for_both(
    tmp_path: Path, optimizers: int
) -> None:
    store, of = ms.Store(tmp_path), headed("new", optimizers=optimizers)
    store.save(1, headed("old", 5, optimizers))
    before = everything(of)
    with pytest.raises(PlanError) as caught:
        store.restore(of)
    assert everything(of) == before
    kinds = {problem.kind.name for problem in caught.value.problems}
    assert kinds == {"MISSING", "UNEXPECTED", "OPTIMIZER_MISFIT"}
    options = proposed(str(caught.value))
    assert set(options) == {"allow_missing", "allow_unexpected"}
    assert store.restore(of, **options).step == 1  # type: ignore[arg-type]


def with_optimizers(**classes: Any) -> dict[str, Any]:
    """Objects with an optimizer of each class that has made a step."""
    model = nn.Linear(3, 3)
    of: dict[str, Any] = {"model": model, "step": 3}
    for name, cls in classes.items():
        of[name] = cls(model.parameters(), lr=0.25)
        model(torch.ones(1, 3)).sum().backward()
        of[name].step()
    return of


@pytest.mark.parametrize("place", ["file", "store"])
def test_the_state_of_another_optimizer_is_left_out_as_the_error_says(tmp_path: Path, place: str) -> None:
    saved = with_optimizers(optimizer=torch.optim.Adam, second=torch.optim.Adagrad)
    restore = restored_from(place, tmp_path, saved)
    of = with_optimizers(optimizer=torch.optim.SGD, second=torch.optim.SGD)
    before = everything(of)
    with pytest.raises(PlanError) as caught:
        restore(of)
    assert everything(of) == before
    remedy = str(caught.value)
    assert "optimizer: the state is of torch.optim.Adam, the optimizer is torch.optim.SGD" in remedy
    assert "second: the state is of torch.optim.Adagrad, the optimizer is torch.optim.SGD" in remedy
    assert "rules" not in remedy
    assert "keep_options" not in remedy
    new = dict(re.findall(r"call it '(\w+)' among the objects.*?allow_unexpected=\['(\w+)'\]", remedy))
    assert set(new.values()) == {"optimizer", "second"}
    again = {name: it for name, it in of.items() if name not in new.values()}
    again |= {name: of[old] for name, old in new.items()}
    options: dict[str, list[str]] = {}
    for option, patterns in re.findall(r"(allow_\w+)=(\[.*?\])", remedy):
        options.setdefault(option, []).extend(ast.literal_eval(patterns))
    state = {name: repr(of[name].state_dict()) for name in new.values()}
    restored = restore(again, **options)
    assert torch.equal(of["model"].weight, saved["model"].weight)
    assert {name: repr(of[name].state_dict()) for name in new.values()} == state
    assert restored["step"] == 3


@pytest.mark.parametrize("place", ["file", "store"])
def test_an_optimizer_takes_the_moments_of_another_class_where_it_is_told_to(tmp_path: Path, place: str) -> None:
    saved = with_optimizers(adam=torch.optim.Adam)
    restore = restored_from(place, tmp_path, saved)
    of = with_optimizers(adam=torch.optim.AdamW)
    options = {key: value for key, value in of["adam"].param_groups[0].items() if key != "params"}
    before = everything(of)
    with pytest.raises(PlanError, match="decoupled_weight_decay True -> False") as caught:
        restore(of)
    assert everything(of) == before
    (remedy,) = re.findall(r"keep_options=(\[.*?\])", str(caught.value))
    report = restore(of, keep_options=ast.literal_eval(remedy)).report
    assert "adam: the state of torch.optim.Adam is loaded into torch.optim.AdamW" in report.notes
    assert {key: value for key, value in of["adam"].param_groups[0].items() if key != "params"} == options
    for name, param in of["model"].named_parameters():
        moment = saved["adam"].state[saved["model"].get_parameter(name)]["exp_avg"]
        assert torch.equal(of["adam"].state[param]["exp_avg"], moment)


def test_some_options_of_one_of_two_optimizers_are_kept(tmp_path: Path) -> None:
    saved = with_optimizers(first=torch.optim.AdamW, second=torch.optim.AdamW)
    ms.save(saved, tmp_path / "training.safetensors")
    of = with_optimizers(first=torch.optim.AdamW, second=torch.optim.AdamW)
    for name in ("first", "second"):
        of[name].param_groups[0].update(lr=0.125, weight_decay=0.5)
    ms.restore(of, tmp_path / "training.safetensors", keep_options=["second.lr"])
    found = {name: [of[name].param_groups[0][key] for key in ("lr", "weight_decay")] for name in ("first", "second")}
    assert found == {"first": [0.25, 0.01], "second": [0.125, 0.01]}
    with pytest.raises(errors.OptionError, match="keep_options='third'"):
        ms.restore(of, tmp_path / "training.safetensors", keep_options=["third"])


class Respelled(nn.Module):
    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(3, 4))
        setattr(self, last, nn.Linear(4, 2))


def respelled(first: str, last: str, unchanged: nn.Module) -> dict[str, Any]:
    nets = {"model": Respelled(first, last), "class": Respelled(first, last)}
    params = [param for net in (*nets.values(), unchanged) for param in net.parameters()]
    optimizer = torch.optim.Adam(params)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    return {"model": nets["model"], "nets": {"critic": nets["class"]}, "other": unchanged, "optimizer": optimizer}


@pytest.mark.parametrize("place", ["file", "torch file", "directory", "store", "checkpoint", "mapping"])
def test_the_rules_that_an_error_proposes_to_work_out_restore_everything(tmp_path: Path, place: str) -> None:
    saved = respelled("fc1", "out", nn.Linear(2, 2))
    restore = restored_from(place, tmp_path, saved)
    of = respelled("first_layer", "last_layer", nn.Linear(2, 2))
    before = everything(of)
    with pytest.raises(PlanError) as caught:
        restore(of)
    assert everything(of) == before
    (code,) = re.findall(r"rules=(\{.*?\)\})", str(caught.value))
    source = getattr(restore, "keywords", {}).get("source")
    rules = eval(code, {"ms": ms, "model": of["model"], "critic": of["nets"]["critic"], "source": source})
    assert set(rules) == {"model", "nets.critic"}
    restore(of, rules=rules)
    for path in ("model", "nets", "other"):
        old, new = ([it[path]] if path != "nets" else [it[path]["critic"]] for it in (saved, of))
        assert [*map(torch.Tensor.tolist, old[0].parameters())] == [*map(torch.Tensor.tolist, new[0].parameters())]
    old_moments, new_moments = ([one["exp_avg"] for one in it["optimizer"].state.values()] for it in (saved, of))
    assert all(map(torch.equal, old_moments, new_moments))


@pytest.mark.parametrize("place", ["file", "store"])
def test_a_model_with_new_parameters_gets_their_first_values_and_no_optimizer_state(tmp_path: Path, place: str) -> None:
    class Model(nn.Module):
        def __init__(self, *heads: str) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            for head in heads:
                self.add_module(head, nn.Linear(4, 2))

    def built(*heads: str) -> dict[str, Any]:
        model = Model(*heads)
        of = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "rng": ms.RNG()}
        sum(param.sum() for param in model.parameters()).backward()
        of["optimizer"].step()
        return of

    saved, of = built("first"), built("first", "second")
    restore = restored_from(place, tmp_path, saved)
    following = torch.rand(3)  # saved with the objects
    with torch.no_grad():
        for param in of["model"].parameters():
            param.fill_(7)
    before = everything(of)
    with pytest.raises(PlanError, match=r"model\.second\.weight"):
        restore(of)
    assert everything(of) == before
    restore(of, init_missing=True)
    assert torch.equal(torch.rand(3), following)
    assert torch.equal(of["model"].first.weight, saved["model"].first.weight)
    assert of["model"].second.weight.abs().max() <= 0.5  # by nn.Linear.reset_parameters
    states = of["optimizer"].state
    assert all(param in states for param in (*of["model"].body.parameters(), *of["model"].first.parameters()))
    assert not any(states.get(param) for param in of["model"].second.parameters())
    of["optimizer"].step()


def test_a_parameter_that_is_not_initialised_keeps_its_need_of_a_state(tmp_path: Path) -> None:
    saved = headed("head")
    saved["optimizer0"] = torch.optim.Adam([saved["model"].body.weight])
    ms.Store(tmp_path).save(1, saved)
    with pytest.raises(PlanError, match=r"model\.head"):
        ms.Store(tmp_path).restore(headed("head"), init_missing=True)
    with pytest.raises(OptionError, match="init_missing"):
        ms.Store(tmp_path).restore(headed("head"), init_missing="model.head.*")  # type: ignore[arg-type]


def test_a_restored_object_is_not_a_plain_value(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ms.save({"model": model, "epoch": 3}, tmp_path / "run.safetensors")
    restored = ms.restore({"model": model, "epoch": None}, tmp_path / "run.safetensors")
    with pytest.raises(errors.KeyNotFoundError, match="use the objects that were passed") as caught:
        restored["model"]
    assert (caught.value.expected, caught.value.found) == ("'epoch'", "'model'")
    assert restored.get("model") is None
    assert "model" not in restored
