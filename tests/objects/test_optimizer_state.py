"""The state of an optimizer by names: it finds its parameters wherever they are, or says what does not fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ObjectStateError, OptimizerStateError, OptionError, RuleError
from tests.loading.fingerprint import described
from tests.objects.nets import Failing


class Separate(nn.Module):
    def __init__(self, *order: str) -> None:
        super().__init__()
        for name in order or ("q", "k", "v", "out"):
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("out")(self.q(x) + self.k(x) * self.v(x))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(q + k * v)


FUSE = ms.rules.Rules([ms.rules.Concat(["q.*", "k.*", "v.*"], "qkv.*")])
X = torch.eye(4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train(model, optimizer)
    return optimizer


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_training_goes_on_in_a_model_with_other_pieces(kind: str) -> None:
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    separate, fused = Separate(), Fused()
    first = getattr(torch.optim, kind)(separate.parameters(), lr=0.01, **options)
    second = getattr(torch.optim, kind)(fused.parameters(), lr=0.01, **options)
    train(separate, first)
    ms.load(fused, separate.state_dict(), rules=FUSE)
    ms.load_optimizer_state(fused, second, ms.optimizer_state(separate, first), rules=FUSE)
    train(separate, first)
    train(fused, second)
    for name, value in FUSE.apply(separate.state_dict()).items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    again = Separate()
    back = getattr(torch.optim, kind)(again.parameters(), lr=0.01, **options)
    ms.load(again, fused.state_dict(), rules=FUSE.reverse())
    ms.load_optimizer_state(again, back, ms.optimizer_state(fused, second), rules=FUSE.reverse())
    assert ms.optimizer_state(again, back)["state"].keys() == ms.optimizer_state(separate, first)["state"].keys()


def test_groups_are_found_by_their_parameters() -> None:
    model = Separate()
    groups = [{"params": [*model.q.parameters()], "lr": 0.5}, {"params": [*model.out.parameters()], "lr": 0.25}]
    first = torch.optim.SGD(groups)
    second = torch.optim.SGD([{"params": [*model.out.parameters()]}, {"params": [*model.q.parameters()]}], lr=1.0)
    ms.load_optimizer_state(model, second, ms.optimizer_state(model, first))
    assert [group["lr"] for group in second.param_groups] == [0.25, 0.5]
    together = torch.optim.SGD([*model.q.parameters(), *model.out.parameters()], lr=1.0)
    with pytest.raises(OptimizerStateError, match="groups with other options"):
        ms.load_optimizer_state(model, together, ms.optimizer_state(model, first))


def unlisted(name: str, instead: str = "") -> Any:
    def change(state: dict[str, Any]) -> None:
        (group,) = state["param_groups"]
        group["params"] = [*(one for one in group["params"] if one != name), *([instead] if instead else [])]
        del state["state"][name]

    return change


def changed(name: str, key: str, value: Any, *, has_class: bool = True) -> Any:
    def change(state: dict[str, Any]) -> None:
        state["state"][name][key] = value
        if not has_class:
            del state["class"]

    return change


@pytest.mark.parametrize(
    ("change", "rules", "error", "says"),
    [
        (lambda state: state["state"].pop("q.weight"), (), OptimizerStateError, "q.weight: nothing was saved for it"),
        (unlisted("q.weight"), (), OptimizerStateError, "q.weight: nothing was saved for it"),
        (unlisted("q.weight", "x"), (), OptimizerStateError, "x: the optimizer has no such parameter"),
        (changed("q.weight", "exp_avg", "x"), (), OptimizerStateError, "exp_avg is str"),
        (changed("q.weight", "exp_avg", torch.eye(4).to_sparse()), (), OptimizerStateError, "no values"),
        (changed("q.weight", "exp_avg", torch.ones(4, 4, device="meta")), (), OptimizerStateError, "no values"),
        (changed("q.weight", "exp_avg", torch.ones(4, 4) * 1j), (), OptimizerStateError, "complex"),
        (changed("q.weight", "x", 1, has_class=False), (), OptimizerStateError, "does not keep the saved x"),
        (changed("q.weight", "exp_avg", torch.ones(1, 4)), (), OptimizerStateError, r"shape \[1, 4\]"),
        (lambda state: state["state"]["q.weight"].pop("step"), (), OptimizerStateError, "step is lacking"),
        (changed("q.weight", "exp_avg", 1.0), (), OptimizerStateError, "is float, where the optimizer has Tensor"),
        (changed("q.weight", "exp_avg", torch.ones(4, 4) > 0), (), OptimizerStateError, "is torch.bool"),
        (changed("q.weight", "step", torch.ones(4, 4)), (), OptimizerStateError, r"step has the shape \[4, 4\]"),
        (lambda state: state["state"].update({"q.weight": 5}), (), OptimizerStateError, "not the state of a parameter"),
        (lambda state: state["param_groups"][0].update({3: 3}), (), OptimizerStateError, "the saved option 3"),
        (lambda state: state["param_groups"][0].update(betas=(1, 2, 3)), (), OptimizerStateError, "the option betas"),
        (lambda state: state["param_groups"][0].update(lr="high"), (), OptimizerStateError, "the option lr is 'high'"),
        (lambda state: state["param_groups"][0].update(nesterov=1), (), OptimizerStateError, "the saved option nest"),
        (changed("q.bias", "step", torch.tensor(99.0)), FUSE, RuleError, "step on qkv.bias: it differs between"),
        (lambda state: state["state"].pop("q.weight"), FUSE, RuleError, "nothing like q"),
        (lambda state: None, [ms.rules.Apply("q.weight", torch.neg)], RuleError, "moves=True"),
        (lambda state: None, [ms.rules.Split("q.*", ["a.*", "b.*", "c.*"])], RuleError, "cannot be cut"),
        (lambda state: state.pop("state"), (), OptimizerStateError, "not the state of an optimizer"),
        (lambda state: state.update(param_groups=3), (), OptimizerStateError, "not the state of an optimizer"),
        (lambda state: state["param_groups"][0].pop("params"), (), OptimizerStateError, "not the state"),
    ],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing(change: Any, rules: Any, error: type, says: str) -> None:
    model = Separate()
    optimizer = trained(model)
    state: Any = copy.deepcopy(ms.optimizer_state(model, optimizer))
    change(state)
    target: nn.Module = Fused() if rules is FUSE else model
    fresh = trained(target)
    before = described(fresh.state_dict())
    with pytest.raises(error, match=says):
        ms.load_optimizer_state(target, fresh, state, rules=rules)
    assert described(fresh.state_dict()) == before


def test_positions_without_names_are_refused() -> None:
    model = Separate()
    optimizer = trained(model)
    with pytest.raises(OptimizerStateError, match="positions"):
        ms.load_optimizer_state(model, optimizer, optimizer.state_dict())


def test_parameters_of_another_model() -> None:
    model = Separate()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])
    with pytest.raises(OptimizerStateError, match="1 of 9"):
        ms.optimizer_state(model, optimizer)
    with pytest.raises(OptionError):
        ms.optimizer_state(model, 7)  # type: ignore[arg-type]


def test_new_parameters_without_state_on_request() -> None:
    model = Separate()
    optimizer = trained(model)
    state = ms.optimizer_state(model, optimizer)
    model.add_module("new", nn.Linear(2, 2))
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptimizerStateError, match=r"new\.weight: nothing was saved"):
        ms.load_optimizer_state(model, fresh, state)
    ms.load_optimizer_state(model, fresh, state, allow_missing=["new.*"])
    train(model, fresh)
    with pytest.raises(OptionError, match="not a model"):
        ms.load_optimizer_state(7, fresh, state)  # type: ignore[arg-type]


def test_sums_over_rows_are_moved_by_names_only() -> None:
    model = Separate()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer)
    state = ms.optimizer_state(model, optimizer)
    with pytest.raises(RuleError, match="several shapes"):
        ms.load_optimizer_state(model, optimizer, state, rules=[ms.rules.Transpose("q.weight")])
    ms.load_optimizer_state(model, optimizer, state)
    swap = [ms.rules.Rename("q.*", "x.*"), ms.rules.Rename("k.*", "q.*"), ms.rules.Rename("x.*", "k.*")]
    expected = state["state"]["k.weight"]["row_var"].clone()
    ms.load_optimizer_state(model, optimizer, state, rules=swap)
    assert torch.equal(optimizer.state[model.q.weight]["row_var"], expected)


def test_a_parameter_that_never_had_a_gradient() -> None:
    model = Separate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in (model.q.weight, model.k.weight):
        param.grad = torch.ones_like(param)
    optimizer.step()
    fresh = trained(model)
    ms.load_optimizer_state(model, fresh, ms.optimizer_state(model, optimizer))
    assert described(fresh.state_dict()) == described(optimizer.state_dict())


def lbfgs_after(steps: int, model: nn.Module) -> torch.optim.LBFGS:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


def test_lbfgs_takes_the_state_of_more_and_of_fewer_steps() -> None:
    """LBFGS adds `al` to its state with its second direction."""
    model = Separate()
    one, three = (ms.optimizer_state(model, lbfgs_after(steps, model)) for steps in (1, 3))
    assert "al" in three["state"]["q.weight"]
    assert "al" not in one["state"]["q.weight"]
    for steps, state in ((1, three), (3, one)):
        optimizer = lbfgs_after(steps, model)
        ms.load_optimizer_state(model, optimizer, state)
        assert described(ms.optimizer_state(model, optimizer)) == described(state)


def test_lbfgs_takes_the_same_parameters_in_the_same_order() -> None:
    model = Separate()
    state = ms.optimizer_state(model, lbfgs_after(2, model))
    same = torch.optim.LBFGS(model.parameters(), max_iter=2)
    ms.load_optimizer_state(model, same, state)
    assert torch.equal(same.state[model.q.weight]["d"], state["state"]["q.weight"]["d"])
    other = Separate("out", "q", "k", "v")
    fused = Fused()
    for target, rules in ((other, ()), (fused, FUSE)):
        fresh = lbfgs_after(2, target)
        before = described(fresh.state_dict())
        for allow in ((), ["*"]):
            with pytest.raises((OptimizerStateError, RuleError)):
                ms.load_optimizer_state(target, fresh, state, rules=rules, allow_missing=allow)
        assert described(fresh.state_dict()) == before


class Counting(torch.optim.Optimizer):
    """Keeps the number of steps, and a sum, among the options of a group, as Prodigy and the optimizers of apex do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["sum"] = group.get("sum", torch.zeros(())) + group["step"]
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"] / group["step"])


