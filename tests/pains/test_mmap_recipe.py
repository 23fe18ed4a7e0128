"""PyTorch's tips for loading from a checkpoint: map, build on meta, assign. The same state, with fewer conditions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class SomeModule(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(size, size) for i in range(10)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    m = SomeModule(1000)
    torch.save(m.state_dict(), tmp_path_factory.mktemp("recipe") / "checkpoint.pth")
    return tmp_path_factory.getbasetemp() / "recipe0" / "checkpoint.pth"


def on_meta() -> SomeModule:
    with torch.device("meta"):
        return SomeModule(1000)


def skeleton() -> SomeModule:
    with ms.skeleton():
        return SomeModule(1000)


def stock(path: Path, capsys: pytest.CaptureFixture[str]) -> SomeModule:
    """The tutorial's snippet; it prints what it says there."""
    state_dict = torch.load(path, mmap=True)
    with torch.device("meta"):
        meta_m = SomeModule(1000)
    print(meta_m.load_state_dict(state_dict, assign=True))
    assert capsys.readouterr().out == "<All keys matched successfully>\n"
    return meta_m


@pytest.mark.parametrize("make", [on_meta, skeleton])
@pytest.mark.parametrize("map", [True, False])
def test_the_same_state(
    make: Callable[[], SomeModule], map: bool, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = stock(path, capsys), make()
    report = ms.load(ours, path, map=map)
    assert report.coverage == 1
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for there, here in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert type(here) is type(there) is nn.Parameter
        assert (here.requires_grad, here.stride()) == (there.requires_grad, there.stride())
    assert all(step.mapped is map for step in report.steps)


@pytest.mark.slow
def test_the_simple_snippet_in_one_pass(path: Path) -> None:
    """The tutorial's second snippet, into a model that has memory."""
    state_dict = torch.load(path)
    theirs, ours = SomeModule(1000), SomeModule(1000)
    theirs.load_state_dict(state_dict)
    ms.load(ours, path, in_place=True)
    for there, here in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(here, there)


def test_the_caveat_is_gone(path: Path, stock_fails: StockFails) -> None:
    """The tutorial: the optimizer must be made after the load."""
    x = torch.randn(2, 1000)

    def moves(model: SomeModule, load: Callable[[], object]) -> bool:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        load()
        before = model.linears[0].weight[0].detach().clone()
        model.linears[0](x).sum().backward()
        optimizer.step()
        return not torch.equal(model.linears[0].weight[0], before)

    theirs, ours = on_meta(), on_meta()
    moved = moves(theirs, lambda: theirs.load_state_dict(torch.load(path, mmap=True), assign=True))
    stock_fails("an optimizer made before the load trains nothing", not moved)
    assert moves(ours, lambda: ms.load(ours, path))


def test_training_does_not_change_the_file(path: Path) -> None:
    before = path.read_bytes()
    model = on_meta()
    ms.load(model, path)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert path.read_bytes() == before
