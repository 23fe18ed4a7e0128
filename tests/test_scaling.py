"""The work of a call is linear in the number of tensors, names and rules. It is counted in calls of functions."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelStateError

pytestmark = pytest.mark.slow

NUMBERS = 100, 200, 400


def model(number: int) -> nn.Module:
    parts = [nn.Module() for _ in range(number)]
    for part in parts:
        part.w = nn.Parameter(torch.zeros(2))
    return nn.ModuleList(parts)


def names(number: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{index}.w" for index in range(number)]


def state(number: int, prefix: str = "") -> dict[str, torch.Tensor]:
    return {name: torch.ones(2) for name in names(number, prefix)}


def tied(number: int) -> nn.Module:
    target = model(number)
    for part in target.children():
        part.w = target[0].w
    return target


def views(number: int, step: int) -> nn.Module:
    target, memory = model(number), torch.zeros(2 * number)
    for index, part in enumerate(target.children()):
        part.w.data = memory[index * step : index * step + 2]
    return target


def load(target: nn.Module, source: Any, **options: Any) -> Callable[[], object]:
    return lambda: ms.load(target, source, **options)


def optimizer_load(number: int) -> Callable[[], object]:
    target = model(number)
    optimizer = torch.optim.SGD(target.named_parameters(), momentum=0.9)
    for parameter in target.parameters():
        parameter.grad = torch.zeros(2)
    optimizer.step()
    saved = ms.optimizer_state(target, optimizer)
    renamed = nn.ModuleDict({"new": target})
    own = torch.optim.SGD(renamed.named_parameters(), momentum=0.9)
    rules = [ms.rules.Rename(name, f"new.{name}") for name in names(number)]
    return lambda: ms.load_optimizer_state(renamed, own, saved, rules=rules)


def failing(target: nn.Module, source: Any, **options: Any) -> Callable[[], object]:
    def call() -> None:
        with pytest.raises(ModelStateError) as caught:
            ms.load(target, source, **options)
        str(caught.value)

    return call


CALLS: dict[str, Callable[[int, Path], Callable[[], object]]] = {
    "allow_missing of every name": lambda n, _: load(model(2 * n), state(n), allow_missing=names(2 * n)[n:]),
    "a Split into all tensors": lambda n, _: load(
        model(n), {"whole": torch.ones(2 * n)}, rules=ms.rules.Split("whole", names(n))
    ),
    "a Rename of every name": lambda n, _: load(
        model(n), state(n, "old."), rules=[ms.rules.Rename(f"old.{name}", name) for name in names(n)]
    ),
    "an optimizer with a Rename of every name": lambda n, _: optimizer_load(n),
    "one tensor under all names, in a file": lambda n, path: (
        ms.save(tied(n), path / "tied.safetensors") and load(tied(n), path / "tied.safetensors")
    ),
    "tensors that overlap their neighbours": lambda n, _: load(views(n, 1), state(n)),
    "rules that fail, and as many that apply to nothing": lambda n, _: failing(
        model(n),
        state(n),
        rules=[
            *(ms.rules.Split(name, [f"a.{name}"], sizes=[9]) for name in names(n)),
            *(ms.rules.Rename(name, f"new.{name}") for name in names(n, "old.")),
        ],
    ),
    "a step with the tensors of the last": lambda n, path: (
        (store := ms.Store(path / str(len([*path.iterdir()])))).save(0, objects := {"model": model(n)})
        and (lambda: store.save(1, objects))
    ),
    "the model's own tensors": lambda n, _: partial(ms.load_state_dict, target := model(n), target.state_dict()),
    "names that do not fit": lambda n, _: failing(model(n), state(n, "body.layers.") | state(n, "head.")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_work_is_linear(call: Callable[[int, Path], Callable[[], object]], tmp_path: Path) -> None:
    call(NUMBERS[0], tmp_path)()  # what is imported and cached at the first call
    few, more, most = (count_calls(call(number, tmp_path)) for number in NUMBERS)
    assert few < more < most
    assert most - more < 2.4 * (more - few)  # twice as much where work is linear, 4 times where it is quadratic


def count_calls(function: Callable[[], object]) -> int:
    """Returns how many functions, in Python and in C, a call calls in this thread."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
