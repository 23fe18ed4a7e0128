"""`load`: every kind of target, with every reference kept."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import described_module, whole
from tests.loading.loads import FORMS, stored
from tests.programs import run_program


class Tied(nn.Module):
    """Ties, shared and hidden buffers, empty slots, frozen parts, several dtypes."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.body = nn.ModuleList([nn.Linear(width, width), nn.LayerNorm(width)])
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
        self.body.register_buffer("same", self.mask)
        self.register_buffer("position", torch.arange(width), persistent=False)
        self.register_parameter("nothing", None)
        self.register_buffer("count", torch.tensor(3))
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) + self.position
        for layer in self.body:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(hidden * self.mask)
        return result


def other(module: nn.Module) -> "OrderedDict[str, torch.Tensor]":
    """A state dict with other values for the module, ties kept."""
    torch.manual_seed(5)
    new: dict[int, torch.Tensor] = {}
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) not in new:
            random = torch.randn(value.shape)
            new[id(value)] = (random if value.is_floating_point() else value.detach() * 2).to(value.dtype)
        state[name] = new[id(value)]
    return state  # type: ignore[return-value]


@pytest.fixture(params=FORMS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return stored(other(Tied()), tmp_path, request.param)


def made(target: str) -> Tied:
    if target == "skeleton":
        with ms.skeleton():
            return Tied()
    module = Tied()
    if target == "mixed":
        module.body[0].to("meta")
    return module


TARGETS: dict[str, dict[str, Any]] = {
    "materialised": {},
    "in place": {"in_place": True},
    "skeleton": {},
    "skeleton, own memory": {"map": False},
    "mixed": {},
}


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_from_every_format(target: str, source: Any) -> None:
    module = made(target.split(",")[0])
    before = {name: (tensor, type(tensor)) for name, tensor in module.state_dict(keep_vars=True).items()}
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    report = ms.load(module, source, **TARGETS[target])

    expected = other(Tied())
    after = module.state_dict(keep_vars=True)
    assert list(after) == list(expected)
    for name, tensor in after.items():
        assert torch.equal(tensor, expected[name])
        assert tensor is before[name][0]
        assert type(tensor) is before[name][1]
    assert module.head.weight is module.embed.weight
    assert module.body.same is module.mask
    assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
    assert report.coverage == 1.0
    assert len(report.steps) == report.slots == 7
    module(torch.tensor([1, 2])).sum().backward()
    assert module.embed.weight.grad is not None


@pytest.mark.parametrize("target", ["materialised", "skeleton, own memory"])
def test_nothing_shows_the_file(target: str, tmp_path: Path) -> None:
    """Overwriting the file in place does not reach a model that has memory of its own."""
    path = tmp_path / "model.safetensors"
    save_file({name: value.clone() for name, value in other(Tied()).items()}, path)
    module = made(target.split(",")[0])
    ms.load(module, path, **TARGETS[target])
    before = described_module(module)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert described_module(module) == before


def test_a_mapped_model_survives_the_replacement_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: value.clone() for name, value in other(Tied()).items()}, path)
    module = made("skeleton")
    assert any(step.mapped for step in ms.load(module, path).steps)
    before = described_module(module)
    replacement = tmp_path / "new"
    replacement.write_bytes(b"\0" * path.stat().st_size)
    os.replace(replacement, path)
    assert described_module(module) == before


