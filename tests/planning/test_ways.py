"""The way of a value into its slot: the cheapest that keeps every reference, and what it takes for granted."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.loading import Way
from modelstate.planning.transfer import copy_cannot_fail
from tests.formats.torch_files import DTYPES, is_copied


class Subclass(torch.Tensor):
    """A tensor subclass that changes nothing."""


VALUE = torch.ones(2, 3)
IMAGE = torch.ones(2, 3, 4, 4)


def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    ("param", "value", "options", "way", "why"),
    [
        (VALUE, VALUE, {}, Way.STAGED, "they are small"),
        (VALUE, VALUE, {"in_place": True}, Way.INTO, "directly"),
        (VALUE, VALUE, {"in_place": False}, Way.STAGED, "after all reads"),
        (VALUE, VALUE, {"in_place": True, "transform": doubled}, Way.STAGED, "after all reads"),
        (VALUE, VALUE.half(), {"in_place": True}, Way.INTO, "directly"),
        (VALUE, VALUE, {"dtype": torch.bfloat16, "in_place": True}, Way.NEW, "changes its dtype to bfloat16"),
        (VALUE.to("meta"), VALUE, {}, Way.MAP, "becomes a map of the file"),
        (VALUE.to("meta"), VALUE, {"map": False}, Way.NEW, "gets memory"),
        (VALUE.to("meta"), VALUE, {"dtype": torch.float16}, Way.NEW, "gets memory"),
        (VALUE.to("meta"), VALUE.half(), {}, Way.NEW, "gets memory"),
        (torch.ones(3, 2, device="meta").T, VALUE, {}, Way.NEW, "gets memory"),
        (IMAGE.to("meta", memory_format=torch.channels_last), IMAGE, {}, Way.NEW, "gets memory"),
        (VALUE.to("meta"), VALUE, {"transform": doubled}, Way.NEW, "gets memory"),
        (VALUE, VALUE, {"transform": lambda _, tensor: tensor.half()}, Way.NEW, "changes its dtype to float16"),
        (VALUE, VALUE, {"transform": lambda _, tensor: tensor.as_subclass(Subclass)}, Way.NEW, "made by transform="),
        (VALUE.as_subclass(Subclass), VALUE, {"in_place": True}, Way.CODE, "decides in module_load"),
        (VALUE.as_subclass(Subclass), VALUE, {"dtype": torch.bfloat16}, Way.CODE, "decides in module_load"),
        (VALUE.to_sparse(), VALUE.to_sparse(), {"dtype": torch.float16}, Way.CODE, "decides in module_load"),
        (VALUE, VALUE.as_subclass(Subclass), {"in_place": True}, Way.CODE, "decides in module_load"),
    ],
)
def test_each_value_has_one_way_with_its_reason(
    tmp_path: Path, param: torch.Tensor, value: torch.Tensor, options: dict[str, Any], way: Way, why: str
) -> None:
    if type(value) is torch.Tensor and value.layout is torch.strided:
        save_file({"weight": value.contiguous()}, source := tmp_path / "x.safetensors")
    else:
        source = {"weight": value}
    module = nn.Module()
    module.register_buffer("weight", param.clone())
    tensor, planned = module.weight, ms.plan(module, source, **options)
    (step,) = ms.load(module, source, **options).steps
    assert step.way is way
    assert why in step.why
    assert step.mapped == (way is Way.MAP)
    assert module.weight is tensor
    assert step.dtype == module.weight.dtype == options.get("dtype", module.weight.dtype)
    assert planned.steps[0].why
    if "transform" not in options:
        assert planned.steps[0].way is way


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
def test_every_dtype_that_torch_copies_is_read_without_a_second_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: torch.arange(1 << 20, dtype=torch.uint8).view(dtype) for name in "abc"}
    save_file(state, tmp_path / "x.safetensors")
    module = nn.Module()
    for name, value in state.items():
        module.register_buffer(name, torch.zeros_like(value))
    for in_place in (None, True):
        report = ms.load(module, tmp_path / "x.safetensors", in_place=in_place)
        assert report.peak_memory_bytes < 1 << 20 or in_place is None, report
        assert all(
            torch.equal(getattr(module, name).view(torch.uint8), state[name].view(torch.uint8)) for name in state
        )
    with torch.device("meta"):
        module.to("meta")
    assert {step.way for step in ms.load(module, tmp_path / "x.safetensors").steps} <= {Way.MAP, Way.NEW}


# Copies that cannot fail.


def cut(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


GOOD = {
    "plain": lambda: torch.zeros(2, 3),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 3)),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part": lambda: torch.zeros(4, 3)[1:3],
    "meta": lambda: torch.zeros(2, 3, device="meta"),
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.zeros(()),
}
BAD = {
    "repeated": lambda: torch.zeros(10)[:3].expand(2, 3),
    "overlapping": lambda: torch.zeros(10).as_strided((2, 3), (1, 1)),
    "without memory": lambda: cut(torch.zeros(2, 3), 0),
    "cut short": lambda: cut(torch.zeros(2, 3), 20),
    "made in inference mode": inference,
    "subclass": lambda: torch.zeros(2, 3).as_subclass(Subclass),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "odd dtype": lambda: torch.zeros(2, 3, dtype=torch.complex32),
}


@pytest.mark.parametrize("kind", GOOD)
def test_targets_that_every_copy_fits(kind: str) -> None:
    target = GOOD[kind]()
    value = torch.ones(target.shape)
    assert copy_cannot_fail(target, value)
    with torch.no_grad():
        target.copy_(value)
    assert target.is_meta or torch.equal(target, value)


@pytest.mark.parametrize("kind", BAD)
def test_targets_that_a_copy_may_fail_for(kind: str) -> None:
    promised = copy_cannot_fail(BAD[kind](), torch.ones(2, 3))
    assert not promised  # in a line of its own: showing a tensor without memory would end the process


@pytest.mark.parametrize(
    "value",
    [VALUE.to("meta"), VALUE.to_sparse(), VALUE.as_subclass(Subclass), VALUE.to(torch.complex32)],
    ids=["meta", "sparse", "subclass", "odd dtype"],
)
def test_values_that_a_copy_may_fail_for(value: torch.Tensor) -> None:
    assert not copy_cannot_fail(torch.zeros(2, 3), value)


@pytest.mark.filterwarnings("ignore:Casting complex", "ignore:ComplexHalf")
def test_promised_copies_between_dtypes_succeed() -> None:
    promised = 0
    for source, target in itertools.product(filter(is_copied, DTYPES), repeat=2):
        value, memory = (torch.zeros(2, 48, dtype=torch.uint8).view(dtype)[:, :2] for dtype in (source, target))
        if copy_cannot_fail(memory.contiguous(), value):
            memory.contiguous().copy_(value)
            promised += 1
    assert promised == 20 * 20 - 2 * 18  # complex into real warns, and a warning may be an error
