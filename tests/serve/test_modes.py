"""Modes of torch that are active in the thread that makes a `Live` or swaps: versions are as if they were not."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import modelstate as ms
from tests.serve.targets import target_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": default_device,
    "torch.device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "skeleton": ms.skeleton,
    "fake": FakeTensorMode,
}
every_mode = pytest.mark.parametrize("mode", MODES)
every_kind = pytest.mark.parametrize("kind", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "exported"])


class Net(nn.Module):
    """Has every kind of tensor, a count of requests, and a hook that computes with what it loads."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, k / 3)
        nn.init.constant_(self.linear.bias, k)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)
        self.constant = torch.ones(4)
        self.register_load_state_dict_pre_hook(Net._rescale)

    @staticmethod
    def _rescale(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        name = prefix + "linear.weight"
        if name in state:
            state[name] = state[name] @ torch.eye(4, dtype=torch.float32, device=state[name].device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y: torch.Tensor = self.linear(x) + self.shift + self.constant
        return y


def check(live: ms.Live, k: float) -> None:
    """The version answers as the module with the weights k does, has plain tensors on the CPU, and gives gradients."""
    answer = live(X)
    assert torch.equal(answer, Net(k).eval()(X))
    tensors = list(live._versions[-1].tensors)
    assert not any(tensor.is_inference() for tensor in tensors)
    assert all(
        (type(tensor) in (torch.Tensor, nn.Parameter), tensor.device.type) == (True, "cpu") for tensor in tensors
    )
    answer.sum().backward()
    assert all(tensor.grad is not None for tensor in tensors if tensor.requires_grad)


@every_kind
@every_mode
def test_a_swap_within_a_mode(mode: str, kind: str) -> None:
    live, state = ms.Live(target_of(kind, Net(1), X)), Net(2).state_dict()
    live(X)
    with MODES[mode]():
        report = live.swap(state)
    check(live, 2)
    assert report.carried == ("count",)
    with MODES[mode]():
        assert live.rollback() == 1
    check(live, 1)


@every_kind
@every_mode
def test_a_live_that_is_made_within_a_mode(mode: str, kind: str) -> None:
    target = target_of(kind, Net(1), X)
    with MODES[mode]():
        live = ms.Live(target)
    check(live, 1)
    live.swap(Net(2).state_dict())
    check(live, 2)


def modes() -> tuple[object, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.empty(0).device.type,
    )


@pytest.mark.parametrize("mode", ["inference", "no_grad", "autocast", "torch.device"])
def test_a_canary_runs_within_the_modes_of_the_caller(mode: str) -> None:
    live, state, seen = ms.Live(Net(1).eval()), Net(2).state_dict(), []
    with MODES[mode]():
        expected = modes()
        live.swap(state, canary=lambda version: seen.append((modes(), version(X).shape)))
        assert modes() == expected
    assert seen == [(expected, (3, 4))]
    check(live, 2)
