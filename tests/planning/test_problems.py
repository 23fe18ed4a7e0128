"""Problems: each says its name on one line, and many of them fit on a screen."""

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate import problems as module
from modelstate.errors import PlanError
from modelstate.problems import (
    BadExtraState,
    BadRule,
    BufferConflict,
    Complaint,
    CyclicRules,
    FakeTensors,
    FreedMemory,
    GuessedRule,
    IdlePattern,
    Missing,
    NameClash,
    NeedsModel,
    NotATensor,
    NothingFits,
    NotYetInitialised,
    NoValues,
    NumPyArray,
    OneShard,
    OptimizerMisfit,
    OtherDimensions,
    OtherNames,
    OtherSharding,
    Problem,
    QuantizedCast,
    QuantizedIntoPlain,
    QuantizedWeight,
    ScriptedOnMeta,
    ShardedTensors,
    ShardedTransform,
    ShardsInUse,
    TieConflict,
    UnevenTransform,
    Unexpected,
    Uninitialised,
    UnloadableLayout,
    UnmergedAdapter,
    Unread,
    WrongDtype,
    WrongShape,
    explain,
    grouped,
    one_line,
    plan_error,
)

CLASSES = {
    name: found
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Problem) and found is not Problem
}

SAMPLES: dict[Problem, str] = {
    OneShard("a-00001-of-00002.bin", "x.json", ("a-00002-of-00002.bin",)): "a-00001-of-00002.bin without "
    "a-00002-of-00002.bin",
    Missing("a.w", (2, 3)): "a.w [2, 3]",
    Missing("a.w", ()): "a.w []",
    Missing("a._extra_state"): "a._extra_state",
    Unexpected("b.w", (4,)): "b.w [4]",
    Unexpected("b.w", (4,), why="registered as None"): "b.w [4] (registered as None)",
    Unexpected("step"): "step",
    OtherNames("a.w", 12, "the prefix 'module.' of the checkpoint", "ms.rules.Prefix(strip='module.')"): (
        "12 names differ only by the prefix 'module.' of the checkpoint (as 'a.w'): "
        "rules=[ms.rules.Prefix(strip='module.')]"
    ),
    WrongShape("a.w", (2, 3), (3, 2)): "a.w: the model has [2, 3], the checkpoint [3, 2]",
    WrongDtype("a.w", "float16", "float32", "lossy"): (
        "a.w: the model has float16, the checkpoint float32: casting loses values"
    ),
    WrongDtype("a.w", "int64", "float32", "kind"): (
        "a.w: the model has int64, the checkpoint float32: casting changes their kind"
    ),
    QuantizedCast("a.w", "float32", "bfloat16", "Int8Tensor"): (
        "a.w: dtype= is float32, the checkpoint has Int8Tensor of bfloat16"
    ),
    QuantizedIntoPlain("a.w", "float32", "bfloat16", "Int8Tensor"): (
        "a.w: the checkpoint has Int8Tensor of bfloat16, the model a plain tensor of float32"
    ),
    QuantizedWeight("a.w", "float8_e4m3fn with scales", ("a.w_scale",), ("ms.rules.Dequantize('a.w', 'a.w_scale')",)): (
        "a.w: float8_e4m3fn with scales: w_scale"
    ),
    QuantizedWeight("a.w", "GPTQ", ("a.g_idx", "a.qweight", "a.scales"), tool="gptqmodel reads it"): (
        "a.w: GPTQ: g_idx, qweight, and 1 more"
    ),
    NotATensor("a.w", "list"): "a.w: found list",
    Unread("a.w", "a nested tensor is not supported", "save its parts"): "a.w: a nested tensor is not supported",
    FakeTensors("a.w"): "a.w: a FakeTensor in the model",
    ShardedTensors("a.w"): "a.w: a DTensor in the checkpoint, a whole tensor in the model",
    UnloadableLayout("a.w", "the ranks hold partial sums"): "a.w: the ranks hold partial sums",
    OtherSharding("a.w"): "a.w",
    ShardsInUse("a.w", "changes its dtype to bfloat16"): "a.w: changes its dtype to bfloat16",
    ShardedTransform(
        "a.w", "Quantize()", "takes the whole tensor", "[0:2, 0:8]"
    ): "a.w: Quantize() takes the whole tensor, and this rank holds [0:2, 0:8]",
    NumPyArray("a.w", "ndarray"): "a.w: found ndarray",
    UnmergedAdapter("a.lora_A.weight"): "a.lora_A.weight",
    OtherDimensions("a.w", (), (1,), "ms.rules.Reshape('a.w', [])"): (
        "a.w: the model has [], the checkpoint [1]: rules=[ms.rules.Reshape('a.w', [])]"
    ),
    TieConflict("a.w", ("b.w", "c.w")): "a.w is the same tensor as b.w, c.w, but the checkpoint's values differ",
    BufferConflict("a.ids"): "a.ids",
    Missing("a.w", (2,), has_values=False, initialiser="Linear.reset_parameters"): "a.w [2]",
    ScriptedOnMeta("a.w"): "a.w",
    Uninitialised("a.w", "buffer"): "a.w (buffer)",
    Uninitialised("a.w", "parameter", "Linear.reset_parameters"): "a.w (parameter)",
    IdlePattern("head.*", "allow_missing"): "allow_missing: head.*",
    IdlePattern("head", "transform", "f applies to none of the names that match"): (
        "transform: head (f applies to none of the names that match)"
    ),
    UnevenTransform("a.w", "f", ("b.w", "c.w")): "f is for a.w, but not for b.w, c.w, which is the same tensor",
    NameClash("a.w", ("x.w", "y.w")): "a.w: from x.w, y.w",
    NoValues("a.w"): "a.w",
    NotYetInitialised("a.w"): "a.w",
    FreedMemory("a.w", 24, 0): "a.w: of 24 bytes, its storage has 0",
    OptimizerMisfit("adam.a.w", "nothing was saved for it"): "adam.a.w: nothing was saved for it",
    NothingFits("Net"): "Net",
    BadRule("a.w", "Transpose('*.w')", "it has one dimension"): "Transpose('*.w') on a.w: it has one dimension",
    NeedsModel("a.*", "Fill('a.*')"): "Fill('a.*')",
    GuessedRule("Rename('a', 'b')"): "Rename('a', 'b')",
    CyclicRules("a", ("Rename('a', 'b')", "Rename('b', 'a')")): "a: by Rename('a', 'b'), then Rename('b', 'a')",
    Complaint("", "size mismatch for a.w"): "size mismatch for a.w",
    BadExtraState("a._extra_state", "it lacks 'p'", "ExtraStateError"): "a._extra_state: it lacks 'p'",
}