def test_the_state_of_the_module_itself() -> None:
    """Loading what the module has, and what it has crosswise: the values of before the load count."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = described_module(module)
    ms.load(module, module.state_dict())
    assert described_module(module) == before
    state = module.state_dict()
    first, second = state["0.weight"].clone(), state["1.weight"].clone()
    state["0.weight"], state["1.weight"] = state["1.weight"], state["0.weight"]
    ms.load(module, state)
    assert torch.equal(module[0].weight, second)
    assert torch.equal(module[1].weight, first)


def test_a_part_of_a_model_from_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    whole_model = Tied()
    torch.save({"step": 7, "model": other(whole_model)}, tmp_path / "all.pt")
    part = Tied().body
    report = ms.load(part, tmp_path / "all.pt", key="model.body")
    assert torch.equal(part[0].weight, other(Tied())["body.0.weight"])
    assert report.coverage == 1.0


def test_dtype_casts_floats_and_keeps_identity(source: Any) -> None:
    module = made("materialised")
    module(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    optimizer.step()
    objects = [id(p) for p in module.parameters()]
    report = ms.load(module, source, dtype=torch.bfloat16, optimizers=[optimizer])
    assert [id(p) for p in module.parameters()] == objects
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.mask.dtype is torch.bool
    assert torch.equal(module.embed.weight, other(Tied())["embed.weight"].bfloat16())
    moments = optimizer.state[module.embed.weight]
    assert moments["exp_avg"].dtype is torch.bfloat16
    assert moments["step"].dtype is torch.float32
    assert module.embed.weight.grad is not None
    assert module.embed.weight.grad.dtype is torch.bfloat16
    assert {step.cast for step in report.steps} == {"", "float32 to bfloat16"}
    optimizer.step()


def _zero(tensor: torch.Tensor) -> None:
    tensor.data.zero_()


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("position_ids", torch.arange(4), persistent=False)


def test_a_hidden_buffer_is_passed_over_when_equal_filled_on_meta_and_refused_when_different() -> None:
    equal = {"weight": torch.ones(2), "position_ids": torch.arange(4)}
    module = WithPositions()
    report = ms.load(module, equal)
    assert "position_ids" in report.notes[0]

    with torch.device("meta"):
        on_meta = WithPositions()
    ms.load(on_meta, equal)
    assert torch.equal(on_meta.position_ids, torch.arange(4))

    before = whole(module)
    for value in (torch.zeros(4, dtype=torch.int64), torch.tensor([0.9, 1.9, 2.9, 3.9])):
        with pytest.raises(ms.PlanError) as caught:
            ms.load(module, {**equal, "position_ids": value})
        assert caught.value.problems[0].kind.name == "BUFFER_CONFLICT"
        assert whole(module) == before
    ms.load(module, {**equal, "position_ids": torch.zeros(4)}, allow_unexpected=["position_ids"])


def test_extra_state_is_loaded_and_is_a_copy(tmp_path: Path) -> None:
    class Extra(nn.Module):
        p: Any = None

        def get_extra_state(self) -> Any:
            return {"p": torch.arange(3.0), "log": [1, 2]}

        def set_extra_state(self, state: Any) -> None:
            self.p, self.log = state["p"], state["log"]

    model = nn.Sequential(nn.Linear(2, 2), Extra())
    torch.save({"net": model.state_dict()}, tmp_path / "x.pt")
    checkpoint = ms.open(tmp_path / "x.pt")
    first, second = nn.Sequential(nn.Linear(2, 2), Extra()), nn.Sequential(nn.Linear(2, 2), Extra())
    report = ms.load(first, checkpoint)
    ms.load(second, checkpoint)
    first[1].log.append(3)
    first[1].p.zero_()
    assert torch.equal(second[1].p, torch.arange(3.0))
    assert second[1].log == [1, 2]
    assert report.steps[-1].way == "code"
    with pytest.raises(ms.PlanError, match="_extra_state"):
        ms.load(nn.Sequential(nn.Linear(2, 2), Extra()), {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})


def test_hooks_see_new_values_and_may_change_what_is_loaded(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    torch.save({"weight": torch.ones(2, 2), "old": torch.full((2,), 4.0)}, tmp_path / "x.pt")

    def before(owner: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "bias"] = state.pop(prefix + "old").mul_(2)
        state[prefix + "weight"].mul_(3)

    seen = []
    module.register_load_state_dict_pre_hook(before)
    module.register_load_state_dict_post_hook(lambda owner, _: seen.append(owner.weight.sum().item()))
    ms.load(module, tmp_path / "x.pt")
    assert torch.equal(module.weight, torch.full((2, 2), 3.0))
    assert torch.equal(module.bias, torch.full((2,), 8.0))
    assert seen == [12.0]
    assert torch.load(tmp_path / "x.pt")["weight"].sum() == 4


def test_lost_version_metadata_is_noted() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    state = module.state_dict()
    assert ms.plan(module, state).notes == ()
    del state["0.num_batches_tracked"]
    notes = " ".join(ms.plan(module, dict(state)).notes)
    assert "for BatchNorm1d: they load it as the oldest version" in notes
    assert "made by the model's own loading code: 0.num_batches_tracked" in notes


def test_planning_changes_nothing(source: Any) -> None:
    for target in ("materialised", "skeleton"):
        module = made(target)
        module.register_load_state_dict_post_hook(lambda owner, _: _zero(owner.embed.weight))
        module.body.register_load_state_dict_post_hook(lambda owner, _: setattr(owner, "mark", 1))
        before = whole(module)
        plan = ms.plan(module, source)
        assert plan.ok
        assert len(plan.steps) == 7
        assert whole(module) == before


def test_plan_and_report_as_json_and_text(source: Any) -> None:
    module = made("skeleton")
    plan = ms.plan(module, source)
    decoded = json.loads(plan.to_json())
    assert decoded["ok"] is True
    assert [step["name"] for step in decoded["steps"]] == [step.name for step in plan.steps]
    assert decoded["bytes"] == plan.bytes > 0
    report = ms.load(module, source)
    told = json.loads(report.to_json())
    assert [one["name"] for one in told["steps"]] == [step.name for step in plan.steps]
    assert told["coverage"] == report.coverage == 1.0
    assert len(str(plan).splitlines()) < 20
    assert len(str(report).splitlines()) < 20
    assert "7 of 7 slots" in str(report)


def test_a_class_is_no_model() -> None:
    with pytest.raises(errors.OptionError, match=r"an instance: Linear\(\.\.\.\)"):
        ms.load(nn.Linear, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16", "BF16"])
def test_dtypes_by_name(name: str, tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    for model in (nn.Linear(2, 2), nn.Linear(2, 2)):
        ms.load(model, state, dtype=name)
        assert model.weight.dtype is torch.bfloat16
        ms.convert(model, "float32")
        assert model.weight.dtype is torch.float32
    ms.convert_checkpoint(state, tmp_path / "half.safetensors", dtype=name)
    assert ms.open(tmp_path / "half.safetensors")["weight"].dtype is torch.bfloat16
    cast = {"weight": state["weight"]}
    assert ms.rules.Rules([ms.rules.Cast("*", name)]).apply(cast)["weight"].dtype is torch.bfloat16


def test_the_proposed_rule_for_dimensions_of_size_1_works(tmp_path: Path) -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(2, 3, 1, bias=False), "norm": nn.BatchNorm1d(3)})
    state = {f"module.{name}": torch.rand(value.shape) for name, value in model.state_dict().items()}
    state["module.conv.weight"] = state["module.conv.weight"].reshape(3, 2)
    state["module.norm.num_batches_tracked"] = torch.tensor([4])
    with pytest.raises(ms.PlanError) as caught:
        ms.load(model, state)
    assert {problem.kind.name for problem in caught.value.problems} == {"OTHER_DIMENSIONS"}
    ms.load(model, state, rules=[eval(problem.rules[0], {"ms": ms}) for problem in caught.value.problems])
    assert model.norm.num_batches_tracked == 4
    assert torch.equal(model.conv.weight.reshape(3, 2), state["module.conv.weight"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": torch.int8}, "dtype= must be a floating-point dtype"),
        ({"dtype": "int8"}, '"bfloat16" or "bf16"'),
        ({"dtype": "float33"}, '"bfloat16" or "bf16"'),
        ({"device": "nowhere"}, "no such device"),
        ({"device": "cuda:99"}, "no such device"),
        ({"device": 1.5}, "no such device"),
        ({"device": 2**70}, "no such device"),
        ({"device": "meta"}, "meta device"),
        ({"allow_missing": "bias"}, r"\['bias'\]"),
        ({"rules": [ms.rules.Prefix]}, "not a rule"),
        ({"rules": "module."}, "found: 'module.'"),
        ({"rules": {"old": "new"}}, "found: {'old': 'new'}"),
        ({"transform": 3}, "transform= must be a function"),
        ({"allow_missing": 3}, r"allow_missing=\[\"head\.\*\"\]"),
        ({"allow_missing": True}, r"list the names: allow_missing=\["),
        ({"allow_unexpected": False}, "leave it out"),
        ({"allow_unexpected": [3]}, "glob patterns of names"),
        ({"map_location": "cpu"}, r"to do: device=: the device"),
        ({"strict": False}, r"allow_missing=\[.*allow_unexpected=\["),
        ({"assign": True}, "stay the same objects"),
        ({"weights_only": True}, "no code of a pickle"),
        ({"mmap": True}, "map=: whether"),
        ({"key": 3}, "key= must be a path"),
        ({"max_memory_bytes": "1GB"}, "must be a number"),
        ({"max_memory_bytes": -5}, "must be a number"),
        ({"optimizers": [torch.optim.SGD([torch.ones(1)])]}, "of another model"),
        ({"optimizers": [3]}, "not an optimizer"),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], text: str) -> None:
    module = Tied()
    before = whole(module)
    with pytest.raises(errors.OptionError, match=text):
        ms.load(module, other(module), **arguments)
    assert whole(module) == before
    with pytest.raises(errors.OptionError):
        ms.load(other(module), module.state_dict())  # type: ignore[arg-type]
    with pytest.raises(errors.SourceTypeError, match="state_dict"):
        ms.load(module, module)  # type: ignore[arg-type]
    plan = ms.plan(module, other(module))
    with pytest.raises(errors.OptionError, match="its own arguments"):
        ms.load(module, plan, map=False)


def test_other_long_calls_have_a_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ms.save({"w": torch.ones(1000)}, tmp_path / "a.safetensors")
    other = {"w": torch.zeros(1000)}
    calls: dict[str, Callable[[bool | None], object]] = {
        "verifying": lambda progress: ms.verify(tmp_path / "a.safetensors", progress=progress),
        "comparing": lambda progress: ms.diff(tmp_path / "a.safetensors", other, progress=progress),
        "reading": lambda progress: ms.inspect(tmp_path / "a.safetensors").stats(progress=progress),
        "writing": lambda progress: ms.save(other, tmp_path / "b.safetensors", progress=progress),
        "wri": lambda progress: ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "c.pt", progress=progress),
    }
    store = ms.Store(tmp_path / "store")
    model = torch.nn.Linear(4, 4)
    store.save(1, {"model": model})
    calls["step 1"] = lambda progress: store.verify(progress=progress)
    calls["loading"] = lambda progress: store.restore({"model": model}, progress=progress)
    for what, call in calls.items():
        for quiet in (None, False):  # a pipe is quiet
            call(quiet)
            assert capfd.readouterr().err == ""
        call(True)
        assert what in capfd.readouterr().err


@pytest.mark.slow
def test_a_progress_bar_on_a_terminal_after_half_a_second() -> None:
    """A terminal sees a bar for a slow load and none for a quick one; a pipe sees none."""
    code = """
