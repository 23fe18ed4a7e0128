"""`assign=True` puts other objects into the model, and everything that referred to the old ones is left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import modelstate as ms
from tests.loading.fingerprint import described
from tests.pains.conftest import StockFails


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)) * self.scale


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6)).pow(2).sum().backward()
    optimizer.step()


def test_ties(stock_fails: StockFails, tmp_path: Path) -> None:
    torch.save(tied(2).state_dict(), tmp_path / "tied.pt")
    # A file in which the two names are separate tensors, as most converters write them.
    torch.save({name: value.clone() for name, value in tied(2).state_dict().items()}, tmp_path / "apart.pt")
    model = tied(1)
    model.load_state_dict(torch.load(tmp_path / "apart.pt"), assign=True)
    stock_fails("assign=True unties tied weights", model.head.weight is not model.embed.weight)

    for file in ("tied.pt", "apart.pt"):
        for model in (tied(1), skeleton()):
            ms.load(model, tmp_path / file)
            assert model.head.weight is model.embed.weight
            assert torch.equal(model.head.weight, tied(2).head.weight)


def skeleton() -> Tied:
    with ms.skeleton():
        return Tied()


def test_optimizer(stock_fails: StockFails) -> None:
    theirs, ours = tied(1), tied(1)
    for model, load in ((theirs, nn.Module.load_state_dict), (ours, ms.load)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        load(model, tied(2).state_dict(), **({"assign": True} if load is not ms.load else {}))
        step(model, optimizer)
    stock_fails(
        "assign=True detaches an optimizer that was there: the step changes nothing",
        torch.equal(theirs.embed.weight, tied(2).embed.weight),
    )

    reference = tied(2)
    step(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    torch.testing.assert_close(ours.embed.weight, reference.embed.weight)
    assert not torch.equal(ours.embed.weight, tied(2).embed.weight)


def test_dtype(stock_fails: StockFails) -> None:
    state = tied(2).half().state_dict()
    theirs, ours = tied(1), tied(1)
    theirs.load_state_dict(state, assign=True)
    stock_fails("assign=True changes the dtype of the model", theirs.embed.weight.dtype is torch.float16)

    report = ms.load(ours, state)
    assert ours.embed.weight.dtype is torch.float32
    assert torch.equal(ours.embed.weight, state["embed.weight"].float())
    assert report.steps[0].cast == "float16 to float32"
    assert "float16 to float32" in str(report)


def test_requires_grad_of_a_buffer(stock_fails: StockFails) -> None:
    state = tied(2).state_dict() | {"scale": torch.full((1,), 3.0, requires_grad=True)}
    theirs, ours = tied(1), tied(1)
    theirs.load_state_dict(state, assign=True)
    stock_fails("assign=True makes a buffer one that needs a gradient", theirs.scale.requires_grad)

    ms.load(ours, state)
    assert not ours.scale.requires_grad
    assert ours.scale.item() == 3.0


def test_requires_grad_of_the_source(stock_fails: StockFails) -> None:
    def load_into_a_frozen_model(load: str) -> bool:
        source, frozen = tied(2), tied(1).requires_grad_(False)
        state = source.state_dict(keep_vars=True)
        if load == "stock":
            frozen.load_state_dict(state, assign=True)
        else:
            ms.load(frozen, state)
        assert not frozen.embed.weight.requires_grad
        return source.embed.weight.requires_grad

    stock_fails("assign=True freezes the model that the state dict came from", not load_into_a_frozen_model("stock"))
    assert load_into_a_frozen_model("ours")


@pytest.mark.parametrize("target", ["materialised", "skeleton"])
def test_memory_of_the_source(target: str, stock_fails: StockFails) -> None:
    theirs, ours = tied(1), tied(1) if target == "materialised" else skeleton()
    their_state, our_state = tied(2).state_dict(), tied(2).state_dict()
    before = described(our_state)
    theirs.load_state_dict(their_state, assign=True)
    ms.load(ours, our_state)
    for model in (theirs, ours):
        with torch.no_grad():
            model.embed.weight.zero_()
            model.scale.zero_()
    stock_fails("with assign=True the model and the state dict are the same memory", described(their_state) != before)
    assert described(our_state) == before


@pytest.fixture
def process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(stock_fails: StockFails) -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def train(load: str) -> nn.Module:
        model = net(1)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        if load == "stock":
            model.load_state_dict(net(2).state_dict(), assign=True)
        elif load == "ours":
            ms.load(model, net(2).state_dict())
        else:
            model.load_state_dict(net(2).state_dict())
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(torch.ones(2, 3)).pow(2).sum().backward()
            optimizer.step()
        return model

    loaded, trained = net(2).state_dict(), train("by copying").state_dict()
    assert not torch.equal(trained["0.weight"], loaded["0.weight"])
    never = all(torch.equal(value, loaded[name]) for name, value in train("stock").state_dict().items())
    stock_fails("after assign=True a model under DDP never trains, and nothing says so", never)
    for name, value in train("ours").state_dict().items():
        torch.testing.assert_close(value, trained[name])
