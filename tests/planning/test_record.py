"""`record`: names are accounted for in full, or not at all where there is nothing to find."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.planning import record
from modelstate.planning.matching import ModelSchemaView, match
from modelstate.planning.options import LoadOptions
from modelstate.planning.preparation import Preparation
from modelstate.problems import ProblemKind
from modelstate.torch_compat.dtypes import Overflows
from modelstate.transaction.slots import slots_of
from modelstate.transaction.transaction import Transaction, Write
from tests.sweeps import examples


class Net(nn.Module):
    """A model with a tied tensor, a buffer, and a non-persistent buffer; the last is optional."""

    def __init__(self, hidden: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        if hidden:
            self.register_buffer("positions", torch.arange(3), persistent=False)


def preparation_of(model: nn.Module, source: Any, **options: Any) -> Preparation:
    """The recorded preparation of a load, outside of a lock."""
    view = ModelSchemaView(model, slots_of(model))
    matched = match(ms.open(source), LoadOptions(**options), view)

    def write(assignment: Any) -> Write:
        return Write(assignment.param, assignment.value)

    preparation = Preparation(Transaction(model), view, matched, Overflows(), write, call_extra_state=False)
    record.record(preparation)
    return preparation


OPTIONS: list[dict[str, Any]] = [
    {},
    {"allow_missing": ["scale"]},
    {"allow_unexpected": ["more"]},
    {"rules": [ms.rules.Rename("other", "scale")]},
    {"dtype": torch.float64},
    {"device": "cpu"},
    {"init_missing": True},
    {"transform": {"scale": lambda _, tensor: tensor * 2}},
    {"transform": {"none": lambda _, tensor: tensor}},
    {"in_place": True},
]
DAMAGE: list[Callable[[dict[str, Any]], object]] = [
    lambda state: None,
    lambda state: state.pop("scale"),
    lambda state: state.update(more=torch.ones(1)),
    lambda state: state.update(scale=torch.ones(3)),
    lambda state: state.update(scale=torch.ones(2, dtype=torch.int64)),
    lambda state: state.update(scale="text"),
    lambda state: state.update({"head.weight": torch.full((3, 2), 7.0)}),
    lambda state: state.update(positions=torch.arange(3)),
    lambda state: state.update(positions=torch.ones(3)),
]


@pytest.mark.slow
@given(
    st.booleans(), st.booleans(), st.sampled_from(["real", "skeleton", "meta"]),
    st.sampled_from(OPTIONS), st.sets(st.sampled_from(range(len(DAMAGE))), max_size=2),
)  # fmt: skip
@settings(deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_quick_check_decides_as_the_full_one(
    hidden: bool, tied: bool, kind: str, options: dict[str, Any], damage: set[int]
) -> None:
    state: dict[str, Any] = dict(Net(hidden, tied).state_dict())
    for index in damage:
        DAMAGE[index](state)

    def outcome() -> tuple[str, ...]:
        with ms.skeleton() if kind == "skeleton" else torch.device("meta" if kind == "meta" else "cpu"):
            model = Net(hidden, tied)
        plan = ms.plan(model, state, **options)
        return tuple(map(str, (plan.problems, plan.notes, plan.steps, plan.slots)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_is_exact", lambda *_: False)
        expected = outcome()
    assert outcome() == expected


def test_a_load_whose_names_are_equal_is_not_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(dict(nn.Linear(2, 2).state_dict()), tmp_path / "model.safetensors")
    monkeypatch.setattr(record, "_Coverage", lambda *_: pytest.fail("names were accounted for"))
    assert ms.load(nn.Linear(2, 2), tmp_path / "model.safetensors").coverage == 1.0


def test_a_preparation_is_empty_until_it_is_recorded() -> None:
    model = nn.Linear(2, 2)
    view = ModelSchemaView(model, slots_of(model))
    matched = match(ms.open(nn.Linear(2, 2).state_dict()), LoadOptions(), view)
    make = partial(Write, model.weight)
    preparation = Preparation(Transaction(model), view, matched, Overflows(), make, call_extra_state=False)
    assert (preparation.assignments, preparation.problems, preparation.steps()) == ([], [], ())
    assert preparation.transaction.writes == []


def test_each_tensor_gets_one_write_that_waits() -> None:
    model = Net(hidden=False, tied=True)
    state = Net(hidden=False, tied=True).state_dict()
    before = model.embed.weight.clone()
    preparation = preparation_of(model, state)
    assert [step.name for step in preparation.steps()] == ["scale", "embed.weight"]
    assert [write.target for write in preparation.transaction.writes] == [model.scale, model.embed.weight]
    assert not any(write.done for write in preparation.transaction.writes)
    assert torch.equal(model.embed.weight, before)


def test_all_problems_are_found_at_once() -> None:
    state = dict(Net(hidden=False, tied=True).state_dict())
    state["head.weight"] = state["embed.weight"] + 1
    state["scale"] = torch.ones(5)
    state["more"] = torch.ones(1)
    preparation = preparation_of(Net(hidden=False, tied=True), state)
    found = {problem.kind for problem in preparation.problems}
    assert found == {ProblemKind.TIE_CONFLICT, ProblemKind.WRONG_SHAPE, ProblemKind.UNEXPECTED}
    assert {problem.kind for problem in preparation.error().problems} == found


def test_slots_that_are_not_tied_map_different_bytes(tmp_path: Path) -> None:
    one = torch.ones(4)
    torch.save({"a": one, "b": one}, tmp_path / "tied.pt")
    with torch.device("meta"):
        model = nn.ParameterDict({"a": torch.empty(4), "b": torch.empty(4)})
    steps = preparation_of(model, tmp_path / "tied.pt", map=True).steps()
    assert [step.mapped for step in steps] == [True, False]


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


def test_memory_that_was_freed_is_a_problem() -> None:
    model = nn.Linear(2, 2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.weight.untyped_storage().resize_(0)
    (problem,) = preparation_of(model, state, in_place=False).problems
    assert problem.kind is ProblemKind.FREED_MEMORY
    assert (problem.name, problem.expected, problem.found) == ("weight", 16, 0)