def test_options_that_the_first_step_adds(tmp_path: Path) -> None:
    model = Separate()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = Counting(model.parameters())
    optimizer.step()
    optimizer.step()
    ms.save({"model": model, "optimizer": optimizer}, tmp_path / "run.safetensors")
    again = Separate()
    fresh = Counting(again.parameters(), lr=0.5)
    ms.restore({"model": again, "optimizer": fresh}, tmp_path / "run.safetensors")
    (group,) = fresh.param_groups
    assert (group["lr"], group["step"], group["sum"].item()) == (0.1, 2, 3.0)

    broken = ms.optimizer_state(model, optimizer)
    broken["state"]["q.weight"]["sum"] = torch.ones(7)
    fresh = Counting(again.parameters())
    with pytest.raises(OptimizerStateError, match="no such parameter"):
        ms.load_optimizer_state(again, fresh, broken | {"state": broken["state"] | {"other": {"sum": 1}}})
    assert "step" not in fresh.param_groups[0]
    del broken["class"]
    with pytest.raises(OptimizerStateError, match="does not have the saved options step, sum"):
        ms.load_optimizer_state(again, fresh, broken)


class Logged(torch.optim.Adam):
    """An optimizer of a user's that computes as the class that it is derived from."""


class Renamed(torch.optim.Optimizer):
    """An optimizer of a user's that torch's classes are no part of."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False})


def without_class(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a file has it that does not name the class."""
    return {key: value for key, value in state.items() if key != "class"}


