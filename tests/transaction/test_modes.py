"""Modes of torch that raise in any call of a load, a conversion or a restore: the model is whole, old or new."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import modelstate as ms
from modelstate.errors import PlacementError


class Stop(Exception):
    pass


class Operations(TorchDispatchMode):
    """Raises at an operation and at all later ones; counts the operations."""

    def __init__(self, last: int = 1 << 60) -> None:
        super().__init__()
        self.count, self.last = 0, last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count > self.last:
            raise Stop
        return func(*args, **(kwargs or {}))


class Counter(nn.Module):
    """Has an extra state, which is set in place, and a counter that the setting changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.extra, self.loads = torch.randn(3), torch.zeros(1)

    def get_extra_state(self) -> Any:
        return self.extra.clone()

    def set_extra_state(self, state: Any) -> None:
        self.extra.copy_(state)
        self.loads += 1


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).half(), nn.BatchNorm1d(3), Counter())


def state(model: nn.Module) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, Counter):
            tensors += [module.extra, module.loads]
    return [tensor.detach().clone() for tensor in tensors]


def is_equal(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, now, strict=True))


Operation = Callable[[nn.Sequential, Path], object]
OPERATIONS: dict[str, Operation] = {
    "staged": lambda model, path: ms.load(model, path, in_place=False),
    "at the commit": lambda model, path: ms.load(model, path),
    "transform": lambda model, path: ms.load(model, path, transform=lambda _, tensor: tensor.clone()),
    "restore": lambda model, path: ms.restore({"model": model}, path.with_name("objects.safetensors")),
    "convert": lambda model, _: ms.convert(model, torch.bfloat16),
    "convert by a function": lambda model, _: ms.convert(model, transform=lambda _, tensor: tensor + 1),
    "dtype": lambda model, path: ms.load(model, path, dtype=torch.bfloat16),
}


def moments(total: int) -> Iterator[int]:
    """Each of the last calls, where the commit is, and some of the others."""
    return iter(sorted({*range(0, total, max(total // 25, 1)), *range(max(total - 25, 0), total)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_mode_that_raises_leaves_the_model_as_it_was(name: str, tmp_path: Path) -> None:
    path, operation = tmp_path / "model.safetensors", OPERATIONS[name]
    ms.save(build(), path)
    ms.save({"model": build()}, path.with_name("objects.safetensors"))
    model, counted = build(), Operations()
    with counted:
        operation(model, path)
    refused = 0
    for last in moments(counted.count):
        model = build()
        before = state(model)
        try:
            with Operations(last):
                operation(model, path)
        except (Stop, ms.ModelStateError, RuntimeError):
            refused += 1
            assert is_equal(before, state(model)), last
        assert torch.is_grad_enabled()
    assert refused


def test_the_models_own_code_sees_the_modes_of_the_caller(tmp_path: Path) -> None:
    class Device(Counter):
        def set_extra_state(self, state: Any) -> None:
            self.made_on = torch.empty(1).device.type

    model, path = Device(), tmp_path / "model.safetensors"
    ms.save(model, path)
    devices: list[str] = []

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        devices.append(torch.empty(1).device.type)
        return tensor

    with torch.device("meta"):
        ms.load(model, path, transform=transform)
        assert torch.empty(1).is_meta
    assert model.made_on == "meta"
    assert devices == ["meta"]
    assert not model.weight.is_meta


def test_where_tensors_stand_for_others_nothing_is_loaded(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "model.safetensors"
    ms.save(nn.Linear(2, 2), path)
    before = state(model)
    with FakeTensorMode(), pytest.raises(PlacementError, match="FakeTensorMode"):
        ms.load(model, path)
    with pytest.raises(PlacementError, match=r"torch\.func"):
        torch.func.grad(lambda x: (ms.load(model, path), x)[1])(torch.tensor(1.0))
    assert is_equal(before, state(model))
