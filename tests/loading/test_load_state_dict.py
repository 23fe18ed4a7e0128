"""`load_state_dict` against torch's own: the same in everything, but that an error leaves the module alone."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import modelstate as ms
from tests.loading.fingerprint import described_module, identities, whole


@pytest.fixture(params=[False, True], ids=["copy", "swap"])
def swapping(request: pytest.FixtureRequest) -> Any:
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def attempt(load: Callable[[], Any]) -> tuple[Any, list[str]]:
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = load()
            result = ("returned", tuple(map(tuple, result)))
        except Exception as error:
            result = (type(error), str(error))
    torch.set_warn_always(False)
    return result, [f"{w.category.__name__}: {w.message}" for w in caught]


def kept_objects(before: Any, after: Any) -> dict[str, Any]:
    """Which tensors are still the object, and show the memory, that they were."""
    return {
        name: (now[0] == before[name][0], now[1] == before[name][1])
        for name, now in after.items()
        if isinstance(now, tuple) and isinstance(before.get(name), tuple)
    }


RUNS_WORDS_TOGETHER = any(
    "notexpected" in str(text)
    for constant in nn.Module.load_state_dict.__code__.co_consts
    for text in getattr(constant, "co_consts", ())  # of the functions in it
)
"""Whether this torch words an error otherwise."""


def same_as_torch(make: Callable[[], nn.Module], make_state: Callable[[nn.Module], Any], **options: Any) -> Any:
    """Loads with torch and with us into equal modules; what both say and leave behind is compared."""
    torch.manual_seed(1)
    theirs = make()
    torch.manual_seed(1)
    ours = make()
    torch.manual_seed(2)
    their_state = make_state(theirs)
    torch.manual_seed(2)
    our_state = make_state(ours)
    before, their_ids, our_ids = whole(ours), identities(theirs), identities(ours)
    expected = attempt(lambda: theirs.load_state_dict(their_state, **options))
    found = attempt(lambda: ms.load_state_dict(ours, our_state, **options))
    assert found == expected
    if expected[0][0] == "returned":
        assert described_module(ours) == described_module(theirs)
        assert kept_objects(our_ids, identities(ours)) == kept_objects(their_ids, identities(theirs))
    else:
        assert whole(ours) == before
    return expected[0]


def randomised(module: nn.Module) -> "OrderedDict[str, Any]":
    """A state dict for the module with other values, and its `_metadata`."""
    state = module.state_dict()
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not value.is_meta:
            state[name] = torch.randn(value.shape).to(value.dtype) if value.is_floating_point() else value + 1
    return state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tail = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
        self.register_buffer("table", torch.arange(6.0).view(2, 3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)


class OnlyNames(Net):
    """No module of it has code that a load would run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)  # type: ignore[assignment]
        self.register_module("nothing", None)
        self.again = self.tail


def edited(**changes: Any) -> Callable[[nn.Module], Any]:
    """A state dict with entries changed (a value, or a function of the old one) or deleted (...)."""

    def make(module: nn.Module) -> Any:
        state = randomised(module)
        for name, change in changes.items():
            name = name.replace("__", ".")
            if change is ...:
                del state[name]
            else:
                state[name] = change(state.get(name)) if callable(change) else change
        return state

    return make


