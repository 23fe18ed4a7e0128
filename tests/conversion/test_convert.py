"""`convert`: what the tensors of a module are changes, and who they are stays."""

import json
import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import whole
from tests.pains.quantized import quantized_class


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def objects(module: nn.Module) -> list[int]:
    return [id(one) for one in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_values_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, torchs = network(), network().to(dtype)
    before = objects(ours)
    changed = [value for value in ours.state_dict().values() if value.is_floating_point() and value.dtype != dtype]
    assert sum(value.nbytes for value in changed) == ms.convert(ours, dtype).bytes
    assert objects(ours) == before
    for one, other in zip(ours.state_dict().values(), torchs.state_dict().values(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.double(), other.double())


def test_common_memory_of_several_dtypes_is_refused() -> None:
    module = nn.Module()
    module.register_buffer("floats", torch.ones(2))
    module.register_buffer("bits", module.floats.view(torch.int32))
    before = whole(module)
    with pytest.raises(errors.PlacementError, match=r"bits and floats|floats and bits"):
        ms.convert(module, torch.float64)
    assert whole(module) == before
    ms.convert(module, torch.float32)


def test_a_function_is_called_once_for_each_tensor() -> None:
    module, names = network(), []

    def double_weights(name: str, tensor: Tensor) -> Tensor:
        names.append(name)
        return tensor.double() if name.endswith("weight") else ms.conversion.UNCHANGED

    module.again = module[0]
    report = ms.convert(module, transform=double_weights)
    assert sorted(names) == sorted({*dict(module.named_parameters()), *dict(module.named_buffers())})
    assert {step.name for step in report.steps} == {"0.weight", "1.weight", "2.weight"}
    assert module[0].bias.dtype is torch.float32
    assert report.steps[0].ties == ("again.weight",)


@pytest.mark.slow
def test_weights_become_a_subclass_under_their_identity() -> None:
    quantized = quantized_class()
    module = nn.Linear(3, 5)
    weight, optimizer = module.weight, torch.optim.SGD(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    report = ms.convert(
        module,
        transform=lambda name, t: quantized(t.detach().clone(), 0.5) if name == "weight" else ms.conversion.UNCHANGED,
    )
    assert module.weight is weight is optimizer.param_groups[0]["params"][0]
    assert isinstance(weight, quantized)
    assert isinstance(weight, nn.Parameter)
    assert [(step.name, step.way) for step in report.steps] == [("weight", "new")]
    ms.convert(
        module, transform=lambda name, t: t.elem.double() if isinstance(t, quantized) else ms.conversion.UNCHANGED
    )
    assert type(weight) is nn.Parameter
    assert weight is module.weight
    assert weight.dtype is torch.float64
    assert not hasattr(weight, "elem")


@pytest.mark.parametrize("layout", ["nested", "jagged", "sparse gradient"])
def test_layouts(layout: str) -> None:
    module = nn.Module()
    made = {
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "sparse gradient": lambda: torch.ones(3, 2),
    }[layout]()
    module.p, module.b = nn.Parameter(made), nn.Buffer(made.clone())
    if layout == "sparse gradient":
        nn.functional.embedding(torch.tensor([1]), module.p, sparse=True).sum().backward()
    p, b, grad = module.p, module.b, module.p.grad
    ms.convert(module, torch.float64)
    assert module.p is p
    assert module.b is b
    for one in (p, b):
        assert one.dtype is torch.float64
        values = one.unbind() if one.is_nested else [one.detach().to_dense()]
        expected = made.unbind() if made.is_nested else [made.to_dense()]
        assert all(torch.equal(x.detach(), y.double()) for x, y in zip(values, expected, strict=True))
    if grad is not None:
        assert p.grad is grad
        assert (grad.is_sparse, grad.dtype) == (True, torch.float64)


def test_complex_numbers_take_complex_dtypes_only() -> None:
    module = nn.Module()
    module.z, module.f = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(2))
    ms.convert(module, torch.float64)
    assert (module.z.dtype, module.f.dtype) == (torch.complex64, torch.float64)
    ms.convert(module, torch.complex128)
    assert (module.z.dtype, module.f.dtype) == (torch.complex128, torch.complex128)


@pytest.mark.slow
def test_meta_gets_memory_only_when_asked() -> None:
    with torch.device("meta"):
        module = network()
    kept = objects(module)
    with pytest.raises(errors.PlacementError, match="has no values") as caught:
        ms.convert(module, device="cpu")
    assert "empty=True" in caught.value.remedy
    ms.convert(module, torch.bfloat16)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    ms.convert(module, torch.float32, device="cpu", empty=True)
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert objects(module) == kept
    ms.load(module, network().state_dict())
    ms.convert(module, device="meta")
    assert objects(module) == kept


def test_inference_tensors_and_inference_mode() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(2, 2)
    ms.convert(frozen, torch.float64)
    assert frozen.weight.dtype is torch.float64
    trained = nn.Linear(2, 2)
    with torch.inference_mode():
        ms.convert(trained, torch.float64)
    trained(torch.ones(1, 2).double()).sum().backward()
    assert trained.weight.grad is not None


def test_the_report_tells_everything() -> None:
    module = network()
    report = ms.convert(module, torch.bfloat16, device="cpu")
    text = str(report)
    assert "Sequential converted to bfloat16 on device cpu: 8 of 9 tensors changed" in text
    assert "new: 8 tensors" in text
    assert "8 tensors from float32 to bfloat16" in text
    assert "all references kept" in text
    assert {(step.way, step.cast) for step in report.steps} == {("new", "float32 to bfloat16")}
    assert report.references_lost == ()
    assert '"action": "converted to bfloat16 on device cpu"' in report.to_json()


def test_views_from_before_are_noted() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        view = module.weight[0]
    report = ms.convert(module, torch.float64)
    assert any("views of it" in note for note in report.notes)
    assert view.dtype is torch.float32


def test_the_budget_counts_what_is_needed_at_once() -> None:
    module = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(10)))
    with pytest.raises(errors.MemoryBudgetError):
        ms.convert(module, torch.bfloat16, max_memory_bytes=79_999)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert ms.convert(module, torch.bfloat16, max_memory_bytes=80_000).peak_memory_bytes == 80_000
    with pytest.raises(errors.MemoryBudgetError):
        ms.convert(module, torch.float32, max_memory_bytes=879_999)
    assert ms.convert(module, torch.float32, max_memory_bytes=880_000).peak_memory_bytes == 880_000


