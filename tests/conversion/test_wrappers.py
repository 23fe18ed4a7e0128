"""Modules that something else holds, or that convert themselves: converted right, or refused whole."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import whole


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    if not dist.is_gloo_available():
        pytest.skip("torch is built without gloo: modules of distributed training are not tested")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("inside", [False, True])
def test_distributed_data_parallel_is_refused(inside: bool) -> None:
    module = network()
    wrapped = nn.parallel.DistributedDataParallel(module)
    wrapped(torch.ones(2, 3)).pow(2).sum().backward()
    before = whole(module)
    with pytest.raises(errors.PlacementError, match="DistributedDataParallel's reducer") as caught:
        ms.convert(module if inside else wrapped, torch.float64)
    assert "wrap it again" in caught.value.remedy
    assert whole(module) == before
    assert len(ms.convert(wrapped, torch.float32).steps) == 0


def sharded() -> Any:
    module: Any = network()
    mesh = init_device_mesh("cpu", (1,))
    for one in (module[0], module[2], module):
        fully_shard(one, mesh=mesh)
    return module


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", ["convert", "to"])
def test_fully_sharded_modules_before_their_first_forward(way: str) -> None:
    module = sharded()
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(module.parameters())
    if way == "convert":
        ms.convert(module, torch.float64, optimizers=[optimizer])
    else:
        with ms.reference_keeping():
            module.to(torch.float64)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    expected = network().double()
    x = torch.ones(2, 3).double()
    assert torch.equal(module(x), expected(x))
    module(x).pow(2).sum().backward()
    optimizer.step()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float64}


@pytest.mark.usefixtures("group")
def test_fully_sharded_modules_in_use_are_refused() -> None:
    module = sharded()
    x = torch.ones(2, 3)
    result = module(x).detach()
    module(x).pow(2).sum().backward()
    with pytest.raises(errors.PlacementError, match="FSDP") as caught:
        ms.convert(module, torch.float64)
    assert "MixedPrecisionPolicy" in caught.value.remedy
    assert torch.equal(module(x), result)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch.compile(m)", "m.compile()"])
@pytest.mark.parametrize("transform", [None, lambda name, t: t.double()])
def test_compiled_modules(way: str, transform: Any) -> None:
    torch.compiler.reset()
    module: Any = network()
    parameters = list(module.parameters())
    if way == "m.compile()":
        module.compile(backend="eager")
    compiled: Any = module if way == "m.compile()" else torch.compile(module, backend="eager")
    x = torch.randn(2, 3)
    compiled(x).sum().backward()
    ms.convert(compiled, transform=transform) if transform else ms.convert(compiled, torch.float64)
    assert all(a is b for a, b in zip(parameters, compiled.parameters(), strict=True))
    assert torch.equal(compiled(x.double()), network().double()(x.double()))
    ms.convert(compiled, torch.float32)
    assert torch.equal(compiled(x), network()(x))


class Metric(nn.Module):
    """A module that converts what it holds besides its parameters, as torchmetrics does."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)
        self.total = torch.zeros(3)
        self.seen: list[torch.dtype] = []
        self.fails = fails

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Metric":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.total = fn(self.total)
        self.seen += [self.weight.dtype, self.inner.weight.dtype]
        if self.fails:
            raise ValueError("no")
        return self


class KeepsOne(nn.Module):
    """A module that leaves one parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsOne":
        super()._apply(lambda t: t if t is self.kept else fn(t), recurse)  # type: ignore[no-untyped-call]
        return self


@pytest.mark.parametrize("way", ["convert", "to"])
def test_modules_that_convert_themselves(way: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Metric(), KeepsOne())
    metric, keeps = module[1], module[2]
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(module.parameters())
    sum((p * p).sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    if way == "convert":
        ms.convert(module, torch.float64, optimizers=optimizer)
        assert optimizer.state[metric.weight]["exp_avg"].dtype is torch.float64
        assert optimizer.state[keeps.kept]["exp_avg"].dtype is torch.float32
    else:
        with ms.reference_keeping():
            module.to(torch.float64)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert metric.seen == [torch.float64, torch.float64]
    assert metric.total.dtype is torch.float64
    assert (keeps.kept.dtype, keeps.other.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("way", ["convert", "to"])
def test_their_errors_undo_everything(way: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Metric(), Metric(fails=True))
    before = whole(module)
    if way == "convert":
        with pytest.raises(errors.ModelCodeError, match="ValueError: no"):
            ms.convert(module, torch.float64)
    else:
        with ms.reference_keeping(), pytest.raises(ValueError, match="no"):
            module.to(torch.float64)
    assert whole(module) == before


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("keeping", [False, True])
def test_recurrent_modules(kind: Any, keeping: bool) -> None:
    module, expected = (kind(3, 4, num_layers=2) for _ in range(2))
    expected.load_state_dict(module.state_dict())
    weights = list(module._flat_weights)
    if keeping:
        with ms.reference_keeping():
            module.double()
    else:
        ms.convert(module, torch.float64)
    assert all(a is b for a, b in zip(weights, module._flat_weights, strict=True))
    x = torch.randn(5, 2, 3).double()
    assert torch.equal(module(x)[0], expected.double()(x)[0])


def test_lazy_modules() -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    weight = module[0].weight
    ms.convert(module, torch.float64)
    assert module(torch.randn(2, 5).double()).dtype is torch.float64
    assert module[0].weight is weight


@pytest.mark.slow
def test_script_modules() -> None:
    module: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ms.convert(module, torch.float64)
    assert module(torch.randn(3, 2).double()).dtype is torch.float64


def test_one_conversion_within_another() -> None:
    """An `_apply` that converts another module by itself."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.__dict__["hidden"] = Metric()

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Outer":
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self.__dict__["hidden"].to(torch.float64)
            return self

    module = Outer()
    ms.convert(module, torch.float64)
    hidden: Metric = module.__dict__["hidden"]
    assert (module.weight.dtype, hidden.weight.dtype, hidden.total.dtype) == (torch.float64,) * 3