CASES: dict[str, Callable[[nn.Module], Any]] = {
    "everything fits": edited(),
    "one is missing": edited(first__weight=...),
    "one is too many": edited(extra=torch.ones(2)),
    "too many below": edited(tail__7__weight=torch.ones(2), tail__0__deep__er=torch.ones(1)),
    "for a None parameter": edited(absent=torch.ones(2)),
    "for a non-persistent buffer": edited(scratch=torch.ones(2)),
    "a wrong shape at the end": edited(tail__2__bias=torch.ones(7)),
    "no tensor": edited(first__bias="text", table=[1.0, 2.0]),
    "several problems": edited(first__weight=..., tail__2__bias=torch.ones(3), norm__what=torch.ones(1), table=None),
    "one element for a scalar": edited(norm__num_batches_tracked=torch.tensor([5])),
    "other dtypes": edited(first__weight=lambda t: t.double(), table=lambda t: t.to(torch.int8)),
    "complex into real": edited(first__weight=lambda t: t.to(torch.complex64)),
    "strided values": edited(first__weight=lambda t: t.t().contiguous().t(), table=lambda t: t[:, :1].expand(2, 3)),
    "values on meta": edited(first__weight=lambda t: t.to("meta")),
    "sparse into dense": edited(first__weight=lambda t: t.to_sparse()),
    "quantized into dense": edited(first__weight=lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
    "float8": edited(first__weight=lambda t: t.to(torch.float8_e4m3fn)),
    "parameters as values": edited(first__weight=nn.Parameter, table=nn.Parameter),
    "integers into parameters": edited(first__weight=lambda t: t.to(torch.int64)),
    "the counter of an old BatchNorm": edited(norm__num_batches_tracked=...),
    "no metadata": lambda module: dict(randomised(module)),
    "old metadata": lambda module: _old_metadata(module),
    "its own tensors": lambda module: module.state_dict(),
    "its own tensors, crossed": lambda module: _crossed(module),
    "a generator of names": lambda module: _Lookup(randomised(module)),
    "not a mapping": lambda module: list(randomised(module).items()),
    "names that are no text": lambda module: {**randomised(module), 3: torch.ones(1)},
}


OF_BATCH_NORM = {
    *("one element for a scalar", "the counter of an old BatchNorm", "old metadata", "its own tensors, crossed")
}


def _old_metadata(module: nn.Module) -> Any:
    state = randomised(module)
    del state["norm.num_batches_tracked"]
    state._metadata["norm"]["version"] = 1
    return state


def _crossed(module: nn.Module) -> Any:
    state = module.state_dict()
    state["norm.weight"], state["norm.bias"] = state["norm.bias"], state["norm.weight"]
    return state


class _Lookup(dict[str, Any]):
    """A mapping that is not quite a dict."""


@pytest.mark.slow_except(60)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("assign", [False, True], ids=["into", "assign"])
@pytest.mark.parametrize("case", CASES)
def test_a_plain_model(case: str, assign: bool, strict: bool, swapping: bool) -> None:
    same_as_torch(Net, CASES[case], strict=strict, assign=assign)


@pytest.mark.slow_except(30)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in OF_BATCH_NORM])
def test_a_model_whose_names_alone_decide(case: str, strict: bool, swapping: bool) -> None:
    same_as_torch(OnlyNames, CASES[case], strict=strict)


def test_names_with_dots_that_torch_does_not_expect() -> None:
    class Dotted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules["a.b"] = nn.Linear(2, 2)
            self.a = nn.ModuleDict({"b": nn.Linear(2, 2)})

    same_as_torch(Dotted, randomised)
    same_as_torch(Dotted, randomised, strict=False)


@pytest.mark.parametrize("assign", [False, True], ids=["into", "assign"])
def test_a_model_on_meta(assign: bool, swapping: bool) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return Net()

    same_as_torch(make, lambda module: randomised(Net()), assign=assign)


def with_hooks(*hooks: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Net()
        for hook in hooks:
            hook(module)
        return module

    return make


def rename_before(module: nn.Module) -> None:
    def hook(state: Any, prefix: str, *_: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "bias"] = state.pop(prefix + "old")

    module.first._register_load_state_dict_pre_hook(hook)


def children_before(module: nn.Module) -> None:
    def hook(owner: nn.Module, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *_: Any) -> None:
        assert owner is module
        assert strict is True
        for key in [key for key in state if key.startswith(prefix + "body.")]:
            state[key.replace("body.", "tail.")] = state.pop(key)

    module.register_load_state_dict_pre_hook(hook)


def derive_after(module: nn.Module) -> None:
    """Reads weights, as stock hooks may: they must be the new ones."""

    def hook(owner: nn.Module, incompatible: Any) -> None:
        owner.total = float(sum(p.detach().sum() for p in owner.parameters()))  # type: ignore[assignment]
        owner.as_array = owner.first.weight.detach().numpy().tobytes()  # type: ignore[union-attr]
        owner.as_list = owner.first.bias.tolist()  # type: ignore[union-attr]

    module.register_load_state_dict_post_hook(hook)


def change_after(module: nn.Module) -> None:
    """Writes to weights and attributes, and forgives a missing key."""

    def hook(owner: nn.Module, incompatible: Any) -> None:
        with torch.no_grad():
            owner.first.weight.mul_(2)  # type: ignore[union-attr]
            owner.tail[2].bias.data[0] = 7  # type: ignore[index, union-attr]
        owner.norm.running_mean.zero_()  # type: ignore[union-attr]
        owner.history = [*getattr(owner, "history", []), "loaded"]
        incompatible.missing_keys[:] = [k for k in incompatible.missing_keys if k != "table"]
        incompatible.unexpected_keys.clear()

    module.register_load_state_dict_post_hook(hook)


def raise_after(module: nn.Module) -> None:
    def hook(owner: nn.Module, incompatible: Any) -> None:
        owner.first.weight.data.fill_(9)  # type: ignore[union-attr]
        owner.tail[2] = nn.Linear(4, 2)  # type: ignore[index]
        owner.first.bias = None  # type: ignore[union-attr]
        raise KeyError("from the hook")

    module.tail.register_load_state_dict_post_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(hook)


def answer_after(module: nn.Module) -> None:
    module.tail.register_load_state_dict_post_hook(lambda *_: "an answer")


HOOKED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "rename before": (with_hooks(rename_before), edited(first__bias=..., first__old=torch.ones(4))),
    "rename for children": (
        with_hooks(children_before),
        lambda module: OrderedDict((k.replace("tail.", "body."), v) for k, v in randomised(module).items()),
    ),
    "derive after": (with_hooks(derive_after), edited()),
    "derive after, then an error": (with_hooks(derive_after), edited(first__weight=torch.ones(9))),
    "change after": (with_hooks(change_after), edited(table=..., more=torch.ones(1))),
    "change after, then an error": (with_hooks(change_after), edited(norm__bias=...)),
    "raise after": (with_hooks(raise_after), edited()),
    "answer after": (with_hooks(answer_after), edited()),
    "all of them": (with_hooks(rename_before, children_before, derive_after, change_after), edited(table=...)),
}


