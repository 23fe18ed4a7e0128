"""Fake tensors, DTensors and modules of FSDP2 are named as what they are, and what the errors advise works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import whole

FULL = StateDictOptions(full_state_dict=True)


pytestmark = pytest.mark.usefixtures("process_group")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def fake() -> nn.Module:
    with FakeTensorMode():
        return network()


def of_dtensors() -> nn.Module:
    module = network()
    mesh = init_device_mesh("cpu", (1,))
    for layer in module.children():
        for name, param in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
    return module


def fsdp2() -> nn.Module:
    module = network()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


def fsdp2_on_meta() -> nn.Module:
    with torch.device("meta"):
        module = network()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


Build = Callable[[], nn.Module]
ANY = pytest.mark.parametrize(
    ("build", "what"), [(fake, "FakeTensor"), (of_dtensors, "DTensor"), (fsdp2, "DTensor"), (fsdp2_on_meta, "DTensor")]
)


def raised(do: Callable[[], object], error: type[Exception], what: str) -> str:
    with pytest.raises(error) as caught:
        do()
    text = str(caught.value)
    assert what in text
    assert "module_load" not in text
    assert "as_subclass" not in text
    assert "__deepcopy__" not in text
    assert ("FakeTensorMode" if what == "FakeTensor" else "state_dict") in text or "before fully_shard" in text
    return text


def test_fake_tensors_as_the_model(tmp_path: Path) -> None:
    source = network().state_dict()
    model = fake()
    plan = ms.plan(model, source)
    assert {problem.kind.name for problem in plan.problems} == {"FAKE_TENSORS"}
    assert {problem.name for problem in plan.problems} == set(source)
    raised(lambda: ms.load(model, source), errors.PlanError, "FakeTensor")
    ms.save({"model": network()}, tmp_path / "x.safetensors")
    raised(lambda: ms.restore({"model": model}, tmp_path / "x.safetensors"), errors.PlanError, "FakeTensor")


@ANY
def test_served(build: Build, what: str) -> None:
    raised(lambda: ms.Live(build()), errors.LiveTargetError, what)


@pytest.mark.parametrize("build", [of_dtensors, fsdp2, fsdp2_on_meta])
def test_dtensors_as_the_model(build: Build, tmp_path: Path) -> None:
    trained, model = network(), build()
    ms.load(model, trained.state_dict())
    for param, true in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), true)  # type: ignore[operator]
    trained, model = network(), build()
    ms.save({"model": trained}, tmp_path / "x.safetensors")
    ms.restore({"model": model}, tmp_path / "x.safetensors")
    for param, true in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), true)  # type: ignore[operator]


@ANY
def test_as_the_source(build: Build, what: str) -> None:
    model, source = network(), build().state_dict()
    before = whole(model)
    raised(lambda: ms.load(model, source), errors.PlanError, what)
    assert whole(model) == before
    live = ms.Live(model.eval())
    raised(lambda: live.swap(source), errors.PlanError, what)


@ANY
@pytest.mark.parametrize("nested", [False, True])
def test_saved(build: Build, what: str, nested: bool, tmp_path: Path) -> None:
    model = build()
    target: Any = {"state": model.state_dict(), "step": 1} if nested else model
    raised(lambda: ms.save(target, tmp_path / "x.pt"), errors.UnsavableError, what)
    path = tmp_path / "x.safetensors"
    if build in (of_dtensors, fsdp2):
        ms.save(target, path)
        saved = ms.open(path, key="state" if nested else None)
        assert all(torch.equal(saved.tensor(name), param.full_tensor()) for name, param in model.named_parameters())  # type: ignore[operator]
    else:
        with pytest.raises(errors.UnsavableError, match=what):
            ms.save(target, path)
        assert not path.exists()
    with ms.Store(tmp_path / "store") as store:
        if build in (of_dtensors, fsdp2):
            store.save(1, {"model": model})
            assert store.steps() == (1,)
        else:
            with pytest.raises(errors.UnsavableError, match=what):
                store.save(1, {"model": model})


@pytest.mark.parametrize("build", [of_dtensors, fsdp2, fsdp2_on_meta])
def test_what_the_errors_advise(build: Build, tmp_path: Path) -> None:
    trained, model = network(), build()
    ms.load(model, trained.state_dict())
    gathered = get_model_state_dict(model, options=FULL)
    ms.save(gathered, tmp_path / "y.safetensors")
    bare = network()
    ms.load(bare, tmp_path / "y.safetensors")
    ms.Live(bare.eval()).swap(gathered)
    assert all(map(torch.equal, bare.parameters(), trained.parameters()))
    ms.load(model, get_model_state_dict(model))  # from shards to shards
