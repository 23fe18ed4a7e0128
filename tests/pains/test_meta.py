"""What a checkpoint does not have stays without values on the meta device, and stock torch reports success."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Attention(nn.Module):
    """Its constructor computes a table that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(8.0) / 8, persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) * self.angles[:4]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Attention(), Attention())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


HIDDEN = ["layers.0.angles", "layers.1.angles"]


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.fixture
def trained() -> Model:
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def path(trained: Model, tmp_path: Path) -> Path:
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def uninitialised_memory_shows() -> Iterator[None]:
    """Torch fills memory that nobody has written to with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_stock_reports_a_model_that_is_still_on_meta(path: Path, stock_fails: StockFails) -> None:
    model = on_meta()
    result = model.load_state_dict(torch.load(path), assign=True)
    assert str(result) == "<All keys matched successfully>"
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    stock_fails("non-persistent buffers stay on meta, and all keys matched", left == HIDDEN)


@pytest.mark.usefixtures("uninitialised_memory_shows")
def test_stock_leaves_garbage_after_to_empty(path: Path, stock_fails: StockFails) -> None:
    model = on_meta().to_empty(device="cpu")
    result = model.load_state_dict(torch.load(path))
    assert str(result) == "<All keys matched successfully>"
    garbage = all(model.get_buffer(name).isnan().all().item() for name in HIDDEN)
    stock_fails("to_empty leaves garbage in non-persistent buffers, and all keys matched", garbage)


def test_ours_names_every_one_of_them(path: Path) -> None:
    model = on_meta()
    with pytest.raises(ms.PlanError) as caught:
        ms.load(model, path)
    problems = caught.value.problems
    assert [p.name for p in problems if p.kind.name == "UNINITIALISED"] == HIDDEN
    assert len(problems) == len(HIDDEN)
    assert all(name in str(caught.value) for name in HIDDEN)
    assert "skeleton" in str(caught.value)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_the_remedy_works(path: Path, trained: Model) -> None:
    with ms.skeleton():
        model = Model()
    assert all(param.is_meta for param in model.parameters())
    assert ms.load(model, path).coverage == 1
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), trained(x))
