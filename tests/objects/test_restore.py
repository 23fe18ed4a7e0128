"""`capture` and `restore_objects`: everything comes back bit for bit, or everything is as it was."""

import ast
import copy
import re
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelstate as ms
from modelstate import errors, problems
from modelstate.errors import OptimizerStateError, OptionError, PlanError
from modelstate.objects.objects import Part, capture
from modelstate.objects.restore import restore_objects
from tests.loading.fingerprint import interrupted_at
from tests.store.training import OPTIMIZERS, SCHEDULERS, Model, Positions, Random, Run, everything, kept, state_of

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


@every_optimizer
@every_scheduler
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(optimizer: str, scheduler: str) -> None:
    torch.manual_seed(0)
    run = Run(optimizer, scheduler)
    run.train(4)
    saved = kept(run.objects)
    losses = run.train(5)
    end = state_of(run.objects)
    torch.manual_seed(99)
    fresh = Run(optimizer, scheduler)
    fresh.step = restore_objects(fresh.objects, saved)["step"]
    assert fresh.step == 4
    assert fresh.train(5) == losses
    assert state_of(fresh.objects) == end


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(SCHEDULERS)),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_what_was_captured_comes_back(optimizer: str, scheduler: str, before: int, after: int, elsewhere: bool) -> None:
    run = Run(optimizer, scheduler)
    run.train(before)
    saved, was = kept(run.objects), state_of(run.objects)
    run.train(after)
    target = Run(optimizer, scheduler) if elsewhere else run
    restored = restore_objects(target.objects, saved)
    assert state_of(target.objects) == was
    assert dict(restored) == {"step": before, "averaged.decay": 0.5}
    assert target.head.weight is target.model.last.weight
    # What was given is not changed, and nobody has kept it.
    target.train(1)
    restore_objects(target.objects, saved)
    assert state_of(target.objects) == was


def test_a_lazy_module_gets_its_shapes_before_its_optimizer_gets_its_state() -> None:
    run = Run()
    run.train(3)
    objects = {"model": run.model, "head": run.head, "optimizer": run.optimizer}
    saved = kept(objects)
    with torch.no_grad():
        model = Model()
    head = nn.Linear(4, 4)
    head.weight = model.last.weight
    assert nn.parameter.is_lazy(model.first.weight)
    optimizer = OPTIMIZERS["Adam"]([*model.parameters(), head.bias])
    restore_objects({"model": model, "head": head, "optimizer": optimizer}, saved)
    assert state_of({"model": model, "head": head, "optimizer": optimizer}) == state_of(objects)


