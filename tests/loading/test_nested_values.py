"""Values with tensors in them that a module writes into its state dict: a list of tensors, a tuple, a dict."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms


class History(nn.Module):
    """Saves a list of tensors and a tuple, as metrics with list states and quantized layers do."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.values: list[torch.Tensor] = []
        self.scale: tuple[torch.Tensor, float] = (torch.zeros(2), 0.0)
        if value is not None:
            self.values = [torch.full((3,), value), torch.tensor(value)]
            self.scale = (torch.full((2,), value), value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}values"], destination[f"{prefix}scale"] = self.values, self.scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}values" in state_dict:
            self.values = state_dict.pop(f"{prefix}values")
        self.scale = state_dict[f"{prefix}scale"]
        del state_dict[f"{prefix}scale"]
        assert state_dict.get(f"{prefix}scale") is state_dict.pop(f"{prefix}values", None) is None
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_loaded(module: History, value: float) -> bool:
    lists = module.values == [] if value == 0 else [item.tolist() for item in module.values] == [[value] * 3, value]
    kinds = type(module.values) is list and type(module.scale) is tuple
    return kinds and lists and module.scale[0].tolist() == [value] * 2 and module.scale[1] == value


def as_mapping(model: nn.Module, path: Path) -> Any:
    return model.state_dict()


def as_torch_file(model: nn.Module, path: Path) -> Any:
    torch.save(model.state_dict(), path / "model.pt")
    return path / "model.pt"


def as_safetensors(model: nn.Module, path: Path) -> Any:
    ms.save(model, path / "model.safetensors")
    return path / "model.safetensors"


Save = Callable[[nn.Module, Path], Any]


@pytest.mark.parametrize("save", [as_mapping, as_torch_file, as_safetensors])
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"in_place": False}, {"background": True}])
def test_the_code_of_a_module_finds_them_under_their_own_names(
    save: Save, options: dict[str, Any], tmp_path: Path
) -> None:
    trained = nn.Sequential(nn.Sequential(History(3.0)), History(5.0), History())
    source = save(trained, tmp_path)
    model = nn.Sequential(nn.Sequential(History(1.0)), History(), History(7.0))

    report = ms.load(model, source, **options)
    if isinstance(report, ms.loading.LoadHandle):
        report.result()

    assert [is_loaded(*pair) for pair in ((model[0][0], 3.0), (model[1], 5.0), (model[2], 0.0))] == [True] * 3
    assert torch.equal(model[1].layer.weight, trained[1].layer.weight)
    trained[1].values[0].zero_()  # the model has values of its own
    assert is_loaded(model[1], 5.0)


@pytest.mark.parametrize(
    "make_copy", [dict.copy, copy.copy, copy.deepcopy, lambda state: state | {}, lambda state: type(state)(state)]
)
def test_the_code_of_a_module_may_copy_the_state_dict(make_copy: Callable[[Any], Any]) -> None:
    class Copying(History):
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
            own = state_dict.copy() if make_copy is dict.copy else make_copy(state_dict)
            super()._load_from_state_dict(own, prefix, *args)

    model = nn.Sequential(Copying())
    ms.load(model, nn.Sequential(History(3.0)).state_dict())
    assert is_loaded(model[0], 3.0)


def test_in_a_skeleton_in_a_part_of_a_file_and_under_other_names(tmp_path: Path) -> None:
    torch.save(
        {"step": 1, "model": {"module.head": {}, **nn.ModuleDict({"old": History(3.0)}).state_dict()}},
        tmp_path / "a.pt",
    )
    with ms.skeleton():
        model = nn.ModuleDict({"new": History()})
    ms.load(
        model, tmp_path / "a.pt", key="model", rules=[ms.rules.Rename("old.*", "new.*"), ms.rules.Ignore("module.head")]
    )
    assert is_loaded(model["new"], 3.0)

    wrapped = {f"module.{name}": value for name, value in History(5.0).state_dict().items()}
    part = History()
    ms.load(part, wrapped, rules=[ms.rules.Prefix(strip="module.")])
    assert is_loaded(part, 5.0)
    ms.load(part, tmp_path / "a.pt", key="model.old")  # the key is no container: the names in it begin with it
    assert is_loaded(part, 3.0)


def test_in_a_store(tmp_path: Path) -> None:
    objects = {"first": History(3.0), "nested": {"second": nn.Sequential(History(5.0))}}
    with ms.Store(tmp_path / "run") as store:
        store.save(1, objects)
        model, second = History(), nn.Sequential(History())
        store.restore({"first": model, "nested": {"second": second}})
    assert is_loaded(model, 3.0)
    assert is_loaded(second[0], 5.0)


def test_a_value_that_a_rule_has_changed_is_not_given() -> None:
    plan = ms.plan(History(), History(3.0).state_dict(), rules=[ms.rules.Cast("values.0", torch.float16)])
    assert {problem.name for problem in plan.problems} == {"values.0", "values.1"}


def test_a_failed_load_leaves_them_as_they_were() -> None:
    model = History(1.0)
    with pytest.raises(ms.PlanError):
        ms.load(model, {**History(3.0).state_dict(), "layer.bias": torch.zeros(7)})
    assert is_loaded(model, 1.0)
