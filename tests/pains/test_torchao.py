"""torchao's int8 weights, through files and on the way into a model; stock torch beside it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import identities, whole
from tests.pains.conftest import StockFails

quantization = pytest.importorskip("torchao.quantization")


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def quantized(model: nn.Module) -> nn.Module:
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def on_meta(seed: int) -> nn.Module:
    with torch.device("meta"):
        return plain(seed)


def skeleton(seed: int) -> nn.Module:
    with ms.skeleton():
        return plain(seed)


def quantize(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A transform that quantises the weights on their way."""
    if not name.endswith("weight"):
        return tensor
    layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    layer.weight = nn.Parameter(tensor)
    return quantized(nn.Sequential(layer))[0].weight


class Files:
    """A model, its file, and the file of its quantised twin."""

    def __init__(self, folder: Path) -> None:
        self.plain, self.quantized = folder / "plain.pt", folder / "quantized.pt"
        self.model = plain(1)
        self.twin = quantized(copy.deepcopy(self.model))
        torch.save(self.model.state_dict(), self.plain)
        torch.save(self.twin.state_dict(), self.quantized)
        self.x = torch.randn(4, 32)

    def is_twin(self, model: nn.Module) -> bool:
        same = all(type(model[i].weight) is quantization.Int8Tensor for i in (0, 2))
        return same and torch.equal(model(self.x), self.twin(self.x))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def failure(load: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        load()
    return str(caught.value)


def objects(model: nn.Module) -> dict[str, int]:
    return {name: id(param) for name, param in model.named_parameters()}


def test_plain_file_into_quantised_model(files: Files, stock_fails: StockFails) -> None:
    theirs = quantized(plain(2))
    failure(lambda: theirs.load_state_dict(torch.load(files.plain)))
    stock_fails(
        "a quantised model refuses plain weights, half loaded", torch.equal(theirs[0].bias, files.model[0].bias)
    )
    theirs.load_state_dict(torch.load(files.plain), assign=True)
    stock_fails("assign=True makes a quantised model a plain one", type(theirs[0].weight) is nn.Parameter)

    ours = quantized(plain(2))
    before = whole(ours)
    for load in (ms.load, ms.load_state_dict):
        source = files.plain if load is ms.load else torch.load(files.plain)
        assert "'qdata'" in failure(lambda load=load, source=source: load(ours, source))
        assert whole(ours) == before


def test_plain_file_into_quantised_model_on_request(files: Files) -> None:
    ours = quantized(plain(2))
    held = objects(ours)
    ms.load(ours, files.plain, transform=quantize)
    assert files.is_twin(ours)
    assert objects(ours) == held


def test_quantised_file_into_quantised_model(files: Files) -> None:
    theirs, ours, also_ours = (quantized(plain(2)) for _ in range(3))
    held = objects(ours)
    theirs.load_state_dict(torch.load(files.quantized))
    assert files.is_twin(theirs)
    ms.load(ours, files.quantized)
    ms.load_state_dict(also_ours, torch.load(files.quantized))
    assert files.is_twin(ours)
    assert files.is_twin(also_ours)
    assert objects(ours) == held


@pytest.mark.parametrize("make", [on_meta, skeleton])
@pytest.mark.parametrize("map", [True, False])
def test_quantised_file_into_model_without_memory(make: Callable[[int], nn.Module], map: bool, files: Files) -> None:
    theirs, ours = make(2), make(2)
    held = objects(ours)
    theirs.load_state_dict(torch.load(files.quantized), assign=True)
    assert files.is_twin(theirs)
    report = ms.load(ours, files.quantized, map=map)
    assert report.coverage == 1
    assert files.is_twin(ours)
    assert objects(ours) == held
    assert ours[0].weight.requires_grad == theirs[0].weight.requires_grad


def test_quantised_file_into_plain_model(files: Files, stock_fails: StockFails) -> None:
    theirs, ours = plain(2), plain(2)
    failure(lambda: theirs.load_state_dict(torch.load(files.quantized)))
    stock_fails(
        "a plain model refuses quantised weights, half loaded", torch.equal(theirs[0].bias, files.model[0].bias)
    )

    before = whole(ours)
    for load in (ms.load, ms.load_state_dict):
        source = files.quantized if load is ms.load else torch.load(files.quantized)
        failure(lambda load=load, source=source: load(ours, source))
        assert whole(ours) == before


def test_quantised_file_into_plain_model_dequantised(files: Files) -> None:
    ours = plain(2)
    held = identities(ours)
    ms.load(ours, files.quantized, transform=lambda name, t: t.dequantize() if hasattr(t, "qdata") else t)
    assert identities(ours) == held
    assert torch.equal(ours[0].weight, files.twin[0].weight.dequantize())
    torch.testing.assert_close(ours(files.x), files.twin(files.x))


@pytest.mark.parametrize("transform", [quantize, ms.loading.Quantize(quantization.Int8WeightOnlyConfig())])
@pytest.mark.parametrize("make", [plain, on_meta, skeleton])
def test_quantise_on_load(make: Callable[[int], nn.Module], transform: Any, files: Files) -> None:
    ours = make(2)
    held = objects(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ms.load(ours, files.plain, transform=transform)
    assert files.is_twin(ours)
    assert objects(ours) == held
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == list(held.values())


def test_a_transform_that_fails_at_the_end_leaves_a_plain_model(files: Files) -> None:
    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "2.bias":
            raise RuntimeError("no")
        return quantize(name, tensor)

    ours = plain(2)
    before = whole(ours)
    with pytest.raises(ms.ModelStateError, match=r"2\.bias"):
        ms.load(ours, files.plain, transform=transform)
    assert whole(ours) == before
