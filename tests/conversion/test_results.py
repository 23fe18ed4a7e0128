"""Results of other classes and layouts than the tensor that they replace, by `convert` and by `reference_keeping`."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import holding, whole
from tests.programs import run_program

WAYS = ["convert", "keeping"]

SCRIPT = """
import sys, torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
import modelstate as ms

def masked(t):
    return torch.masked.masked_tensor(t.detach().clone(), t.detach() > 0)

FUNCTIONS = {{
    "two tensors": lambda t: TwoTensor(t.double(), t.double()),
    "two tensors of the input": lambda t: TwoTensor(t, t),
    "jagged": lambda t: torch.nested.nested_tensor([t.detach().double()] * 2, layout=torch.jagged),
    "nested": lambda t: torch.nested.nested_tensor([t.detach().double()] * 2),
    "sparse": lambda t: t.double().to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t.detach(), 0.5, 0, torch.qint8),
    "masked": masked,
}}
fn = FUNCTIONS[{case!r}]
module = nn.Module()
module.weight, module.scale = nn.Parameter(torch.full((2, 2), 3.0)), nn.Buffer(torch.full((2, 2), 5.0))
weight, scale = module.weight, module.scale
if {way!r} == "convert":
    ms.convert(module, transform=lambda name, t: fn(t))
else:
    with ms.reference_keeping():
        module._apply(fn)
assert module.weight is weight and module.scale is scale
expected = fn(torch.full((2, 2), 3.0))
assert isinstance(weight, nn.Parameter) and isinstance(weight, type(expected)), type(weight)
assert type(scale) is type(expected) and scale.layout == expected.layout and scale.dtype == expected.dtype
def values(t):
    t = t.detach()
    if t.is_nested:
        return torch.stack(list(t.unbind()))
    if t.is_quantized:
        return t.dequantize()
    if hasattr(t, "get_data"):
        return t.get_data()
    return t.b if hasattr(t, "b") else t.to_dense()
for tensor, number in ((weight, 3.0), (scale, 5.0)):
    repr(tensor)
    found = values(tensor)
    assert torch.equal(found, torch.full_like(found, number)), found
print("done")
"""
CASES = ("two tensors", "two tensors of the input", "jagged", "nested", "sparse", "quantized", "masked")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_result_of_another_class(case: str, way: str) -> None:
    """In a process of its own, since torch ends a process that uses a tensor of a wrong class."""
    code = SCRIPT.format(case=case, way=way)
    done = run_program(code)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout == "done\n"


DTENSOR = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
import modelstate as ms
from tests.loading.fingerprint import whole

dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
mesh = init_device_mesh("cpu", (1,))
fn = lambda t: distribute_tensor(t.detach().double(), mesh, [Replicate()])
module = nn.BatchNorm1d(2)
before = whole(module)
for convert in (lambda: ms.convert(module, transform=lambda name, t: fn(t)), lambda: module._apply(fn)):
    with ms.reference_keeping():
        try:
            convert()
        except ms.errors.PlacementError as error:
            print(error.what)
    assert whole(module) == before
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_parameter_cannot_become_a_dtensor() -> None:
    """Python cannot assign that class to the object of a parameter: its objects have another layout."""
    done = run_program(DTENSOR)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("torch cannot put the new tensor in the place of the old one") == 2


def changed(module: nn.Module, fn: Any, way: str) -> None:
    if way == "convert":
        ms.convert(module, transform=lambda name, t: fn(t))
    else:
        with ms.reference_keeping():
            module._apply(fn)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("way", WAYS)
def test_a_result_that_holds_its_input_does_not_come_to_hold_itself(way: str) -> None:
    module = holding(scale=torch.arange(3.0))
    scale: Any = module.scale
    changed(module, lambda t: TwoTensor(t, t), way)
    assert module.scale is scale
    assert type(scale) is TwoTensor
    for part in (scale.a, scale.b):
        assert type(part) is torch.Tensor
        assert part.tolist() == [0, 1, 2]
    assert (scale + 1).a.tolist() == [1, 2, 3]


class Undetachable(TwoTensor):
    """A wrapper that cannot be detached from its input."""

    def detach(self) -> Any:
        return self


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["attribute", "list", "dict"])
def test_a_result_that_cannot_be_parted_from_its_input(way: str, kind: str) -> None:
    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        made: Any = Undetachable(tensor.clone(), tensor.clone())
        made.input = {"attribute": tensor, "list": [tensor], "dict": {"input": tensor}}[kind]
        return made

    module = holding(scale=torch.arange(3.0))
    before = whole(module)
    with pytest.raises(errors.TransformError, match="holds its input") as caught:
        changed(module, wrap, way)
    assert caught.value.where == "scale"
    assert whole(module) == before


def test_one_result_for_two_slots() -> None:
    """As with torch, both have its values; with torch's exchange of objects one would get those of the other."""
    module = holding(first=torch.zeros(2, 2), second=torch.ones(2, 2))
    kept = (2 * torch.eye(2)).to_sparse()
    with ms.reference_keeping():
        module._apply(lambda t: kept)  # type: ignore[no-untyped-call]
    for tensor in (kept, module.first, module.second):
        assert torch.equal(tensor.to_dense(), 2 * torch.eye(2))  # type: ignore[operator, union-attr]


def test_a_mode_without_values() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = whole(module)
    for arguments in ({"dtype": torch.float16}, {"device": "meta"}, {"transform": lambda name, tensor: tensor.half()}):
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(errors.PlacementError, match="FakeTensorMode"):
            ms.convert(module, **arguments)  # type: ignore[arg-type]
        assert whole(module) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_without_values(way: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = whole(module)
    with pytest.raises(errors.PlacementError, match="FakeTensor, which has no values"):
        changed(module, lambda t: mode.from_tensor(t.detach()), way)
    assert whole(module) == before


def test_keeping_references_leaves_tracing_to_torch() -> None:
    """A trace in FakeTensorMode replaces the tensors of the module, as torch does; the real ones keep their values."""
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight, values, of_torch = module.weight, module.weight.tolist(), other.weight
    with FakeTensorMode(allow_non_fake_inputs=True), ms.reference_keeping():
        module.half()
    with FakeTensorMode(allow_non_fake_inputs=True):
        other.half()
    if of_torch.is_meta:
        pytest.skip("this torch changes the real tensors")
    assert module.weight is not weight
    assert weight.dtype is torch.float32
    assert weight.tolist() == values


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_buffers_over_one_numpy_array_share_memory_or_the_report_says_that_they_do_not(
    source: Any, dtype: torch.dtype
) -> None:
    array = np.arange(12).astype(source)
    for first, second in ((array, array), (array, array[3:9]), (array, array.reshape(3, 4).T), (array[:8], array[6:])):
        model = nn.Module()
        model.register_buffer("first", torch.from_numpy(first))
        model.register_buffer("second", torch.from_numpy(second))
        expected = model.second.to(dtype)
        report = ms.convert(model, dtype)
        assert torch.equal(model.second.double(), expected.double())
        begin = model.first.data_ptr()
        is_shared = begin <= model.second.data_ptr() < begin + model.first.nbytes
        assert is_shared == (len(first) == len(array))  # one of them has all of the memory
        lost = () if is_shared else ("first and second no longer share memory",)
        assert report.references_lost == lost
