"""Buffers that are None until they are assigned: whatever they were, a load makes them what the checkpoint has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.problems import ProblemKind
from tests.loading.fingerprint import whole
from tests.objects.nets import Load, stock


class Lazy(nn.Module):
    """A layer with one lazy buffer, which it adds to what it computes."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        ms.register_lazy_buffer(self, "p")
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x if self.p is None else x + self.p.sum()


LOADS: dict[str, Load] = {"stock": stock, "load_state_dict": ms.load_state_dict, "load": ms.load}
every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
ours_only = pytest.mark.parametrize("load", [ms.load_state_dict, ms.load], ids=["load_state_dict", "load"])
STATES: dict[str, Callable[[], torch.Tensor | None]] = {
    "None": lambda: None,
    "same shape": lambda: torch.tensor([7.0, 8, 9]),
    "another shape": lambda: torch.full((2, 4), 5.0),
    "a scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
}


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def saved(state: Any, form: str, folder: Path) -> Any:
    """A state dict in one of the ways in which it is kept."""
    if form == "state dict":
        return state
    if form == "plain dict":
        return dict(state)
    if form == "torch file":
        torch.save(state, folder / "state.pt")
        return folder / "state.pt"
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "state.safetensors")
    return folder / "state.safetensors"


# What it is before and after it is assigned.


def test_none_and_then_a_buffer() -> None:
    module = Lazy()
    assert module.p is None
    assert "p" not in module.state_dict()
    module.p = torch.arange(3)
    assert dict(module.named_buffers())["p"] is module.p
    assert torch.equal(module.state_dict()["p"], torch.arange(3))
    module.p = torch.ones(2, 5)
    assert module.half().p.dtype is torch.float16
    assert module.to("meta").p.is_meta
    module.p = None
    assert module.double().p is None
    assert "p" not in module.state_dict()


# Loading.


@pytest.mark.slow_except(60)
@every_load
@pytest.mark.parametrize("there", STATES.values(), ids=[f"into {name}" for name in STATES])
@pytest.mark.parametrize("value", STATES.values(), ids=[f"from {name}" for name in STATES])
@pytest.mark.parametrize("form", ["state dict", "plain dict", "torch file", "safetensors"])
def test_from_every_state_into_every_state(
    load: Load, there: Callable[[], Any], value: Callable[[], Any], form: str, tmp_path: Path
) -> None:
    source, target = Lazy(value()), Lazy(there())
    held, linear = target.p, target.linear.weight
    state = saved(source.state_dict(), form, tmp_path)
    if load is not ms.load and isinstance(state, Path):
        state = torch.load(state) if form == "torch file" else dict(ms.open(state).items())
        if form == "safetensors":
            state = {name: ms.open(tmp_path / "state.safetensors").tensor(name) for name in state}
    load(target, state)
    assert same(target.p, source.p)
    assert target.linear.weight is linear
    assert torch.equal(linear, source.linear.weight)
    if held is not None and target.p is not None:
        assert target.p is held
    if target.p is not None:
        target.p.fill_(11)  # memory of its own
        assert source.p is not None
        assert not source.p.numel() or not same(target.p, source.p)


@every_load
def test_one_that_is_none_takes_the_dtype_and_one_that_is_set_keeps_its_own(load: Load) -> None:
    state = Lazy(torch.tensor([1.5, 2], dtype=torch.float16)).state_dict()
    for there, dtype in ((None, torch.float16), (torch.zeros(2), torch.float32), (torch.zeros(3), torch.float32)):
        target = Lazy(there)
        load(target, state)
        assert same(target.p, torch.tensor([1.5, 2], dtype=dtype))


@every_load
@pytest.mark.parametrize("note", [True, False], ids=["noted", "not noted"])
def test_a_value_that_has_got_lost_is_missing_where_that_is_known(load: Load, note: bool) -> None:
    state: Any = Lazy(torch.ones(3)).state_dict()
    del state["p"]
    for there in (None, torch.zeros(2)):
        target = Lazy(there)
        if note:
            with pytest.raises(RuntimeError, match="p") as caught:
                load(target, state)
            if isinstance(caught.value, ms.PlanError):
                assert [problem.kind for problem in caught.value.problems] == [ProblemKind.MISSING]
            else:
                assert 'Missing key(s) in state_dict: "p"' in str(caught.value)
            assert target.p is there
        else:
            load(target, dict(state))
            assert target.p is None


@every_load
@pytest.mark.parametrize("there", [None, torch.zeros(2)], ids=["None", "set"])
def test_values_that_are_no_tensors(load: Load, there: torch.Tensor | None) -> None:
    target = Lazy(there)
    with pytest.raises(RuntimeError, match="int") as caught:
        load(target, {**Lazy().state_dict(), "p": 3})
    assert "nexpected" not in str(caught.value)  # the name is right
    assert target.p is there


# What modelstate's own loads add.


