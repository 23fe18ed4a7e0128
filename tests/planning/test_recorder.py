"""`needs_protocol` and `compare_names`: models without loading code of their own do not run the protocol."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.torch_compat.modules import needs_protocol
from modelstate.transaction.slots import compare_names, slots_of


class Net(nn.Module):
    """A module that has parameters, a buffer and a non-persistent buffer at two levels, and a child that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("positions", torch.arange(2), persistent=False)
        self.absent: nn.Module | None = None


class Plain(Net):
    """`Net` without the loading code of batch norms, which depends on a version."""

    def __init__(self) -> None:
        super().__init__()
        self.block[0] = nn.LayerNorm(2)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Lacks and exceeds names at every level."""
    state = {name: value for name, value in model.state_dict().items() if name not in ("first.bias", "block.1.weight")}
    extra = ("more", "first.more", "block.more", "block.0.more", "absent.more", "positions", "block._extra_state")
    return {**{name: torch.ones(1) for name in extra}, **state}


def test_names_are_compared_as_torch_compares_them() -> None:
    model = Plain()
    state = state_of(model)
    common, missing, unexpected = compare_names(slots_of(model), state.keys())
    expected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (expected.missing_keys, expected.unexpected_keys)
    assert common == ["scale", "first.weight", "block.0.weight", "block.0.bias"]


def test_names_whose_values_are_taken_are_left_out() -> None:
    slots, state = slots_of(model := Plain()), model.state_dict()
    left = [name for name in state if name not in ("scale", "first.bias")]
    assert compare_names(slots, state.keys(), {"scale", "first.bias"}) == (left, [], [])
    assert compare_names(slots, state.keys(), state.keys()) == ([], [], [])


def hooked(model: nn.Module) -> None:
    model.block.register_load_state_dict_post_hook(lambda *_: None)  # type: ignore[operator, union-attr]


def patched(model: nn.Module) -> None:
    model.first._load_from_state_dict = lambda *_: None  # type: ignore[union-attr]


class Extra(nn.Linear):
    def set_extra_state(self, state: object) -> None: ...


class Counting(nn.BatchNorm1d):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


class Behind(nn.Module):
    def _load_from_state_dict(self, *arguments: Any) -> None: ...


class Mixed(nn.BatchNorm1d, Behind):
    """torch's method of BatchNorm calls that of `Behind`."""


CODE: dict[str, Callable[[Plain], object]] = {
    "hook": hooked,
    "method of an object": patched,
    "method of a class": lambda model: setattr(model, "block", Counting(2)),
    "method behind that of BatchNorm": lambda model: setattr(model, "block", Mixed(2)),
    "method of InstanceNorm": lambda model: setattr(model, "block", nn.InstanceNorm1d(2)),
    "extra state": lambda model: setattr(model, "first", Extra(2, 2)),
    "name with a dot": lambda model: model._parameters.update({"a.b": nn.Parameter(torch.ones(1))}),
}


@pytest.mark.parametrize("change", CODE.values(), ids=CODE)
def test_code_of_the_model_needs_a_walk(change: Callable[[Plain], object]) -> None:
    model = Plain()
    assert not needs_protocol(slots_of(model).modules, model.state_dict(), {})
    change(model)
    assert needs_protocol(slots_of(model).modules, model.state_dict(), {})


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
    """The code that adds them runs only where one is missing."""
    saved, ours, theirs = Old(), Old(), Old()
    for one in (saved, ours, theirs):
        one.norm[0].num_batches_tracked.fill_(7)  # type: ignore[union-attr, operator]
    names = [f"{prefix}.num_batches_tracked" for prefix in missing]
    state = OrderedDict((name, value + 1) for name, value in saved.state_dict().items() if name not in names)
    versions = {"": {"version": 1}, "norm": {"version": 1}}
    versions |= {prefix: {} if version is None else {"version": version} for prefix in ("norm.0", "norm.1")}
    assert needs_protocol(slots_of(ours).modules, state.keys(), versions) == bool(missing)
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


@pytest.mark.parametrize("versions", [{"": {"assign_to_params_buffers": True}}, {"": 1}, "text"])
def test_versions_that_torch_reads_itself_need_a_walk(versions: object) -> None:
    assert needs_protocol(slots_of(Plain()).modules, ["scale"], versions)
    assert not needs_protocol(slots_of(Plain()).modules, ["scale"], {"": {"version": 1}})
    assert needs_protocol(slots_of(Plain()).modules, [("scale",)], None)


def test_a_load_state_dict_that_only_compares_names_says_what_torch_says() -> None:
    model, other = Plain(), Plain()
    state = OrderedDict(state_of(model))
    state["scale"] = torch.ones(3)
    with pytest.raises(RuntimeError) as expected:
        other.load_state_dict(state)
    with pytest.raises(RuntimeError) as caught:
        ms.load_state_dict(model, state)
    assert str(caught.value) == str(expected.value)
