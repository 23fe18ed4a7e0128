"""Models with loading code of their own: it runs where PyTorch runs it, and what it does is accounted for."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms

CALLS: list[str] = []


class Overriding(nn.Linear):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        CALLS.append("method of a class")
        super()._load_from_state_dict(*arguments)


class Behind(nn.Module):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        CALLS.append("method behind that of BatchNorm")
        super()._load_from_state_dict(*arguments)


class Mixed(nn.BatchNorm1d, Behind):
    """torch's method of BatchNorm calls that of `Behind`."""


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: object) -> None:
        CALLS.append("extra state")


def with_method(module: nn.Module) -> nn.Module:
    stock = module._load_from_state_dict

    def load(*arguments: Any) -> None:
        CALLS.append("method of an object")
        stock(*arguments)

    module._load_from_state_dict = load  # type: ignore[method-assign]
    return module


def with_hook(module: nn.Module) -> nn.Module:
    module.register_load_state_dict_post_hook(lambda *_: CALLS.append("hook"))
    return module


CODE: dict[str, Callable[[], nn.Module]] = {
    "hook": lambda: with_hook(nn.Linear(2, 2)),
    "method of an object": lambda: with_method(nn.Linear(2, 2)),
    "method of a class": lambda: Overriding(2, 2),
    "method behind that of BatchNorm": lambda: Mixed(2),
    "extra state": lambda: Extra(2, 2),
}


@pytest.mark.parametrize("kind", CODE)
def test_code_of_a_module_runs_wherever_it_is_defined(kind: str, tmp_path: Path) -> None:
    model, saved = nn.Sequential(nn.Linear(2, 2), CODE[kind]()), nn.Sequential(nn.Linear(2, 2), CODE[kind]())
    ms.save(saved, tmp_path / "x.safetensors")
    ms.plan(model, tmp_path / "x.safetensors")
    CALLS.clear()
    ms.load(model, tmp_path / "x.safetensors")
    assert set(CALLS) == {kind}
    assert torch.equal(model[1].weight, saved[1].weight)


class Old(nn.Module):
    """Of the days when BatchNorm had no counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2, affine=False))


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("missing", [(), ("norm.0",), ("norm.0", "norm.1")])
@pytest.mark.parametrize("in_memory", [True, False])
def test_counters_of_batch_norm_are_added_as_in_torch(
    version: int | None, missing: tuple[str, ...], in_memory: bool, tmp_path: Path
) -> None:
    saved, ours, theirs = Old(), Old(), Old()
    for one in (saved, ours, theirs):
        one.norm[0].num_batches_tracked.fill_(7)  # type: ignore[union-attr, operator]
    names = [f"{prefix}.num_batches_tracked" for prefix in missing]
    state = OrderedDict((name, value + 1) for name, value in saved.state_dict().items() if name not in names)
    versions = {"": {"version": 1}, "norm": {"version": 1}}
    versions |= {prefix: {} if version is None else {"version": version} for prefix in ("norm.0", "norm.1")}
    state._metadata = versions  # type: ignore[attr-defined]
    outcome = theirs.load_state_dict(state, strict=False)
    source: object = state
    if not in_memory:
        source = tmp_path / "x.pt"
        torch.save(state, source)
    ms.load(ours, source, allow_missing=outcome.missing_keys)  # type: ignore[arg-type]
    assert {name: value.tolist() for name, value in ours.state_dict().items()} == {
        name: value.tolist() for name, value in theirs.state_dict().items()
    }


def test_a_weight_on_meta_that_the_code_of_its_module_does_not_assign() -> None:
    """As a layer of optimum-quanto: its code makes the weight of two tensors, and copies it into what is there."""

    class Layer(nn.Linear):
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
            weight = state_dict.pop(f"{prefix}weight.codes") * state_dict.pop(f"{prefix}weight.scale")
            missing = args[2]
            super()._load_from_state_dict(state_dict, prefix, *args)
            missing.remove(f"{prefix}weight")
            with torch.no_grad():
                self.weight.copy_(weight)

    state = {"0.weight.codes": torch.ones(2, 2), "0.weight.scale": torch.tensor(3.0), "0.bias": torch.zeros(2)}
    model = nn.Sequential(Layer(2, 2))
    ms.load(model, state)
    assert (model[0].weight == 3).all()

    with ms.skeleton():
        model = nn.Sequential(Layer(2, 2))
    with pytest.raises(ms.PlanError, match=r"without ms\.skeleton") as caught:
        ms.load(model, state)
    assert "has taken 0.weight.codes, 0.weight.scale and has not assigned 0.weight" in str(caught.value)
    assert "Fill" not in str(caught.value)


def test_an_override_of_load_state_dict_is_called_where_torch_calls_it(tmp_path: Path) -> None:
    class Halved(nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
            return super().load_state_dict({name: value / 2 for name, value in state_dict.items()}, *args, **named)

    note = "Halved: its own load_state_dict was called"
    state = Halved(2, 2).state_dict()
    assert note in ms.plan(Halved(2, 2), state).notes
    in_another = nn.Sequential(Halved(2, 2))
    assert not ms.load(in_another, {f"0.{name}": value for name, value in state.items()}).notes
    assert torch.equal(in_another[0].weight, state["weight"])
    ms.save({"model": Halved(2, 2)}, tmp_path / "run.safetensors")
    model = Halved(2, 2)
    assert note in ms.restore({"model": model}, tmp_path / "run.safetensors").report.notes
    assert torch.equal(model.weight, ms.open(tmp_path / "run.safetensors").tensor("model.weight") / 2)


def test_a_buffer_that_the_constructor_computes_from_a_parameter() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.register_buffer("first", layer.weight.detach().clone(), persistent=False)
        return layer

    trained = build().state_dict()
    with ms.skeleton():
        model = build()
    with pytest.raises(ms.PlanError, match="without it, where the constructor computes them from parameters"):
        ms.load(model, trained)
    assert ms.load(build(), trained).coverage == 1


def test_a_nested_buffer_that_may_be_missing() -> None:
    """torch has no shape for a tensor that is nested with strides."""
    model = nn.Linear(2, 2)
    state = model.state_dict()
    model.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    plan = ms.plan(model, state, allow_missing=["ragged"])
    assert plan.ok
    assert ms.load(model, plan).coverage < 1

    with pytest.raises(ms.errors.UnsupportedTensorError, match="save the tensors that it is made of"):
        ms.plan(model, model.state_dict())


def test_values_that_an_override_swallows() -> None:
    class Swallows(nn.Linear):
        def _load_from_state_dict(self, *_: Any) -> None:
            pass

    module = nn.Sequential(Swallows(2, 2), nn.Linear(2, 2))
    report = ms.load(module, module.state_dict())
    assert report.coverage == 0.5
    assert "2 went into the model's own loading code: 0.bias, 0.weight" in report.notes
    assert "2 left to the model's own loading code: 0.bias, 0.weight" in report.notes


def test_names_that_hooks_forgive_or_take_away() -> None:
    forgiving = nn.Linear(2, 2)
    forgiving.register_load_state_dict_post_hook(lambda _, incompatible: incompatible.missing_keys.clear())
    report = ms.load(forgiving, {"weight": torch.ones(2, 2)})
    assert "1 left to the model's own loading code: bias" in report.notes

    taking = nn.Linear(2, 2)
    taking._register_load_state_dict_pre_hook(lambda state, *_: state.pop("x") and None)
    report = ms.load(taking, {"weight": torch.ones(2, 2), "bias": torch.ones(2), "x": torch.ones(())})
    assert "1 went into the model's own loading code: x" in report.notes
