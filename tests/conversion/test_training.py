"""Training goes on through a conversion, with every optimizer that torch has."""

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import described, whole

CLASSES = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True, "momentum": 0.5},
    "nesterov": {"nesterov": True, "momentum": 0.5},
    "decoupled": {"decoupled_weight_decay": True},
    "strong Wolfe": {"line_search_fn": "strong_wolfe"},
    "a tensor as lr": {"lr": torch.tensor(0.01), "fused": True},
}
STEADY = {"LBFGS": {"lr": 0.1, "max_iter": 3}}
"""Where the defaults overshoot on a tiny model, so that any rounding would grow."""


class Tokens(nn.Module):
    """An embedding with sparse gradients, for the optimizer that takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3, sparse=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.embed((batch[:, 0].abs() * 10).long() % 6)


class Training:
    """A model and its optimizer, which can be trained for any number of steps, always with the same batch."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.name, self.options = name, options
        self.model: nn.Module = Tokens()
        if name != "SparseAdam":
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.optimizer = self._new_optimizer()
        self.batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        self.losses: list[float] = []

    def _new_optimizer(self) -> Any:
        params = [p for p in self.model.parameters() if p.dim() == 2 or self.name != "Muon"]
        return CLASSES[self.name](params, **STEADY.get(self.name, {}), **copy.deepcopy(self.options))

    def renew_on(self, device: str) -> None:
        """Another device, with a new optimizer, which has no state."""
        self.model.to(device)
        self.optimizer = self._new_optimizer()

    def train(self, steps: int = 5) -> "Training":
        for _ in range(steps):
            param = next(self.model.parameters())
            batch = self.batch.to(param.device, param.dtype)

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = (self.model(batch) - batch.roll(1, 0)).square().mean()  # noqa: B023
                loss.backward()
                return loss

            self.losses.append(self.optimizer.step(closure).item())
        return self

    def state(self) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        """Every tensor in the optimizer's state, at any depth, with its place."""
        for number, state in self.optimizer.state_dict()["state"].items():
            yield from tensors_in(state, (number,))

    def groups(self) -> list[Any]:
        """Who `param_groups` is: the list, its dicts, and every value in them."""
        groups = self.optimizer.param_groups
        values = [value for group in groups for value in group.values()]
        params = [param for group in groups for param in group["params"]]
        return [groups, *groups, *values, *params]


