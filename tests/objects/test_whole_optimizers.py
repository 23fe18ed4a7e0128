"""Optimizers whose state is not by parameter: saved whole and restored by their own methods, or refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelStateError, ObjectStateError, OptimizerStateError, PlanError
from tests.loading.fingerprint import described
from tests.objects.nets import Failing, restored_from


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and keeps slow weights beside it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = {index: param.detach().clone() for index, param in enumerate(self.params())}

    def params(self) -> list[torch.Tensor]:
        return [param for group in self.inner.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, param in zip(self.slow.values(), self.params(), strict=True):
                slow.lerp_(param.to(slow.dtype), 0.5)
                param.copy_(slow)

    def state_dict(self) -> Any:
        return {"slow": self.slow, "count": self.count, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.slow, self.count = state["slow"], state["count"]
        self.inner.load_state_dict(state["inner"])


class Naive(Lookahead):
    """Inherits the methods of torch, which leave out all that it keeps."""

    state_dict = torch.optim.Optimizer.state_dict
    load_state_dict = torch.optim.Optimizer.load_state_dict


class NaiveInner(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inners = [inner]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inners[0].step()


class Delegating(torch.optim.Optimizer):
    """Has no state of its own, and returns that of another optimizer in the layout of torch."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class Counting(torch.optim.SGD):
    """Keeps a number and a list for all parameters under keys of their own, as MADGRAD does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        state.setdefault("k", torch.zeros((), dtype=torch.long)).add_(1)
        params = [param for group in self.param_groups for param in group["params"]]
        sums = state.setdefault("sums", [torch.zeros_like(param) for param in params])
        with torch.no_grad():
            for total, param in zip(sums, params, strict=True):
                param.sub_(total.add_(param.grad), alpha=0.1 / float(state["k"]))
        super().step()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


BUILDERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lookahead": lambda params: Lookahead(adam(params)),
    "nested": lambda params: Lookahead(Lookahead(adam(params))),
    "delegating": lambda params: Delegating(adam(params)),
    "counting": lambda params: Counting(params, lr=0.1, momentum=0.9),
}


def built(
    builder: Callable[[Any], torch.optim.Optimizer] = BUILDERS["lookahead"],
    name: str = "fc",
    dtype: torch.dtype = torch.float32,
) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 2), "last": nn.Linear(3, 2)}).to(dtype)
    return {"model": model, "optimizer": builder(model.parameters())}


def step(of: Any, count: int = 3) -> Any:
    for number in range(count):
        torch.manual_seed(number)
        for param in of["model"].parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)
        of["optimizer"].step()
    return of


PLACES = ["store", "file"]


def everything(of: Any) -> Any:
    return described([copy.deepcopy(of["optimizer"].state_dict()), of["model"].state_dict()])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_resumes_bit_for_bit(place: str, builder: str, steps: int, tmp_path: Path) -> None:
    saved, of = step(built(BUILDERS[builder]), 3), step(built(BUILDERS[builder]), steps)
    report = restored_from(place, tmp_path, saved)(of).report
    is_whole = builder != "counting"
    assert any("not by name" in note for note in report.notes) == is_whole
    step(saved)
    step(of)
    assert all(map(torch.equal, saved["model"].parameters(), of["model"].parameters()))
    assert everything(saved) == everything(of)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("builder", BUILDERS)
def test_names_are_compared_by_position(place: str, builder: str, tmp_path: Path) -> None:
    restore = restored_from(place, tmp_path, step(built(BUILDERS[builder])))
    renamed = step(built(BUILDERS[builder], name="head"), 1)
    restore(renamed, rules={"model": [ms.rules.Rename("fc.*", "head.*")]})
    of = step(built(BUILDERS[builder]), 1)
    of["optimizer"] = BUILDERS[builder](reversed([*of["model"].parameters()]))
    before = everything(of)
    with pytest.raises((OptimizerStateError, PlanError), match="order") as caught:
        restore(of)
    assert everything(of) == before
    assert "call it 'optimizer_new'" in str(caught.value)
    of["optimizer_new"] = of.pop("optimizer")
    restore(of, allow_missing=["optimizer_new"], allow_unexpected=["optimizer"])


@pytest.mark.parametrize("builder", ["lookahead", "counting"])
def test_rules_that_change_more_than_names_are_refused(builder: str, tmp_path: Path) -> None:
    def square(name: str) -> Any:
        model = nn.ModuleDict({name: nn.Linear(2, 2)})
        return {"model": model, "optimizer": BUILDERS[builder](model.parameters())}

    restore = restored_from("store", tmp_path, step(square("fc")))
    of = step(square("head"), 1)
    before = everything(of)
    rules = [ms.rules.Rename("fc.*", "head.*"), ms.rules.Transpose("head.weight")]
    with pytest.raises((OptimizerStateError, PlanError), match=r"fc\.weight: Transpose.* changes the parameter"):
        restore(of, rules={"model": rules})
    assert everything(of) == before
    restore(of, rules={"model": rules[:1]})


@pytest.mark.parametrize("builder", BUILDERS)
def test_all_or_nothing(builder: str, tmp_path: Path) -> None:
    restore = restored_from("store", tmp_path, {**step(built(BUILDERS[builder])), "z": Failing()})
    of = step(built(BUILDERS[builder]), 2)
    before, optimizer = everything(of), of["optimizer"]
    attributes = {name: id(value) for name, value in vars(optimizer).items()}
    groups = [id(group) for group in optimizer.param_groups]
    with pytest.raises(ObjectStateError, match="z"):
        restore({**of, "z": Failing()})
    assert everything(of) == before
    assert attributes == {name: id(value) for name, value in vars(optimizer).items()}
    assert groups == [id(group) for group in optimizer.param_groups]
    twin = step(built(BUILDERS[builder]), 2)
    step(of)
    step(twin)
    assert all(map(torch.equal, twin["model"].parameters(), of["model"].parameters()))


@pytest.mark.parametrize("place", PLACES)
def test_state_in_another_dtype_than_the_weights_keeps_it(place: str, tmp_path: Path) -> None:
    """The `load_state_dict` of the inner optimizer casts it to the dtype of the parameters."""

    def wide(params: Any) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for param in inner.param_groups[0]["params"]:
            inner.state[param]["momentum_buffer"] = torch.zeros(param.shape)
        return Lookahead(inner)

    saved, of = step(built(wide, dtype=torch.bfloat16)), built(wide, dtype=torch.bfloat16)
    restored_from(place, tmp_path, saved)(of)
    assert everything(saved) == everything(of)
    step(saved, 9)
    step(of, 9)
    assert everything(saved) == everything(of)


@pytest.mark.parametrize("place", PLACES)
def test_options_are_kept(place: str, tmp_path: Path) -> None:
    restore = restored_from(place, tmp_path, step(built()))
    of = built(lambda params: Lookahead(torch.optim.Adam(params, lr=0.5, weight_decay=0.25)))
    restore(of, keep_options=["optimizer.lr"])
    (group,) = of["optimizer"].inner.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0)


@pytest.mark.parametrize("builder", [lambda params: Naive(adam(params)), lambda params: NaiveInner(adam(params))])
def test_state_in_attributes_that_no_state_dict_has_is_refused(builder: Any, tmp_path: Path) -> None:
    of = built(builder)
    for call in (
        lambda: ms.Store(tmp_path).check(of),
        lambda: ms.Store(tmp_path).save(1, of),
        lambda: ms.save(of, tmp_path / "run.safetensors"),
        lambda: ms.optimizer_state(of["model"], of["optimizer"]),
    ):
        with pytest.raises(OptimizerStateError, match=r"attributes that its state_dict leaves out[^~]*inner"):
            call()
    assert not any(tmp_path.iterdir())


def test_tensors_in_attributes_that_are_no_state_are_saved(tmp_path: Path) -> None:
    """As the list of parameters of LBFGS, the quantization maps of bitsandbytes, and the buffers of apex."""

    class WithConstants(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.maps, self.overflow = {"dynamic": torch.rand(256)}, torch.zeros(1, dtype=torch.int)
            self.all_params = list(self.param_groups[0]["params"])

    restored_from("store", tmp_path, step(built(WithConstants)))(built(WithConstants))


def test_a_layout_without_a_method_that_takes_it_is_refused(tmp_path: Path) -> None:
    class OneWay(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "more": 1}

    with pytest.raises(OptimizerStateError, match="no load_state_dict"):
        ms.Store(tmp_path).save(1, built(lambda params: OneWay(params, lr=0.1)))
    assert not any(tmp_path.iterdir())


def test_a_method_that_does_not_take_its_state_is_found_out(tmp_path: Path) -> None:
    class Forgetful(Lookahead):
        def load_state_dict(self, state: Any) -> None:
            self.inner.load_state_dict(state["inner"])

    builder: Any = lambda params: Forgetful(adam(params))  # noqa: E731
    restore = restored_from("store", tmp_path, step(built(builder)))
    of = built(builder)
    before = everything(of)
    with pytest.raises(OptimizerStateError, match=r"another value of (slow|count)"):
        restore(of)
    assert everything(of) == before


def test_a_state_by_name_does_not_go_into_a_layout_of_its_own(tmp_path: Path) -> None:
    restore = restored_from("store", tmp_path, step(built(adam)))
    of = built()
    before = everything(of)
    for options in ({}, {"keep_options": ["optimizer"]}):
        with pytest.raises(ModelStateError, match="layout of its own"):
            restore(of, **options)
    assert everything(of) == before
    with pytest.raises(OptimizerStateError, match="save it whole"):
        ms.optimizer_state(of["model"], of["optimizer"])


def test_a_state_that_is_whole_goes_into_its_class_only(tmp_path: Path) -> None:
    restore = restored_from("file", tmp_path, step(built()))
    of = built(adam)
    with pytest.raises(PlanError, match=r"the state is of .*Lookahead, the optimizer is torch\.optim\.Adam"):
        restore(of)
    value = ms.open(tmp_path / "model.safetensors").value("optimizer")
    with pytest.raises(OptimizerStateError, match=r"ms\.restore"):
        ms.load_optimizer_state(of["model"], of["optimizer"], value)
