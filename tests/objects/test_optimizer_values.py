"""Values in the state of an optimizer: what is saved comes back in the same containers, dtypes and bits."""

from collections import OrderedDict, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelStateError, OptimizerStateError, PlanError, RuleError
from tests.objects.nets import restored_from

ms.register_codec(deque, lambda queue: [list(queue), queue.maxlen], lambda saved: deque(*saved))


class Nesting(torch.optim.Optimizer):
    """Keeps its state in containers within containers, as Distributed Shampoo does."""

    def __init__(self, params: Any, lr: float = 0.1, keeps: Any = None) -> None:
        super().__init__(params, {"lr": lr})
        self.keeps = keeps or kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(self.keeps(param))
                if "factors" in state:
                    for factor in state["factors"]["blocks"][0].values():
                        factor.add_(torch.eye(len(factor)).to(factor.dtype) * param.grad.float().square().sum())
                        param.sub_(param.grad * group["lr"] / (1 + factor.float().trace()).to(param.dtype))
                param.sub_(param.grad, alpha=group["lr"])


def kept(param: torch.Tensor) -> dict[str, Any]:
    return {
        "factors": {"blocks": [{"L": torch.eye(2), 0: torch.eye(3, dtype=torch.float64)}, ()], "shape": (2, 3)},
        "queue": deque([torch.rand_like(param), None], maxlen=2),
        "ordered": OrderedDict(b=torch.arange(3), a="text"),
        "plain": ["text", b"bytes", {1, 2}, torch.float16, 1j, None, True, float("nan"), {}],
    }


def built(optimizer: Any = Nesting, dtype: torch.dtype = torch.float32, name: str = "fc", **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 2)}).to(dtype)
    return {"model": model, "optimizer": optimizer(model.parameters(), **options)}


def step(of: Any, count: int = 1) -> Any:
    for number in range(count):
        torch.manual_seed(number)
        (layer,) = of["model"].children()
        of["optimizer"].zero_grad()
        layer(torch.randn(4, 3).to(layer.weight.dtype)).float().square().mean().backward()
        of["optimizer"].step()
    return of