def test_a_skeleton_takes_weights_and_the_optimizer_its_state() -> None:
    source = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(source.parameters())
    source(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = kept({"model": source, "optimizer": optimizer})
    with ms.skeleton():
        model = nn.Linear(3, 3)
    fresh = torch.optim.Adam(model.parameters())
    weight = model.weight
    restore_objects({"model": model, "optimizer": fresh}, saved)
    assert model.weight is weight
    assert fresh.state[weight]["exp_avg"].device.type == "cpu"
    assert state_of({"m": model, "o": fresh}) == state_of({"m": source, "o": optimizer})


def test_an_optimizer_that_was_not_saved_follows_its_parameters() -> None:
    with ms.skeleton():
        model = nn.Linear(3, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    assert optimizer.state[model.weight]["sum"].is_meta
    saved = kept({"model": nn.Linear(3, 3)})
    restore_objects({"model": model, "optimizer": optimizer}, saved, allow_missing=["optimizer"])
    assert optimizer.state[model.weight]["sum"].eq(0).all()


def test_a_module_under_two_keys_and_a_part_of_another() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    objects = {"a": model, "b": model, "part": model[0]}
    saved, was = kept(objects), state_of(objects)
    with torch.no_grad():
        model[0].weight.zero_()
    restore_objects(objects, saved)
    assert state_of(objects) == was


def test_a_loader_of_torchdata_goes_on_where_it_was() -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader")
    generator = torch.Generator().manual_seed(5)
    loader = loading.StatefulDataLoader(range(20), batch_size=3, shuffle=True, generator=generator)
    batches = iter(loader)
    next(batches)
    saved = kept({"loader": loader})
    rest = [batch.tolist() for batch in batches]
    fresh = loading.StatefulDataLoader(range(20), batch_size=3, shuffle=True, generator=torch.Generator())
    restore_objects({"loader": fresh}, saved)
    assert [batch.tolist() for batch in fresh] == rest


def test_keys_that_are_names_of_methods() -> None:
    objects = {"train": nn.Linear(2, 2), "state_dict": nn.Linear(2, 2), "forward": {"weight": nn.BatchNorm1d(2)}}
    saved, was = kept(objects), state_of(objects)
    for part in (objects["train"], objects["state_dict"], objects["forward"]["weight"]):
        nn.init.zeros_(part.weight)  # type: ignore[index,arg-type,union-attr]
    restore_objects(objects, saved)
    assert state_of(objects) == was


def test_values_that_a_module_under_such_a_key_makes_itself() -> None:
    saved = {"train": Part("module", {"weight": torch.ones(2, 2)}), "ema": Part("module", {"weight": torch.ones(2)})}
    objects = {"train": nn.Linear(2, 2), "ema": nn.LayerNorm(2)}
    nn.init.constant_(objects["ema"].bias, 3)  # type: ignore[arg-type]
    restore_objects(objects, saved, rules={"train": [ms.rules.Fill("bias")], "ema": [ms.rules.Fill("bias")]})
    assert not objects["ema"].bias.any()  # type: ignore[union-attr]


def test_hooks_see_their_own_names_behind_their_prefix() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = nn.Linear(2, 2)
            self._register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
            assert metadata == {"version": 1}
            for name in ("weight", "bias"):
                if f"{prefix}old.{name}" in state:
                    state[f"{prefix}new.{name}"] = state.pop(f"{prefix}old.{name}")

    source, target = Renamed(), Renamed()
    state = source.state_dict()
    versions = state._metadata  # type: ignore[attr-defined]
    state = OrderedDict((name.replace("new", "old"), value) for name, value in state.items())
    state._metadata = versions  # type: ignore[attr-defined]
    restore_objects({"x": target}, {"x": Part("module", state)})
    assert torch.equal(source.new.weight, target.new.weight)


# Everything is as it was.


class Failing(Positions):
    """Fails in the middle of its `load_state_dict`, as long as it is told to."""

    fails: type[BaseException] | None = ZeroDivisionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(-1)
        if type(self).fails is not None and state["at"] != self.at:
            self.half = True
            raise type(self).fails("in the middle")
        super().load_state_dict(state)


def broken(path: str, saved: dict[str, Part]) -> None:
    """Makes what was saved for one object such that it does not fit."""
    tree = saved[path].tree
    if path in ("model", "head", "averaged.ema"):
        name = next(iter(tree))
        tree[name] = torch.zeros(9, 9, 9)
    elif path == "optimizer":
        name = next(iter(tree["state"]))
        tree["state"][name]["exp_avg"] = torch.zeros(9, 9)
    elif path == "generator":
        saved[path] = Part("generator", torch.zeros(3, dtype=torch.uint8))
    elif path in ("rng", "scaler"):
        tree.clear()
    elif path == "scheduler":
        saved[path] = Part("stateful", [1, 2])
    else:
        del tree["seen"]


RAISED = {
    "model": errors.PlanError,
    "head": errors.PlanError,
    "averaged.ema": errors.PlanError,
    "optimizer": errors.OptimizerStateError,
    "scheduler": errors.ObjectStateError,
    "scaler": errors.ObjectStateError,
    "loader": errors.ObjectStateError,
    "generator": errors.ObjectStateError,
    "rng": errors.ObjectStateError,
}


@pytest.mark.parametrize("path", RAISED)
def test_whichever_object_fails_nothing_has_changed(path: str) -> None:
    run = Run()
    run.train(2)
    saved = kept(run.objects)
    run.train(2)
    broken(path, saved)
    before = everything(run.objects)
    with pytest.raises(RAISED[path]) as caught:
        restore_objects(run.objects, saved)
    assert path in str(caught.value)
    assert everything(run.objects) == before


@pytest.mark.parametrize("fails", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_object_that_fails_in_the_middle(fails: type[BaseException]) -> None:
    run = Run()
    run.loader = Failing()
    Failing.fails = None
    run.train(2)
    saved = kept(run.objects)
    run.train(2)
    before = everything(run.objects)
    Failing.fails = fails
    with pytest.raises(errors.ObjectStateError if fails is ZeroDivisionError else fails):
        restore_objects(run.objects, saved)
    assert everything(run.objects) == before


def test_code_of_an_object_that_looks_at_the_model_sees_the_new_values_and_can_be_undone() -> None:
    class Watching(Positions):
        fails = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.sum = model.weight.sum().item()
            with torch.no_grad():
                model.bias.add_(1)
                for values in optimizer.state.values():
                    values["exp_avg"].add_(1)
            if self.fails and state["at"] == 0:
                raise ValueError

    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    watching = Watching()
    objects = {"model": model, "optimizer": optimizer, "watching": watching}
    saved = kept(objects)
    with torch.no_grad():
        model.weight.add_(1)
    watching.sum, watching.fails, watching.at = 0.0, True, 1
    before = everything(objects)
    with pytest.raises(errors.ObjectStateError):
        restore_objects(objects, saved)
    watching.fails = False
    assert everything(objects) == before
    restore_objects(objects, saved)
    assert watching.sum == saved["model"].tree["weight"].sum().item()


@pytest.mark.parametrize("holds", [False, True])
def test_what_an_object_does_to_others_before_it_fails(holds: bool) -> None:
    """To tensors and entries of the optimizer from before, to torch's generator; and a module that holds them."""

    class Meddling(Positions):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["at"] != self.at:
                values["exp_avg"].add_(1)
                values["new"] = 1
                del optimizer.param_groups[0]["lr"]
                torch.rand(3)
                raise ValueError

    model = nn.Linear(3, 3)
    optimizer = trained(model, model.parameters())
    if holds:
        model.holds = [optimizer]  # type: ignore[assignment]
    values = optimizer.state[model.weight]
    meddling = Meddling()
    objects = {"model": model, "optimizer": optimizer, "meddling": meddling}
    saved = kept({"model": model, "optimizer": optimizer, "meddling": meddling})
    trained(model, model.parameters())
    meddling.at = 3
    before, moments, random = everything(objects), values["exp_avg"].clone(), torch.get_rng_state()
    with pytest.raises(errors.ObjectStateError, match="meddling"):
        restore_objects(objects, saved)
    assert everything(objects) == before
    assert torch.equal(values["exp_avg"], moments)
    assert torch.equal(torch.get_rng_state(), random)


def test_objects_may_keep_and_change_what_they_are_given() -> None:
    class Keeping(Positions):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]
            self.seen.append(state.pop("at"))

    saved = {"it": Part("stateful", {"at": 1, "seen": []})}
    for _ in range(2):
        it = Keeping()
        restore_objects({"it": it}, saved)
        assert it.seen == [1]


def test_an_interrupt_at_any_line_leaves_all_of_the_old_or_all_of_the_new() -> None:
    torch.manual_seed(1)
    run = Run()
    run.train(2)
    saved = kept(run.objects)
    new = state_of(run.objects)
    run.train(2)
    old = kept(run.objects)
    was = everything(run.objects)
    lines = interrupted_at(0, lambda: restore_objects(run.objects, saved))
    assert state_of(run.objects) == new
    assert lines > 1000
    kinds = set()
    for line in range(1, lines, max(lines // 150, 1)):
        restore_objects(run.objects, old)
        was = everything(run.objects)
        assert was["state"] != new
        interrupted_at(line, lambda: restore_objects(run.objects, saved))
        now = everything(run.objects)
        kinds.add(now["state"] == new)
        if now["state"] != new:
            assert now == was, f"line {line}"
    assert False in kinds


def test_objects_are_left_alone_where_the_modules_fail() -> None:
    loader = Failing()
    saved = kept({"model": nn.Linear(2, 2), "loader": loader})
    saved["loader"].tree["at"] = 7
    loader.load_state_dict = pytest.fail  # type: ignore[assignment]
    with pytest.raises(errors.PlanError):
        restore_objects({"model": nn.Linear(3, 3), "loader": loader}, saved)


def test_asking_for_states_draws_no_numbers() -> None:
    class Drawing(Positions):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

    objects = {"loader": Drawing(), "rng": Random()}
    torch.manual_seed(2)
    saved = kept(objects)
    follows = torch.rand(2)
    broken("loader", saved)
    before = torch.get_rng_state()
    with pytest.raises(errors.ObjectStateError):
        restore_objects(objects, saved)
    assert torch.equal(torch.get_rng_state(), before)
    saved["loader"].tree["seen"] = []
    restore_objects(objects, saved)
    assert torch.equal(torch.rand(2), follows)
    state = torch.get_rng_state()
    restore_objects({"loader": Drawing()}, {"loader": saved["loader"]})
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_are_undone_after_whoever_draws_from_them() -> None:
    class Drawing(Positions):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1, generator=first)
            return super().state_dict()

    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    objects = {"loader": Drawing(), "first": first, "second": second}
    saved = kept(objects)
    first.manual_seed(3)
    broken("loader", saved)
    before = first.get_state()
    with pytest.raises(errors.ObjectStateError, match="loader"):
        restore_objects(objects, saved)
    assert torch.equal(first.get_state(), before)
    del objects["loader"], saved["loader"]
    saved["second"] = Part("generator", torch.zeros(1))
    with pytest.raises(errors.ObjectStateError, match="second"):
        restore_objects(objects, saved)
    assert torch.equal(first.get_state(), before)


# What does not go together.


def test_objects_that_were_not_saved_and_objects_that_are_not_there() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = kept({"model": model, "ema": other, "step": 3})
    with pytest.raises(errors.MissingObjectError, match="extra") as caught:
        restore_objects({"model": model, "extra": other, "step": 0}, saved)
    assert "ema" in str(caught.value)
    with pytest.raises(errors.UnexpectedObjectError, match="ema, step"):
        restore_objects({"model": model}, saved)
    restored = restore_objects(
        {"model": model, "extra": other}, saved, allow_missing=["ext*"], allow_unexpected=["ema", "step"]
    )
    assert (restored.missing, restored.unexpected, len(restored)) == (("extra",), ("ema", "step"), 0)


@pytest.mark.parametrize(
    ("given", "kind"), [(nn.Linear(2, 2), "module"), (Positions(), "stateful"), (torch.Generator(), "generator")]
)
def test_another_kind_than_what_was_saved(given: Any, kind: str) -> None:
    with pytest.raises(errors.ObjectKindError, match=kind) as caught:
        restore_objects({"it": given}, {"it": Part("value", 3)})
    assert "value" in caught.value.expected
    with pytest.raises(errors.ObjectKindError):
        restore_objects({"it": None}, {"it": capture({"it": given})["it"]})


def test_patterns_have_to_be_of_use_somewhere() -> None:
    model = nn.Linear(2, 2)
    saved = kept({"model": model})
    for option in ("allow_missing", "allow_unexpected"):
        with pytest.raises(errors.PlanError) as caught:
            restore_objects({"model": model}, saved, **{option: ["emma"]})  # type: ignore[arg-type]
        assert [type(problem) for problem in caught.value.problems] == [problems.IdlePattern]


def trained(model: nn.Module, params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params)
    sum(param.sum() * 2 for param in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def test_parameters_that_are_new_or_no_longer_trained() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    optimizer = trained(model, model.parameters())
    saved = kept({"model": model, "optimizer": optimizer})
    fewer = torch.optim.Adam([*model["body"].parameters()])
    objects = {"model": model, "optimizer": fewer}
    with pytest.raises(errors.OptimizerStateError, match=r"optimizer: Adam(.|\n)*model.head.weight"):
        restore_objects(objects, saved)
    restore_objects(objects, saved, allow_unexpected=["optimizer.model.head.*"])
    assert (
        state_of(objects)["optimizer"]["state"]["model.body.bias"]
        == state_of({"model": model, "optimizer": optimizer})["optimizer"]["state"]["model.body.bias"]
    )
    more = nn.ModuleDict({"new": nn.Linear(2, 2), **model})
    objects = {"model": more, "optimizer": torch.optim.Adam(more.parameters())}
    new = ["model.new.*"]
    with pytest.raises(errors.OptimizerStateError, match=r"model.new.bias: nothing was saved"):
        restore_objects(objects, saved, allow_missing=new)
    restore_objects(objects, saved, allow_missing=[*new, "optimizer.model.new.*"])
    del saved["optimizer"].tree["state"]["model.head.bias"]
    saved["optimizer"].tree["param_groups"][0]["params"].remove("model.head.bias")
    with pytest.raises(errors.OptimizerStateError, match=r"model.head.bias: nothing was saved"):
        restore_objects(objects, saved, allow_missing=[*new, "optimizer.model.new.*"])


@pytest.mark.parametrize("by", ["path", "names", "schema"])
def test_rules_for_a_module_and_its_optimizer(by: str) -> None:
    old = nn.ModuleDict({"qkv": nn.Linear(2, 6), "b": nn.Linear(2, 2)})
    optimizer, other = trained(old, old.parameters()), nn.Linear(2, 2)
    saved = kept({"model": old, "other": other, "optimizer": optimizer})
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("q", "k", "v", "c", "d")})
    split: list[Any] = [ms.rules.Split("qkv.weight", ["q.weight", "k.weight", "v.weight"])]
    split += [
        ms.rules.Split("qkv.bias", ["q.bias", "k.bias", "v.bias"]),
        ms.rules.Rename("b.*", "c.*"),
        ms.rules.Fill("d.*", 0.0),
    ]
    rules: Any = {"model": split}
    if by == "schema":
        rules = {
            "model": ms.rules.Schema("1", [ms.rules.Migration("2", split)], recognise={"1": lambda it: "b.bias" in it})
        }
    elif by == "names":
        parts = [(part, [f"model.{one}.{part}" for one in "qkv"]) for part in ("weight", "bias")]
        rules = [ms.rules.Split(f"model.qkv.{part}", names) for part, names in parts]
        rules += [ms.rules.Rename("model.b.*", "model.c.*"), ms.rules.Fill("model.d.*", 0.0)]
    fresh = torch.optim.Adam(model.parameters())
    objects = {"model": model, "other": nn.Linear(2, 2), "optimizer": fresh}
    restore_objects(objects, saved, rules=rules, allow_missing=["optimizer.model.d.*"])
    assert torch.equal(model["k"].weight, old["qkv"].weight[2:4])
    assert torch.equal(fresh.state[model["k"].weight]["exp_avg"], optimizer.state[old["qkv"].weight]["exp_avg"][2:4])
    assert torch.equal(fresh.state[model["c"].bias]["exp_avg"], optimizer.state[old["b"].bias]["exp_avg"])
    assert torch.equal(objects["other"].weight, other.weight)  # type: ignore[arg-type]
    assert not model["d"].weight.any()


def test_rules_that_cannot_be() -> None:
    model = nn.Linear(2, 2)
    saved = kept({"model": model})
    with pytest.raises(errors.OptionError, match="not a restored module"):
        restore_objects({"model": model}, saved, rules={"emma": [ms.rules.Prefix(strip="a")]})
    with pytest.raises(errors.SchemaError, match="version of the checkpoint is unknown"):
        restore_objects({"model": model}, saved, rules=ms.rules.Schema("1", []))
    with pytest.raises(errors.PlanError) as caught:
        restore_objects({"model": model}, saved, rules={"model": [ms.rules.Prefix(strip="emma.")]})
    assert "in model.*" in str(caught.value)
    with pytest.raises(errors.PlanError) as caught:
        restore_objects({"model": model}, saved, rules={"model": [ms.rules.Split("weight", ["a"], sizes=[9])]})
    assert problems.BadRule in map(type, caught.value.problems)


def test_an_optimizer_with_parameters_of_nobody() -> None:
    model, optimizer = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    for function in (capture, lambda objects: restore_objects(objects, {})):
        with pytest.raises(errors.OptimizerStateError, match=r"opt: .*no names(.|\n)*2 of 2(.|\n)*add the module"):
            function({"model": model, "opt": optimizer})


def test_plain_values_are_what_holds_no_objects() -> None:
    objects = {"config": {"a.b": 1, 3: [4]}, "list": [1], "tensor": torch.ones(2), "class": nn.Linear, "none": None}
    assert {part.kind for part in capture(objects).values()} == {"value"}
    restored = restore_objects(dict.fromkeys(objects), capture(objects))
    assert dict(restored) == objects


def test_nothing_at_all() -> None:
    assert dict(capture({})) == {}
    assert len(restore_objects({}, {})) == 0
    bare = {"relu": nn.ReLU(), "nested": {"list": nn.ModuleList()}}
    assert restore_objects(bare, kept(bare)).report.coverage == 1


class NoCopy(Positions):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": (one for one in ())}


class NoReturn(Positions):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(1)
        raise ZeroDivisionError


def test_objects_that_cannot_be_undone_say_so() -> None:
    with pytest.raises(errors.ObjectStateError, match=r"loader: its state cannot be copied"):
        restore_objects({"loader": NoCopy()}, {"loader": Part("stateful", {})})
    with pytest.raises(errors.RollbackError, match=r"loader: its load_state_dict does not take what"):
        restore_objects({"loader": NoReturn()}, {"loader": Part("stateful", {})})


def test_a_file_that_changes_between_two_parts(tmp_path: Any) -> None:
    path = tmp_path / "model.pt"
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    torch.save(model.state_dict(), path)
    first = ms.open(path, key="a")
    torch.save({**model.state_dict(), "c": torch.ones(9)}, path)
    saved = {"a": Part("module", first), "b": Part("module", ms.open(path, key="b"))}
    with pytest.raises(errors.ReadFailedError, match="between the opening"):
        restore_objects({"a": model["a"], "b": model["b"]}, saved)


def test_files_are_verified_before_anything_is_put_in_place(tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    saved = {"model": Part("module", ms.open(path))}
    target = nn.Linear(2, 2)
    restore_objects({"model": target}, saved, verify=True)
    assert torch.equal(target.weight, model.weight)
    data = bytearray(path.read_bytes())
    at = data.index(model.weight.detach().numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(errors.ChecksumError):
        restore_objects({"model": target}, {"model": Part("module", ms.open(path))}, verify=True)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), target.state_dict().values(), strict=True))


def test_what_allows_parameters_that_are_new_or_gone_is_named() -> None:
    def of(*frozen: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        for number in frozen:
            model[number].requires_grad_(False)
        return {"m": model, "o": torch.optim.SGD([p for p in model.parameters() if p.requires_grad], momentum=0.9)}

    saved = capture(of(1))
    with pytest.raises(errors.OptimizerStateError) as caught:
        restore_objects(of(0, 2), saved)
    allowed = {"allow_missing": ["o.m.1.*"], "allow_unexpected": ["o.m.0.*", "o.m.2.weight"]}
    for option, patterns in allowed.items():
        assert f"{option}={patterns}" in str(caught.value.remedy)
    restore_objects(of(0, 2), saved, **allowed)  # type: ignore[arg-type]


class Headed(nn.Module):
    def __init__(self, head: str, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        setattr(self, head, nn.Linear(4, width))
        setattr(self, f"{head}_norm", nn.LayerNorm(width))


def headed(head: str, width: int = 4, optimizers: int = 1) -> dict[str, Any]:
    model = Headed(head, width)
    of: dict[str, Any] = {"model": model}
    for number in range(optimizers):
        of[f"optimizer{number}"] = optimizer = torch.optim.Adam(list(model.parameters())[number::optimizers])
        sum(param.sum() for param in model.parameters()).backward()
        optimizer.step()
    return of


def proposed(remedy: str) -> dict[str, list[str]]:
    found = re.findall(r"(allow_\w+)=(\[.*?\])", remedy)
    return {option: ast.literal_eval(patterns) for option, patterns in found if "'" in patterns}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_models_and_optimizers_have_their_problems_in_one_error_with_patterns_for_both(
    tmp_path: Path, optimizers: int
) -> None:
    store, of = ms.Store(tmp_path), headed("new", optimizers=optimizers)
    store.save(1, headed("old", 5, optimizers))
    before = everything(of)
    with pytest.raises(PlanError) as caught:
        store.restore(of)
    assert everything(of) == before
    kinds = {type(problem).__name__ for problem in caught.value.problems}
    assert kinds == {"Missing", "Unexpected", "OptimizerMisfit"}
    options = proposed(str(caught.value))
    assert set(options) == {"allow_missing", "allow_unexpected"}
    assert store.restore(of, **options).step == 1  # type: ignore[arg-type]


def with_optimizers(**classes: Any) -> dict[str, Any]:
    """Objects with an optimizer of each class that has made a step."""
    model = nn.Linear(3, 3)
    of: dict[str, Any] = {"model": model, "step": 3}
    for name, cls in classes.items():
        of[name] = cls(model.parameters(), lr=0.25)
        model(torch.ones(1, 3)).sum().backward()
        of[name].step()
    return of


def restored_from(place: str, path: Path, objects: dict[str, Any]) -> Any:
    """Saves the objects, and gives the function that restores others from there."""
    if place == "store":
        store = ms.Store(path)
        store.save(1, objects)
        return store.restore
    file = path / ("training.pt" if place == "torch file" else "model.safetensors")
    ms.save(objects, file, shard_size_bytes=100 if place == "directory" else None)
    source: Any = path if place == "directory" else str(file)
    source = {"checkpoint": ms.open, "mapping": lambda file: ms.open(file).value()}.get(place, lambda file: file)(
        source
    )
    return partial(ms.restore, source=source)


@pytest.mark.parametrize("place", ["file", "store"])
def test_the_state_of_another_optimizer_is_left_out_as_the_error_says(tmp_path: Path, place: str) -> None:
    saved = with_optimizers(optimizer=torch.optim.Adam, second=torch.optim.Adagrad)
    restore = restored_from(place, tmp_path, saved)
    of = with_optimizers(optimizer=torch.optim.SGD, second=torch.optim.SGD)
    before = everything(of)
    with pytest.raises(OptimizerStateError) as caught:
        restore(of)
    assert everything(of) == before
    found, remedy = caught.value.found, str(caught.value.remedy)
    assert "optimizer: the state is of torch.optim.Adam, the optimizer is torch.optim.SGD" in found
    assert "second: the state is of torch.optim.Adagrad, the optimizer is torch.optim.SGD" in found
    assert "rules" not in remedy
    assert "keep_options" not in remedy
    new = dict(re.findall(r"call it '(\w+)' among the objects.*?allow_unexpected=\['(\w+)'\]", remedy))
    assert set(new.values()) == {"optimizer", "second"}
    again = {name: it for name, it in of.items() if name not in new.values()}
    again |= {name: of[old] for name, old in new.items()}
    options: dict[str, list[str]] = {}
    for option, patterns in re.findall(r"(allow_\w+)=(\[.*?\])", remedy):
        options.setdefault(option, []).extend(ast.literal_eval(patterns))
    state = {name: repr(of[name].state_dict()) for name in new.values()}
    restored = restore(again, **options)
    assert torch.equal(of["model"].weight, saved["model"].weight)
    assert {name: repr(of[name].state_dict()) for name in new.values()} == state
    assert restored["step"] == 3


@pytest.mark.parametrize("place", ["file", "store"])
def test_an_optimizer_takes_the_moments_of_another_class_where_it_is_told_to(tmp_path: Path, place: str) -> None:
    saved = with_optimizers(adam=torch.optim.Adam)
    restore = restored_from(place, tmp_path, saved)
    of = with_optimizers(adam=torch.optim.AdamW)
    options = {key: value for key, value in of["adam"].param_groups[0].items() if key != "params"}
    before = everything(of)
    with pytest.raises(OptimizerStateError, match="decoupled_weight_decay True -> False") as caught:
        restore(of)
    assert everything(of) == before
    (remedy,) = re.findall(r"keep_options=(\[.*?\])", str(caught.value.remedy))
    report = restore(of, keep_options=ast.literal_eval(remedy)).report
    assert "adam: the state of torch.optim.Adam is loaded into torch.optim.AdamW" in report.notes
    assert {key: value for key, value in of["adam"].param_groups[0].items() if key != "params"} == options
    for name, param in of["model"].named_parameters():
        moment = saved["adam"].state[saved["model"].get_parameter(name)]["exp_avg"]
        assert torch.equal(of["adam"].state[param]["exp_avg"], moment)


def test_some_options_of_one_of_two_optimizers_are_kept(tmp_path: Path) -> None:
    saved = with_optimizers(first=torch.optim.AdamW, second=torch.optim.AdamW)
    ms.save(saved, tmp_path / "training.safetensors")
    of = with_optimizers(first=torch.optim.AdamW, second=torch.optim.AdamW)
    for name in ("first", "second"):
        of[name].param_groups[0].update(lr=0.125, weight_decay=0.5)
    ms.restore(of, tmp_path / "training.safetensors", keep_options=["second.lr"])
    found = {name: [of[name].param_groups[0][key] for key in ("lr", "weight_decay")] for name in ("first", "second")}
    assert found == {"first": [0.25, 0.01], "second": [0.125, 0.01]}
    with pytest.raises(errors.OptionError, match="keep_options='third'"):
        ms.restore(of, tmp_path / "training.safetensors", keep_options=["third"])


def test_a_model_and_an_optimizer_of_another_class_have_their_problems_in_one_error(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), headed("new")
    store.save(1, headed("old"))
    of["optimizer0"] = torch.optim.SGD(of["model"].parameters())
    with pytest.raises(PlanError) as caught:
        store.restore(of)
    whys = [one.line() for one in caught.value.problems if isinstance(one, problems.OptimizerMisfit)]
    assert "optimizer0: the state is of torch.optim.Adam, the optimizer is torch.optim.SGD" in whys
    assert "build the optimizer that was saved: torch.optim.Adam" in str(caught.value)


class Respelled(nn.Module):
    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(3, 4))
        setattr(self, last, nn.Linear(4, 2))


def respelled(first: str, last: str, unchanged: nn.Module) -> dict[str, Any]:
    nets = {"model": Respelled(first, last), "class": Respelled(first, last)}
    params = [param for net in (*nets.values(), unchanged) for param in net.parameters()]
    optimizer = torch.optim.Adam(params)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    return {"model": nets["model"], "nets": {"critic": nets["class"]}, "other": unchanged, "optimizer": optimizer}


@pytest.mark.parametrize("place", ["file", "torch file", "directory", "store", "checkpoint", "mapping"])
def test_the_rules_that_an_error_proposes_to_work_out_restore_everything(tmp_path: Path, place: str) -> None:
    saved = respelled("fc1", "out", nn.Linear(2, 2))
    restore = restored_from(place, tmp_path, saved)
    of = respelled("first_layer", "last_layer", nn.Linear(2, 2))
    before = everything(of)
    with pytest.raises(PlanError) as caught:
        restore(of)
    assert everything(of) == before
    (code,) = re.findall(r"rules=(\{.*?\)\})", str(caught.value))
    source = getattr(restore, "keywords", {}).get("source")
    rules = eval(code, {"ms": ms, "model": of["model"], "critic": of["nets"]["critic"], "source": source})
    assert set(rules) == {"model", "nets.critic"}
    restore(of, rules=rules)
    for path in ("model", "nets", "other"):
        old, new = ([it[path]] if path != "nets" else [it[path]["critic"]] for it in (saved, of))
        assert [*map(torch.Tensor.tolist, old[0].parameters())] == [*map(torch.Tensor.tolist, new[0].parameters())]
    old_moments, new_moments = ([one["exp_avg"] for one in it["optimizer"].state.values()] for it in (saved, of))
    assert all(map(torch.equal, old_moments, new_moments))


def test_the_rules_that_an_error_proposes_for_a_state_dict_of_a_part() -> None:
    saved = {"model": Part("module", Respelled("fc1", "out").state_dict())}
    model = Respelled("first_layer", "last_layer")
    with pytest.raises(PlanError) as caught:
        restore_objects({"model": model}, saved)
    (code,) = re.findall(r"rules=(\{.*?\)\})", str(caught.value))
    restore_objects({"model": model}, saved, rules=eval(code, {"ms": ms, "model": model, "saved": saved}))
    assert torch.equal(model.first_layer.weight, saved["model"].tree["fc1.weight"])


def test_all_optimizers_have_their_problems_in_one_error(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), headed("new", optimizers=2)
    store.save(1, headed("old", optimizers=2))
    allowed = {"allow_missing": ["model.*"], "allow_unexpected": ["model.*"]}
    before = everything(of)
    with pytest.raises(OptimizerStateError, match=r"(?s)optimizer0.*optimizer1") as caught:
        store.restore(of, **allowed)  # type: ignore[arg-type]
    assert everything(of) == before
    more = proposed(str(caught.value))
    options = {option: [*allowed[option], *more[option]] for option in allowed}
    assert store.restore(of, **options).step == 1  # type: ignore[arg-type]


def test_a_shape_that_does_not_fit_is_said_once_of_the_model(tmp_path: Path) -> None:
    ms.Store(tmp_path).save(1, headed("head", 5))
    with pytest.raises(PlanError) as caught:
        ms.Store(tmp_path).restore(headed("head", 4))
    assert {type(problem).__name__ for problem in caught.value.problems} == {"WrongShape"}


@pytest.mark.parametrize("restore", ["file", "store"])
def test_a_model_with_new_parameters_gets_their_first_values_and_no_optimizer_state(
    tmp_path: Path, restore: str
) -> None:
    class Model(nn.Module):
        def __init__(self, *heads: str) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            for head in heads:
                self.add_module(head, nn.Linear(4, 2))

    def built(*heads: str) -> dict[str, Any]:
        model = Model(*heads)
        of = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "rng": ms.RNG()}
        sum(param.sum() for param in model.parameters()).backward()
        of["optimizer"].step()
        return of

    def into(of: dict[str, Any], **options: Any) -> object:
        if restore == "file":
            return ms.restore(of, tmp_path / "x.safetensors", **options)
        return ms.Store(tmp_path).restore(of, **options)

    saved, of = built("first"), built("first", "second")
    ms.save(saved, tmp_path / "x.safetensors")
    ms.Store(tmp_path).save(1, saved)
    following = torch.rand(3)  # saved with the objects
    with torch.no_grad():
        for param in of["model"].parameters():
            param.fill_(7)
    before = everything(of)
    with pytest.raises(PlanError, match=r"model\.second\.weight"):
        into(of)
    assert everything(of) == before
    into(of, init_missing=True)
    assert torch.equal(torch.rand(3), following)
    assert torch.equal(of["model"].first.weight, saved["model"].first.weight)
    assert of["model"].second.weight.abs().max() <= 0.5  # by nn.Linear.reset_parameters
    states = of["optimizer"].state
    assert all(param in states for param in (*of["model"].body.parameters(), *of["model"].first.parameters()))
    assert not any(states.get(param) for param in of["model"].second.parameters())
    of["optimizer"].step()


def test_a_parameter_that_is_not_initialised_keeps_its_need_of_a_state(tmp_path: Path) -> None:
    saved = headed("head")
    saved["optimizer0"] = torch.optim.Adam([saved["model"].body.weight])
    ms.Store(tmp_path).save(1, saved)
    with pytest.raises(OptimizerStateError, match=r"model\.head"):
        ms.Store(tmp_path).restore(headed("head"), init_missing=True)
    with pytest.raises(OptionError, match="init_missing"):
        ms.Store(tmp_path).restore(headed("head"), init_missing="model.head.*")  # type: ignore[arg-type]
