"""`reference_keeping`: `.to()` and its kin on an unchanged model."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.conversion.test_convert import objects
from tests.loading.fingerprint import whole
from tests.programs import run_program

STOCK = nn.Module._apply


@pytest.fixture(autouse=True)
def _torch_is_left_alone() -> Iterator[None]:
    yield
    assert nn.Module._apply is STOCK


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to(torch.ones(1, dtype=torch.float16)),
        lambda m: m.double().half().float(),
        lambda m: m.bfloat16(),
        lambda m: m.cpu(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.type(torch.float64),
        lambda m: m.share_memory(),
        lambda m: m.requires_grad_(False).eval(),
    ],
)
def test_all_of_them_keep_every_object(convert: Any) -> None:
    ours, torchs = network(), network()
    before = objects(ours)
    with ms.reference_keeping():
        assert convert(ours) is ours
    convert(torchs)
    assert objects(ours) == before
    for one, other in zip(ours.state_dict().values(), torchs.state_dict().values(), strict=True):
        assert (one.dtype, one.device, one.is_shared()) == (other.dtype, other.device, other.is_shared())


def test_from_meta_to_memory_and_back() -> None:
    with torch.device("meta"):
        module = network()
    before = objects(module)
    with ms.reference_keeping():
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            module.to("cpu")
        module.to_empty(device="cpu")
    assert objects(module) == before
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_an_error_half_way_changes_nothing() -> None:
    module = network()
    before, calls = whole(module), []

    def fails_late(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise ArithmeticError("late")
        return tensor.double()

    with ms.reference_keeping(), pytest.raises(ArithmeticError, match="late"):
        module._apply(fails_late)  # type: ignore[no-untyped-call]
    assert whole(module) == before


def test_only_the_module_itself_where_torch_does_not_recurse() -> None:
    module = nn.Module()
    module.own, module.child = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    with ms.reference_keeping():
        module.to_empty(device="meta", recurse=False)
    assert module.own.is_meta
    assert not module.child.weight.is_meta


def test_switched_on_for_good_and_off_again() -> None:
    module = network()
    buffer: Any = module[1].running_mean
    ms.reference_keeping()
    try:
        module.double()
        with ms.reference_keeping(False):
            assert nn.Module._apply is STOCK
        module.float()
    finally:
        ms.reference_keeping(False)
    assert module[1].running_mean is buffer
    module.double()
    assert module[1].running_mean is not buffer


def test_one_object_that_is_entered_within_itself() -> None:
    module = network()
    buffer: Any = module[1].running_mean
    keeping = ms.reference_keeping()
    with keeping:
        with keeping:
            module.double()
        module.float()
    assert nn.Module._apply is STOCK
    with keeping:
        module.double()
    assert module[1].running_mean is buffer
    assert nn.Module._apply is STOCK


@pytest.mark.slow
def test_threads() -> None:
    """Conversions in several threads do not come into each other's way."""
    modules = [nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 4)) for _ in range(8)]
    kept = [objects(module) for module in modules]

    def work(module: nn.Module) -> None:
        for _ in range(20):
            ms.convert(module, torch.float64)
            module.to(torch.float32)

    threads = [threading.Thread(target=work, args=(module,)) for module in modules]
    with ms.reference_keeping():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [objects(module) for module in modules] == kept
    assert {p.dtype for module in modules for p in module.parameters()} == {torch.float32}


def with_gradients(other_dtype: bool = False) -> nn.Module:
    module = network()
    module(torch.ones(4, 3) * torch.arange(4.0)[:, None]).pow(2).sum().backward()
    if other_dtype:
        module.double()
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()  # which leaves the gradient what it is
    return module


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


GRADIENTS: dict[str, Any] = {
    "share_memory": lambda m: m.share_memory(),
    "zero_": lambda m: m._apply(lambda t: t.zero_()),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.float32),
    "cpu": lambda m: m.cpu(),
    "float of what is shared": lambda m: m.share_memory().float(),
}


@pytest.mark.parametrize("other_dtype", [False, True])
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_become_what_they_become_with_torch(case: str, other_dtype: bool) -> None:
    ours, torchs = with_gradients(other_dtype), with_gradients(other_dtype)
    before = gradients(ours)
    with ms.reference_keeping():
        GRADIENTS[case](ours)
    GRADIENTS[case](torchs)
    assert all(one is other for one, other in zip(gradients(ours), before, strict=True))
    for one, other in zip(gradients(ours), gradients(torchs), strict=True):
        assert (one.dtype, one.is_shared()) == (other.dtype, other.is_shared())
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convert_casts_a_gradient_of_another_dtype(dtype: torch.dtype) -> None:
    module = with_gradients(other_dtype=True)
    before = gradients(module)
    assert {grad.dtype for grad in before} == {torch.float64}
    report = ms.convert(module, dtype)
    assert {grad.dtype for grad in gradients(module)} == {dtype}
    assert all(one is other for one, other in zip(gradients(module), before, strict=True))
    assert len(report.steps) == (0 if dtype is torch.float32 else 6)


PEAK = """
import torch, modelstate as ms

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10

model = torch.nn.Sequential(*[torch.nn.Linear(2000, 2000, bias=False) for _ in range(8)])
with ms.reference_keeping():
    torch.nn.Linear(2, 2).to(torch.bfloat16)  # imports what it needs
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    CAST
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the memory is read from /proc")
@pytest.mark.parametrize("cast", ["model.to(torch.bfloat16)", "model.bfloat16()", "ms.convert(model, torch.bfloat16)"])
def test_a_cast_frees_each_tensor_before_the_next(cast: str) -> None:
    """A second copy of the model would be 64 MB."""
    ended = run_program(PEAK.replace("CAST", cast))
    assert int(ended.stdout) < 32 << 20
