"""What is captured of several objects, and who they may be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from modelstate import errors
from modelstate.objects.objects import capture, targets_of
from modelstate.objects.restore import restore_objects
from tests.store.training import Model, Positions, Random, Run


def test_the_kinds_and_paths_of_objects() -> None:
    run = Run()
    run.train(1)
    parts = capture(targets_of(run.objects))
    assert {path: part.kind for path, part in parts.items()} == {
        "rng": "stateful",
        "step": "value",
        "generator": "generator",
        "scheduler": "stateful",
        "optimizer": "optimizer",
        "scaler": "stateful",
        "loader": "stateful",
        "model": "module",
        "head": "module",
        "averaged.ema": "module",
        "averaged.decay": "value",
    }
    assert list(parts["model"].tree) == list(run.model.state_dict())
    assert parts["model"].tree["body.0._extra_state"] == {"passes": 2}
    # A tied parameter is there once, under its first name.
    names = [f"model.{name}" for name, _ in run.model.named_parameters()]
    assert list(parts["optimizer"].tree["state"]) == [*names, "head.bias"]


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "..", 3, None, "a\n", "a\0", "\ud800", "a\\b"])
@pytest.mark.parametrize("nested", [False, True])
def test_names_that_no_file_can_have(name: Any, nested: bool) -> None:
    objects = {name: nn.Linear(2, 2)}
    with pytest.raises(errors.OptionError, match="not a name"):
        capture(targets_of({"above": objects} if nested else objects))


def test_what_is_no_mapping_of_objects() -> None:
    model = nn.Linear(2, 2)
    for wrong in (model, [model], None, nn.ModuleDict()):
        with pytest.raises(errors.OptionError, match="from names to objects"):
            capture(targets_of(wrong))  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="list") as caught:
        capture(targets_of({"models": [1, model]}))
    assert "Linear" in caught.value.found
    endless: dict[str, Any] = {"model": model}
    endless["again"] = endless
    with pytest.raises(errors.OptionError, match=r"nested|too long"):
        capture(targets_of(endless))
    with pytest.raises(errors.OptionError, match="Part"):
        restore_objects({"model": model}, {"model": model.state_dict()})  # type: ignore[dict-item]


@pytest.mark.parametrize("make", [Model, Positions, lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))])])
def test_an_object_that_raises_when_it_is_asked(make: Callable[[], Any]) -> None:
    it = make()

    def state_dict() -> None:
        raise ZeroDivisionError

    it.state_dict = state_dict
    if isinstance(it, torch.optim.Optimizer):
        return  # it is asked for its parameters
    with pytest.raises(errors.ObjectStateError, match=r"it: .*asked for its state(.|\n)*ZeroDivisionError"):
        capture(targets_of({"it": it}))


def test_nothing_is_copied() -> None:
    model = nn.Linear(2, 2)
    parts = capture(targets_of({"model": model, "value": (value := [1])}))
    assert parts["model"].tree["weight"].data_ptr() == model.weight.data_ptr()
    assert parts["model"].tree._metadata[""] == {"version": 1}
    assert parts["value"].tree is value


def test_generators_are_asked_last() -> None:
    class Drawing(Positions):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            torch.rand(1, generator=generator)
            return {}

    generator = torch.Generator()
    parts = capture(targets_of({"generator": generator, "rng": Random(), "loader": Drawing()}))
    assert list(parts) == ["generator", "rng", "loader"]
    assert torch.equal(parts["generator"].tree, generator.get_state())
    assert torch.equal(parts["rng"].tree["torch"], torch.get_rng_state())
