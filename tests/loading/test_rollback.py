"""What is hard to restore, and what is hard to foresee: each of these once left a module half loaded."""

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.transaction import object_snapshot
from tests.loading.fingerprint import holding, whole


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def ones(module: nn.Module) -> dict[str, Any]:
    return {name: torch.ones_like(value) for name, value in module.state_dict().items()}


def failing_late(module: nn.Module, change: Callable[[Any], object] = lambda owner: None) -> None:
    def hook(owner: nn.Module, _: Any) -> None:
        change(owner)
        raise LookupError("too late")

    module.register_load_state_dict_post_hook(hook)


def left_as_it_was(module: nn.Module, load: Callable[[], Any], error: type[BaseException]) -> None:
    before = whole(module)
    with pytest.raises(error):
        load()
    assert whole(module) == before


# What looks as if it could not fail.


def test_a_value_that_overlaps_its_target() -> None:
    flat = torch.arange(10.0)
    module = holding(a=torch.zeros(3), p=flat[:4], z=torch.zeros(3))
    state = {"a": torch.ones(3), "p": flat[2:6], "z": torch.ones(3)}
    left_as_it_was(module, lambda: ms.load_state_dict(module, state), RuntimeError)
    ms.load(module, state)
    assert torch.equal(flat[:4], torch.tensor([2.0, 3, 4, 5]))


def test_a_warning_that_is_an_error() -> None:
    module = holding(a=torch.zeros(2), b=torch.zeros(2), c=torch.zeros(2))
    state = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64), "c": torch.ones(2)}
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left_as_it_was(module, lambda: ms.load_state_dict(module, state), RuntimeError)
    torch.set_warn_always(False)


def test_a_registration_hook_that_raises() -> None:
    def hook(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if name == "bias":
            raise LookupError("not this one")

    module = pair()
    state = ones(module)
    handle = torch.nn.modules.module.register_module_parameter_registration_hook(hook)
    try:
        left_as_it_was(module, lambda: ms.load_state_dict(module, state, assign=True), RuntimeError)
    finally:
        handle.remove()


def test_a_transform_to_integers(tmp_path: Path) -> None:
    module = pair()
    state = {**ones(module), "1.weight": torch.ones(2, 2, dtype=torch.int8)}
    left_as_it_was(module, lambda: ms.load(module, state, transform=lambda name, t: t), errors.PlacementError)


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"in_place": False}, {"background": True}])
def test_elements_that_share_memory(options: dict[str, Any]) -> None:
    module, state = holding(a=torch.zeros(4), p=torch.zeros(1).expand(4)), {"a": torch.ones(4), "p": torch.arange(4.0)}
    plan = ms.plan(module, state)
    left_as_it_was(module, lambda: ms.load(module, state, **options), ms.PlanError)
    with pytest.raises(ms.PlanError, match=r"tensor\.data = tensor\.data\.clone") as caught:
        ms.load(module, state, **options)
    assert plan.problems == tuple(caught.value.problems)
    module.p.data = module.p.data.clone()
    assert ms.plan(module, state).ok
    ms.load(module, state)
    assert torch.equal(module.p, state["p"])


def test_a_model_that_was_built_in_inference_mode() -> None:
    with torch.inference_mode():
        module = pair()
    plan = ms.plan(module, ones(module))
    with pytest.raises(ms.PlanError, match=r"load under torch.inference_mode\(\)") as caught:
        ms.load(module, ones(module))
    assert plan.problems == tuple(caught.value.problems)
    with torch.inference_mode():
        assert ms.plan(module, ones(module)).ok
        ms.load(module, ones(module))
    assert torch.equal(module[0].weight, torch.ones(2, 2))


# What is hard to restore.


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_of_a_file(tmp_path: Path, layout: torch.layout) -> None:
    module = holding(exotic=torch.eye(3).to_sparse(layout=layout))
    torch.save({"exotic": (torch.eye(3) * 2).to_sparse(layout=layout)}, tmp_path / "x.pt")
    ms.load(module, tmp_path / "x.pt")
    assert module.exotic.layout is layout
    assert torch.equal(module.exotic.to_dense(), torch.eye(3) * 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "csr", "mkldnn", "quantized"])
