"""Versions of a model's state: checkpoints of any of them load into the present one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, RuleError, SchemaError
from tests.place.fingerprint import whole

SCHEMA = ms.Schema(
    "1.0",
    [
        ms.Migration("2.0", [ms.Rename("old.*", "body.*")]),
        ms.Migration("2.1", [ms.Split("body.qk.*", ["body.q.*", "body.k.*"])]),
        ms.Migration("3.0", [ms.Rename("body.*", "old.*"), ms.Fill("old.extra", 0.0)]),
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
    state: dict[str, Any] = ms.Rules([rule for rule in steps if not isinstance(rule, ms.Fill)]).apply(FIRST)
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


def test_back_to_an_older_version() -> None:
    newest = ms.Rules(rule for rule in SCHEMA.rules("1.0", "2.1")).apply(FIRST)
    again = SCHEMA.rules("2.1", "1.0").apply(newest)
    assert again.keys() == FIRST.keys()
    assert all(torch.equal(again[name], value) for name, value in FIRST.items())
    assert SCHEMA.rules("2.0", "2.0") == ()


def test_a_name_may_come_back_in_a_later_version() -> None:
    """What would be a circle within one migration is none over several."""
    there, back = ms.Migration("2", [ms.Rename("a", "b")]), ms.Migration("3", [ms.Rename("b", "a")])
    rules = ms.Schema("1", [there, back]).rules("1")
    assert list(rules.apply({"a": torch.ones(1)})) == ["a"]
    with pytest.raises(RuleError, match="back and forth"):
        ms.Rules([ms.Rename("a", "b"), ms.Rename("b", "a")]).apply({"a": torch.ones(1)})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"other.weight": torch.ones(1)}, "nothing says of which version"),
        ({"old.qk.weight": torch.ones(1), "old.extra": torch.ones(1)}, "several versions recognise"),
    ],
)
def test_checkpoints_of_no_version(source: Any, says: str) -> None:
    wanted = model()
    before = whole(wanted)
    for do in (ms.plan, ms.load):
        with pytest.raises(SchemaError, match=says):
            do(wanted, source, rules=SCHEMA)
    assert whole(wanted) == before


@pytest.mark.parametrize("version", ["0.9", "4.0", ""])
def test_versions_that_are_none(version: str) -> None:
    with pytest.raises(SchemaError, match="not a version"):
        SCHEMA.rules(version)
    with pytest.raises(SchemaError, match="not a version"):
        SCHEMA.rules("1.0", version)


def test_what_cannot_go_back() -> None:
    schema = ms.Schema("1", [ms.Migration("2", [ms.Ignore("a")])])
    with pytest.raises(RuleError, match="cannot be reversed"):
        schema.rules("2", "1")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ms.Schema("1", [ms.Migration("1", [])]), "twice"),
        (lambda: ms.Schema("1", [("2", [])]), "not a migration"),
        (lambda: ms.Schema(1), "version is text"),
        (lambda: ms.Migration(2, []), "version is text"),
        (lambda: ms.Migration("2", [7]), "not a rule"),
        (lambda: ms.Schema("1", recognise={"1": "x"}), "takes functions"),
    ],
)
def test_what_is_no_schema(make: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        make()


def test_recognising_a_version_that_is_none() -> None:
    with pytest.raises(SchemaError, match="not a version"):
        ms.Schema("1", recognise={"2": bool})


def test_a_schema_prints_as_code() -> None:
    assert repr(eval(repr(SCHEMA), vars(ms))) == repr(SCHEMA)
    assert SCHEMA.version == "3.0"


@pytest.mark.parametrize("predicate", [lambda names: names["absent"].shape == (1,), lambda names: 1 / 0])
def test_a_predicate_that_raises(predicate: Any) -> None:
    schema = ms.Schema("1", recognise={"1": predicate})
    with pytest.raises(SchemaError, match="predicate that recognises version 1 raised"):
        ms.plan(nn.Linear(1, 1), {"weight": torch.ones(1, 1)}, rules=schema)
