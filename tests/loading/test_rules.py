"""Loading by rules: what is read, what is kept, what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import PlanError
from tests.loading.fingerprint import whole
from tests.loading.loads import FORMS, stored


class Attention(nn.Module):
    """Separate projections, with a batch norm whose loading code looks at what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.norm = nn.BatchNorm1d(4)


PARTS = ["q.*", "k.*", "v.*"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in memory", "skeleton", "skeleton, no map", "in place", "transform", "planned"])
@pytest.mark.parametrize("form", FORMS)
def test_fused_and_separate(form: str, way: str, tmp_path: Path) -> None:
    for make, source, rules in (
        (Attention, Fused(), [ms.rules.Split("qkv.*", PARTS)]),
        (Fused, Attention(), [ms.rules.Concat(PARTS, "qkv.*")]),
    ):
        nn.init.normal_(source.norm.running_mean)
        expected = ms.rules.Rules(rules).apply(source.state_dict())
        state = stored(dict(source.state_dict()), tmp_path, form)
        options: dict[str, Any] = {"rules": rules, "map": way != "skeleton, no map", "in_place": way == "in place"}
        if way == "transform":
            options["transform"] = lambda name, tensor: tensor.clone()
        model = make()
        if way.startswith("skeleton"):
            with ms.skeleton():
                model = make()
        if way == "planned":
            plan = ms.plan(model, state, **options)
            assert plan.ok
            ms.load(model, plan)
        else:
            ms.load(model, state, **options)
        now = model.state_dict()
        assert now.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(now[name], value), name
        pointers = [param.data_ptr() for param in model.parameters()]
        assert len(set(pointers)) == len(pointers)


def test_the_report_says_where_everything_came_from() -> None:
    rules = [ms.rules.Concat(PARTS, "qkv.*")]
    report = ms.load(Fused(), Attention().state_dict(), rules=rules)
    step = next(step for step in report.steps if step.name == "qkv.weight")
    assert step.source == "q.weight, k.weight, v.weight"
    assert step.rules == (repr(rules[0]),)


def kilobytes(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise AssertionError(name)


def test_a_split_reads_no_more_than_its_part(tmp_path: Path) -> None:
    """One of 64 parts of 1 MB: neither the plan nor the load touches the others."""
    path = tmp_path / "large.safetensors"
    save_file({"w": torch.arange(16 << 20, dtype=torch.float32).reshape(64, -1)}, path)
    model = nn.Module()
    model.register_parameter("p7", nn.Parameter(torch.zeros(1, 1 << 18)))
    rules = [ms.rules.Split("w", [f"p{index}" for index in range(64)])]
    mapped, read = kilobytes("status", "RssFile"), kilobytes("io", "rchar")
    plan = ms.plan(model, path, rules=rules, allow_unexpected=["p*"])
    assert plan.ok
    assert plan.bytes == 1 << 20
    ms.load(model, plan)
    assert kilobytes("status", "RssFile") - mapped < 8 << 10
    assert kilobytes("io", "rchar") - read < 4 << 20
    assert torch.equal(model.p7, torch.arange(7 << 18, 8 << 18, dtype=torch.float32)[None])


def test_model_code_sees_what_rules_have_made() -> None:
    seen = []

    class Curious(Fused):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            seen.append(state_dict["qkv.weight"].clone())
            state_dict["qkv.bias"] = state_dict["qkv.bias"] * 2
            super()._load_from_state_dict(state_dict, prefix, *rest)

    source, model = Attention(), Curious()
    ms.load(model, source.state_dict(), rules=[ms.rules.Concat(PARTS, "qkv.*")])
    expected = torch.cat([source.q.weight, source.k.weight, source.v.weight])
    assert torch.equal(seen[0], expected)
    assert torch.equal(model.qkv.weight, expected)
    assert torch.equal(model.qkv.bias, 2 * torch.cat([source.q.bias, source.k.bias, source.v.bias]))


def test_tied_slots_that_get_computed_values() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 4, bias=False)
            self.b = nn.Linear(2, 4, bias=False)
            self.b.weight = self.a.weight

    halves = {"a0": torch.ones(2, 2), "a1": torch.zeros(2, 2), "b0": torch.ones(2, 2), "b1": torch.zeros(2, 2)}
    rules = [ms.rules.Concat(["*0", "*1"], "*.weight")]
    model = Tied()
    ms.load(model, halves, rules=rules)
    assert model.a.weight[:, 0].tolist() == [1, 1, 0, 0]
    before = whole(model)
    with pytest.raises(PlanError, match="tied"):
        ms.load(model, {**halves, "b1": torch.ones(2, 2)}, rules=rules)
    assert whole(model) == before


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ([ms.rules.Split("qkv.*", ["q.*", "k.*", "v.*"], sizes=[5, 4, 4])], "BAD_RULE"),
        ([ms.rules.Split("qkv.*", ["q.*", "q.x*", "v.*"])], "MISSING"),
        ([ms.rules.Split("qkv.*", ["q.*", "k.*", "norm.*"])], "NAME_CLASH"),
        ([ms.rules.Split("qkv.*", PARTS), ms.rules.Rename("nothing", "else")], "IDLE_PATTERN"),
        ([ms.rules.Rename("qkv.*", "x.*"), ms.rules.Rename("x.*", "qkv.*")], "CYCLIC_RULES"),
        ([ms.rules.Apply("qkv.*", lambda t: 1 / 0)], "BAD_RULE"),
    ],
)
def test_rules_that_do_not_fit_are_problems(rules: list[Any], problem: str) -> None:
    model = Attention()
    before = whole(model)
    state = Fused().state_dict()
    plan = ms.plan(model, state, rules=rules)
    assert problem in [found.kind.name for found in plan.problems]
    with pytest.raises(PlanError) as caught:
        ms.load(model, state, rules=rules)
    assert caught.value.problems == plan.problems
    assert whole(model) == before


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda t: t if t.is_meta else 1 / 0, "ZeroDivisionError"),
        (lambda t: t if t.is_meta else t[:1], "another shape or dtype for the values"),
        (lambda t: t.to_sparse(), "between dense and sparse"),
    ],
)
def test_values_that_cannot_be_computed_leave_the_model_as_it_was(fn: Any, why: str, overlaps: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if overlaps:
        model.register_buffer("part", model[1].weight.detach()[:1])
    before = whole(model)
    source = copy.deepcopy(model).state_dict()
    with pytest.raises(ms.ModelStateError, match=why):
        ms.load(model, source, rules=[ms.rules.Apply("1.weight", fn)])
    assert whole(model) == before


def test_fill_says_so_where_the_owner_has_no_initialiser() -> None:
    model = nn.Module()
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    model.register_parameter("other", nn.Parameter(torch.ones(2)))
    plan = ms.plan(model, {"other": torch.zeros(2)}, rules=[ms.rules.Fill("scale")])
    assert "reset_parameters" in str(plan)
    ms.load(model, {"other": torch.zeros(2)}, rules=[ms.rules.Fill("scale", 3)])
    assert model.scale.tolist() == [3, 3]


def test_fill_goes_by_the_names_of_its_time() -> None:
    """It stands before a rename, as in a chain of migrations, and speaks of the names from before it."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    state = {f"norm.{name}": torch.full((2,), 7.0) for name in ("weight", "bias", "running_mean", "running_var")}
    ms.load(model, state, rules=[ms.rules.Fill("norm.num_batches_tracked", 5), ms.rules.Rename("norm.*", "0.*")])
    assert model[0].num_batches_tracked.item() == 5
    assert model[0].running_mean.tolist() == [7, 7]


def test_extra_state_goes_by_the_rules() -> None:
    class Counter(nn.Module):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    model = nn.ModuleDict({"inner": Counter()})
    ms.load(model, {"old._extra_state": 3}, rules=[ms.rules.Rename("old.*", "inner.*")])
    assert model["inner"].count == 3
    double = ms.rules.Apply("*._extra_state", lambda count: count * 2)
    ms.load(model, {"old._extra_state": 3}, rules=[ms.rules.Rename("old.*", "inner.*"), double])
    assert model["inner"].count == 6


def test_versions_follow_a_module_whose_tensors_were_renamed_one_by_one() -> None:
    source = nn.Sequential(nn.BatchNorm1d(2))
    rules = [ms.rules.Rename(f"0.{name}", f"1.{name}") for name in source[0].state_dict()]
    plan = ms.plan(nn.ModuleDict({"1": nn.BatchNorm1d(2)}), source.state_dict(), rules=rules)
    assert plan.ok
    assert not any("version metadata" in note for note in plan.notes)


def test_a_value_that_cannot_be_decoded_matters_only_to_who_takes_it(tmp_path: Path) -> None:
    class Held:
        pass

    class Keeps(nn.Module):
        def get_extra_state(self) -> Any:
            return Held()

        def set_extra_state(self, state: Any) -> None:
            pass

    ms.register_codec(Held, lambda held: 1, lambda value: Held(), name="test.Held")
    ms.save(nn.ModuleDict({"a": Keeps(), "b": nn.Linear(1, 1)}), tmp_path / "held.safetensors")
    text = (tmp_path / "held.safetensors").read_bytes().replace(b"test.Held", b"test.Gone")
    text = text.replace(b"modelstate_seal", b"modelstate_none")  # as a program that knows nothing of it
    (tmp_path / "held.safetensors").write_bytes(text)
    without = nn.ModuleDict({"b": nn.Linear(1, 1)})
    ms.load(without, tmp_path / "held.safetensors", allow_unexpected=["a.*"])
    ms.load(without, tmp_path / "held.safetensors", rules=[ms.rules.Ignore("a.*")])
    plan = ms.plan(nn.ModuleDict({"a": Keeps(), "b": nn.Linear(1, 1)}), tmp_path / "held.safetensors")
    assert [problem.kind.name for problem in plan.problems] == ["BAD_EXTRA_STATE"]
    assert "test.Gone" in str(plan)


def test_in_place_from_the_model_itself() -> None:
    """What is computed from tensors that the load overwrites is computed before."""
    model = nn.ParameterList([nn.Parameter(torch.full((2,), float(index))) for index in range(4)])
    halves = {f"{index}.{half}": model[index].detach()[half : half + 1] for index in range(4) for half in range(2)}
    swapped = {f"{3 - int(name[0])}{name[1:]}": value for name, value in halves.items()}
    ms.load(model, swapped, rules=[ms.rules.Concat(["*.0", "*.1"], "*")], in_place=True)
    assert [param.tolist() for param in model] == [[3, 3], [2, 2], [1, 1], [0, 0]]


def test_a_fill_where_some_have_it() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1))
    state = {name: value for name, value in model.state_dict().items() if name != "1.num_batches_tracked"}
    state["0.num_batches_tracked"] = torch.tensor(5)
    ms.load(model, state, rules=ms.rules.Fill("*.num_batches_tracked", 0))
    assert [norm.num_batches_tracked.item() for norm in model] == [5, 0]
    alone = nn.BatchNorm1d(1)
    without = {name: value for name, value in alone.state_dict().items() if name != "num_batches_tracked"}
    ms.load(alone, without, rules=ms.rules.Fill("num_batches_tracked", 0))


def test_the_initialiser_of_an_owner_leaves_its_children_alone() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))
            self.child = nn.Linear(4, 4)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)
            self.child.reset_parameters()

    owner = Owner()
    kept = owner.child.weight.detach().clone()
    source = {name: value for name, value in owner.state_dict().items() if name != "scale"}
    ms.load(owner, source, rules=[ms.rules.Fill("scale")])
    assert owner.scale.tolist() == [1, 1, 1]
    assert torch.equal(owner.child.weight, kept)