def same(first: Any, second: Any) -> bool:
    """Whether two states have the same classes and bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.stride() == second.stride() and torch.equal(first, second)
    if isinstance(first, dict):
        return [*first] == [*second] and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second) or first != first


def same_states(first: Any, second: Any) -> bool:
    return all(map(same, first["optimizer"].state.values(), second["optimizer"].state.values()))


def through_state(path: Path, saved: Any, into: Any, rules: Any = (), **options: Any) -> None:
    into["model"].load_state_dict(saved["model"].state_dict(), strict=not rules)
    ms.load_optimizer_state(
        into["model"],
        into["optimizer"],
        ms.optimizer_state(saved["model"], saved["optimizer"]),
        rules=[ms.rules.Rename("fc.*", "head.*")] if rules else (),
        **options,
    )


WAYS: dict[str, Any] = {
    "store": lambda path, saved, into, **options: restored_from("store", path, saved)(into, **options),
    "file": lambda path, saved, into, **options: restored_from("file", path, saved)(into, **options),
    "state": through_state,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("renamed", [False, True])
def test_nested_state_comes_back(way: str, renamed: bool, tmp_path: Path) -> None:
    saved = step(built(), 3)
    of = built(name="head" if renamed else "fc")
    rules = {"rules": {"model": [ms.rules.Rename("fc.*", "head.*")]}} if renamed else {}
    WAYS[way](tmp_path, saved, of, **rules)
    assert same_states(of, saved)
    (saved_state, _), (state, _) = (one["optimizer"].state.values() for one in (saved, of))
    assert type(state["ordered"]) is OrderedDict
    assert (type(state["queue"]), state["queue"].maxlen) == (deque, 2)
    assert state["factors"]["blocks"][0]["L"].data_ptr() != saved_state["factors"]["blocks"][0]["L"].data_ptr()
    if renamed and way == "state":
        return
    step(saved)
    step(of)
    assert all(map(torch.equal, saved["model"].parameters(), of["model"].parameters()))


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: np.ones(3), "ndarray"),
        (torch.Generator, "Generator"),
        (Holder, "Holder"),
        (lambda: {"deep": [{torch.ones(2)}]}, "deep.0 is set"),
        (lambda: object, "type"),
    ],
)
def test_what_would_not_come_back_is_refused_before_anything_is_written(value: Any, says: str, tmp_path: Path) -> None:
    of = step(built(keeps=lambda param: {"kept": value()}))
    store = ms.Store(tmp_path / "store")
    calls = [
        partial(store.check, of),
        partial(store.save, 1, of),
        partial(ms.save, of, tmp_path / "run.safetensors"),
        partial(ms.optimizer_state, of["model"], of["optimizer"]),
    ]
    for call in calls:
        with pytest.raises(OptimizerStateError, match=rf"fc\.weight: kept.*{says}"):
            call()
    assert not store.steps()
    assert not any(tmp_path.iterdir())


def test_state_that_is_the_memory_of_a_parameter_is_refused(tmp_path: Path) -> None:
    for keeps in (lambda param: {"kept": [param]}, lambda param: {"kept": [param.data]}):
        of = step(built(keeps=keeps))
        with pytest.raises(OptimizerStateError, match=r"kept\.0 shares the memory of a parameter"):
            ms.Store(tmp_path).check(of)


def test_views_of_one_memory_are_refused_where_they_overlap(tmp_path: Path) -> None:
    def overlapping(param: torch.Tensor) -> dict[str, Any]:
        flat = torch.zeros(6)
        return {"flat": flat, "views": [flat[:3], flat[3:]]}

    def apart(param: torch.Tensor) -> dict[str, Any]:
        flat = torch.zeros(6)
        return {"views": [flat[:3], flat[3:]]}

    with pytest.raises(OptimizerStateError, match=r"views\.0 shares memory with fc\.weight\.flat"):
        through_state(tmp_path, step(built(keeps=overlapping)), built())
    WAYS["store"](tmp_path, step(built(keeps=apart)), built())


def test_a_state_that_is_given_to_several_parameters_is_copied_for_each() -> None:
    saved = step(built(torch.optim.Adam))
    state = ms.optimizer_state(saved["model"], saved["optimizer"])
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    optimizer = torch.optim.Adam(model.parameters())
    values = {f"{name}.{kind}": state["state"][f"fc.{kind}"] for name in "ab" for kind in ("weight", "bias")}
    groups = [{**state["param_groups"][0], "params": [*values]}]
    ms.load_optimizer_state(model, optimizer, {"state": values, "param_groups": groups, "class": state["class"]})
    first, second = (optimizer.state[model[name].weight]["step"] for name in "ab")
    assert first is not second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_view", [False, True])
def test_a_tensor_that_parameters_share_stays_one(way: str, is_view: bool, tmp_path: Path) -> None:
    shared = torch.zeros(())
    saved, of = step(built(keeps=lambda param: {"count": shared.view(()) if is_view else shared})), built()
    saved["optimizer"].param_groups[0]["count"] = saved["optimizer"].state["count"] = shared
    WAYS[way](tmp_path, saved, of)
    first, second, of_all = of["optimizer"].state.values()
    assert first["count"] is second["count"] is of_all is of["optimizer"].param_groups[0]["count"]
    assert of_all is not shared


def test_rules_do_not_change_factors_of_a_parameter() -> None:
    """The factors of a square parameter have its shape; those of the bias say that they are no moments."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"fc": nn.Linear(2, 2)})
    optimizer = Nesting(model.parameters(), keeps=lambda param: {"L": [torch.ones(2, 2)], "m": torch.ones_like(param)})
    model["fc"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = ms.optimizer_state(model, optimizer)
    with pytest.raises(RuleError, match="several shapes"):
        ms.load_optimizer_state(model, optimizer, state, rules=[ms.rules.Transpose("fc.weight")])


def test_rules_change_nested_moments() -> None:
    """As those of AggMo, which keeps one for each of its betas."""
    separate = nn.ModuleDict({"q": nn.Linear(3, 2), "k": nn.Linear(3, 2)})
    fused = nn.ModuleDict({"qk": nn.Linear(3, 4)})
    keeps = lambda param: {"moments": {0.9: torch.rand_like(param), 0.99: torch.rand_like(param)}, "step": 1}  # noqa: E731
    first = Nesting(separate.parameters(), keeps=keeps)
    for param in separate.parameters():
        param.grad = torch.ones_like(param)
    first.step()
    second = Nesting(fused.parameters())
    rules = [ms.rules.Concat(["q.*", "k.*"], "qk.*")]
    ms.load_optimizer_state(fused, second, ms.optimizer_state(separate, first), rules=rules)
    for beta in (0.9, 0.99):
        parts = [first.state[separate[name].weight]["moments"][beta] for name in "qk"]
        assert torch.equal(second.state[fused["qk"].weight]["moments"][beta], torch.cat(parts))
    assert second.state[fused["qk"].weight]["step"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_tensors_lie_in_memory_as_before(way: str, tmp_path: Path) -> None:
    """A product with a transposed matrix, as those of an eigenvalue decomposition, rounds otherwise than a copy."""

    def keeps(param: torch.Tensor) -> dict[str, Any]:
        return {"basis": [torch.rand(3, 2).T, torch.rand(2, 3, 4).permute(2, 0, 1)], "square": torch.rand(2, 2).T}

    saved, of = step(built(keeps=keeps)), built(keeps=keeps)
    WAYS[way](tmp_path, saved, of)
    assert same_states(of, saved)
    first, second = of["optimizer"].state[of["model"]["fc"].weight]["basis"]
    assert (first.stride(), second.stride()) == ((1, 2), (1, 12, 4))


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_moments_follow_the_memory_format_of_their_parameter(before: bool, after: bool, tmp_path: Path) -> None:
    """A fused optimizer goes through both in the order of their memory."""

    def trained(channels_last: bool, fused: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        step(of := {"model": model, "optimizer": optimizer})
        return of

    def step(of: dict[str, Any]) -> None:
        of["model"](torch.linspace(-1, 1, 2 * 3 * 49).view(2, 3, 7, 7)).square().sum().backward()
        of["optimizer"].step()

    with ms.Store(tmp_path) as store:
        store.save(1, trained(before, fused=True))
        store.restore(restored := trained(after, fused=True))
    step(restored)
    step(expected := trained(False, fused=False))
    assert torch.allclose(restored["model"].weight, expected["model"].weight, atol=1e-5)


# Dtypes.


def wide(of: Any) -> Any:
    """Momentum in float32 beside weights in bfloat16, as `torch.optim.SGD` takes it."""
    for param in of["model"].parameters():
        of["optimizer"].state[param].setdefault("momentum_buffer", torch.zeros(param.shape))
    return of


@pytest.mark.parametrize("way", [*WAYS, "torch file", "torch's own"])
def test_momentum_in_another_dtype_than_the_weights_resumes_bit_for_bit(way: str, tmp_path: Path) -> None:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    saved, of = step(wide(built(sgd, torch.bfloat16)), 3), built(sgd, torch.bfloat16)
    if way == "torch's own":  # the file has the names, and the dtypes of the parameters in the model
        named = torch.optim.SGD([*saved["model"].named_parameters(prefix="model")], lr=0.05, momentum=0.9)
        named.state.update(saved["optimizer"].state)
        torch.save({"model": saved["model"].state_dict(), "optimizer": named.state_dict()}, tmp_path / "run.pt")
        ms.restore(of, tmp_path / "run.pt")
    elif way == "torch file":
        restored_from("torch file", tmp_path, saved)(of)
    else:
        WAYS[way](tmp_path, saved, of)
    assert same_states(of, saved)
    step(saved, 20)
    step(of, 20)
    assert all(map(torch.equal, saved["model"].parameters(), of["model"].parameters()))


@pytest.mark.parametrize(
    ("way", "before", "after"),
    [("state", torch.float32, torch.bfloat16), *((way, torch.bfloat16, torch.float64) for way in WAYS)],
)
def test_state_in_the_dtype_of_a_parameter_follows_it_and_other_state_keeps_its_own(
    way: str, before: torch.dtype, after: torch.dtype, tmp_path: Path
) -> None:
    def keeps(param: torch.Tensor) -> dict[str, Any]:
        moments = {"exp_avg": torch.ones_like(param), "half": torch.ones_like(param, dtype=torch.float16)}
        moments["mu"] = torch.ones_like(param)  # a name of a number of torch's optimizers
        return {"step": torch.tensor(1.0), "scale": torch.ones((), dtype=before), "nested": [moments]}

    saved, of = step(built(dtype=before, keeps=keeps)), built(dtype=after, keeps=keeps)
    WAYS[way](tmp_path, saved, of)
    for state in of["optimizer"].state.values():
        (moments,) = state["nested"]
        dtypes = moments["exp_avg"].dtype, moments["half"].dtype, state["step"].dtype, state["scale"].dtype
        assert dtypes == (after, torch.float16, torch.float32, before)
        assert moments["mu"].dtype == after


@pytest.mark.parametrize("cls", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_a_state_of_torch_without_dtypes_gets_that_of_the_parameters(cls: Any) -> None:
    """As from torch's own `load_state_dict`."""
    saved, of = built(cls), built(cls, torch.bfloat16)
    saved["optimizer"] = cls(saved["model"].named_parameters())
    step(saved)
    ms.load_optimizer_state(of["model"], of["optimizer"], saved["optimizer"].state_dict())
    key = "exp_avg" if cls is torch.optim.Adam else "momentum_buffer"
    assert {state[key].dtype for state in of["optimizer"].state.values()} == {torch.bfloat16}
    step(of)


def test_state_of_a_parameter_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    of = built()
    of["optimizer"].state[of["model"]["fc"].weight] = [torch.zeros(2)]
    with pytest.raises(OptimizerStateError, match=r"fc\.weight: .*something else than a dict"):
        ms.Store(tmp_path).check(of)


def test_what_the_class_of_the_optimizer_added_comes_back(tmp_path: Path) -> None:
    """As the state that a hook adds, and that of an `amsgrad` which the live optimizer does not have yet."""
    adam = partial(torch.optim.Adam, lr=0.1)
    saved, of = step(built(adam, amsgrad=True)), step(built(adam))
    for param in saved["model"].parameters():
        saved["optimizer"].state[param]["average"] = param.detach().clone()
    WAYS["store"](tmp_path, saved, of)
    assert same_states(of, saved)


# Remedies.


def test_the_remedy_for_options_that_do_not_fit_keeps_the_own_ones(tmp_path: Path) -> None:
    saved = step(built(torch.optim.Adam, lr=0.25))
    of = built(torch.optim.Adam)
    saved["optimizer"].param_groups[0]["unknown"] = 3
    with pytest.raises(PlanError, match="does not have the saved option unknown") as caught:
        WAYS["store"](tmp_path, saved, of)
    assert "keep_options=['optimizer']" in str(caught.value)
    ms.Store(tmp_path).restore(of, keep_options=["optimizer"])
    state = ms.optimizer_state(saved["model"], saved["optimizer"])
    with pytest.raises(ModelStateError, match=r'keep_options=\["\*"\]'):
        ms.load_optimizer_state(of["model"], of["optimizer"], state)
    ms.load_optimizer_state(of["model"], of["optimizer"], state, keep_options=["*"])
