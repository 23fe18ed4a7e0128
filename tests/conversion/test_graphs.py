"""Autograd graphs that are held while a module is converted."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import whole


class Biased(nn.Module):
    """A layer whose last operation saves nothing for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.bias


MODULES: dict[str, tuple[Any, int]] = {"an addition": (Biased, 1), "bilinear": (lambda: nn.Bilinear(2, 2, 2), 2)}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODULES)
def test_a_graph_that_is_used_up_behind_nodes_that_save_nothing(case: str) -> None:
    make, inputs = MODULES[case]
    module = make()
    loss = module(*[torch.ones(1, 2)] * inputs).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(errors.PlacementError, match="waits for backward: its result is held by `loss`"):
        ms.convert(module, torch.float64)
    loss.backward()
    ms.convert(module, torch.float64)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize("way", ["keeping", "convert"])
def test_another_memory_format_leaves_a_waiting_graph_right(way: str) -> None:
    module, stock, batch = convolutions(), convolutions(), torch.randn(2, 3, 6, 6)
    loss, expected = module(batch).square().sum(), stock(batch).square().sum()
    stock.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if way == "keeping":
        with ms.reference_keeping():
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        ms.convert(
            module,
            transform=lambda name, t: (
                t.to(memory_format=torch.channels_last, copy=True) if t.dim() == 4 else ms.conversion.UNCHANGED
            ),
        )
    loss.backward()
    expected.backward()
    for ours, torchs in zip(module.parameters(), stock.parameters(), strict=True):
        assert ours.stride() == torchs.stride()
        assert torch.equal(ours.grad, torchs.grad)  # type: ignore[arg-type]


def test_other_values_of_the_same_dtype_are_refused() -> None:
    module = convolutions()
    loss = module(torch.randn(2, 3, 6, 6)).sum()
    before = whole(module)
    with pytest.raises(errors.PlacementError, match="waits for backward"):
        ms.convert(module, transform=lambda name, t: t * 2)
    assert whole(module) == before
    loss.backward()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: prune.l1_unstructured(nn.Linear(3, 2), "weight", 0.5),
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.weight_norm(nn.RNN(3, 2), "weight_hh_l0"),
    ],
)
def test_an_attribute_that_a_hook_computes_before_each_call(make: Callable[[], nn.Module]) -> None:
    """It has a graph from the beginning, which no backward pass runs through."""
    module, x = make(), torch.ones(4, 3)
    expected = copy.deepcopy({name: param.detach().double() for name, param in module.named_parameters()})
    ms.convert(module, torch.float64)
    assert all(torch.equal(param, expected[name]) for name, param in module.named_parameters())
    out = module(x.double())
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    assert {param.grad.dtype for param in module.parameters() if param.grad is not None} == {torch.float64}

    pending = module(x.double())
    with pytest.raises(errors.PlacementError, match="waits for backward"):
        ms.convert(module, torch.float32)
    del pending, out
    module.float()
    module.kept = next(module.parameters()) * 2  # an attribute that no hook computes
    with pytest.raises(errors.PlacementError, match="its result is attribute `kept`") as caught:
        ms.convert(module, torch.float64)
    assert "run backward first" in caught.value.remedy


@pytest.mark.parametrize("used_up", [False, True])
def test_a_checkpointed_forward_pass_is_not_run_again(used_up: bool) -> None:
    """Who holds a tensor is found out without what would recompute the activations, and count the batch twice."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loss = checkpoint(module, torch.randn(4, 2, requires_grad=True), use_reentrant=False).square().sum()
    if used_up:
        loss.backward()
    before: Any = copy.deepcopy(module[1].state_dict())
    if used_up:
        ms.convert(module, torch.float64)
    else:
        with pytest.raises(errors.PlacementError, match="waits for backward"):
            ms.convert(module, torch.float64)
    assert module[1].num_batches_tracked == before["num_batches_tracked"]
    assert torch.equal(module[1].running_mean.float(), before["running_mean"])
