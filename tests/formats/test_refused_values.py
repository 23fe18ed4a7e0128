"""A value of a pickle that is not read never becomes live state, and is never left out of a copy without a word."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.cli.main import app

NAME = re.escape(f"{__name__}.Setting")


class Setting:
    """A class that no checkpoint may use by itself."""

    def __init__(self, number: float = 0.1) -> None:
        self.number = number

    def __float__(self) -> float:
        return self.number


class Net(nn.Linear):
    """A module with extra state."""

    info: Any = None

    def get_extra_state(self) -> Any:
        return {"setting": [Setting()]}

    def set_extra_state(self, state: Any) -> None:
        self.info = state


class OwnCode(nn.Linear):
    """A module that takes a value out of the state dict by itself."""

    info: Any = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.info = state_dict.pop(f"{prefix}info")
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = Setting()
    schedule = {"base_lrs": [Setting()], "last_epoch": 3}
    torch.save(
        {
            "model": Net(2, 2).state_dict(),
            "own": OrderedDict(nn.Linear(2, 2).state_dict(), info=Setting()),
            "optimizer": state,
            "schedule": schedule,
            "epoch": Setting(),
            "history": [1, {"best": Setting(), "n": 2}],
            "kept": {"a": 1},
        },
        tmp_path / "run.pt",
    )
    return tmp_path / "run.pt"


@pytest.fixture
def checkpoint(path: Path) -> ms.Checkpoint:
    return ms.open(path, skip_forbidden=True)


def test_extra_state_is_a_problem_of_the_plan(checkpoint: ms.Checkpoint, path: Path) -> None:
    model = Net(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(errors.PlanError, match=NAME) as caught:
        ms.load(model, checkpoint, key="model")
    (problem,) = ms.plan(model, checkpoint, key="model").problems
    assert problem.name == "_extra_state"
    for remedy in (str(caught.value), problem.as_dict()["remedy"]):
        assert f'allow=["{__name__}.Setting"]' in str(remedy)
    assert model.info is None
    assert torch.equal(model.weight, before)
    report = ms.load(model, ms.open(path, allow=[Setting]), key="model")
    assert report.coverage == 1
    assert model.info["setting"][0].number == 0.1


def test_a_placeholder_in_a_mapping_is_a_problem(checkpoint: ms.Checkpoint) -> None:
    state = {**nn.Linear(2, 2).state_dict(), "_extra_state": checkpoint.extra["model._extra_state"]}
    for call, error in ((ms.load, errors.PlanError), (ms.load_state_dict, errors.ForbiddenGlobalError)):
        model = Net(2, 2)
        with pytest.raises(error, match=NAME):
            call(model, state)  # type: ignore[operator]
        assert model.info is None


def test_a_value_that_the_models_own_code_takes_is_a_problem(checkpoint: ms.Checkpoint, path: Path) -> None:
    model = OwnCode(2, 2)
    with pytest.raises(errors.PlanError, match=f"info: .*{NAME}"):
        ms.load(model, checkpoint, key="own")
    assert not isinstance(model.info, Setting)
    ms.load(model, ms.open(path, allow=[Setting]), key="own")
    assert isinstance(model.info, Setting)


@pytest.mark.parametrize("name", ["epoch", "schedule", "optimizer", "history"])
def test_values_that_are_restored_are_an_error(checkpoint: ms.Checkpoint, name: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    objects: dict[str, Any] = {
        "epoch": None,
        "history": None,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    with pytest.raises(errors.ForbiddenGlobalError, match=f"{NAME} at {name}") as caught:
        ms.restore({name: objects[name]}, checkpoint, allow_unexpected=["*"])
    assert caught.value.allow == (f"{__name__}.Setting",)
    assert caught.value.names[0].startswith(name)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(errors.ForbiddenGlobalError, match=f"{NAME} at {name}"):
        checkpoint.value(name)
    assert "refused" in repr(checkpoint.extra[name])  # for looking


def test_load_optimizer_state(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = ms.optimizer_state(model, optimizer)
    state["param_groups"][0]["lr"] = Setting()
    torch.save({"optimizer": state}, tmp_path / "x.pt")
    found = ms.open(tmp_path / "x.pt", skip_forbidden=True).extra["optimizer"]
    with pytest.raises(errors.ForbiddenGlobalError, match=NAME):
        ms.load_optimizer_state(model, optimizer, found)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_conversion_says_what_it_leaves_out(checkpoint: ms.Checkpoint, path: Path, tmp_path: Path) -> None:
    for number, convert in enumerate(
        (
            lambda to: ms.save(checkpoint, to),
            lambda to: ms.convert_checkpoint(checkpoint, to),
            lambda to: ms.convert_checkpoint(checkpoint, to, rules=[ms.rules.Rename("kept", "was_kept")]),
        )
    ):
        report = convert(tmp_path / f"{number}.safetensors")
        (note,) = report.notes
        for left_out in ("model._extra_state.setting.0", "optimizer.param_groups.0.lr", "epoch", "history.1.best"):
            assert f"{left_out} ({__name__}.Setting)" in note
        written = ms.open(tmp_path / f"{number}.safetensors")
        assert written.value("history") == [1, {"n": 2}]
        assert "epoch" not in written.extra
        assert not any("_extra_state" in name for name in written.extra)  # a part of it would be loaded without a word
        assert "lr" not in written.value("optimizer")["param_groups"][0]
    done = CliRunner().invoke(app, ["convert", "--skip-forbidden", str(path), str(tmp_path / "cli.safetensors")])
    assert done.exit_code == 0
    assert f"epoch ({__name__}.Setting)" in " ".join((done.stdout + done.stderr).split())


def test_a_conversion_of_a_list_of_tensors_is_refused(tmp_path: Path) -> None:
    """Without an item, the others would have another index."""
    torch.save({"parts": [Setting(), torch.ones(2)]}, tmp_path / "x.pt")
    with pytest.raises(errors.ForbiddenGlobalError, match=rf"{NAME} at parts\.0"):
        ms.save(ms.open(tmp_path / "x.pt", skip_forbidden=True), tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


def test_a_rule_that_computes_with_a_value_is_refused(checkpoint: ms.Checkpoint, tmp_path: Path) -> None:
    rule = ms.rules.Apply("epoch", lambda value: [value])
    with pytest.raises(errors.RuleError, match=NAME):
        ms.convert_checkpoint(checkpoint, tmp_path / "x.safetensors", rules=[rule])


def test_a_comparison_lists_what_it_cannot_compare(path: Path) -> None:
    diff = ms.diff(path, path, skip_forbidden=True)
    assert {value.path for value in diff.values} >= {"epoch", "optimizer", "schedule", "history"}
    assert "kept" not in {value.path for value in diff.values}


def test_a_placeholder_is_not_saved(checkpoint: ms.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(errors.CodecError, match="placeholder") as caught:
        ms.save({"epoch": checkpoint.extra["epoch"]}, tmp_path / "x.safetensors")
    assert "allow=" in caught.value.remedy
    with pytest.raises(errors.UnsavableError):
        ms.save({"epoch": checkpoint.extra["epoch"]}, tmp_path / "x.pt")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run.pt"]


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_supported_is_a_problem_where_the_model_needs_it(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    state["1.weight"] = torch.quantize_per_tensor(state["1.weight"], 0.1, 2, torch.qint8)
    torch.save(state, tmp_path / "x.pt")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(errors.PlanError, match=r"1\.weight: a quantized tensor \(torch.qint8\) is not supported"):
        ms.load(model, tmp_path / "x.pt")
    ms.load(model[0], tmp_path / "x.pt", key="0")
    assert torch.equal(model[0].weight, state["0.weight"])


def test_freed_memory(tmp_path: Path) -> None:
    """As of weights that FSDP or an offloader has taken away while torch.save ran."""
    freed, good = torch.ones(3), torch.ones(2)
    freed.untyped_storage().resize_(0)
    torch.save({"freed": freed, "good": good, "parameter": nn.Parameter(freed)}, tmp_path / "x.pt")
    checkpoint = ms.open(tmp_path / "x.pt")
    assert torch.equal(checkpoint.tensor("good"), good)
    for name in ("freed", "parameter"):
        with pytest.raises(errors.UnsupportedTensorError, match=f"{name}: a tensor whose memory had been given back"):
            checkpoint.tensor(name)


omegaconf = pytest.importorskip("omegaconf")


@pytest.fixture
def lightning(tmp_path: Path) -> Path:
    config = omegaconf.OmegaConf.create({"lr": 0.1, "data": {"paths": ["a", "b"], "n": 3}, "of": "${lr}"})
    torch.save(
        {
            "state_dict": nn.Linear(2, 2).state_dict(),
            "hyper_parameters": config,
            "callbacks": {"best": {"config": config}},
        },
        tmp_path / "last.ckpt",
    )
    return tmp_path / "last.ckpt"


def test_the_objects_of_omegaconf_refer_to_their_parents(lightning: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint = ms.open(lightning, skip_forbidden=True)
    assert ms.load(model, checkpoint, key="state_dict").coverage == 1
    with pytest.raises(errors.ForbiddenGlobalError, match="omegaconf") as caught:
        checkpoint.value("hyper_parameters")
    with pytest.raises(errors.ForbiddenGlobalError, match=r"omegaconf\.dictconfig\.DictConfig") as opened:
        ms.open(lightning)
    assert set(opened.value.allow) == set(caught.value.allow)
    for allow in (opened.value.allow, caught.value.allow):  # the remedies, followed
        assert f"allow={list(allow)}".replace("'", '"') in f"{opened.value.remedy} {caught.value.remedy}"
        allowed = ms.open(lightning, allow=allow)
        assert ms.load(model, allowed, key="state_dict").coverage == 1
        assert allowed.value("hyper_parameters") == {"lr": 0.1, "data": {"paths": ["a", "b"], "n": 3}, "of": 0.1}


class Node:
    """An object that holds itself, and its siblings."""

    def __init__(self) -> None:
        self.own = self
        self.listed = [self, {"again": self}]
        self.other: Any = None


def test_an_allowed_object_may_hold_itself(tmp_path: Path) -> None:
    node = Node()
    node.other = Node()
    node.other.other = node
    torch.save({"node": node, "w": torch.ones(1)}, tmp_path / "x.pt")
    found = ms.open(tmp_path / "x.pt", allow=[Node]).value("node")
    assert found.own is found
    assert found.listed[0] is found
    assert found.listed[1]["again"] is found
    assert found.other.other is found


def test_an_allowed_object_with_a_placeholder_in_it_is_one(tmp_path: Path) -> None:
    """Also where the two objects refer to each other, and the other one has the placeholder."""
    node, other = Node(), Node()
    node.other, other.other = other, node
    node.listed.append(Setting())
    torch.save({"node": node, "other": other, "w": torch.ones(1)}, tmp_path / "x.pt")
    checkpoint = ms.open(tmp_path / "x.pt", allow=[Node], skip_forbidden=True)
    assert torch.equal(checkpoint.tensor("w"), torch.ones(1))
    for name in ("node", "other"):
        with pytest.raises(errors.ForbiddenGlobalError, match=NAME):
            checkpoint.value(name)