@pytest.mark.parametrize("assign", [False, True], ids=["into", "assign"])
@pytest.mark.parametrize("case", HOOKED)
def test_hooks(case: str, assign: bool, swapping: bool) -> None:
    if case == "answer after" and RUNS_WORDS_TOGETHER:
        pytest.skip("this torch words the error otherwise")
    make, state = HOOKED[case]
    same_as_torch(make, state, assign=assign)


class Override(nn.Module):
    """Loads some of its state by itself, before and after the base class."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("late", torch.zeros(1))
        self.double: Any = None
        self.fails = fails

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        late = state_dict.pop(prefix + "late", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.double = self.scale.detach() * 2
        if late is not None:
            self.register_buffer("late", late.clone())
            missing = rest[2]
            if prefix + "late" in missing:
                missing.remove(prefix + "late")
        if self.fails:
            rest[-1].append("the override is not content")


class Extra(nn.Module):
    """Has extra state of several kinds, and may raise when half of it is set."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.note: Any = "fresh"
        self.history: list[Any] = ["made"]
        self.table: dict[str, Any] = {"a": [1]}
        self.fails = fails

    def get_extra_state(self) -> Any:
        return {"note": "saved", "p": torch.arange(3.0)}

    def set_extra_state(self, state: Any) -> None:
        self.history.append(state["note"])
        self.table["a"].append(2)
        self.note = state["note"]
        self.p = state["p"] + self.weight.detach()
        with torch.no_grad():
            self.weight += 1
        if self.fails:
            raise ValueError("no such state")


def nested(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Sequential(inner)}), nn.Linear(2, 3))


def a_lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))


def a_lazy_state(module: nn.Module) -> Any:
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def spoiled(make_state: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        state = make_state(module)
        last = next(key for key in reversed(state) if isinstance(state[key], torch.Tensor))
        state[last] = torch.ones(11)
        return state

    return make


def old_weight_norm(module: nn.Module) -> Any:
    old: Any = nn.utils.weight_norm
    return randomised(nn.Sequential(old(nn.Linear(3, 4)), nn.Linear(4, 4)))


def quantized() -> nn.Module:
    from torch.ao.nn.quantized import Linear

    return nn.Sequential(Linear(4, 4))


def quantized_state(module: nn.Module) -> Any:
    torch.manual_seed(3)
    made = quantized()
    made[0].set_weight_bias(torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8), torch.randn(4))
    return made.state_dict()


