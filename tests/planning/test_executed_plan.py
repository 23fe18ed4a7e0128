"""A plan that was made before is executed as it is: no rule is applied, and no name is matched again."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.loading.loads import built, stored


class Tied(nn.Module):
    """A model without loading code: the steps of a plan are all that a load needs."""

    norm_class: type[nn.Module] = nn.LayerNorm

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm: Any = self.norm_class(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3), persistent=False)


class TiedWithCode(Tied):
    """The same with a module that overrides `_load_from_state_dict`, which runs again."""

    norm_class = nn.BatchNorm1d


MODELS = pytest.mark.parametrize("cls", [Tied, TiedWithCode])


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.loads = 0
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "loads", module.loads + 1))


@pytest.fixture(params=["safetensors", "torch", "mapping"])
def source(request: pytest.FixtureRequest, tmp_path: Path, cls: type[Tied]) -> Any:
    return stored(dict(cls().state_dict()), tmp_path, request.param)


@pytest.mark.slow_except(12)
@pytest.mark.parametrize("kind", ["real", "skeleton"])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bf16"}, {"map": False}, {"in_place": True}, {"init_missing": True}], ids=str
)
@MODELS
def test_the_model_and_the_report_are_those_of_a_load_at_once(
    kind: str, options: dict[str, Any], source: Any, cls: type[Tied]
) -> None:
    at_once, planned = built(cls, kind), built(cls, kind)
    plan = ms.plan(planned, source, **options)
    expected, report = ms.load(at_once, source, **options), ms.load(planned, plan)
    assert report.steps == plan.steps == expected.steps
    assert (report.notes, report.slots, report.coverage) == (expected.notes, expected.slots, 1.0)
    found = planned.state_dict()
    assert all(torch.equal(found[name], value) for name, value in at_once.state_dict().items())
    assert planned.head.weight is planned.embed.weight


@MODELS
def test_a_plan_goes_into_another_model_of_the_same_slots(source: Any, cls: type[Tied]) -> None:
    plan = ms.plan(cls(), source)
    other = cls()
    ms.load(other, plan)
    again = cls()
    ms.load(again, source)
    assert torch.equal(other.embed.weight, again.embed.weight)


def test_no_rule_is_applied_again() -> None:
    renamed: list[str] = []

    class Watched(ms.rules.Prefix):
        def rename(self, name: str) -> str | None:
            renamed.append(name)
            return super().rename(name)

    state = {f"old.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    computed: list[torch.Tensor] = []

    def double(tensor: torch.Tensor) -> torch.Tensor:
        computed.append(tensor)
        return tensor * 2

    model = nn.Linear(2, 2)
    plan = ms.plan(model, state, rules=[Watched(strip="old."), ms.rules.Apply("weight", double)])
    assert renamed
    renamed.clear()
    computed.clear()
    ms.load(model, plan)
    assert not renamed
    assert len(computed) == 1
    assert torch.equal(model.weight, state["old.weight"] * 2)


def test_code_of_the_model_runs_again_with_its_effects() -> None:
    state = Hooked().state_dict()
    model = Hooked()
    plan = ms.plan(model, state)
    assert model.loads == 0
    assert ms.load(model, plan).steps == plan.steps
    assert model.loads == 1
    assert ms.load(model, plan, background=True).result().steps == plan.steps
    assert model.loads == 2


def test_a_hook_that_came_after_the_plan_runs() -> None:
    model = nn.Linear(2, 2)
    plan = ms.plan(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("bias"))
    with pytest.raises(ms.PlanError):
        ms.load(model, plan)
    model = nn.Linear(2, 2)
    plan = ms.plan(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    model.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(bias=torch.zeros(2)))
    with pytest.raises(errors.PlanError):
        ms.load(model, plan)
    assert not torch.equal(model.weight, torch.ones(2, 2))


def test_a_hook_that_is_gone_since_the_plan() -> None:
    model = nn.Linear(2, 2)
    hook = model.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(bias=torch.zeros(2)))
    plan = ms.plan(model, {"weight": torch.ones(2, 2)})
    assert plan.ok
    hook.remove()
    before = model.weight.clone()
    with pytest.raises((ms.PlanError, errors.PlanError)):
        ms.load(model, plan)
    assert torch.equal(model.weight, before)


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


CHANGES: dict[str, Any] = {
    "another dtype": lambda model: model.norm.bfloat16(),
    "another shape": lambda model: setattr(model, "norm", type(model.norm)(4)),
    "a name less": lambda model: setattr(model.norm, "bias", None),
    "a name more": lambda model: setattr(model, "more", nn.Linear(1, 1)),
    "a tie less": untie,
    "no memory": lambda model: model.to("meta"),
}


@MODELS
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_refused(change: str, cls: type[Tied]) -> None:
    model = cls()
    plan = ms.plan(model, cls().state_dict())
    CHANGES[change](model)
    with pytest.raises(errors.PlanError) as caught:
        ms.load(model, plan)
    assert "make the plan again" in str(caught.value)
    assert caught.value.where.startswith(f"{cls.__name__}: ")


def sharing_memory(second: int) -> nn.Module:
    """Two parameters in one storage, the second one so many elements behind the first."""
    model, flat = nn.Module(), torch.zeros(8)
    model.first, model.second = nn.Parameter(flat[:4]), nn.Parameter(flat[second : second + 4])
    return model


@pytest.mark.parametrize("second", [0, 2])
def test_a_model_whose_slots_overlap_is_refused(second: int) -> None:
    state = {"first": torch.ones(4), "second": torch.zeros(4)}
    plan = ms.plan(sharing_memory(4), state)
    ms.load(sharing_memory(4), plan)
    with pytest.raises(errors.PlanError, match="second is the same tensor as first") as caught:
        ms.load(sharing_memory(second), plan)
    assert [problem.kind.name for problem in caught.value.problems] == ["TIE_CONFLICT"]


@pytest.mark.parametrize("in_place", [None, True])
@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view, lambda values: values[::2]])
def test_a_view_with_other_bytes_than_its_values_gets_the_values(
    tmp_path: Path, in_place: bool | None, view: Any
) -> None:
    """A plan that reads bytes into the memory of a slot reads them elsewhere for a slot that is such a view."""
    model, other = nn.Module(), nn.Module()
    other.register_buffer("values", view(torch.zeros(400_000, dtype=torch.complex64)))
    model.register_buffer("values", torch.zeros(other.values.shape, dtype=torch.complex64))
    saved = torch.full(other.values.shape, 2 - 3j)
    ms.save({"values": saved}, tmp_path / "values.safetensors")
    plan = ms.plan(model, tmp_path / "values.safetensors", in_place=in_place)
    ms.load(other, plan)
    assert torch.equal(other.values, saved)


def test_a_model_whose_memory_was_freed_is_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    ms.save(model, tmp_path / "model.safetensors")
    plan = ms.plan(model, tmp_path / "model.safetensors")
    other.weight.untyped_storage().resize_(0)
    with pytest.raises(errors.PlanError) as caught:
        ms.load(other, plan)
    assert [problem.kind.name for problem in caught.value.problems] == ["FREED_MEMORY"]


@MODELS
def test_values_gradients_and_requires_grad_may_change(cls: type[Tied]) -> None:
    model = cls()
    state = cls().state_dict()
    plan = ms.plan(model, state)
    model.embed.weight.data.add_(1)
    model.norm.weight.requires_grad_(False)
    model.norm.bias = nn.Parameter(torch.zeros(3))
    model.embed.weight.grad = torch.ones(5, 3)
    ms.load(model, plan)
    assert torch.equal(model.embed.weight, state["embed.weight"])
    assert not model.norm.weight.requires_grad


@MODELS
def test_a_buffer_that_the_checkpoint_must_agree_with_is_compared_again(cls: type[Tied]) -> None:
    model = cls()
    plan = ms.plan(model, {**cls().state_dict(), "steps": torch.arange(3)})
    assert plan.ok
    model.steps.add_(1)
    with pytest.raises(ms.PlanError, match="steps"):
        ms.load(model, plan)


def test_a_plan_holds_no_tensor_of_its_model(tmp_path: Path) -> None:
    """It may be kept for later models, while the first one is gone."""
    ms.save(Tied(), tmp_path / "model.safetensors")
    model = Tied()
    plan = ms.plan(model, tmp_path / "model.safetensors")
    references = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
    del model
    assert all(reference() is None for reference in references)
    assert len(ms.load(Tied(), plan).steps) == len(plan.steps) == 3


def test_a_plan_with_problems_raises_them_again() -> None:
    model = nn.Linear(2, 2)
    plan = ms.plan(model, {"weight": torch.ones(2, 2)})
    with pytest.raises(ms.PlanError) as caught:
        ms.load(model, plan)
    assert tuple(caught.value.problems) == plan.problems


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = nn.Linear(2, 2)
    ms.save(nn.Linear(2, 2), path)
    plan = ms.plan(model, path)
    ms.save(nn.Linear(2, 2), path, overwrite=True)
    before = model.weight.clone()
    with pytest.raises(errors.ModelStateError, match=r"changed|replaced"):
        ms.load(model, plan)
    assert torch.equal(model.weight, before)