def test_layouts_of_their_own(layout: str) -> None:
    make: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "coo": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "mkldnn": torch.Tensor.to_mkldnn,
        "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.5, 1, torch.qint8),
    }

    def content(buffer: torch.Tensor) -> Any:
        return (buffer.dequantize() if buffer.is_quantized else buffer.to_dense()).tolist()

    module = nn.Sequential(holding(exotic=make[layout](torch.eye(3))), nn.Linear(2, 2))
    state = {**module.state_dict(), "0.exotic": make[layout](torch.eye(3) * 2)}
    buffer, before = module[0].exotic, content(module[0].exotic)
    failing_late(module)
    with pytest.raises(LookupError):
        ms.load_state_dict(module, state)
    assert module[0].exotic is buffer
    assert content(buffer) == before


def test_storages_that_a_hook_has_emptied() -> None:
    module = pair()
    before = module[0].weight.detach().clone()  # a NumPy view would keep the storage from being resized
    failing_late(module, lambda owner: owner[0].weight.untyped_storage().resize_(0))
    with pytest.raises(LookupError):
        ms.load_state_dict(module, {name: torch.ones_like(p) for name, p in module.named_parameters()})
    assert torch.equal(module[0].weight, before)


def test_gradients_and_their_hooks() -> None:
    module = pair()
    module(torch.ones(1, 2)).sum().backward()
    called: list[int] = []

    def change(owner: Any) -> None:
        owner(torch.ones(1, 2)).sum().backward()
        owner[0].weight.register_hook(lambda grad: called.append(1))

    failing_late(module, change)
    left_as_it_was(module, lambda: ms.load_state_dict(module, ones(module)), LookupError)
    module(torch.ones(1, 2)).sum().backward()
    assert not called


def test_slots_with_private_names_and_owners_of_methods() -> None:
    class Slotted:
        __slots__ = ("__value",)

        def __init__(self) -> None:
            self.__value = 1

        def set(self, value: int) -> None:
            self.__value = value

        def get(self) -> int:
            return self.__value

    module: Any = pair()
    module.by_slot, module.by_method = Slotted(), Slotted().set
    failing_late(module, lambda owner: (owner.by_slot.set(2), owner.by_method(2)))
    with pytest.raises(LookupError):
        ms.load_state_dict(module, ones(module))
    assert module.by_slot.get() == module.by_method.__self__.get() == 1


# Modules that are not what they seem.


def test_script_modules_on_meta() -> None:
    """Their C++ object would keep the tensors without values, and the report would call them loaded."""
    with ms.skeleton():
        model = nn.ModuleDict({"plain": nn.Linear(2, 2), "scripted": torch.jit.script(nn.Linear(2, 2))})
    state = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
    with pytest.raises(ms.PlanError) as caught:
        ms.load(model, state)
    assert [(problem.kind.name, problem.name) for problem in caught.value.problems] == [
        ("SCRIPTED_ON_META", "scripted.weight"),
        ("SCRIPTED_ON_META", "scripted.bias"),
    ]
    with ms.skeleton():
        model = nn.ModuleDict({"plain": nn.Linear(2, 2), "scripted": nn.Linear(2, 2)})
    ms.load(model, state)
    assert torch.jit.script(model["scripted"])(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]


