"""Comparing what is on a GPU, and loading an average onto one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: comparing on one is not tested"),
]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 4))


def test_models_on_different_devices(tmp_path: Path) -> None:
    model = network().cuda()
    ms.save(model, tmp_path / "x.safetensors")
    for other in (tmp_path / "x.safetensors", network(), {k: v.cuda() for k, v in network().state_dict().items()}):
        assert ms.diff(model, other).is_equal
    with torch.no_grad():
        model[0].weight[1, 2] += 1
    for other in (tmp_path / "x.safetensors", network()):
        diff = ms.diff(other, model)
        assert [tensor.name for tensor in diff.tensors if tensor.status.value != "equal"] == ["0.weight"]


@pytest.mark.parametrize("where", ["default stream", "own stream"])
def test_what_is_queued_is_compared(where: str) -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    expected = {"weight": torch.full((1024, 1024), 2.0), "bias": torch.full((1024,), 2.0)}
    stream = torch.cuda.current_stream() if where == "default stream" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(2)
        assert ms.diff(model, expected).is_equal


def test_an_average_of_states_on_the_device_and_in_files(tmp_path: Path) -> None:
    first, second, target = network(1), network(2).cuda(), network(3).cuda()
    ms.save(first, tmp_path / "x.safetensors")
    address = target[0].weight.data_ptr()
    ms.load(target, ms.open([tmp_path / "x.safetensors", second.state_dict()], combine=ms.merge.Average()))
    expected = (first[0].weight.double() + second[0].weight.cpu().double()) / 2
    assert target[0].weight.data_ptr() == address
    torch.testing.assert_close(target[0].weight.detach().cpu().double(), expected.detach(), atol=1e-7, rtol=1e-6)
    ms.load(target, ms.open([target.state_dict(), second.state_dict()], combine=ms.merge.Average(weights=[0.0, 1.0])))
    assert torch.equal(target[0].weight, second[0].weight)
