"""Loading onto an accelerator."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: loading onto one is not tested"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("position", torch.arange(64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + self.position
        return result


@pytest.mark.parametrize("target", ["skeleton", "cpu", "cuda"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_onto_a_device(target: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    state = Net().state_dict()
    save_file(state, tmp_path / "x.safetensors")
    if target == "skeleton":
        with ms.skeleton():
            module = Net()
    else:
        module = Net().to(target)
    objects = [*module.parameters(), *module.buffers()]
    ms.load(module, tmp_path / "x.safetensors", device="cuda", dtype=dtype)
    assert [id(t) for t in (*module.parameters(), *module.buffers())] == [id(t) for t in objects]
    assert {t.device.type for t in objects} == {"cuda"}
    expected = state["layer.weight"].to(dtype or torch.float32)
    assert torch.equal(module.layer.weight.cpu(), expected)
    module(torch.ones(2, 64, device="cuda", dtype=dtype)).sum().backward()


def test_into_a_model_that_is_there() -> None:
    module = Net().cuda()
    state = {name: value.cuda() for name, value in Net().state_dict().items()}
    address = module.layer.weight.data_ptr()
    ms.load_state_dict(module, state)
    assert torch.equal(module.layer.weight, state["layer.weight"])
    ms.load(module, {name: value.cpu() for name, value in state.items()})
    assert module.layer.weight.data_ptr() == address
