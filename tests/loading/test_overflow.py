"""Finite values that become infinite or NaN are in the notes of a report, by name and count."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.loads import stored

FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a = nn.Linear(300, 300, **options)
        self.b = nn.Linear(300, 3, **options)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")))


def large() -> Net:
    """Three finite values that float16 does not have, in two tensors, beside some that are infinite already."""
    model = Net()
    with torch.no_grad():
        model.a.weight[0, 0], model.a.weight[299, 299] = 1e5, -1e6
        model.b.bias[1] = 70000.0
        model.b.bias[2] = float("inf")
    return model


NOTE = "finite values became infinite or NaN by a cast, 3 in all: a.weight (2), b.bias (1)"


def half_skeleton() -> nn.Module:
    with ms.skeleton():
        return Net(dtype=torch.float16)


LOADS: dict[str, Callable[[Any], ms.LoadReport]] = {
    "streamed": lambda source: ms.load(Net(), source, dtype=torch.float16),
    "skeleton": lambda source: ms.load(half_skeleton(), source, dtype=torch.float16),
    "in place": lambda source: ms.load(Net(dtype=torch.float16), source, dtype=torch.float16, in_place=True),
    "background": lambda source: ms.load(
        Net(dtype=torch.float16), source, dtype=torch.float16, background=True
    ).result(),
    "a rule": lambda source: ms.load(half_skeleton(), source, rules=[ms.rules.Cast("*", torch.float16)]),
    "a rule, in place": lambda source: ms.load(
        Net(dtype=torch.float16), source, rules=[ms.rules.Cast("*", torch.float16)], in_place=True
    ),
    "transform": lambda source: ms.load(Net(), source, dtype=torch.float16, transform=lambda name, tensor: tensor * 1),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("form", ["safetensors", "torch", "mapping"])
def test_a_load(tmp_path: Path, load: Callable[[Any], ms.LoadReport], form: str) -> None:
    report = load(stored(large().state_dict(), tmp_path, form))
    assert [note for note in report.notes if "infinite" in note] == [NOTE]
    assert NOTE in str(report)


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("name", ["y.safetensors", "y.pt"])
@pytest.mark.parametrize("options", [{}, {"rules": [ms.rules.Prefix(strip="net.")]}], ids=["", "rules"])
@pytest.mark.parametrize("live", [False, True])
def test_a_checkpoint_that_is_converted(tmp_path: Path, name: str, options: dict[str, Any], live: bool) -> None:
    state = {("net." if options else "") + key: value for key, value in large().state_dict().items()}
    torch.save(state, tmp_path / "x.pt")
    source: Any = state if live else tmp_path / "x.pt"
    report = ms.convert_checkpoint(source, tmp_path / name, dtype=torch.float16, **options)
    assert report.notes == (NOTE,)
    assert f"note: {NOTE}" in str(report)
    rules = [*options.get("rules", ()), ms.rules.Cast("*", torch.float16)]
    assert ms.convert_checkpoint(source, tmp_path / name, rules=rules).notes == (NOTE,)
    assert ms.convert_checkpoint(source, tmp_path / name).notes == ()


def test_a_module_that_is_converted() -> None:
    assert ms.convert(large(), dtype=torch.float16).notes == (NOTE,)
    assert ms.convert(large(), dtype=torch.float64).notes == ()
    assert ms.convert(Net(), dtype=torch.float16).notes == ()


@pytest.mark.parametrize("in_place", [None, True, False])
def test_nan_before_a_cast(tmp_path: Path, in_place: bool | None) -> None:
    weight = torch.ones(4, 3)
    weight[1:3, 0] = float("nan")
    path = str(tmp_path / "model.safetensors")
    ms.save({"weight": weight, "bias": torch.ones(4)}, path)
    report = ms.load(torch.nn.Linear(3, 4).half(), path, in_place=in_place, dtype="fp16")
    assert [note for note in report.notes if "NaN" in note] == ["values were NaN before a cast, 2 in all: weight (2)"]


def test_nothing_is_said_where_nothing_overflows(tmp_path: Path) -> None:
    """Also where the sum of the result is too large for its dtype."""
    ms.save(Net(), tmp_path / "x.safetensors")
    report = ms.load(half_skeleton(), tmp_path / "x.safetensors", dtype=torch.float16)
    assert not any("infinite" in note for note in report.notes)
    state = {"w": torch.full((1000, 1000), 60000.0)}
    assert ms.convert_checkpoint(state, tmp_path / "y", dtype=torch.float16).notes == ()


def in_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """Changes the tensor in place, which the tensor's version counter does not show."""
    with np.errstate(over="ignore"):
        tensor.numpy()[...] *= np.float32(1e34)
    return tensor


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a cast": lambda tensor: tensor.half(),
    "a product": lambda tensor: tensor * 1e34,
    "in place": lambda tensor: tensor.mul_(1e34),
    "in place, as a view": lambda tensor: tensor.mul_(1e34).view(tensor.shape),
    "in place, by NumPy": in_numpy,
    "another order": lambda tensor: (tensor * 1e34).flip(0),
}