def tensors_in(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield at, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_in(one, (*at, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from tensors_in(one, (*at, index))


def works(name: str, options: dict[str, Any]) -> bool:
    try:
        Training(name, options).train(1)
    except (RuntimeError, AssertionError, ValueError):
        return False
    return True


VARIANTS = {
    f"{name} {variant}".strip(): (name, options)
    for name, found in CLASSES.items()
    for variant, options in OPTIONS.items()
    if not variant or (set(options) <= set(inspect.signature(found).parameters) and works(name, options))
}
every_optimizer = pytest.mark.parametrize("variant", VARIANTS)


def training(variant: str) -> Training:
    name, options = VARIANTS[variant]
    return Training(name, options)


def same_bits(one: Training, other: Training) -> None:
    assert whole(one.model)[0] == whole(other.model)[0]
    assert described(one.optimizer.state_dict()) == described(other.optimizer.state_dict())
    assert one.losses == other.losses


def close(one: Training, other: Training, tolerance: float = 1e-6) -> None:
    """Equal within a tolerance; what was learned, not every moment of the optimizer on the way.

    Both have to have computed the same in the same dtypes: a line search, or a batch norm of a tiny batch, makes much
    of a difference in rounding.
    """
    for key, value in other.model.state_dict().items():
        torch.testing.assert_close(
            one.model.state_dict()[key], value, atol=tolerance, rtol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert one.losses == pytest.approx(other.losses, rel=tolerance, abs=tolerance)


@pytest.mark.slow
@every_optimizer
def test_there_and_back_without_loss(variant: str) -> None:
    """Every float32 is a float64, so training never knows."""
    one, other = training(variant).train(), training(variant).train(10)
    who = ms.identity(one.model, [one.optimizer])
    ms.convert(one.model, torch.float64, optimizers=[one.optimizer])
    ms.convert(one.model, torch.float32, optimizers=[one.optimizer])
    assert who.differences(ms.identity(one.model, [one.optimizer])) == []
    same_bits(one.train(), other)


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_what_follows_and_what_stays(variant: str, dtype: torch.dtype) -> None:
    """Moments take the dtype of the parameter, counters keep theirs, and nobody touches the groups."""
    one = training(variant).train()
    before = {at: (value.dtype, value.device, value.clone()) for at, value in one.state()}
    groups, contents = one.groups(), described(one.optimizer.param_groups[0] | {"params": None})
    ms.convert(one.model, dtype, optimizers=[one.optimizer])
    assert all(param.dtype is dtype and param.grad.dtype is dtype for param in one.optimizer.param_groups[0]["params"])
    assert {at for at, _ in one.state()} == set(before)
    for at, value in one.state():
        old_dtype, old_device, old = before[at]
        assert value.device == old_device
        if "step" in at:
            assert value.dtype is old_dtype
            assert torch.equal(value, old)
        elif value.dim():
            assert value.dtype is dtype
            assert torch.equal(value, old.to(dtype))
    now = one.groups()
    assert len(now) == len(groups)
    assert all(a is b for a, b in zip(now, groups, strict=True))
    assert described(one.optimizer.param_groups[0] | {"params": None}) == contents


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", sorted({*CLASSES} - {"Muon", "SparseAdam", "LBFGS"}))
def test_a_parameter_that_is_one_number(name: str, dtype: torch.dtype) -> None:
    """Its moments look like counters, and are not: all dtypes are what they are when training begins in the new one."""

    def trained(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Module()
        module.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        optimizer = CLASSES[name](module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module.scale.square().backward()
            optimizer.step()
        return module, optimizer

    module, optimizer = trained(torch.float32)
    ms.convert(module, dtype, optimizers=[optimizer])
    dtypes = [(at, value.dtype) for at, value in tensors_in(optimizer.state_dict()["state"], ())]
    fresh = trained(dtype)[1].state_dict()["state"]
    assert dtypes == [(at, value.dtype) for at, value in tensors_in(fresh, ())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_optimizer
def test_to_a_device_and_back(variant: str) -> None:
    fresh = training(variant)
    fresh.renew_on("cuda")
    try:
        fresh.train(1)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"torch cannot do it: {error}")
    one, other = training(variant).train(), training(variant).train(15)
    who = ms.identity(one.model, [one.optimizer])
    ms.convert(one.model, device="cuda", optimizers=[one.optimizer])
    for at, value in one.state():
        beside = one.optimizer.param_groups[0].get("fused") or one.optimizer.param_groups[0].get("capturable")
        if value.dim() or ("step" in at and beside):
            assert value.is_cuda, at
    one.train()
    ms.convert(one.model, device="cpu", optimizers=[one.optimizer])
    assert not any(value.is_cuda for _, value in one.state())
    assert who.differences(ms.identity(one.model, [one.optimizer])) == []
    one.train()
    if variant == "LBFGS strong Wolfe":  # its line search takes other steps where values are rounded in another way
        assert all(math.isfinite(loss) for loss in one.losses)
    else:
        close(one, other, 2e-3)


def test_state_that_was_made_on_meta_needs_the_call_that_takes_optimizers() -> None:
    """As the documentation of `reference_keeping` says."""
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    with ms.reference_keeping():
        model.to_empty(device="meta")
    assert all(state["sum"].is_meta for state in optimizer.state.values())
    ms.convert(model, device="cpu", empty=True, optimizers=[optimizer])
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["sum"], torch.full_like(param, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_for_several_parameters_are_refused_where_they_would_have_to_follow(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["all"] = {"t": torch.ones(3, dtype=dtype)}
    refused = pytest.raises(ms.errors.PlacementError, match="for several parameters together")
    with refused if dtype is torch.float32 else nullcontext():
        ms.convert(model, torch.bfloat16, optimizers=[optimizer])
    assert model.weight.dtype is (torch.float32 if dtype is torch.float32 else torch.bfloat16)