every_sample = pytest.mark.parametrize("problem", SAMPLES, ids=repr)


def test_there_is_a_sample_of_every_class() -> None:
    assert {type(problem) for problem in SAMPLES} == set(CLASSES.values())


@every_sample
def test_the_line(problem: Problem) -> None:
    assert problem.line() == SAMPLES[problem]
    assert problem.name in problem.line()


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_every_class_has_a_title_and_a_remedy_of_its_own(kind: type[Problem]) -> None:
    for other in CLASSES.values():
        assert other is kind or other.title != kind.title
    assert kind.remedy
    assert "\n" not in kind.title + kind.remedy
    assert not (kind.__doc__ or "").startswith(kind.__name__)  # what a dataclass without a docstring gets


@every_sample
def test_problems_are_values(problem: Problem) -> None:
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert hash(dataclasses.replace(problem)) == hash(problem)
    assert dataclasses.replace(problem, name="other") != problem
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.name = "other"  # type: ignore[misc]


@every_sample
def test_problems_as_json(problem: Problem) -> None:
    found = json.loads(json.dumps(problem.as_dict()))
    assert found.pop("problem") == type(problem).__name__
    assert found.pop("remedy") == type(problem).remedy_for([problem])
    assert found == json.loads(json.dumps(dataclasses.asdict(problem)))


# Many of them.


def test_groups_keep_their_order() -> None:
    a, b, c = Missing("a"), Unexpected("b"), Missing("c")
    assert grouped([a, b, c]) == [(Missing, [a, c]), (Unexpected, [b])]
    assert grouped([]) == []


def test_a_rule_that_matches_nothing_comes_before_what_follows_from_it() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(24)))
    state = {f"old.{name}": value for name, value in model.state_dict().items()} | {"more": torch.ones(1)}
    with pytest.raises(PlanError) as caught:
        ms.load(model, state, rules=[ms.rules.Rename("odl.*", "*")])
    lines = str(caught.value).splitlines()
    assert lines[1] == "  patterns and rules that match nothing (1):"
    assert lines[2] == "    rules: Rename('odl.*', '*')"


def test_problems_are_explained_by_their_cause() -> None:
    assert explain([Missing("a", (2,)), NoValues("b"), Missing("c", (3,))]) == (
        "  names of the model that the checkpoint lacks (2):\n"
        "    a [2]\n"
        "    c [3]\n"
        "    to do: to keep the model's own values for them: allow_missing=['a', 'c']\n"
        "    more: modelstate explain missing-keys\n"
        "  tensors of the source without values: on meta, or with their memory freed (1):\n"
        "    b\n"
        "    to do: take the state dict of a model that has been loaded\n"
        "    more: modelstate explain left-on-meta"
    )
    assert explain([]) == ""


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, "    ... and 1 more"), (312, "    ... and 304 more")])
def test_many_problems_are_cut_short(count: int, more: str) -> None:
    lines = explain([Missing(f"layer{i}") for i in range(count)]).split("\n")
    assert lines[0].endswith(f"({count}):")
    assert lines[1:9] == [f"    layer{i}" for i in range(8)]
    assert lines[9:-2] == ([more] if more else [])
    assert lines[-2].startswith("    to do: ")
    assert lines[-1] == "    more: modelstate explain missing-keys"


