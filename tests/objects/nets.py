"""Models that declare extra state, and ways to load them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.problems import ProblemKind
from tests.loading.fingerprint import whole

Load = Callable[[nn.Module, Any], Any]


@ms.extra_state("p", "epoch")
class Net(nn.Module):
    def __init__(self, epoch: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.epoch = epoch
        self.p: Any = None
        self.forwards = 0


@ms.extra_state("p", optional=True)
class Lenient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.p: Any = "as built"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def stock(model: nn.Module, state: Any) -> Any:
    return model.load_state_dict(state)


def through_a_file(model: nn.Module, state: Any, path: Path) -> Any:
    torch.save(state, path)
    return ms.load(model, path)


def saved_as(cls: str = "", version: int = 1, **values: Any) -> dict[str, Any]:
    """What a class of that name has saved at some time."""
    holder = type("Holder", (nn.Module,), {})
    ms.extra_state(*values, version=version)(holder)
    module = holder()
    for name, value in values.items():
        setattr(module, name, value)
    saved: dict[str, Any] = module.get_extra_state()
    saved["class"] = cls or saved["class"]
    return saved


def with_values(model: nn.Module, path: str = "", **values: Any) -> nn.Module:
    for name, value in values.items():
        setattr(model.get_submodule(path), name, value)
    return model


def deep(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), inner)}))


@ms.extra_state("p")
class Required(Plain):
    p: Any = None


class Own(Plain):
    """A class that keeps something by itself, in its own way."""

    kept = 0

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


def refused(kind: type[Exception], model: nn.Module, state: Any, *says: str) -> None:
    """Every way to load raises, says the same, and changes nothing; ours finds what else is wrong at the same time."""
    was = whole(model)
    for one in (stock, ms.load_state_dict):
        with pytest.raises(kind) as caught:
            one(model, state)
        assert whole(model) == was
        for text in says:
            assert text in str(caught.value)
    for worse in (state, {**state, "weight": torch.ones(3)}):
        problems = ms.plan(model, worse).problems
        (found,) = [problem for problem in problems if problem.kind is ProblemKind.BAD_EXTRA_STATE]
        assert found.name.endswith("_extra_state")
        for text in says:
            assert text in found.line()
        with pytest.raises(errors.PlanError) as raised:
            ms.load(model, worse)
        assert raised.value.problems == problems
        assert whole(model) == was
    assert any(problem.kind is ProblemKind.WRONG_SHAPE for problem in problems)


@ms.extra_state("p", "epoch", optional=True)
class Two(Plain):
    p: Any = None
    epoch = 1


def trained(model: nn.Module, params: Any) -> torch.optim.Optimizer:
    """Returns an Adam that has made a step."""
    optimizer = torch.optim.Adam(params)
    sum(param.sum() * 2 for param in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


class Failing:
    """An object that takes no state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("no")


def restored_from(place: str, path: Path, objects: dict[str, Any]) -> Any:
    """Saves the objects, and returns the function that restores others from there.

    A place is "store", "file", "torch file", "directory" (of shards), "checkpoint" or "mapping".
    """
    if place == "store":
        store = ms.Store(path)
        store.check(objects)
        store.save(1, objects)
        return store.restore
    file = path / ("training.pt" if place == "torch file" else "model.safetensors")
    ms.save(objects, file, shard_size_bytes=100 if place == "directory" else None)
    source: Any = path if place == "directory" else str(file)
    opened = {"checkpoint": ms.open, "mapping": lambda file: ms.open(file).value()}.get(place, lambda file: file)
    return partial(ms.restore, source=opened(source))