@pytest.mark.slow_except(16)
@ours_only
@pytest.mark.parametrize("there", STATES.values(), ids=STATES)
@pytest.mark.parametrize("value", STATES.values(), ids=STATES)
def test_nothing_is_changed_by_a_load_that_fails_later(
    load: Load, there: Callable[[], Any], value: Callable[[], Any]
) -> None:
    def too_late(module: nn.Module, _: Any) -> None:
        raise LookupError("too late")

    target = nn.Sequential(Lazy(there()), nn.Linear(2, 2))
    source = nn.Sequential(Lazy(value()), nn.Linear(2, 2)).state_dict()
    before = whole(target)
    with pytest.raises(RuntimeError):
        load(target, {name: value for name, value in source.items() if name != "1.weight"})
    assert whole(target) == before
    target.register_load_state_dict_post_hook(too_late)
    with pytest.raises((LookupError, errors.ModelCodeError)):
        load(target, source)
    assert whole(target) == before
    assert same(target[0].p, there())


@pytest.mark.parametrize("there", STATES.values(), ids=STATES)
@pytest.mark.parametrize("value", STATES.values(), ids=STATES)
def test_a_plan_changes_nothing_and_lists_the_buffer(there: Callable[[], Any], value: Callable[[], Any]) -> None:
    source, target = Lazy(value()), Lazy(there())
    before = whole(target)
    plan = ms.plan(target, source.state_dict())
    assert whole(target) == before
    assert plan.ok
    assert plan.coverage == 1
    steps = {step.name: step for step in plan.steps}
    if source.p is None:
        assert "p" not in steps
        assert any("become None" in note and note.endswith(": p") for note in plan.notes) == (target.p is not None)
    else:
        assert steps["p"].kind == "buffer"
        assert steps["p"].shape == tuple(source.p.shape)
    report = ms.load(target, plan)
    assert same(target.p, source.p)
    assert report.coverage == 1
    assert report.references_lost == (("p is gone",) if target.p is None and there() is not None else ())


# Trees of modules.


@every_load
def test_shared_modules(load: Load) -> None:
    def build(p: torch.Tensor | None) -> nn.Module:
        shared = Lazy(p)
        return nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, Lazy(torch.zeros(1))])})

    for value in (None, torch.arange(3.0)):
        for there in (None, torch.zeros(2), torch.zeros(3)):
            target: Any = build(there)
            load(target, build(value).state_dict())
            assert same(target["a"].p, value)
            assert target["a"] is target["b"][0]


@every_load
def test_two_states_for_a_shared_module(load: Load) -> None:
    shared = Lazy()
    target = nn.ModuleDict({"a": shared, "b": shared})
    for first, second in ((torch.ones(3), None), (None, torch.ones(3))):
        state: Any = nn.ModuleDict({"a": Lazy(first), "b": Lazy(second)}).state_dict()
        for name in ("weight", "bias"):
            state[f"b.linear.{name}"] = state[f"a.linear.{name}"]
        with pytest.raises(RuntimeError, match="set under one name of a shared module, and None under another"):
            load(target, state)


def test_names_that_are_not_lazy_stay_strict() -> None:
    target = Lazy()
    target.register_buffer("q", None)
    target.register_buffer("r", torch.zeros(2))
    state = {**Lazy(torch.ones(3)).state_dict(), "q": torch.ones(1), "r": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"q"'):
        target.load_state_dict(state)
    plan = ms.plan(target, state)
    assert {problem.name for problem in plan.problems} == {"q", "r"}
    assert [problem.why for problem in plan.problems if problem.kind is ProblemKind.UNEXPECTED] == [
        "registered as None in the model"
    ]


# What cannot be registered.


class Taken(nn.Module):
    table = None

    def __init__(self) -> None:
        super().__init__()
        self.p = None
        self.child = nn.Linear(1, 1)
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("old", None)


@pytest.mark.parametrize(
    "name", ["table", "p", "child", "weight", "old", "forward", "training", "a.b", "", "1", "a b", "class"]
)
def test_names_that_are_refused(name: str) -> None:
    module = Taken()
    before = whole(module), dict(vars(module))
    with pytest.raises(errors.BufferNameError) as caught:
        ms.register_lazy_buffer(module, name)
    assert isinstance(caught.value, KeyError)  # as torch's
    assert caught.value.remedy
    assert (whole(module), dict(vars(module))) == before
    assert not module._load_state_dict_pre_hooks


def test_twice() -> None:
    module = Lazy(torch.ones(2))
    with pytest.raises(errors.BufferNameError, match="once"):
        ms.register_lazy_buffer(module, "p")
    assert same(module.p, torch.ones(2))


def test_what_is_no_module_or_no_name() -> None:
    with pytest.raises(errors.OptionError, match="not a module"):
        ms.register_lazy_buffer({}, "p")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="text"):
        ms.register_lazy_buffer(nn.Linear(1, 1), 3)  # type: ignore[arg-type]

    class Early(nn.Module):
        def __init__(self) -> None:
            ms.register_lazy_buffer(self, "p")

    with pytest.raises(errors.OptionError, match="super"):
        Early()