def test_all_causes_at_once_fit_on_a_screen() -> None:
    everything = [dataclasses.replace(problem, name=f"{problem.name}{i}") for problem in SAMPLES for i in range(100)]
    text = explain(everything)
    assert len(text.split("\n")) <= len(CLASSES) * 12
    for kind in CLASSES.values():
        assert kind.title in text
        # What to do about missing names depends on the other problems.
        assert kind is Missing or kind.remedy_for([problem for problem in everything if type(problem) is kind]) in text


# The error.


def test_the_error_has_the_problems_and_their_text() -> None:
    problems = list(SAMPLES)
    error = plan_error("Net", "x.pt [model]", problems)
    assert isinstance(error, PlanError)
    assert isinstance(error, RuntimeError)
    assert error.problems == tuple(problems)
    first, rest = str(error).split("\n", 1)
    assert first == f"cannot load x.pt [model] into Net; nothing has been changed. {len(problems)} problems:"
    assert rest == explain(problems)
    assert "1 problem:" in str(plan_error("Net", "x.pt", [NoValues("a")]))


def test_the_error_survives_a_pickle() -> None:
    error = plan_error("Net", "x.pt", list(SAMPLES))
    made = pickle.loads(pickle.dumps(error))
    assert (str(made), made.problems) == (str(error), error.problems)


def broken() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("a", "b", "c")})
    state: dict[str, Any] = dict(model.state_dict())
    del state["a.weight"]
    state |= {
        "b.weight": torch.ones(3),
        "c.weight": "text",
        "c.bias": torch.ones(2, dtype=torch.float64),
        "d": torch.ones(1),
    }
    return model, state


def test_a_plan_and_a_load_report_the_same_problems_at_once() -> None:
    model, state = broken()
    expected: set[Problem] = {
        Missing("a.weight", (2, 2)),
        WrongShape("b.weight", (2, 2), (3,)),
        NotATensor("c.weight", "str"),
        WrongDtype("c.bias", "float32", "float64", "lossy"),
        Unexpected("d", (1,)),
        IdlePattern("z*", "allow_missing"),
    }
    plan = ms.plan(model, state, allow_missing=["z*"])
    adding = {"allow_missing": "*allow_missing"}
    assert not plan.ok
    assert set(plan.problems) == expected
    assert len(plan.problems) == len(expected)
    assert explain(plan.problems, given=adding) in str(plan)
    with pytest.raises(PlanError, match="cannot load mapping into ModuleDict") as caught:
        ms.load(model, state, allow_missing=["z*"])
    assert caught.value.problems == plan.problems


class OfTheModel(errors.ExtraStateError):
    """An error of a user's, whose constructor does not call that of the class that it extends."""

    def __init__(self, number: int) -> None:
        Exception.__init__(self, f"number {number}\nis wrong")


class Strict(nn.Module):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        raise OfTheModel(state)


def test_an_error_of_the_user_without_fields_is_a_problem_like_others() -> None:
    with pytest.raises(errors.PlanError, match="OfTheModel: number 3 is wrong") as caught:
        ms.load(Strict(), {"_extra_state": 3})
    assert isinstance(caught.value.__cause__, OfTheModel)
    assert str(caught.value.__cause__) == "number 3\nis wrong"


def test_foreign_errors_in_one_line() -> None:
    assert one_line(ValueError("a\nb")) == "ValueError: a b"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(errors.OptionError("no", found="1\n2", remedy="x")) == "no (found 1 2); x"


@pytest.mark.parametrize("path", ["model", "model.net", "a.b"])
@pytest.mark.parametrize("beside", [{}, {"epoch": 3, "rng": {"state": np.ones(2)}}])
def test_nested_arrays_are_named_as_flat_ones_are(path: str, beside: dict[str, object]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    arrays = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    flat = ms.plan(model, arrays).problems
    assert {type(problem) for problem in flat} == {NumPyArray}
    nested: dict[str, object] = {path.rpartition(".")[2]: arrays}
    for key in reversed(path.split(".")[:-1]):
        nested = {key: nested}
    assert ms.plan(model, {**nested, **beside}).problems == flat


def test_arrays_of_other_names_are_left_where_they_are() -> None:
    problems = ms.plan(nn.Linear(2, 2), {"rng": {"state": np.ones(2)}}).problems
    assert {problem.name for problem in problems} == {"weight", "bias", "rng"}