CHANGES = [
    ("Adam", "AdamW", "decoupled_weight_decay True -> False"),
    ("AdamW", "Adam", "decoupled_weight_decay False -> True"),
    ("RAdam", "Adam", ""),
    ("RAdam", "AdamW", "decoupled_weight_decay True -> False"),
]


@pytest.mark.parametrize(("before", "after", "change"), CHANGES)
def test_a_state_that_would_make_the_optimizer_compute_as_another(before: str, after: str, change: str) -> None:
    model = Separate()
    first = getattr(torch.optim, before)(model.parameters(), lr=0.25)
    train(model, first)
    state = ms.optimizer_state(model, first)
    assert state["class"] == f"torch.optim.{before}"
    second = getattr(torch.optim, after)(model.parameters(), weight_decay=0.125)
    was = described(second.state_dict())
    with pytest.raises(OptimizerStateError) as caught:
        ms.load_optimizer_state(model, second, state)
    assert described(second.state_dict()) == was
    assert f"the state is of torch.optim.{before}" in caught.value.found
    assert change in caught.value.found
    assert 'keep_options=["*"]' in caught.value.remedy
    ms.load_optimizer_state(model, second, state, keep_options=["*"])
    assert described(second.param_groups) == described(
        getattr(torch.optim, after)(model.parameters(), weight_decay=0.125).param_groups
    )
    assert torch.equal(second.state[model.q.weight]["exp_avg"], first.state[model.q.weight]["exp_avg"])


