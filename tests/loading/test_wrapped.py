"""What `torch.compile` and data parallelism wrap is loaded, saved and converted as the module itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.wrappers import data_parallel

pytestmark = pytest.mark.usefixtures("process_group")

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item,return-value]
    "DataParallel": data_parallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "DDP of compiled": lambda module: nn.parallel.DistributedDataParallel(torch.compile(module, backend="eager")),
}
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
Wrap = Callable[[nn.Module], nn.Module]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.slow
@wrapped
def test_load_and_plan(wrap: Wrap, tmp_path: Path) -> None:
    trained, inner = network(1), network()
    torch.save(trained.state_dict(), tmp_path / "x.pt")
    model = wrap(inner)
    before = whole(inner)
    plan = ms.plan(model, tmp_path / "x.pt")
    assert plan.ok, str(plan)
    assert whole(inner) == before
    report = ms.load(model, tmp_path / "x.pt")
    assert [step.name for step in report.steps] == [step.name for step in plan.steps] == list(trained.state_dict())
    assert report.target == "Sequential"
    assert not any(step.rules for step in report.steps)
    assert_equal(inner, trained)
    ms.load(model, ms.plan(model, network(2).state_dict()))
    assert_equal(inner, network(2))


@wrapped
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_save(wrap: Wrap, suffix: str, tmp_path: Path) -> None:
    inner = network()
    ms.save(wrap(inner), tmp_path / f"x{suffix}")
    assert set(ms.open(tmp_path / f"x{suffix}")) == set(inner.state_dict())
    other = network(1)
    ms.load(other, tmp_path / f"x{suffix}")
    assert_equal(other, inner)


@pytest.mark.slow
@wrapped
def test_objects_in_a_file_and_in_a_store(wrap: Wrap, tmp_path: Path) -> None:
    """What was saved of the wrapped module goes into the bare one, and the other way round, optimizer included."""
    inner = network()
    saved, optimizer = wrap(inner), torch.optim.Adam(inner.parameters(), lr=0.125)
    saved(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    with ms.Store(tmp_path / "store") as store:
        store.save(1, {"model": saved, "optimizer": optimizer})
        ms.save({"model": saved, "optimizer": optimizer}, tmp_path / "x.safetensors")
        for target in (network(1), wrap(network(2))):
            for restore in (store.restore, lambda objects: ms.restore(objects, tmp_path / "x.safetensors")):
                later = torch.optim.Adam(target.parameters())
                restore({"model": target, "optimizer": later})
                found: Any = list(target.state_dict().values())
                assert all(map(torch.equal, found, inner.state_dict().values()))
                moments = [later.state[param]["exp_avg"] for param in target.parameters()]
                assert all(
                    map(torch.equal, moments, [optimizer.state[param]["exp_avg"] for param in inner.parameters()])
                )
    state = ms.optimizer_state(saved, optimizer)
    assert list(state["state"]) == [name for name, _ in inner.named_parameters()]
    other = network(3)
    ms.load_optimizer_state(wrap(other), torch.optim.Adam(other.parameters()), state)


@pytest.mark.parametrize("wrap", [WRAPPERS["compile"], WRAPPERS["DataParallel"]], ids=["compile", "DataParallel"])
def test_convert(wrap: Wrap) -> None:
    inner = network()
    report = ms.convert(wrap(inner), torch.float64)
    assert {step.name for step in report.steps} == {name for name, t in inner.state_dict().items() if t.dim()}
    assert inner[0].weight.dtype is torch.float64


@wrapped
def test_suggest(wrap: Wrap) -> None:
    inner, other = network(), network(1)
    source = {f"net.{name}": value for name, value in other.state_dict().items()}
    ms.load(wrap(inner), source, rules=ms.suggest(wrap(inner), source))
    assert_equal(inner, other)


@pytest.mark.slow_except(2)
@wrapped
def test_live(wrap: Wrap) -> None:
    live = ms.Live(wrap(network().eval()))
    other = network(1).eval()
    live.swap(other.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(live(x), other(x))


def test_a_wrapper_with_code_of_its_own_is_a_module_like_any_other(tmp_path: Path) -> None:
    class Counting(nn.DataParallel[Any]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.register_buffer("count", torch.tensor(3))

    ms.save(Counting(network()), tmp_path / "x.safetensors")
    assert {"count", "module.0.weight"} <= set(ms.open(tmp_path / "x.safetensors"))
    hooked = data_parallel(network())
    called: list[str] = []
    hooked.register_load_state_dict_pre_hook(lambda *_: called.append("hook"))
    ms.load(hooked, hooked.state_dict())
    assert called == ["hook"]


@wrapped
def test_a_file_with_the_names_of_the_wrapper(wrap: Wrap, tmp_path: Path) -> None:
    """As `torch.save(model.state_dict())` of a wrapped model leaves it: into the same wrapper, another, or none."""
    inner = network(1)
    torch.save(wrap(inner).state_dict(), tmp_path / "x.pt")
    for again in (wrap, WRAPPERS["compile"], WRAPPERS["DDP of compiled"], lambda module: module):
        other = network()
        report = ms.load(again(other), tmp_path / "x.pt")
        assert_equal(other, inner)
        assert {step.name for step in report.steps} == set(inner.state_dict())
