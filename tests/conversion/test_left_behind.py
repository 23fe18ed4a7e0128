"""Optimizers that have state, and were not passed to the conversion of their model."""

import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms


def trained(make: Any, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if model is None else model
    optimizer = make(model.parameters())
    result = model(torch.ones(1, 2))
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("make", "name"), [(torch.optim.AdamW, "AdamW"), (momentum, "SGD")])
def test_the_report_names_an_optimizer_whose_state_did_not_follow(make: Any, name: str) -> None:
    model, optimizer = trained(make)
    report = ms.convert(model, torch.float64)
    assert report.left_behind == (f"the state of {name} for 4 of these parameters, which was not passed",)
    assert "left behind: the state of" in str(report)
    assert "optimizers=[...]" in str(report)
    assert "all references kept" not in str(report)
    assert json.loads(report.to_json())["left_behind"] == list(report.left_behind)
    assert all(value.dtype is torch.float32 for state in optimizer.state.values() for value in state.values())


def test_one_of_two_was_passed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.Adam(model[0].parameters())
    second = torch.optim.Adagrad(model[1].parameters())
    model(torch.ones(1, 2)).sum().backward()
    first.step()
    second.step()
    report = ms.convert(model, torch.float64, optimizers=[first])
    assert report.left_behind == ("the state of Adagrad for 2 of these parameters, which was not passed",)
    report = ms.convert(model, torch.float32, optimizers=[first, second])
    assert report.left_behind == ()
    assert "all references kept" in str(report)


def test_a_report_says_how_many_optimizers_it_does_not_list() -> None:
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(10)])
    optimizers = [trained(torch.optim.Adam, layer)[1] for layer in model]
    report = ms.convert(model, torch.float64)
    assert len(report.left_behind) == len(optimizers)
    assert "; and 2 more; pass them with optimizers=[...]" in str(report)


def test_a_part_of_a_model_and_parameters_that_stay() -> None:
    model, optimizer = trained(torch.optim.Adam)
    report = ms.convert(model[1], transform=lambda name, t: t.double() if name == "weight" else ms.conversion.UNCHANGED)  # type: ignore[index]
    assert report.left_behind == ("the state of Adam for 1 of these parameters, which was not passed",)
    del optimizer


def none(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("case", ["no state", "the same dtype", "another model", "passed", "gone"])
def test_nothing_is_left_behind(case: str) -> None:
    model, optimizer = trained(none if case == "no state" else torch.optim.Adam)
    target = trained(torch.optim.Adam)[0] if case in ("another model", "gone") else model
    report = ms.convert(
        target,
        torch.float32 if case == "the same dtype" else torch.float64,
        optimizers=[optimizer] if case == "passed" else [],
    )
    assert report.left_behind == ()
    assert "all references kept" in str(report)


@pytest.mark.parametrize("case", ["passed", "none of this model", "recurrent", "a used-up graph"])
def test_all_objects_are_searched_only_where_something_else_refers_to_a_parameter(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(torch.optim.Adam, nn.LSTM(2, 2) if case == "recurrent" else None)
    target = model if case in ("passed", "recurrent") else nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kept = target(torch.ones(2, 2)).sum() if case == "a used-up graph" else None
    if kept is not None:
        kept.backward()
    searches: list[str] = []
    stock = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda *a: (searches.append("all"), stock(*a))[1])
    report = ms.convert(target, torch.float64, optimizers=[optimizer] if target is model else [])
    assert report.steps
    assert len(searches) == (1 if kept is not None else 0)
