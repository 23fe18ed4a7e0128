"""Optimizer state by the names that a model has alone, restored beside the model: from torch.save and from DCP."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import modelstate as ms


class Nested(nn.Module):
    """Has a module of the name that the model has among the objects, and parameters of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(2, 2))


MODELS: dict[str, Any] = {
    "layer": lambda: nn.Linear(2, 2),
    "layers": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    "nested": Nested,
}


def trained(model: nn.Module, *, reverse: bool = False) -> torch.optim.Optimizer:
    """Returns an optimizer over the named parameters, whose moments tell the parameters apart."""
    named = sorted(model.named_parameters(), reverse=reverse)
    optimizer = torch.optim.AdamW(named)
    for number, (_, param) in enumerate(sorted(named), 1):
        param.grad = torch.full_like(param, number)
    optimizer.step()
    return optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: float(values["exp_avg"].flatten()[0]) for param, values in optimizer.state.items()}


def saved(kind: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run.pt")
        return folder / "run.pt"
    if kind == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"
    if kind == "by name":
        return {"model": model.state_dict(), "optimizer": ms.optimizer_state(model, optimizer)}
    ms.save({"model": model, "optimizer": optimizer}, folder / "run.safetensors")
    return folder / "run.safetensors"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["torch", "dcp", "by name", "modelstate"])
def test_each_parameter_gets_its_own_state(tmp_path: Path, kind: str, name: str) -> None:
    source = MODELS[name]()
    optimizer = trained(source)
    model = MODELS[name]()
    other = torch.optim.AdamW(sorted(model.named_parameters(), reverse=True), lr=0.5)
    ms.restore({"model": model, "optimizer": other}, saved(kind, tmp_path, source, optimizer))
    assert moments(model, other) == moments(source, optimizer)
    assert len(other.state) == len(list(model.parameters()))
    assert other.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_rules_for_the_model(tmp_path: Path, kind: str) -> None:
    source = nn.ModuleDict({"old": nn.Linear(2, 2), "kept": nn.Linear(2, 2)})
    optimizer = trained(source)
    for rules in ({"model": [ms.rules.Rename("old.*", "new.*")]}, [ms.rules.Rename("model.old.*", "model.new.*")]):
        model = nn.ModuleDict({"kept": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
        other = torch.optim.AdamW(model.parameters())
        ms.restore({"model": model, "optimizer": other}, saved(kind, tmp_path, source, optimizer), rules=rules)
        expected = {name.replace("old", "new"): value for name, value in moments(source, optimizer).items()}
        assert moments(model, other) == expected


def test_two_models_and_their_optimizers(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), MODELS["layers"]()
    of_first, of_second = trained(first), trained(second)
    torch.save(
        {"a": first.state_dict(), "b": second.state_dict(), "x": of_first.state_dict(), "y": of_second.state_dict()},
        tmp_path / "run.pt",
    )
    new_first, new_second = nn.Linear(2, 2), MODELS["layers"]()
    x, y = torch.optim.AdamW(new_first.parameters()), torch.optim.AdamW(new_second.parameters())
    ms.restore({"a": new_first, "b": new_second, "x": x, "y": y}, tmp_path / "run.pt")
    assert moments(new_first, x) == moments(first, of_first)
    assert moments(new_second, y) == moments(second, of_second)
