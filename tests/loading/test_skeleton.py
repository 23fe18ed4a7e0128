"""Models built without memory for their parameters, and with everything that their constructors compute."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import modelstate as ms


class Rotary(nn.Module):
    """Computes a hidden buffer and a mask from its arguments, as real models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inverse = 1.0 / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("mask", torch.ones(width, width).tril())
        self.weight = nn.Parameter(torch.randn(width, width))
        self.other = self.weight
        nn.init.normal_(self.weight)


def test_parameters_have_no_memory_and_buffers_are_what_the_constructor_computes() -> None:
    expected = Rotary(8)
    with ms.skeleton():
        module = Rotary(8)
    assert module.weight.is_meta
    assert module.weight.requires_grad
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.shape == (8, 8)
    assert torch.equal(module.inverse, expected.inverse)
    assert torch.equal(module.mask, expected.mask)


def test_ties_made_in_the_constructor_stay() -> None:
    with ms.skeleton():
        module = Rotary(8)
    assert module.other is module.weight
    ms.load(module, Rotary(8).state_dict())
    assert module.other is module.weight
    assert not module.weight.is_meta


def test_requires_grad_dtype_and_layout_are_kept() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.zeros(2, 3, dtype=torch.int8), requires_grad=False)
            self.images = nn.Parameter(torch.zeros(2, 3, 4, 4, dtype=torch.half).to(memory_format=torch.channels_last))
            self.register_parameter("absent", None)

    with ms.skeleton():
        module = Odd()
    assert (module.frozen.dtype, module.frozen.requires_grad) == (torch.int8, False)
    assert module.images.is_contiguous(memory_format=torch.channels_last)
    assert module.absent is None
    ms.load(module, {"frozen": torch.ones(2, 3, dtype=torch.int8), "images": torch.randn(2, 3, 4, 4).half()})
    assert module.images.is_contiguous(memory_format=torch.channels_last)


def test_what_is_built_outside_is_real() -> None:
    with ms.skeleton(), ms.skeleton():
        inner = nn.Linear(2, 2)
    outside = nn.Linear(2, 2)
    assert inner.weight.is_meta
    assert not outside.weight.is_meta
    assert nn.Module.register_parameter.__name__ == "register_parameter"


def test_an_error_in_a_constructor_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), ms.skeleton():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_build_real_models() -> None:
    built: list[Any] = []
    with ms.skeleton():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        built.append(nn.Linear(2, 2))
    assert [module.weight.is_meta for module in built] == [False, True]


FILLS = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "erfinv_", "clamp_")


@pytest.mark.parametrize("name", FILLS)
def test_initialisation_of_what_is_on_meta_calls_nothing(name: str) -> None:
    names: list[str] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    arguments = {"geometric_": (0.5,), "clamp_": (-1.0, 1.0)}.get(name, ())
    with ms.skeleton():
        module = nn.Linear(3, 3)
        real = torch.full((100,), 0.25)
        with Seen():
            assert getattr(module.weight.data, name)(*arguments).is_meta
            with torch.no_grad():
                assert getattr(module.weight, name)(*arguments) is module.weight
        assert name not in names
        torch.manual_seed(0)
        getattr(real, name)(*arguments)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            getattr(module.weight, name)(*arguments)
    torch.manual_seed(0)
    assert torch.equal(real, getattr(torch.full((100,), 0.25), name)(*arguments))  # a buffer gets its values


def test_lazy_and_parametrized_modules_can_be_built() -> None:
    with ms.skeleton():
        lazy = nn.LazyLinear(3)
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    assert isinstance(lazy.weight, nn.parameter.UninitializedParameter)
    state = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)).state_dict()
    ms.load(normed, state)
    assert normed(torch.ones(1, 2)).shape == (1, 3)


def test_parameters_of_models_that_live_already_are_left_alone() -> None:
    teacher = nn.Linear(3, 3)
    expected = teacher.weight.detach().clone()
    with ms.skeleton():
        student = nn.Linear(3, 3)
        student.weight = teacher.weight
        other = nn.Linear(3, 3)
        ms.load_state_dict(other, teacher.state_dict(keep_vars=True), assign=True)
    assert torch.equal(teacher.weight, expected)
    assert student.weight is teacher.weight
    assert student.bias.is_meta


def test_copies_made_inside_have_no_memory() -> None:
    with ms.skeleton():
        module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert all(p.is_meta for p in module.parameters())
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    ms.load(module, plain.state_dict())
    assert torch.equal(module.layers[1].linear1.weight, plain.layers[1].linear1.weight)


def test_a_load_under_inference_mode_can_be_trained_afterwards(tmp_path: Any) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "x.pt")
    for options in ({}, {"map": False}, {"dtype": torch.float64}, {"transform": lambda name, tensor: tensor * 2}):
        with ms.skeleton():
            module = nn.Linear(3, 3)
        with torch.inference_mode():
            ms.load(module, tmp_path / "x.pt", **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        before = module.weight.detach().clone()
        module(torch.ones(1, 3, dtype=module.weight.dtype)).sum().backward()
        optimizer.step()
        assert torch.allclose(module.weight, before - 0.1)  # the gradient of each weight is 1


class Table(nn.Module):
    """Fills its buffers where its parameter has memory, as models of timm do."""

    def __init__(self, condition: str = "is_meta", size: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(9, 2))
        self.child = nn.Linear(2, 2)
        self.register_buffer("index", torch.empty(size, dtype=torch.long), persistent=False)
        self.register_buffer("mask", None, persistent=False)
        if not (self.bias.is_meta if condition == "is_meta" else self.child.weight.device.type == "meta"):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.bias)
        self.index.copy_(torch.arange(self.index.numel()).view_as(self.index) % 9)
        self.register_buffer("mask", torch.ones(2, device=self.bias.device), persistent=False)


