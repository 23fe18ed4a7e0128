"""Objects that are saved in a store come back bit for bit."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.io.test_lease import can_lease
from tests.objects.nets import restored_from
from tests.store.training import OPTIMIZERS, SCHEDULERS, Model, Run, Saved, state_of

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


@pytest.mark.slow_except(8)
@every_optimizer
@every_scheduler
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(optimizer: str, scheduler: str) -> None:
    torch.manual_seed(0)
    run = Run(optimizer, scheduler)
    run.train(4)
    saved = Saved(run.objects)
    losses = run.train(5)
    end = state_of(run.objects)
    torch.manual_seed(99)
    fresh = Run(optimizer, scheduler)
    fresh.step = saved.restore(fresh.objects)["step"]
    assert fresh.step == 4
    assert fresh.train(5) == losses
    assert state_of(fresh.objects) == end


def test_a_lazy_module_gets_its_shapes_before_its_optimizer_gets_its_state() -> None:
    run = Run()
    run.train(3)
    objects = {"model": run.model, "head": run.head, "optimizer": run.optimizer}
    saved = Saved(objects)
    with torch.no_grad():
        model = Model()
    head = nn.Linear(4, 4)
    head.weight = model.last.weight
    assert nn.parameter.is_lazy(model.first.weight)
    optimizer = OPTIMIZERS["Adam"]([*model.parameters(), head.bias])
    saved.restore({"model": model, "head": head, "optimizer": optimizer})
    assert state_of({"model": model, "head": head, "optimizer": optimizer}) == state_of(objects)


def test_a_skeleton_takes_weights_and_the_optimizer_its_state() -> None:
    source = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(source.parameters())
    source(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = Saved({"model": source, "optimizer": optimizer})
    with ms.skeleton():
        model = nn.Linear(3, 3)
    fresh = torch.optim.Adam(model.parameters())
    weight = model.weight
    saved.restore({"model": model, "optimizer": fresh})
    assert model.weight is weight
    assert fresh.state[weight]["exp_avg"].device.type == "cpu"
    assert state_of({"m": model, "o": fresh}) == state_of({"m": source, "o": optimizer})


def test_an_optimizer_that_was_not_saved_follows_its_parameters() -> None:
    with ms.skeleton():
        model = nn.Linear(3, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    assert optimizer.state[model.weight]["sum"].is_meta
    saved = Saved({"model": nn.Linear(3, 3)})
    saved.restore({"model": model, "optimizer": optimizer}, allow_missing=["optimizer"])
    assert optimizer.state[model.weight]["sum"].eq(0).all()


def test_a_module_under_two_keys_and_a_part_of_another() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    objects = {"a": model, "b": model, "part": model[0]}
    saved, was = Saved(objects), state_of(objects)
    with torch.no_grad():
        model[0].weight.zero_()
    saved.restore(objects)
    assert state_of(objects) == was


def test_a_loader_of_torchdata_goes_on_where_it_was() -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader")
    generator = torch.Generator().manual_seed(5)
    loader = loading.StatefulDataLoader(range(20), batch_size=3, shuffle=True, generator=generator)
    batches = iter(loader)
    next(batches)
    saved = Saved({"loader": loader})
    rest = [batch.tolist() for batch in batches]
    fresh = loading.StatefulDataLoader(range(20), batch_size=3, shuffle=True, generator=torch.Generator())
    saved.restore({"loader": fresh})
    assert [batch.tolist() for batch in fresh] == rest


class Whole(nn.Module):
    """Code that is written for a model that is loaded alone, so that its names have no prefix."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.new, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.seen: list[tuple[list[str], str, object]] = []
        self.incompatible: list[tuple[list[str], list[str]]] = []
        self._register_state_dict_hook(lambda module, state, prefix, metadata: self.saved(state))
        if by == "hook":
            self._register_load_state_dict_pre_hook(self.rename)
        elif by == "override":
            self._load_from_state_dict = self.load_by_override  # type: ignore[method-assign]
        self.register_load_state_dict_post_hook(
            lambda module, keys: self.incompatible.append(([*keys.missing_keys], [*keys.unexpected_keys]))
        )

    @staticmethod
    def saved(state: Any) -> Any:
        renamed = OrderedDict((name.replace("new.", "old."), value) for name, value in state.items())
        renamed._metadata = state._metadata  # type: ignore[attr-defined]
        return renamed

    def rename(self, state: Any, prefix: str, *_: Any) -> None:
        self.seen.append((sorted(state), prefix, getattr(state, "_metadata", {}).get("norm")))
        for name in ("weight", "bias"):
            state[f"new.{name}"] = state.pop(f"old.{name}")

    def load_by_override(self, state: Any, prefix: str, *rest: Any) -> None:
        self.rename(state, prefix)
        nn.Module._load_from_state_dict(self, state, prefix, *rest)


@pytest.mark.parametrize("by", ["hook", "override"])
@pytest.mark.parametrize("path", ["model", "models.student"])
def test_code_for_a_model_that_is_loaded_alone(tmp_path: Path, by: str, path: str) -> None:
    def objects_of(model: nn.Module) -> dict[str, Any]:
        other = nn.Linear(2, 2)
        return {"model": model, "other": other} if path == "model" else {"models": {"student": model, "other": other}}

    source, alone, target = Whole(by), Whole(by), Whole(by)
    alone.load_state_dict(source.state_dict())
    with ms.Store(tmp_path) as store:
        store.save(1, objects_of(source))
        store.restore(objects_of(target))
    assert torch.equal(target.new.weight, source.new.weight)
    assert target.seen == alone.seen
    assert target.incompatible == alone.incompatible
    del source.norm
    with ms.Store(tmp_path) as store:
        store.save(2, objects_of(source))
        with pytest.raises(errors.PlanError) as caught:
            store.restore(objects_of(target))
    assert {problem.name for problem in caught.value.problems} == {
        f"{path}.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }


def test_plain_values_are_what_holds_no_objects() -> None:
    objects = {"config": {"a.b": 1, 3: [4]}, "list": [1], "tensor": torch.ones(2), "none": None}
    restored = Saved(objects).restore(dict.fromkeys(objects))
    assert torch.equal(restored["tensor"], torch.ones(2))
    assert dict(restored) | {"tensor": objects["tensor"]} == objects


def test_nothing_at_all() -> None:
    assert len(Saved({}).restore({})) == 0
    bare = {"relu": nn.ReLU(), "nested": {"list": nn.ModuleList()}}
    assert Saved(bare).restore(bare).report.coverage == 1


@pytest.mark.parametrize("place", ["file", "store"])
def test_in_place_says_whether_all_values_are_read_first(place: str, tmp_path: Path) -> None:
    if not can_lease(tmp_path):
        pytest.skip("no read leases here")
    model, target = nn.Linear(512, 512), nn.Linear(512, 512)
    restore = restored_from(place, tmp_path, {"model": model})
    for options, why in (
        ({}, "into the existing memory, directly, while a read lease holds the file"),
        ({"in_place": None}, "into the existing memory, directly, while a read lease holds the file"),
        ({"in_place": False}, "into the existing memory, after all reads"),
    ):
        nn.init.zeros_(target.weight)
        assert restore({"model": target}, **options).report.steps[0].why == why
        assert torch.equal(target.weight, model.weight)
    for wrong in (True, "no", 0):
        with pytest.raises(errors.OptionError, match="None or False"):
            restore({"model": target}, in_place=wrong)