def test_small_tensors_need_the_memory_of_a_few() -> None:
    module = nn.ParameterList(torch.full((size % 40, 8), float(size)) for size in range(2000))
    before = list(module)
    report = ms.convert(module, torch.bfloat16)
    assert all(now is then for now, then in zip(module, before, strict=True))
    for size, parameter in enumerate(module):
        assert (parameter.dtype, parameter.shape) == (torch.bfloat16, (size % 40, 8))
        assert torch.equal(parameter.detach(), torch.full((size % 40, 8), float(size)).bfloat16())
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert report.peak_memory_bytes < 200_000 < sum(parameter.nbytes for parameter in module)
    assert sorted(step.name for step in report.steps) == sorted(name for name, _ in module.named_parameters())
    assert all(step.shape == (int(step.name) % 40, 8) for step in report.steps)


def test_values_that_overflow_are_counted_by_tensor() -> None:
    """Among small tensors, which are cast together, and in large ones."""
    module = nn.ParameterDict({name: torch.ones(3, 3) for name in ("a", "b", "c")})
    module["large"] = nn.Parameter(torch.ones(1200, 1200))
    module["across"] = nn.Parameter(torch.ones(1200, 1200).T)
    with torch.no_grad():
        module["b"][0, :2] = 1e6
        module["large"][-1, -3:] = -1e6
        module["across"][0, 0] = 1e6
    (note,) = ms.convert(module, torch.float16).notes
    assert "6 in all: across (1), b (2), large (3)" in note
    assert ms.convert(module, torch.float32).notes == ()


def test_a_system_without_memory_changes_nothing() -> None:
    module = nn.Linear(4000, 4000, bias=False)
    before = module.weight.sum().item()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 50_000_000, hard))
    try:
        with pytest.raises(errors.MemoryBudgetError, match="no memory for the new tensors"):
            ms.convert(module, torch.float64)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert (module.weight.dtype, module.weight.sum().item()) == (torch.float32, before)


def test_a_gradient_that_the_new_tensor_cannot_have_is_dropped_and_noted() -> None:
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    weight, bias = module.weight, module.bias
    report = ms.convert(
        module, transform=lambda name, t: t.to(torch.int8) if name == "bias" else t.detach().to_sparse()
    )
    assert module.weight is weight
    assert module.bias is bias
    assert (bias.dtype, bias.requires_grad, bias.grad) == (torch.int8, False, None)
    assert (weight.is_sparse, weight.requires_grad, weight.grad) == (True, True, None)
    for name in ("weight", "bias"):
        assert any(f"{name}: its gradient is dropped" in note for note in report.notes)