@pytest.mark.parametrize("condition", ["is_meta", "device"])
def test_a_constructor_fills_buffers_where_its_parameters_have_memory(condition: str) -> None:
    right = Table()
    with ms.skeleton():
        model = Table(condition)
    assert model.bias.is_meta
    assert model.bias.device.type == "meta"
    report = ms.load(model, right.state_dict())
    assert not report.notes
    assert {name for name, _ in model.named_buffers()} == {"index", "mask"}
    assert all(torch.equal(getattr(model, name), getattr(right, name)) for name in ("index", "mask"))


def test_code_outside_of_the_new_modules_sees_meta_within_a_skeleton() -> None:
    with ms.skeleton():
        model = Table()
        assert model.bias.is_meta
        assert model.bias.device.type == "meta"
        assert torch.nn.Parameter(torch.empty(1)).device.type == "cpu"


def allocations() -> dict[str, Any]:
    def partly(size: int) -> torch.Tensor:
        values = torch.empty(size)
        values[: size // 2] = 1.0
        return values

    return {
        "int64": lambda: torch.empty(64, 64, dtype=torch.long),
        "float32": lambda: torch.empty(64, 64),
        "bool": lambda: torch.empty(64, dtype=torch.bool),
        "uint8": lambda: torch.empty(64, dtype=torch.uint8),
        "scalar": lambda: torch.empty(()),
        "large": lambda: torch.empty(1000, 1000),
        "empty_like": lambda: torch.empty_like(torch.zeros(8, 8)),
        "new_empty": lambda: torch.zeros(1).new_empty(8, 8),
        "Tensor": lambda: torch.Tensor(8, 8),
        "a view": lambda: torch.empty(4, 4).t()[:2],
        "a copy": lambda: torch.empty(4, 4).clone(),
        "a copy as integers": lambda: torch.empty(64, 64).to(torch.long),
        "channels last": lambda: torch.empty(2, 3, 4, 4, memory_format=torch.channels_last),
        "half of a large one written": lambda: partly(100_000),
    }


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", allocations())
def test_a_buffer_that_is_only_allocated_has_no_values(kind: str, persistent: bool) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("table", allocations()[kind](), persistent=persistent)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)
            self.table.copy_(torch.arange(self.table.numel()).view_as(self.table) % 2)

    right = Module()
    right.reset_parameters()
    with ms.skeleton():
        model = Module()
    assert model.table.is_meta
    values = {"weight": torch.zeros(2)}
    with pytest.raises(ms.PlanError, match="table"):
        ms.load(model, values)
    ms.load(model, values, init_missing=True)
    assert torch.equal(model.table, right.table)
    assert torch.equal(model.weight, values["weight"])


def test_a_buffer_that_is_written_keeps_what_the_constructor_has_written() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bytes", torch.empty(1024, dtype=torch.uint8).copy_(torch.arange(1024) % 256))
            self.register_buffer("shorts", torch.empty(65536, dtype=torch.int16).copy_(torch.arange(65536) - 32768))
            self.register_buffer("positions", torch.empty(100_000, dtype=torch.long))
            self.positions.numpy()[:] = range(100_000)
            self.register_buffer("nothing", torch.empty(0))
            self.register_buffer("limits", torch.full((3,), float("nan")))
            self.register_buffer("later", torch.empty(4))

    expected = Module()
    expected.later.fill_(2)
    with ms.skeleton():
        model = Module()
        model.later.data.fill_(2)
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffer.nan_to_num(7), getattr(model, name).nan_to_num(7)), name


def test_code_that_initialises_other_modules_computes_with_parameters_on_meta() -> None:
    """As models of transformers do in `_init_weights`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.initialise(self.layer)

        @torch.no_grad()
        def initialise(self, module: nn.Linear) -> None:
            steps = torch.arange(2.0, device=module.weight.device)
            module.weight.copy_(module.weight * 0 + steps)

    with ms.skeleton():
        model = Model()
    ms.load(model, Model().state_dict())
    assert torch.equal(model.layer.weight, torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


def test_attributes_without_values_are_noted() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.table, self.tables = torch.empty(3), [torch.empty(3), torch.ones(3)]
            self.cache = {"angles": torch.empty(3)}
            self.scale = self.weight.sum()

    with ms.skeleton():
        model = Module()
    assert [model.table.is_meta, *(table.is_meta for table in model.tables)] == [True, True, False]
    report = ms.load(model, Module().state_dict())
    (note,) = report.notes
    assert note.startswith("4 attributes are tensors on meta")
    assert all(name in note for name in ("table", "tables", "cache", "scale"))