def test_a_file_without_a_class_does_not_make_the_optimizer_compute_as_another() -> None:
    model = Separate()
    state = without_class(ms.optimizer_state(model, torch.optim.Adam(model.parameters())))
    with pytest.raises(OptimizerStateError, match=r"AdamW: the saved .* \(decoupled_weight_decay True -> Fal"):
        ms.load_optimizer_state(model, torch.optim.AdamW(model.parameters()), state)
    ms.load_optimizer_state(model, torch.optim.AdamW(model.parameters()), state, keep_options=["*"])


def test_an_adam_that_decouples_its_weight_decay_is_resumed() -> None:
    model = Separate()
    first = torch.optim.Adam(model.parameters(), decoupled_weight_decay=True)
    train(model, first)
    state = ms.optimizer_state(model, first)
    for second in (torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters(), lr=0.5)):
        ms.load_optimizer_state(model, second, state)
        assert second.param_groups[0]["decoupled_weight_decay"] is True
    second = torch.optim.Adam(model.parameters(), decoupled_weight_decay=True)
    ms.load_optimizer_state(model, second, without_class(state))
    assert described(second.state_dict()) == described(first.state_dict())


@pytest.mark.parametrize("names_class", [True, False])
def test_classes_that_are_derived_from_each_other_share_their_state(names_class: bool) -> None:
    model = Separate()
    for before, after in [(torch.optim.Adam, Logged), (Logged, torch.optim.Adam), (Logged, Logged)]:
        first = before(model.parameters(), lr=0.25)
        train(model, first)
        state = ms.optimizer_state(model, first)
        second = after(model.parameters())
        ms.load_optimizer_state(model, second, state if names_class else without_class(state))
        assert described(second.state_dict()) == described(first.state_dict())


def test_a_class_that_nothing_is_known_of_needs_a_decision() -> None:
    model = Separate()
    first = torch.optim.SparseAdam(model.parameters(), lr=0.25)
    state = ms.optimizer_state(model, first)
    with pytest.raises(OptimizerStateError, match=r"torch.optim.SparseAdam, the optimizer is .*Renamed"):
        ms.load_optimizer_state(model, Renamed(model.parameters()), state)
    second = Renamed(model.parameters())
    ms.load_optimizer_state(model, second, state, keep_options=["*"])
    assert second.param_groups[0]["lr"] == 1e-3
    # The file does not say that it is of another class, and the options are the same.
    ms.load_optimizer_state(model, second, without_class(state))
    assert second.param_groups[0]["lr"] == 0.25