def test_within_a_transform_of_torch_func_it_is_refused() -> None:
    """What a tensor stands for there is gone afterwards."""
    module = nn.Linear(3, 3)
    before = whole(module)
    for change in (lambda: ms.convert(module, torch.float64), lambda: ms.swap_tensors(module.bias, torch.ones(3))):
        with pytest.raises(errors.PlacementError, match="transform"):
            torch.func.grad(lambda x, change=change: (change(), x.sum())[1])(torch.randn(2, 3))
    assert whole(module) == before


def test_a_tensor_subclass_that_raises_is_named() -> None:
    class Fixed(torch.Tensor):
        """As the quantized weights of optimum-quanto, whose dtype is fixed."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.to:
                raise ValueError("The dtype of a weights Tensor cannot be changed")
            return super().__torch_function__(func, types, args, kwargs)

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = nn.Parameter(torch.ones(2, 2).as_subclass(Fixed))
    before = whole(module)
    with pytest.raises(
        errors.PlacementError, match=r"1.weight: torch cannot convert this tensor(.|\n)*cannot be changed"
    ):
        ms.convert(module, torch.float64)
    assert whole(module) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform", [lambda _, t: torch.zeros(1).expand(t.shape), lambda *_: torch.zeros(1000)[:4].view(2, 2)]
)
def test_what_a_function_returns_becomes_memory_of_its_own(transform: Any) -> None:
    module = nn.Linear(2, 2, bias=False)
    module.others = nn.ParameterList(nn.Parameter(torch.ones(2, 2)) for _ in range(20))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ms.convert(module, transform=transform)
    assert {one.untyped_storage().nbytes() for one in module.parameters()} == {16}
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.allclose(module.weight, torch.full((2, 2), -0.1))


@pytest.mark.parametrize("recurrent", [False, True], ids=["plain", "own _apply"])
def test_a_device_without_memory(recurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes in the middle of the conversion. A function of meta, which is never cast at the commit."""
    module = nn.Sequential(nn.LSTM(2, 2) if recurrent else nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    before, moved, real = whole(module), [], torch.Tensor.to

    def to(tensor: Tensor, *arguments: Any) -> Tensor:
        moved.append(tensor)
        if len(moved) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has none.")
        return real(tensor, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", to)
        with pytest.raises(errors.MemoryBudgetError, match=r"nothing has been changed\n.*Tried to allocate 16.00 MiB"):
            ms.convert(module, device="meta")
    assert len(moved) == 6
    assert whole(module) == before


# Optimizers that have state, and were not passed.


def trained_with(make: Any, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if model is None else model
    optimizer = make(model.parameters())
    result = model(torch.ones(1, 2))
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("make", "name"), [(torch.optim.AdamW, "AdamW"), (momentum, "SGD")])
def test_the_report_names_an_optimizer_whose_state_did_not_follow(make: Any, name: str) -> None:
    model, optimizer = trained_with(make)
    report = ms.convert(model, torch.float64)
    assert report.left_behind == (f"the state of {name} for 4 of these parameters, which was not passed",)
    assert "left behind: the state of" in str(report)
    assert "optimizers=[...]" in str(report)
    assert "all references kept" not in str(report)
    assert json.loads(report.to_json())["left_behind"] == list(report.left_behind)
    assert all(value.dtype is torch.float32 for state in optimizer.state.values() for value in state.values())


def test_one_of_two_was_passed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.Adam(model[0].parameters())
    second = torch.optim.Adagrad(model[1].parameters())
    model(torch.ones(1, 2)).sum().backward()
    first.step()
    second.step()
    report = ms.convert(model, torch.float64, optimizers=[first])
    assert report.left_behind == ("the state of Adagrad for 2 of these parameters, which was not passed",)
    report = ms.convert(model, torch.float32, optimizers=[first, second])
    assert report.left_behind == ()
    assert "all references kept" in str(report)


def none(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("case", ["no state", "the same dtype", "another model", "passed", "gone"])
def test_nothing_is_left_behind(case: str) -> None:
    model, optimizer = trained_with(none if case == "no state" else torch.optim.Adam)
    target = trained_with(torch.optim.Adam)[0] if case in ("another model", "gone") else model
    report = ms.convert(
        target,
        torch.float32 if case == "the same dtype" else torch.float64,
        optimizers=[optimizer] if case == "passed" else [],
    )
    assert report.left_behind == ()
    assert "all references kept" in str(report)
