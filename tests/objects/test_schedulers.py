"""A rate that a restore keeps stays in effect when a scheduler is restored with the optimizer."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import modelstate as ms
from modelstate.errors import ObjectStateError, OptionError
from tests.objects.nets import restored_from

Build = Callable[[Any], Any]
BUILDERS: dict[str, Build] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 6]),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, total_iters=6),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, total_iters=6),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 20),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 6, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 4, eta_min=0.01),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 1.0, total_steps=20),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.05),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=2), schedulers.CosineAnnealingWarmRestarts(optimizer, 5)],
        milestones=[6],
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.LinearLR(optimizer, total_iters=6), schedulers.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "ChainedScheduler of closed forms": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)), schedulers.ExponentialLR(optimizer, 0.9)],
        optimizer,
    ),
}


def built(build: Build, lr: Any = 0.1) -> Any:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr * 2}], momentum=0.9
    )
    return {"model": model, "optimizer": optimizer, "scheduler": build(optimizer)}


def rates(of: Any) -> list[float]:
    return [float(group["lr"]) for group in of["optimizer"].param_groups]


def step(of: Any) -> list[float]:
    of["optimizer"].step()
    if isinstance(of["scheduler"], schedulers.ReduceLROnPlateau):
        of["scheduler"].step(1.0)
    else:
        of["scheduler"].step()
    return rates(of)


def saved_after(count: int, build: Build, path: Path) -> Any:
    of = built(build)
    for _ in range(count):
        step(of)
    ms.save(of, path / "run.safetensors")
    return of


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_schedule_goes_on_from_the_kept_rate(builder: str, kind: Any, tmp_path: Path) -> None:
    build = BUILDERS[builder]
    saved = saved_after(4, build, tmp_path)
    of = built(build)
    kept = [rate * 3 for rate in rates(saved)]
    for group, rate in zip(of["optimizer"].param_groups, kept, strict=True):
        group["lr"] = kind(rate)
    ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"])
    assert rates(of) == pytest.approx(kept)
    for _ in range(6):
        assert step(of) == pytest.approx([rate * 3 for rate in step(saved)])


def test_a_schedule_whose_rates_are_not_kept_is_that_of_the_file(tmp_path: Path) -> None:
    saved = saved_after(4, BUILDERS["LambdaLR"], tmp_path)
    of = built(BUILDERS["LambdaLR"], lr=7.0)
    ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.momentum"])
    assert step(of) == step(saved)


def test_groups_keep_their_own_rates(tmp_path: Path) -> None:
    saved = saved_after(4, BUILDERS["LambdaLR"], tmp_path)
    of = built(BUILDERS["LambdaLR"])
    for group, rate in zip(of["optimizer"].param_groups, (0.5, 0.25), strict=True):
        group["lr"] = rate
    before = rates(saved)
    ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer"])
    expected = [a / b * kept for a, b, kept in zip(step(saved), before, (0.5, 0.25), strict=True)]
    assert step(of) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_state_of_another_class_is_refused(builder: str, tmp_path: Path) -> None:
    """Most of torch's schedulers take the state of any other class, and compute other rates then."""
    saved = saved_after(2, BUILDERS[builder], tmp_path)
    ms.restore(built(BUILDERS[builder]), tmp_path / "run.safetensors")
    for other, build in BUILDERS.items():
        of = built(build)
        if str(classes(of["scheduler"])) == str(classes(saved["scheduler"])):
            continue
        before, weight = dict(vars(of["scheduler"])), of["model"].weight.clone()
        with pytest.raises(ObjectStateError, match=f"scheduler: .*another class[^~]*{other.split()[0]}") as caught:
            ms.restore(of, tmp_path / "run.safetensors")
        assert builder.split()[0] in str(caught.value.found)
        assert vars(of["scheduler"]) == before
        assert torch.equal(of["model"].weight, weight)
        names = {"allow_missing": ["scheduler_new"], "allow_unexpected": ["scheduler"]}
        assert str(names["allow_missing"]) in str(caught.value.remedy)
        of["scheduler_new"] = of.pop("scheduler")
        ms.restore(of, tmp_path / "run.safetensors", **names)


@pytest.mark.parametrize("place", ["file", "store"])
def test_the_state_of_another_class_is_loaded_as_the_error_says(place: str, tmp_path: Path) -> None:
    restore = restored_from(place, tmp_path, built(BUILDERS["StepLR"]))
    of = built(BUILDERS["MultiStepLR"])
    with pytest.raises(ObjectStateError) as caught:
        restore(of)
    names = {"file": tmp_path / "model.safetensors", "store": ms.Store(tmp_path), "ms": ms}
    codes = re.findall(r"(?:ms|store)\.open\(.*?\)\.value\(.*?\)", str(caught.value.remedy))
    (code,) = [code for code in codes if code.startswith("store") == (place == "store")]
    scheduler = of.pop("scheduler")
    restore(of, allow_unexpected=["scheduler"])
    scheduler.load_state_dict(eval(code, names))
    assert scheduler.step_size == 2
    assert restored_from("store", tmp_path / "again", {"scheduler": scheduler, "model": of["model"]})