def test_a_base_class_that_others_have_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = nn.Module._load_from_state_dict

    def patched(self: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        calls.append(prefix)
        original(self, state, prefix, *rest)

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", patched)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ms.load_state_dict(module, ones(module))
    assert calls == ["", "0.", "1."]
    assert nn.Module._load_from_state_dict is patched
    assert torch.equal(module[0].weight, torch.ones(2, 2))
    left_as_it_was(module, lambda: ms.load_state_dict(module, {**ones(module), "1.bias": torch.ones(7)}), RuntimeError)


# What a rollback meets on its way.


def failing_with(module: nn.Module, hook: Callable[[nn.Module], object]) -> None:
    """Loads into a module whose code runs `hook`, with a name too many."""
    module.register_load_state_dict_post_hook(lambda owner, _: hook(owner) and None)
    state = {name: torch.full_like(value, 3) for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\)"):
        ms.load_state_dict(module, {**state, "zz": torch.ones(1)})


class Holding(nn.Module):
    """A module that holds `held` besides a parameter."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.held = held


class Settings(dict[str, int]):
    """A dict with attributes."""


class Items(list[int]):
    """A list with attributes."""


def with_attribute(value: Any) -> Any:
    value.number = 1
    return value


def test_arrays_that_show_the_memory_of_tensors() -> None:
    module = Holding(torch.arange(3.0).numpy())

    def change(owner: Any) -> None:
        owner.held[:] = 7
        with torch.no_grad():
            owner.weight.fill_(9)

    failing_with(module, change)
    assert module.held.tolist() == [0, 1, 2]
    assert module.weight.tolist() == [0, 0]
    assert ms.plan(module, {"weight": torch.ones(2)}).ok
    assert module.weight.tolist() == [0, 0]


@pytest.mark.parametrize("how", [lambda g: g.resize_(5), lambda g: setattr(g, "data", torch.zeros(5))])
def test_a_gradient_of_another_size(how: Callable[[torch.Tensor], object]) -> None:
    module = Holding()
    module.weight.grad = grad = torch.ones(2)

    def change(owner: Any) -> None:
        owner.weight.grad = None
        how(grad)

    failing_with(module, change)
    assert module.weight.grad is grad
    assert grad.tolist() == [1, 1]


def change_attribute(owner: Any) -> None:
    owner.held.number = 2


def change_element(owner: Any) -> None:
    for one in owner.held:
        with torch.no_grad():
            one.fill_(9)


def change_argument(owner: Any) -> None:
    owner.held.args[0].append(2)


def change_hooks(owner: Any) -> None:
    owner.weight.register_post_accumulate_grad_hook(print)
    owner.weight.register_hook(print)


def change_class(owner: Any) -> None:
    owner.__class__ = type("Other", (Holding,), {})


def change_leaf(owner: Any) -> None:
    owner.held.add_(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(
    ("held", "change", "look"),
    [
        (lambda: with_attribute(Settings(a=1)), change_attribute, lambda m: (dict(m.held), m.held.number)),
        (lambda: with_attribute(Items([1])), change_attribute, lambda m: (list(m.held), m.held.number)),
        (lambda: {torch.ones(2)}, change_element, lambda m: [one.tolist() for one in m.held]),
        (lambda: {torch.ones(2): 1}, change_element, lambda m: [one.tolist() for one in m.held]),
        (lambda: partial(print, [1]), change_argument, lambda m: m.held.args),
        (
            lambda: None,
            change_hooks,
            lambda m: (dict(m.weight._backward_hooks or {}), dict(m.weight._post_accumulate_grad_hooks or {})),
        ),
        (lambda: None, change_class, type),
        (lambda: torch.ones(2), change_leaf, lambda m: (m.held.is_leaf, m.held.tolist())),
        (lambda: np.random.default_rng(1), lambda m: m.held.random(), lambda m: m.held.bit_generator.state),
        (lambda: np.random.PCG64(1), lambda m: m.held.random_raw(), lambda m: m.held.state),
        (
            lambda: np.random.RandomState(1),
            lambda m: m.held.rand(),
            lambda m: m.held.get_state(legacy=False)["state"]["pos"],
        ),
        (torch.Generator, lambda m: torch.rand(1, generator=m.held), lambda m: m.held.get_state().tolist()),
    ],
)
def test_everything_that_can_be_reached(held: Any, change: Any, look: Any) -> None:
    module = Holding(held())
    before = look(module)
    failing_with(module, change)
    assert look(module) == before


class Refusing:
    """An object that cannot say what it holds."""

    @property
    def __dict__(self) -> Any:
        raise OSError


class Pretending:
    """An object that says that it is a dict, and is none."""

    __class__ = dict  # type: ignore[assignment]


@pytest.mark.parametrize("held", [random.SystemRandom, Refusing, Pretending])
def test_objects_that_cannot_be_looked_into(held: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), Holding(held()))
    ms.load_state_dict(module, {name: value + 1 for name, value in module.state_dict().items()})
    assert module[1].weight.tolist() == [1, 1]
    ms.load(module, {name: value + 1 for name, value in module.state_dict().items()})
    assert module[1].weight.tolist() == [2, 2]


class WithVocabulary(nn.Module):
    """Has more objects than a rollback records, before a tensor that its code changes in a load."""

    def __init__(self) -> None:
        super().__init__()
        self.words = [[word] for word in range(1000)]
        self.kept = {"table": torch.ones(2)}
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> Any:
        return {"words": 1000}

    def set_extra_state(self, state: Any) -> None:
        self.kept["table"].requires_grad_()
        raise ValueError("other words")


def test_tensors_come_before_a_vocabulary_that_is_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_snapshot, "_MAX_OBJECTS", 100)
    model = WithVocabulary()
    with pytest.raises(ms.ModelStateError, match="other words"):
        ms.load(model, {"weight": torch.zeros(2), "_extra_state": {"words": 1000}})
    assert not model.kept["table"].requires_grad
    assert model.weight.eq(1).all()
