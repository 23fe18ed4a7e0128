"""Conversions to a GPU, on it, and back: the same objects, the same training, and nothing changed by an error."""

import gc
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: converting to one is not tested"),
]

OPTIMIZERS: dict[str, Any] = {
    "plain": lambda params: torch.optim.AdamW(params, 1e-2),
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
}


class Tied(nn.Module):
    """An embedding whose weight is that of the head, a norm with statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.embed(tokens)) * self.scale)
        return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> list[float]:
    """Two steps, from the first one on."""
    losses = []
    for step in (first, first + 1):
        tokens = (torch.arange(32, device=next(model.parameters()).device) * (step + 3)) % 16
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def devices(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    state = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
    tensors = [*model.parameters(), *model.buffers(), *(param.grad for param in model.parameters()), *state]
    return {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("how", ["convert", "reference_keeping"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_the_same_tensors(name: str, how: str) -> None:
    model, other = Tied(), Tied()
    optimizer, other_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    expected = [loss for first in (0, 2, 4) for loss in train(other, other_optimizer, first)]
    losses = train(model, optimizer)
    before = ms.identity(model, [optimizer])
    for first, device in ((2, "cuda"), (4, "cpu")):
        grads = [param.grad for param in model.parameters()]
        if how == "convert":
            report = ms.convert(model, device=device, optimizers=[optimizer])
            assert report.references_lost == ()
        else:
            with ms.reference_keeping():
                assert (model.cuda() if device == "cuda" else model.cpu()) is model
            optimizer.load_state_dict(optimizer.state_dict())  # which moves the state to the parameters
        assert devices(model, optimizer) == {device}
        assert before.differences(ms.identity(model, [optimizer])) == []
        assert model.head.weight is model.embed.weight
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
        losses += train(model, optimizer, first)
    assert losses == pytest.approx(expected, rel=1e-2)


def test_values_that_overflow_are_counted_on_the_device() -> None:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight[:, 0] = 1e6
        model.weight[0, 1] = float("inf")
    notes = ms.convert(nn.Linear(8, 8), torch.float16).notes
    assert not any("became infinite" in note for note in notes)
    ms.convert(model, device="cuda")
    notes = ms.convert(model, torch.float16).notes
    assert any("weight (8)" in note for note in notes)
    assert model.weight.is_cuda


@pytest.mark.parametrize("where", ["default stream", "own stream"])
def test_what_is_queued_is_converted(where: str) -> None:
    model = nn.Linear(512, 512, device="cuda")
    stream = torch.cuda.current_stream() if where == "default stream" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            model.weight.fill_(2)
        ms.convert(model, device="cpu")
    assert model.weight.unique().tolist() == [2]


@pytest.mark.parametrize("how", ["convert", "reference_keeping"])
def test_recurrent_layers(how: str) -> None:
    """They have an `_apply` of their own, and weights that cuDNN wants in one piece of memory."""
    torch.manual_seed(0)
    model, batch = nn.LSTM(8, 8, num_layers=2), torch.randn(5, 3, 8)
    expected = model(batch)[0].detach()
    before = ms.identity(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cuda", "cpu"):
            if how == "convert":
                ms.convert(model, device=device)
            else:
                with ms.reference_keeping():
                    model.to(device)
            assert {id(param) for param in model.parameters()} == {id(value) for value in before.objects.values()}
            found = model(batch.to(device))[0]
            torch.testing.assert_close(found.detach().cpu(), expected, atol=1e-3, rtol=1e-3)
            found.sum().backward()
            del found  # its graph holds the parameters


# A device without memory.


def refused(case: str) -> None:
    """Converts a model that does not fit the memory that this process may have on the device, and checks everything."""
    on = "cuda" if case in ("dtype", "state of the optimizer") else "cpu"
    # 40 layers of 16 MiB, and one with an `_apply` of its own.
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(40)]
    model = nn.Sequential(*([nn.LSTM(8, 8)] if case == "recurrent" else []), *layers).to(on)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if case == "state of the optimizer":
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        with ms.reference_keeping():
            model.cpu()
        optimizer.load_state_dict(optimizer.state_dict())
    if case == "dtype":
        with ms.reference_keeping():
            model.bfloat16()
    gc.collect()
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + (900 if case == "state of the optimizer" else 250) * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    before = ms.identity(model, [optimizer])
    values = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    places = [(param.device, param.data_ptr()) for param in model.parameters()]
    used = torch.cuda.memory_allocated()
    if case == "Module.cuda":
        with ms.reference_keeping(), pytest.raises(torch.OutOfMemoryError):  # as torch raises it
            model.cuda()
    else:
        to: dict[str, Any] = {"dtype": torch.float32} if case == "dtype" else {"device": "cuda"}
        with pytest.raises(errors.MemoryBudgetError, match="beside the old ones; nothing has been changed"):
            ms.convert(model, optimizers=[optimizer], **to)
    gc.collect()
    assert before.differences(ms.identity(model, [optimizer])) == []
    assert [(param.device, param.data_ptr()) for param in model.parameters()] == places
    assert all(torch.equal(tensor.cpu(), values[name]) for name, tensor in model.state_dict().items())
    assert torch.cuda.memory_allocated() == used
    torch.cuda.set_per_process_memory_fraction(1.0)
    ms.convert(model, torch.float32, "cuda", optimizers=[optimizer])
    assert all(torch.equal(tensor.cpu(), values[name].float()) for name, tensor in model.state_dict().items())


CASES = ("module", "state of the optimizer", "dtype", "recurrent", "Module.cuda")


def main() -> None:
    torch.cuda.init()
    for case in CASES:
        refused(case)
        print(case, flush=True)


def test_a_conversion_that_finds_no_memory_changes_nothing() -> None:
    """In a process of its own, whose memory on the device is limited."""
    program = "from tests.conversion.test_on_gpu import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == list(CASES), ended.stderr
    assert ended.returncode == 0, ended.stderr