class Wrapper(torch.optim.Optimizer):
    """Shows the groups and the state of another optimizer, as accelerate's class does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


def test_a_wrapper_has_the_class_of_what_it_wraps() -> None:
    model = Separate()
    first = trained(model, lr=0.25)
    state = ms.optimizer_state(model, Wrapper(first))
    assert state["class"] == "torch.optim.AdamW"
    second = torch.optim.AdamW(model.parameters())
    ms.load_optimizer_state(model, Wrapper(second), state)
    assert described(second.state_dict()) == described(first.state_dict())


def test_options_that_the_optimizer_keeps() -> None:
    model = Separate()
    first = trained(model, lr=0.25, weight_decay=0.5)
    state = ms.optimizer_state(model, first)
    second = torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.0)
    ms.load_optimizer_state(model, second, state, keep_options=["lr"])
    assert (second.param_groups[0]["lr"], second.param_groups[0]["weight_decay"]) == (0.125, 0.5)
    assert torch.equal(second.state[model.q.weight]["exp_avg"], first.state[model.q.weight]["exp_avg"])
    with pytest.raises(OptionError, match="keep_options='learning_rate'"):
        ms.load_optimizer_state(model, second, state, keep_options=["learning_rate"])
    with pytest.raises(OptionError, match=r"keep_options=\['lr'\]"):
        ms.load_optimizer_state(model, second, state, keep_options="lr")


def test_a_parameter_that_is_tied_now_had_one_state_before() -> None:
    before = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    optimizer = torch.optim.AdamW(before.parameters(), lr=0.01)
    for number, param in enumerate(before.parameters()):
        param.grad = torch.full_like(param, number)
    optimizer.step()
    state = ms.optimizer_state(before, optimizer)
    tied = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    later = torch.optim.AdamW(tied.parameters())
    with pytest.raises(
        OptimizerStateError, match=r"b\.weight: its state differs from that of another name of a\.weight"
    ):
        ms.load_optimizer_state(tied, later, state)
    assert not later.state
    state["state"]["b.weight"] = {key: value.clone() for key, value in state["state"]["a.weight"].items()}
    ms.load_optimizer_state(tied, later, state)
    assert torch.equal(later.state[tied["a"].weight]["exp_avg"], state["state"]["a.weight"]["exp_avg"])


@pytest.mark.parametrize(("saved", "live"), [(None, True), (True, None), (False, True), (True, False)])
def test_the_saved_choice_of_an_implementation_decides_as_in_torch(saved: Any, live: Any) -> None:
    """A fused optimizer keeps its step counters beside the parameters, in float32, and no other one has to."""
    one, other, torchs = (nn.Linear(3, 3) for _ in range(3))
    first = torch.optim.AdamW(one.parameters(), fused=saved)
    one(torch.ones(2, 3)).sum().backward()
    first.step()
    for values in first.state.values():
        values["step"] = values["step"].double()
    second, of_torch = (torch.optim.AdamW(model.parameters(), fused=live) for model in (other, torchs))
    state = first.state_dict()
    ms.load_optimizer_state(other, second, ms.optimizer_state(one, first))
    of_torch.load_state_dict(copy.deepcopy(state))
    assert second.param_groups[0]["fused"] == of_torch.param_groups[0]["fused"] == saved
    assert described(second.state_dict()) == described(of_torch.state_dict())


@pytest.mark.parametrize("how", ["load_optimizer_state", "restore"])
def test_tensors_on_a_gpu_stay_where_a_graph_has_recorded_them(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor of an optimizer says here that it is on one."""
    model, other = Separate(), Separate()
    optimizer, second = trained(model, lr=torch.tensor(0.5)), trained(other, lr=torch.tensor(0.25))
    state = ms.optimizer_state(model, optimizer)
    ms.save({"model": model, "optimizer": optimizer, "failing": Failing()}, tmp_path / "x.safetensors")

    def tensors() -> list[torch.Tensor]:
        return [second.param_groups[0]["lr"], *(value for values in second.state.values() for value in values.values())]

    before, values = tensors(), described(second.state_dict())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    if how == "restore":
        objects = {"model": other, "optimizer": second}
        with pytest.raises(ObjectStateError):
            ms.restore({**objects, "failing": Failing()}, tmp_path / "x.safetensors")
        assert described(second.state_dict()) == values
        assert [*map(id, tensors())] == [*map(id, before)]
        ms.restore(objects, tmp_path / "x.safetensors", allow_unexpected=["failing"])
    else:
        ms.load_optimizer_state(other, second, state)
    assert [*map(id, tensors())] == [*map(id, before)]
    assert described(second.state_dict()) == described(optimizer.state_dict())


@pytest.mark.parametrize("rates", [(0.5, 0.25), (0.5, 0.5)])
@pytest.mark.parametrize("count", [1, 2], ids=["one optimizer", "two optimizers"])
def test_a_tensor_of_several_groups_on_a_gpu_does_not_get_the_values_of_one(
    count: int, rates: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*rates: torch.Tensor) -> dict[str, Any]:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
        each = [groups] if count == 1 else [[group] for group in groups]
        return {"model": layers, **{f"opt{at}": torch.optim.SGD(some) for at, some in enumerate(each)}}

    def rates_of(objects: dict[str, Any]) -> list[torch.Tensor]:
        return [group["lr"] for at in range(count) for group in objects[f"opt{at}"].param_groups]

    ms.save(made(*map(torch.tensor, rates)), tmp_path / "x.safetensors")
    shared = torch.tensor(1.0)
    objects = made(shared, shared)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    ms.restore(objects, tmp_path / "x.safetensors")
    assert tuple(map(float, rates_of(objects))) == rates
    assert [rate is shared for rate in rates_of(objects)] == [rates[0] == rates[1]] * 2
