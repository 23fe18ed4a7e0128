"""Lazy modules of torch that have not run yet: saved as what they are, and restored so."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

import modelstate as ms
from modelstate.problems import ProblemKind


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def partly(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))


def wholly(seed: int = 0) -> nn.Module:
    return nn.LazyLinear(3, bias=False)


def objects(model: nn.Module, cls: type = torch.optim.AdamW) -> dict[str, Any]:
    optimizer = cls(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}


def lazy_names(state: Any) -> list[str]:
    return [name for name, value in state.items() if is_lazy(value)]


LAZY = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]


def test_a_file_has_what_is_initialised_and_says_what_is_not(tmp_path: Path) -> None:
    model, path = partly(), tmp_path / "m.safetensors"
    report = ms.save(model, path)
    assert report.tensors == len(load_file(path)) == 3
    checkpoint = ms.open(path)
    assert list(checkpoint) == ["1.num_batches_tracked", "2.weight", "2.bias"]
    assert list(checkpoint.extra) == LAZY
    assert lazy_names(checkpoint.value()) == LAZY
    assert checkpoint.verify() == checkpoint.nbytes
    fresh = partly(1)
    weight = fresh[0].weight  # type: ignore[index]
    loaded = ms.load(fresh, path, verify=True)
    assert loaded.coverage == 1.0
    assert any("6 stay uninitialised" in note for note in loaded.notes)
    assert lazy_names(fresh.state_dict()) == LAZY
    assert torch.equal(fresh[2].weight, model[2].weight)  # type: ignore[index]
    fresh(torch.randn(3, 5))
    assert fresh[0].weight is weight  # type: ignore[index]
    assert weight.shape == (4, 5)


def test_a_file_of_torch_save_cannot_have_them(tmp_path: Path) -> None:
    with pytest.raises(ms.errors.UnsavableError, match=r"0\.weight.*UninitializedParameter(.|\n)*\.safetensors"):
        ms.save(partly(), tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("make", [partly, wholly])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("background", [True, False])
def test_a_store_before_the_first_step(tmp_path: Path, make: Any, cls: type, background: bool) -> None:
    was, store = objects(make(), cls), ms.Store(tmp_path)
    store.save(0, was, background=background)  # type: ignore[call-overload]
    store.wait()
    now = objects(make(1), cls)
    now["optimizer"].param_groups[0]["lr"] = 7.0
    restored = ms.Store(tmp_path).restore(now)
    assert restored.step == 0
    assert now["optimizer"].param_groups[0]["lr"] == 0.1
    assert lazy_names(now["model"].state_dict()) == lazy_names(was["model"].state_dict()) != []
    for name, value in was["model"].state_dict().items():
        assert is_lazy(value) or torch.equal(value, now["model"].state_dict()[name])
    now["model"](torch.randn(3, 5)).sum().backward()
    now["optimizer"].step()
    store.save(1, now)  # beside files of the same names that had less in them
    again = objects(make(2), cls)
    store.restore(again)
    assert not lazy_names(again["model"].state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again["model"].parameters(), now["model"].parameters(), strict=True))
    assert store.verify() == {0: "", 1: ""}


@pytest.mark.parametrize("make", [partly, wholly])
@pytest.mark.parametrize("as_file", [True, False])
def test_where_the_model_has_run_it_is_a_problem_beside_the_others(tmp_path: Path, make: Any, as_file: bool) -> None:
    source: Any = make().state_dict()
    if as_file:
        ms.save(source, tmp_path / "m.safetensors")
        source = tmp_path / "m.safetensors"
    model = make(1)
    model(torch.randn(3, 5))
    model.more = nn.Linear(1, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ms.PlanError, match="had not initialised") as caught:
        ms.load(model, source)
    found = {problem.name for problem in caught.value.problems if problem.kind is ProblemKind.NOT_YET_INITIALISED}
    assert found == set(lazy_names(make().state_dict()))
    assert {p.name for p in caught.value.problems} - found == {"more.weight", "more.bias"}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_skeleton_has_lazy_modules_that_can_run() -> None:
    with ms.skeleton():
        model = partly()
    ms.load(model, partly().state_dict())
    assert model(torch.randn(3, 5)).shape == (3, 2)