import os, pty, time, torch, modelstate as ms
os.environ.update(TERM="xterm", COLUMNS="80")
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))

def shown(seconds, terminal):
    def slow(name, tensor):
        time.sleep(seconds)
        return tensor

    ours, theirs = pty.openpty() if terminal else os.pipe()
    stderr = os.dup(2)
    os.dup2(theirs, 2)
    os.close(theirs)
    try:
        assert os.isatty(2) == terminal
        ms.load(model, model.state_dict(), transform=slow)
    finally:
        os.dup2(stderr, 2)
    os.set_blocking(ours, False)
    try:
        return os.read(ours, 1 << 16).decode()
    except OSError:
        return ""

assert "loading" in shown(0.1, terminal=True)
assert "loading" not in shown(0, terminal=True)
assert "loading" not in shown(0.1, terminal=False)
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr


class LoadsItsChildren(nn.Module):
    """A module that loads its children by itself, by shorter names."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(2, 2), nn.Linear(2, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in "xy":
            start = f"{prefix}{name}."
            part = {key[len(start) :]: state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
            getattr(self, name).load_state_dict(part)


def test_names_are_the_models_whoever_loads() -> None:
    module, seen = nn.Sequential(nn.Linear(2, 2), LoadsItsChildren()), []
    state = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
    report = ms.load(module, state, transform=lambda name, value: (seen.append(name), value)[1])
    assert sorted(seen) == sorted(step.name for step in report.steps) == sorted(state)
    assert all(bool((value == 1).all()) for value in module.state_dict().values())
    wrong = {**state, "1.x.weight": torch.ones(3, 3)}
    found = ms.plan(module, wrong)
    assert [one.name for one in found.problems] == ["1.x.weight"]


def test_a_tie_that_the_file_has_under_its_second_name(tmp_path: Path) -> None:
    source, model = Tied(), Tied()
    state = {name: value.clone() for name, value in source.state_dict().items() if name != "embed.weight"}
    save_file(state, tmp_path / "m.safetensors")
    report = ms.load(model, tmp_path / "m.safetensors")
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, source.embed.weight)
    ties = {step.name: step.ties for step in report.steps}
    layers = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)])
    layers[2].weight = layers[0].weight  # all values go the same way, and the tied one is not the first of them
    save_file({"1.weight": torch.ones(3, 3), "2.weight": torch.zeros(3, 3)}, tmp_path / "layers.safetensors")
    assert [step.name for step in ms.load(layers, tmp_path / "layers.safetensors").steps] == ["1.weight", "2.weight"]
    assert list(ties) == [name for name in model.state_dict() if name not in ("embed.weight", "body.same")]
    assert (ties["head.weight"], ties["mask"], ties["count"]) == (("embed.weight",), ("body.same",), ())
