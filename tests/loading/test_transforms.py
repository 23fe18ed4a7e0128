"""Transforms by pattern: the first pattern that matches counts, and what none is for is loaded as without any."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import identities, whole
from tests.loading.loads import built


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.register_buffer("count", torch.tensor(3))
        if tied:
            self.head.weight = self.embed.weight


def skeleton(tied: bool = False) -> Net:
    with ms.skeleton():
        return Net(tied)


def lazy() -> Net:
    net = Net()
    net.mlp[0] = nn.LazyLinear(8)
    return net


def twice(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    path = tmp_path / "net.safetensors"
    save_file(Net().state_dict(), path)
    return path


def saved(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def plan_problems(model: nn.Module, source: Any, transform: Any) -> tuple[Any, ...]:
    found = ms.plan(model, source, transform=transform).problems
    before = whole(model)
    with pytest.raises(ms.PlanError):
        ms.load(model, source, transform=transform)
    assert whole(model) == before
    return found


def test_the_first_pattern_that_matches_a_name_or_the_path_of_its_module(path: Path) -> None:
    model = Net()
    held = identities(model)
    seen = []

    def halve(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return tensor / 2

    ms.load(model, path, transform={"head": None, "mlp.1": halve, "mlp.*.weight": twice, "*.weight": halve})
    factors = dict.fromkeys(model.state_dict(), 1.0)
    factors |= {"mlp.1.weight": 0.5, "mlp.1.bias": 0.5, "mlp.0.weight": 2, "norm.weight": 0.5, "embed.weight": 0.5}
    for name, value in saved(path).items():
        assert torch.equal(model.state_dict()[name], (value * factors[name]).to(value.dtype)), name
    assert sorted(seen) == ["embed.weight", "mlp.1.bias", "mlp.1.weight", "norm.weight"]
    assert identities(model) == held


def test_a_pattern_that_matches_nothing_and_one_that_comes_too_late(path: Path) -> None:
    found = plan_problems(Net(), path, {"*": twice, "head*": None, "haed*": None})
    assert [(problem.kind.name, problem.name, problem.why) for problem in found] == [
        ("IDLE_PATTERN", "head*", "earlier patterns match all of its names"),
        ("IDLE_PATTERN", "haed*", ""),
    ]


@pytest.mark.parametrize("make", [Net, skeleton])
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"map": False}, {"dtype": torch.bfloat16}])
def test_what_no_transform_is_for_is_planned_as_without_one(make: Any, options: Any, path: Path) -> None:
    model, plain = make(), ms.plan(make(), path, **options)
    alone = ms.plan(model, path, transform={"*": None}, **options)
    assert (alone.steps, alone.notes, alone.peak_memory_bytes) == (plain.steps, plain.notes, plain.peak_memory_bytes)

    some = ms.plan(model, path, transform={"mlp.0.weight": twice}, **options)
    assert [step for step in some.steps if step.name != "mlp.0.weight"] == [
        step for step in plain.steps if step.name != "mlp.0.weight"
    ]
    ms.load(model, some)
    expected = saved(path)["mlp.0.weight"] * 2
    assert torch.equal(model.mlp[0].weight, expected.to(options.get("dtype", torch.float32)))


def test_shapes_and_dtypes_are_checked_where_no_transform_is_called(path: Path) -> None:
    state = saved(path)
    state["head.weight"] = torch.ones(7, 4)
    state["embed.weight"] = torch.ones(6, 4, dtype=torch.int64)
    state["norm.weight"] = torch.ones(2, 2)
    found = plan_problems(Net(), state, {"norm*": lambda name, tensor: tensor.flatten(), "head*": None})
    assert {problem.kind.name for problem in found} == {"WRONG_SHAPE", "WRONG_DTYPE"}
    assert {problem.name for problem in found} == {"head.weight", "embed.weight"}


@pytest.mark.parametrize("name", ["embed.weight", "embed", "head.weight", "head*"])
def test_a_tied_tensor_is_meant_by_each_of_its_names(name: str, path: Path) -> None:
    state = {key: value for key, value in saved(path).items() if key != "head.weight"}
    model = Net(tied=True)
    ms.load(model, state, transform={name: None, "*.weight": twice})
    assert torch.equal(model.head.weight, state["embed.weight"])
    ms.load(model, state, transform={name: twice})
    assert torch.equal(model.embed.weight, state["embed.weight"] * 2)
    assert model.embed.weight is model.head.weight


def test_a_plan_brings_its_transforms(path: Path) -> None:
    model = Net()
    plan = ms.plan(model, path, transform={"embed": twice})
    ms.load(model, plan)
    assert torch.equal(model.embed.weight, saved(path)["embed.weight"] * 2)


def test_names_are_those_of_the_model(path: Path) -> None:
    state = {f"module.{name}": value for name, value in saved(path).items()}
    model = Net()
    ms.load(model, state, rules=[ms.rules.Prefix(strip="module.")], transform={"mlp.?": twice})
    assert torch.equal(model.mlp[1].weight, state["module.mlp.1.weight"] * 2)


def test_no_patterns_at_all(path: Path) -> None:
    assert ms.plan(Net(), path, transform={}) == ms.plan(Net(), path)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"*": 3}, r"'\*'(.|\n)*found: 3"),
        ({"a": None, "mlp.*": "twice"}, r"'mlp\.\*'(.|\n)*found: 'twice'"),
        ({3: twice}, "patterns(.|\n)*found: 3"),
        ([("*", twice)], "mapping from patterns"),
    ],
)
@pytest.mark.parametrize("function", [ms.plan, ms.load])
def test_what_is_no_transform(given: Any, text: str, function: Any, path: Path) -> None:
    model = Net()
    before = whole(model)
    with pytest.raises(errors.OptionError, match=text):
        function(model, path, transform=given)
    assert whole(model) == before


# Transforms of modules.


class Scale(ms.loading.ModuleTransform):
    """Scales what it is for, and takes down what it is given."""

    def __init__(self, factor: float = 2, result: Any = None) -> None:
        self.factor, self.result = factor, result
        self.seen: dict[str, tuple[torch.dtype, type]] = {}

    def __str__(self) -> str:
        return f"Scale({self.factor})"

    def applies_to(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and name.endswith("weight")

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        self.seen[name] = tensor.dtype, type(module)
        result: torch.Tensor = tensor * self.factor if self.result is None else self.result(tensor)
        return result


@pytest.mark.parametrize("make", [Net, skeleton])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_sees_what_would_be_loaded_and_only_what_it_is_for(make: Any, dtype: Any, path: Path) -> None:
    model, scale, plain = make(), Scale(), make()
    ms.load(plain, path, dtype=dtype)
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    report = ms.load(model, path, transform=scale, dtype=dtype)
    linear = ["head.weight", "mlp.0.weight", "mlp.1.weight"]
    assert sorted(scale.seen) == linear
    assert set(scale.seen.values()) == {(dtype or torch.float32, nn.Linear)}
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value * 2 if name in linear else value), name
    assert {name: param.requires_grad for name, param in model.named_parameters()} == flags
    assert report.coverage == 1


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"background": True}, {"dtype": torch.float64}])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: t[:], nn.Parameter, lambda t: torch.from_numpy(t.numpy())])
@pytest.mark.parametrize("make", [Net, skeleton, lazy])
def test_a_function_that_returns_one_buffer_again_and_again(make: Any, wrap: Any, options: Any, path: Path) -> None:
    if make is skeleton and "in_place" in options:
        pytest.skip("in place takes memory that is there")
    buffers: dict[torch.Size, torch.Tensor] = {}

    def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return wrap(torch.mul(tensor, 2, out=buffers.setdefault(tensor.shape, torch.empty_like(tensor))))

    model = make()
    done = ms.load(model, path, transform=doubled, **options)
    if isinstance(done, ms.loading.LoadHandle):
        done.result()
    for name, value in model.state_dict().items():
        expected = saved(path)[name]
        assert torch.equal(value, (expected * 2 if expected.is_floating_point() else expected).to(value.dtype)), name


@pytest.mark.parametrize("view", [lambda t: torch.stack([t] * 9)[1], lambda t: torch.complex(t, -t).conj()])
@pytest.mark.parametrize("make", [Net, skeleton])
def test_a_result_that_is_a_view_gets_memory_of_its_own(make: Any, view: Any, path: Path) -> None:
    model = make()
    ms.load(model, path, transform=lambda name, tensor: view(tensor) if tensor.is_floating_point() else tensor)
    for name, value in model.state_dict().items():
        found = value.is_contiguous(), value.is_conj(), value.untyped_storage().nbytes()
        assert found == (True, False, value.nbytes)
        assert torch.equal(value, view(saved(path)[name]) if name != "count" else saved(path)[name])


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t.view(t.shape), lambda t: t.numpy()])
@pytest.mark.parametrize("returned", [lambda t: t, lambda t: t * 2])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("make", [Net, skeleton])
def test_a_function_that_keeps_what_it_returns_and_writes_to_it(
    make: Any, background: Any, returned: Any, keep: Any, path: Path
) -> None:
    kept = []

    def keeping(name: str, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = returned(tensor)
        kept.append(keep(result))
        return result

    model = make()
    done = ms.load(model, path, transform=keeping, background=background)
    if isinstance(done, ms.loading.LoadHandle):
        while not done.done:
            time.sleep(0.001)
    for one in kept:
        one[...] = 0
    if isinstance(done, ms.loading.LoadHandle):
        done.result()
    for name, value in model.state_dict().items():
        assert torch.equal(value, returned(saved(path)[name])), name


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, torch.float64), (torch.complex64, torch.complex128)], ids=["real", "complex"]
)
def test_a_gradient_follows_its_parameter_to_another_dtype(dtype: torch.dtype, wide: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=dtype))
    model.weight.grad = grad = torch.full((3,), 2, dtype=dtype)
    ms.load(model, {"weight": torch.zeros(3, dtype=dtype)}, transform=lambda _, tensor: tensor.to(wide))
    assert model.weight.grad is grad
    assert (model.weight.dtype, grad.dtype, grad.tolist()) == (wide, wide, [2, 2, 2])


def test_a_parameter_says_whether_it_gets_a_gradient(path: Path) -> None:
    model = Net()
    model.head.weight.grad = torch.ones(6, 4)
    ms.load(model, path, transform={"head": Scale(result=lambda t: nn.Parameter(t + 0, requires_grad=False))})
    assert not model.head.weight.requires_grad
    assert model.head.weight.grad is None
    assert model.mlp[0].weight.requires_grad


@pytest.mark.parametrize("result", [lambda t: None, lambda t: t[0], lambda t: t.to("meta"), lambda t: t.nothing])
@pytest.mark.parametrize("make", [Net, skeleton])
def test_one_that_fails_leaves_the_model_as_it_was(make: Any, result: Any, path: Path) -> None:
    model = make()
    before = whole(model)
    frozen = Scale(result=lambda t: nn.Parameter(t + 0, requires_grad=False))
    with pytest.raises(errors.TransformError, match=r"mlp\.1\.weight"):
        ms.load(model, path, transform={"mlp.1": Scale(result=result), "*": frozen})
    assert whole(model) == before


@pytest.mark.parametrize("how", ["real", "skeleton"])
def test_a_failure_after_it_takes_back_the_flag_and_the_gradient(how: str, path: Path) -> None:
    class Raising(nn.Module):
        def set_extra_state(self, state: Any) -> None:
            raise LookupError("too late")

        def get_extra_state(self) -> Any:
            return 1

    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tail = Raising()

    model = built(Late, how)
    grad = torch.ones_like(model.head.weight.detach())
    model.head.weight.grad = grad
    seen = []
    # A hook that looks at the tensor makes the write happen before the failure.
    model.head.register_load_state_dict_post_hook(
        lambda module, keys: seen.append((module.weight.sum(), module.weight.requires_grad)[1])
    )
    before = whole(model)
    frozen = Scale(result=lambda t: nn.Parameter(t + 0, requires_grad=False))
    with pytest.raises(errors.ModelCodeError, match="too late"):
        ms.load(model, {**saved(path), "tail._extra_state": 1}, transform={"head": frozen})
    assert whole(model) == before
    assert seen == [False]
    assert model.head.weight.requires_grad
    assert model.head.weight.grad is grad


def test_one_of_a_tensor_that_the_model_creates_during_the_load(path: Path) -> None:
    model = nn.Linear(2, 2)
    ms.register_lazy_buffer(model, "grown")
    state = {**nn.Linear(2, 2).state_dict(), "grown": torch.ones(2)}
    ms.load(model, state, transform={"grown": lambda name, value: value * 2})
    assert model.grown.tolist() == [2, 2]


def test_one_that_is_for_nothing(path: Path) -> None:
    (problem,) = plan_problems(Net(), path, {"norm*": Scale(), "*": None})
    assert (problem.name, problem.why) == ("norm*", "Scale(2) applies to none of the names that match")
    (problem,) = plan_problems(nn.LayerNorm(2), {"weight": torch.ones(2), "bias": torch.ones(2)}, Scale())
    assert (problem.name, problem.why) == ("Scale(2)", "Scale(2) applies to none of the model's tensors")


def test_one_that_is_for_some_places_of_a_tied_tensor(path: Path) -> None:
    state = {key: value for key, value in saved(path).items() if key != "head.weight"}
    (problem,) = plan_problems(Net(tied=True), state, Scale())
    assert (problem.kind.name, problem.name, problem.others) == ("UNEVEN_TRANSFORM", "head.weight", ("embed.weight",))
    ms.load(Net(tied=True), state, transform={"head": None, "*": Scale()})


def test_one_that_cannot_say_what_it_is_for(path: Path) -> None:
    class Broken(Scale):
        def applies_to(self, name: str, module: nn.Module) -> bool:
            raise LookupError("no idea")

    model = Net()
    before = whole(model)
    with pytest.raises(errors.TransformError, match="no idea"):
        ms.plan(model, path, transform=Broken())
    assert whole(model) == before


@pytest.mark.parametrize("name", ["head.weight", "mlp.0.weight"])
def test_an_optimizer_of_what_it_remakes_is_refused(name: str, path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    before = whole(model)
    with pytest.raises(errors.OptionError, match=name):
        ms.load(model, path, transform={name: Scale()}, optimizers=[optimizer])
    assert whole(model) == before
    others = torch.optim.Adam([model.norm.weight])
    ms.load(model, path, transform={name: Scale()}, optimizers=[others], dtype=torch.bfloat16)


@pytest.mark.parametrize("extra", [-1, 2.5, "x", None, ValueError("no")])
def test_nonsense_about_memory(extra: Any, path: Path) -> None:
    class Wrong(Scale):
        def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
            if isinstance(extra, Exception):
                raise extra
            return extra

    with pytest.raises(errors.TransformError, match=r"extra_bytes\(\)"):
        ms.plan(Net(), path, transform=Wrong())
