"""Versions of a model's state: checkpoints of any of them load into the present one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, RuleError
from tests.loading.fingerprint import whole

NAMES = {name: getattr(ms.rules, name) for name in ms.rules.__all__}
"""What a program has after `from modelstate.rules import *`."""

SCHEMA = ms.rules.Schema(
    "1.0",
    [
        ms.rules.Migration("2.0", [ms.rules.Rename("old.*", "body.*")]),
        ms.rules.Migration("2.1", [ms.rules.Split("body.qk.*", ["body.q.*", "body.k.*"])]),
        ms.rules.Migration("3.0", [ms.rules.Rename("body.*", "old.*"), ms.rules.Fill("old.extra", 0.0)]),
    ],
    recognise={
        "1.0": lambda names: "old.qk.weight" in names,
        "2.0": lambda names: "body.qk.weight" in names,
        "2.1": lambda names: "body.q.weight" in names,
        "3.0": lambda names: "old.extra" in names,
    },
)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 2), nn.Linear(3, 2)
        self.extra = nn.Parameter(torch.ones(2))


def model() -> nn.Module:
    return nn.ModuleDict({"old": Body()})


FIRST = {"old.qk.weight": torch.arange(12.0).reshape(4, 3), "old.qk.bias": torch.arange(4.0)}


@pytest.mark.parametrize("version", SCHEMA.versions)
@pytest.mark.parametrize("source", ["noted", "recognised", "given", "nested"])
def test_a_checkpoint_of_any_version(version: str, source: str, tmp_path: Path) -> None:
    wanted = model()
    steps = SCHEMA.rules("1.0", version)
    state: dict[str, Any] = ms.rules.Rules([rule for rule in steps if not isinstance(rule, ms.rules.Fill)]).apply(FIRST)
    if version == "3.0":
        state["old.extra"] = torch.zeros(2)
    path = tmp_path / "state.safetensors"
    ms.save(state, path, schema=version if source == "noted" else None)
    given: Any = {"step": 3, "model": state} if source == "nested" else path
    ms.load(wanted, given, rules=SCHEMA.rules(version) if source == "given" else SCHEMA)
    old = wanted["old"]
    assert torch.equal(torch.cat([old.q.weight, old.k.weight]), FIRST["old.qk.weight"])
    assert torch.equal(torch.cat([old.q.bias, old.k.bias]), FIRST["old.qk.bias"])
    assert old.extra.tolist() == [0, 0]


def test_the_noted_version_needs_no_other_value(tmp_path: Path) -> None:
    manifest = {"format": 1, "schema": "1.0", "attached": {"run": {"$object": {"codec": "gone", "value": 1}}}}
    path = tmp_path / "state.safetensors"
    save_file(FIRST, path, metadata={"modelstate": json.dumps(manifest)})
    assert SCHEMA.version_of(ms.open(path)) == "1.0"
    ms.load(wanted := model(), path, rules=SCHEMA)
    assert torch.equal(torch.cat([wanted["old"].q.weight, wanted["old"].k.weight]), FIRST["old.qk.weight"])


def test_back_to_an_older_version() -> None:
    newest = ms.rules.Rules(rule for rule in SCHEMA.rules("1.0", "2.1")).apply(FIRST)
    again = SCHEMA.rules("2.1", "1.0").apply(newest)
    assert again.keys() == FIRST.keys()
    assert all(torch.equal(again[name], value) for name, value in FIRST.items())
    assert SCHEMA.rules("2.0", "2.0") == ()


def test_a_name_may_come_back_in_a_later_version() -> None:
    """What would be a circle within one migration is none over several."""
    there, back = (
        ms.rules.Migration("2", [ms.rules.Rename("a", "b")]),
        ms.rules.Migration("3", [ms.rules.Rename("b", "a")]),
    )
    rules = ms.rules.Schema("1", [there, back]).rules("1")
    assert list(rules.apply({"a": torch.ones(1)})) == ["a"]
    with pytest.raises(RuleError, match="back and forth"):
        ms.rules.Rules([ms.rules.Rename("a", "b"), ms.rules.Rename("b", "a")]).apply({"a": torch.ones(1)})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"other.weight": torch.ones(1)}, "version of the checkpoint is unknown"),
        ({"old.qk.weight": torch.ones(1), "old.extra": torch.ones(1)}, "several versions recognise"),
    ],
)
def test_checkpoints_of_no_version(source: Any, says: str) -> None:
    wanted = model()
    before = whole(wanted)
    for do in (ms.plan, ms.load):
        with pytest.raises(RuleError, match=says):
            do(wanted, source, rules=SCHEMA)
    assert whole(wanted) == before


@pytest.mark.parametrize("version", ["0.9", "4.0", ""])
def test_versions_that_are_none(version: str) -> None:
    with pytest.raises(RuleError, match="not a version"):
        SCHEMA.rules(version)
    with pytest.raises(RuleError, match="not a version"):
        SCHEMA.rules("1.0", version)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ms.rules.Schema("1", [ms.rules.Migration("1", [])]), "twice"),
        (lambda: ms.rules.Schema("1", [("2", [])]), "not a migration"),
        (lambda: ms.rules.Schema(1), "version must be text"),
        (lambda: ms.rules.Migration(2, []), "version must be text"),
        (lambda: ms.rules.Migration("2", [7]), "not a rule"),
        (lambda: ms.rules.Schema("1", recognise={"1": "x"}), "takes functions"),
    ],
)
def test_what_is_no_schema(make: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        make()


def test_a_schema_prints_as_code() -> None:
    assert repr(eval(repr(SCHEMA), NAMES)) == repr(SCHEMA)
    assert SCHEMA.version == "3.0"


@pytest.mark.parametrize("predicate", [lambda names: names["absent"].shape == (1,), lambda names: 1 / 0])
def test_a_predicate_that_raises(predicate: Any) -> None:
    schema = ms.rules.Schema("1", recognise={"1": predicate})
    with pytest.raises(RuleError, match="predicate that recognises version 1 raised"):
        ms.plan(nn.Linear(1, 1), {"weight": torch.ones(1, 1)}, rules=schema)


TURNED = ms.rules.Schema(
    "1",
    [ms.rules.Migration("2", [ms.rules.Transpose("fc.weight")])],
    recognise={"1": lambda names: "fc.bias" not in names, "2": lambda names: "fc.bias" in names},
)
"""Both versions have a square weight, so that the rules of the wrong one apply without an error."""


def test_the_version_is_that_of_the_part_that_is_loaded() -> None:
    wanted = nn.ModuleDict({"fc": nn.Linear(3, 3)})
    newest = {name: torch.randn_like(tensor) for name, tensor in wanted.state_dict().items()}
    for source in ({"model": newest, "step": 3}, {"old": {"fc.x": torch.ones(3, 3)}, "model": newest}):
        for options in ({}, {"key": "model"}):
            ms.load(wanted, source, rules=TURNED, **options)
            assert torch.equal(wanted["fc"].weight, newest["fc.weight"])
    planned = ms.plan(wanted, {"model": newest, "optimizer": {"a": torch.ones(2)}}, rules=TURNED)
    with torch.no_grad():
        wanted["fc"].weight.zero_()
    assert any("other parts" in note for note in ms.load(wanted, planned).notes)
    assert torch.equal(wanted["fc"].weight, newest["fc.weight"])


def test_a_version_of_a_part_that_is_not_recognised() -> None:
    """The version is not taken from another part of the file."""
    wanted = nn.ModuleDict({"fc": nn.Linear(2, 2, bias=False)})
    schema = ms.rules.Schema(
        "1", [ms.rules.Migration("2", [ms.rules.Transpose("fc.weight")])], recognise={"1": lambda n: "a.b" in n}
    )
    source = {"model": wanted.state_dict(), "a": {"b": torch.ones(2)}}
    before = whole(wanted)
    with pytest.raises(RuleError, match=r"mapping \[model\]: the version"):
        ms.load(wanted, source, rules=schema)
    assert whole(wanted) == before


def test_a_live_program_takes_the_version_of_its_part() -> None:
    serving = nn.Sequential(nn.Linear(3, 3)).eval()
    schema = ms.rules.Schema(
        "1",
        [ms.rules.Migration("2", [ms.rules.Rename("fc.*", "0.*")])],
        recognise={"1": lambda names: "fc.bias" in names, "2": lambda names: "fc.bias" not in names},
    )
    oldest = {"fc.weight": torch.randn(3, 3), "fc.bias": torch.randn(3)}
    live = ms.Live(serving)
    live.swap({"model": oldest, "step": 1}, rules=schema)
    assert torch.equal(live(torch.eye(3)), torch.eye(3) @ oldest["fc.weight"].T + oldest["fc.bias"])


class Renamed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(3, 3))


def trained(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


NAMED = ms.rules.Schema(
    "1",
    [ms.rules.Migration("2", [ms.rules.Rename("old.*", "new.*")])],
    recognise={"1": lambda names: "old.weight" in names, "2": lambda names: "new.weight" in names},
)


def test_of_a_file_with_several_state_dicts_the_error_names_them(tmp_path: Path) -> None:
    path, state = tmp_path / "both.pt", {"old.weight": torch.ones(2)}
    torch.save({"model": state, "ema": state}, path)
    with pytest.raises(RuleError, match="key='model' or 'ema'"):
        ms.convert_checkpoint(path, tmp_path / "new.safetensors", rules=NAMED)
    ms.convert_checkpoint(path, tmp_path / "new.safetensors", key="ema", rules=NAMED)
    assert list(ms.open(tmp_path / "new.safetensors")) == ["new.weight"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_the_state_of_an_optimizer_of_any_version(name: str) -> None:
    then, now = Renamed(name), Renamed("new")
    saved, optimizer = trained(then), torch.optim.Adam(now.parameters())
    ms.load_optimizer_state(now, optimizer, ms.optimizer_state(then, saved), rules=NAMED)
    for one, other in zip(then.parameters(), now.parameters(), strict=True):
        assert torch.equal(saved.state[one]["exp_avg"], optimizer.state[other]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_optimizer_has_no_shapes_to_recognise_a_version_by() -> None:
    then, now = Renamed("old"), Renamed("new")
    schema = ms.rules.Schema("1", NAMED.migrations, recognise={"1": lambda names: names["old.weight"].shape == (3, 3)})
    optimizer = torch.optim.Adam(now.parameters())
    with pytest.raises(RuleError, match="only the names of the parameters are known"):
        ms.load_optimizer_state(now, optimizer, ms.optimizer_state(then, trained(then)), rules=schema)
    assert not optimizer.state


def test_a_schema_alone_restores_one_module_and_its_optimizer(tmp_path: Path) -> None:
    then, now = Renamed("old"), Renamed("new")
    saved, optimizer = trained(then), torch.optim.Adam(now.parameters())
    ms.save({"net": then, "optimizer": saved}, tmp_path / "x.safetensors")
    ms.restore({"net": now, "optimizer": optimizer}, tmp_path / "x.safetensors", rules=NAMED)
    for one, other in zip(then.parameters(), now.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(saved.state[one]["exp_avg"], optimizer.state[other]["exp_avg"])
    ms.save({"net": then, "ema": then}, tmp_path / "y.safetensors")
    with pytest.raises(OptionError, match=r"rules=\{'net': schema\}"):
        ms.restore({"net": now, "ema": Renamed("new")}, tmp_path / "y.safetensors", rules=NAMED)