def classes(scheduler: Any) -> Any:
    return type(scheduler), [classes(inner) for inner in getattr(scheduler, "_schedulers", ())]


class Derived(schedulers.StepLR):
    pass


class Wrapper:
    """As that of accelerate."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()


def test_a_wrapper_and_a_derived_class_take_the_state_of_their_class(tmp_path: Path) -> None:
    derived: Build = lambda optimizer: Wrapper(Derived(optimizer, 2))  # noqa: E731
    for first, second in ((BUILDERS["StepLR"], derived), (derived, BUILDERS["StepLR"])):
        saved, of = saved_after(4, first, tmp_path), built(second)
        ms.restore(of, tmp_path / "run.safetensors")
        assert not any("modelstate" in name for name in of["scheduler"].state_dict())
        assert step(of) == step(saved)
    with pytest.raises(ObjectStateError, match="another class"):
        ms.restore(built(lambda optimizer: Wrapper(BUILDERS["LinearLR"](optimizer))), tmp_path / "run.safetensors")


def test_a_state_of_another_tool_has_no_class(tmp_path: Path) -> None:
    saved = built(BUILDERS["StepLR"])
    source = {"model": saved["model"].state_dict(), "scheduler": saved["scheduler"].state_dict()}
    of = built(BUILDERS["ExponentialLR"])
    ms.restore({"model": of["model"], "scheduler": of["scheduler"]}, source)


class Own(schedulers.LRScheduler):
    def get_lr(self) -> Any:
        return [0.125 for _ in self.base_lrs]


class Foreign:
    """As the schedulers of other libraries, which are not derived from that of torch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.125

    def get_last_lr(self) -> list[float]:
        return [0.125]

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("build", [Own, Foreign])
def test_a_scheduler_that_would_undo_it_is_refused_and_can_be_left_out(build: Any, tmp_path: Path) -> None:
    saved_after(2, build, tmp_path)
    of = built(build)
    for group in of["optimizer"].param_groups:
        group["lr"] = 0.5
    weight = of["model"].weight.clone()
    with pytest.raises(OptionError, match="would set an option that is kept") as caught:
        ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"])
    assert torch.equal(of["model"].weight, weight)
    assert rates(of) == [0.5, 0.5]
    assert "allow_unexpected=['scheduler']" in str(caught.value.remedy)
    del of["scheduler"]
    ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"], allow_unexpected=["scheduler"])
    assert rates(of) == [0.5, 0.5]


def test_a_rate_of_0_cannot_go_on(tmp_path: Path) -> None:
    """As that of a warmup before its first step."""
    warmup: Build = lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: min(step, 5) / 5)  # noqa: E731
    saved = saved_after(3, warmup, tmp_path)
    of = built(warmup)
    with pytest.raises(OptionError, match="is 0") as caught:
        ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"])
    assert "set the rate" in str(caught.value.remedy)
    for group, rate in zip(of["optimizer"].param_groups, rates(saved), strict=True):
        group["lr"] = rate / 2
    ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"])
    assert step(of) == pytest.approx([rate / 2 for rate in step(saved)])


def test_one_lowest_rate_for_groups_that_change_differently_is_refused(tmp_path: Path) -> None:
    saved_after(4, BUILDERS["CosineAnnealingLR"], tmp_path)
    of = built(BUILDERS["CosineAnnealingLR"])
    of["optimizer"].param_groups[0]["lr"] = 0.5
    with pytest.raises(OptionError, match="eta_min"):
        ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("builder", ["OneCycleLR", "CyclicLR"])
def test_a_kept_momentum_that_a_scheduler_cycles_is_refused(builder: str, tmp_path: Path) -> None:
    saved_after(4, BUILDERS[builder], tmp_path)
    of = built(BUILDERS[builder])
    with pytest.raises(OptionError, match=r"optimizer\.momentum.*\n.*cycles the momentum") as caught:
        ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.momentum"])
    assert "keep_options=['optimizer.lr']" in str(caught.value.remedy)
    ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer.lr"])
    if builder == "OneCycleLR":  # its momenta are options, which are kept too
        ms.restore(of, tmp_path / "run.safetensors", keep_options=["optimizer"])