class ByModule(ms.loading.ModuleTransform):
    """Calls a function with the tensors of modules."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def applies_to(self, name: str, module: nn.Module) -> bool:
        return name != "mask"

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        return self.function(tensor)


BY_FUNCTION = NOTE.replace("a cast", "transform=")


@pytest.mark.slow_except(15)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("form", ["safetensors", "torch", "mapping"])
@pytest.mark.parametrize("way", ["tensors", "modules", "background", "after a rule"])
def test_a_transform(tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor], form: str, way: str) -> None:
    report = ms.load(
        Net(),
        stored(large().state_dict(), tmp_path, form),
        transform=ByModule(function) if way == "modules" else lambda name, tensor: function(tensor),
        background=way == "background",
        rules=[ms.rules.Apply("*", torch.clone)] if way == "after a rule" else [],
    )
    if isinstance(report, ms.loading.LoadHandle):
        report = report.result()
    assert [note for note in report.notes if "infinite" in note] == [BY_FUNCTION]


def test_a_transform_and_the_cast_after_it_are_told_apart() -> None:
    def grow(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if name == "a.bias":
            tensor[:5] = float("nan")
        return tensor

    report = ms.load(Net(), large().state_dict(), transform=grow, dtype=torch.float16)
    assert NOTE in report.notes
    assert "finite values became infinite or NaN by transform=, 5 in all: a.bias (5)" in report.notes


def test_a_transform_that_keeps_or_repairs_infinite_values() -> None:
    for function in (lambda _, tensor: tensor, lambda _, tensor: tensor.neg(), lambda _, tensor: tensor.nan_to_num()):
        report = ms.load(Net(), large().state_dict(), transform=function)
        assert not any("infinite" in note for note in report.notes)


def test_a_function_that_converts_a_module() -> None:
    note = NOTE.replace("a cast", "transform=")
    assert ms.convert(large(), transform=lambda name, tensor: tensor.half()).notes == (note,)
    assert ms.convert(large(), transform=lambda name, tensor: tensor * 1e34).notes == (note,)
    assert ms.convert(large(), transform=lambda name, tensor: tensor * 2).notes == ()
    assert ms.convert(large(), transform=lambda name, tensor: tensor.nan_to_num(posinf=0.0, neginf=0.0)).notes == ()
    cast = ms.convert(large(), transform=lambda name, tensor: tensor.clone(), dtype=torch.float16)
    assert cast.notes == (NOTE.replace("a cast", "transform= or the cast after it"),)


@pytest.mark.slow_except(20)
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_the_count_is_that_of_comparing_every_value(source: torch.dtype, target: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randint(0, 256, (4096 * source.itemsize,), generator=generator).to(torch.uint8).view(source)
    report = ms.convert_checkpoint({"w": value}, tmp_path / "x.safetensors", rules=[ms.rules.Cast("w", target)])
    expected = int((value.to(torch.float64).isfinite() & ~value.to(target).to(torch.float64).isfinite()).sum())
    note = f"finite values became infinite or NaN by a cast, {expected:,} in all: w ({expected:,})"
    assert [found for found in report.notes if "infinite" in found] == [note] * bool(expected)