CODED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "an override": (lambda: nested(Override()), randomised),
    "an override that complains": (lambda: nested(Override(fails=True)), randomised),
    "an override, then an error": (lambda: nested(Override()), spoiled(randomised)),
    "extra state": (lambda: nested(Extra()), randomised),
    "extra state, then an error": (lambda: nested(Extra()), spoiled(randomised)),
    "extra state that raises": (lambda: nested(Extra(fails=True)), randomised),
    "extra state is missing": (lambda: nested(Extra()), lambda m: _without_extra(randomised(m))),
    "extra state is unexpected": (
        lambda: nested(nn.Linear(2, 2)),
        lambda m: {**randomised(m), "1.a.0._extra_state": 3},
    ),
    "a lazy model": (a_lazy_model, a_lazy_state),
    "a lazy model, then an error": (a_lazy_model, spoiled(a_lazy_state)),
    "a lazy model from a lazy one": (lambda: nn.LazyLinear(4), lambda module: nn.LazyLinear(4).state_dict()),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 4)), randomised),
    "old weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 4)),
        old_weight_norm,
    ),
    "old weight norm, then an error": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 4)),
        spoiled(old_weight_norm),
    ),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4))), randomised),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))), randomised),
    "a quantized module": (quantized, quantized_state),
    "a recurrent module": (lambda: nn.LSTM(3, 4, 2), randomised),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16), randomised),
    "empty": (nn.Identity, randomised),
}


def _without_extra(state: Any) -> Any:
    return OrderedDict((k, v) for k, v in state.items() if not k.endswith("_extra_state"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("assign", [False, True], ids=["into", "assign"])
@pytest.mark.parametrize("case", CODED)
def test_modules_with_code_of_their_own(case: str, assign: bool, swapping: bool) -> None:
    make, state = CODED[case]
    same_as_torch(make, state, assign=assign)


def test_ties_and_gradients_are_treated_as_torch_does(swapping: bool) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        module(torch.ones(1, 3)).sum().backward()
        return module

    assert same_as_torch(make, randomised)[0] == "returned"
    same_as_torch(make, spoiled(randomised))


def test_a_tensor_that_cannot_be_swapped_is_reported_as_torch_does() -> None:
    import weakref

    torch.__future__.set_swap_module_params_on_conversion(True)
    keep: list[Any] = []

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        keep.append(weakref.ref(module[1].weight))
        keep.append(module[1].bias.view(3, 1))
        return module

    try:
        assert same_as_torch(make, randomised)[0] is RuntimeError
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_an_error_leaves_the_flags_of_assigned_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    given = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="size mismatch"):
        ms.load_state_dict(module, {"0.weight": given, "1.weight": torch.ones(9)}, strict=False, assign=True)
    assert given.requires_grad


@pytest.mark.parametrize("assign", [False, True], ids=["its own tensors", "assign"])
def test_other_objects_are_left_alone_where_no_code_of_the_model_runs(assign: bool) -> None:
    read: list[str] = []

    class Proxy:
        """As one that connects to a service when an attribute of it is read."""

        def __getattribute__(self, name: str) -> Any:
            read.append(name)
            return super().__getattribute__(name)

    module = nn.Linear(2, 2)
    module.service = Proxy()  # type: ignore[assignment]
    state = randomised(module) if assign else module.state_dict()
    read.clear()
    ms.load_state_dict(module, state, assign=assign)
    assert not read


@pytest.mark.parametrize(("module", "says"), [(nn.Linear, "this is a class"), (None, "not a model")])
def test_what_is_no_module(module: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        ms.load_state_dict(module, {})


# The order of writes to one place.


class Tied(nn.Module):
    """A tie, and a buffer that shows a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = self.a
        self.register_buffer("view", self.a.weight.detach()[0])


@pytest.mark.parametrize("order", [("view", "a.weight"), ("a.weight", "view")])
@pytest.mark.parametrize("reads", [False, True])
def test_writes_to_overlapping_memory_keep_their_order(order: tuple[str, str], reads: bool) -> None:
    def load(load_into: Callable[..., Any]) -> list[Any]:
        module: Any = Tied()
        if reads:
            module.register_load_state_dict_post_hook(lambda owner, _: [p.sum() for p in owner.parameters()] and None)
        values = {"view": torch.ones(2), "a.weight": torch.full((2, 2), 2.0)}
        load_into(module, {name: values[name] for name in order}, strict=False)
        found: list[Any] = module.a.weight.tolist()
        return found

    assert load(ms.load_state_dict) == load(nn.Module.load_state_dict)


def test_a_child_that_another_one_puts_in() -> None:
    parent = nn.Module()
    parent.a, parent.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def replace(*_: Any) -> None:
        del parent._modules["b"]
        parent._modules["c"] = nn.Linear(2, 2)

    parent.a.register_load_state_dict_pre_hook(replace)
    state = {
        f"{child}.{name}": torch.ones(shape) for child in "ac" for name, shape in (("weight", (2, 2)), ("bias", 2))
    }
    ms.load_state_dict(parent, state, strict=False)
    assert parent.c.bias.tolist() == [1, 1]
