"""Problems: each says its name on one line, and many of them fit on a screen."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.errors import PlanError
from modelstate.problems import CHANGES_KIND, LOSES_VALUES, Problem, ProblemKind, explain, one_line, plan_error
from tests.faults import faulty_reads

SAMPLES = {
    kind: Problem(kind, "a.w", why="the reason", rules=("ms.rules.Ignore('a.w')",), others=("b.w",))
    for kind in ProblemKind
} | {
    ProblemKind.WRONG_SHAPE: Problem(ProblemKind.WRONG_SHAPE, "a.w", (2, 3), (3, 2)),
    ProblemKind.OTHER_DIMENSIONS: Problem(ProblemKind.OTHER_DIMENSIONS, "a.w", (), (1,), rules=("ms.rules.X()",)),
    ProblemKind.COMPLAINT: Problem(ProblemKind.COMPLAINT, "", why="the reason"),
    ProblemKind.NEEDS_MODEL: Problem(ProblemKind.NEEDS_MODEL, "a.w", found="Fill('a.w')"),
}
every_sample = pytest.mark.parametrize("problem", SAMPLES.values(), ids=[kind.name for kind in SAMPLES])


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem(ProblemKind.ONE_SHARD, "a-1-of-2.bin", found="x.json", others=("b",)), "a-1-of-2.bin without b"),
        (Problem(ProblemKind.MISSING, "a.w", (2, 3)), "a.w [2, 3]"),
        (Problem(ProblemKind.MISSING, "a.w", ()), "a.w []"),
        (Problem(ProblemKind.MISSING, "a._extra_state"), "a._extra_state"),
        (Problem(ProblemKind.UNEXPECTED, "b.w", found=(4,), why="registered as None"), "b.w [4] (registered as None)"),
        (Problem(ProblemKind.WRONG_SHAPE, "a.w", (2,), (3,)), "a.w: the model has [2], the checkpoint [3]"),
        (
            Problem(ProblemKind.OTHER_DIMENSIONS, "a.w", (), (1,), rules=("ms.rules.Reshape('a.w', [])",)),
            "a.w: the model has [], the checkpoint [1]: rules=[ms.rules.Reshape('a.w', [])]",
        ),
        (
            Problem(ProblemKind.WRONG_DTYPE, "a.w", "float16", "float32", why=LOSES_VALUES),
            "a.w: the model has float16, the checkpoint float32: casting loses values",
        ),
        (
            Problem(ProblemKind.WRONG_DTYPE, "a.w", "int64", "float32", why=CHANGES_KIND),
            "a.w: the model has int64, the checkpoint float32: casting changes their kind",
        ),
        (
            Problem(ProblemKind.QUANTIZED_WEIGHT, "a.w", found="GPTQ", others=("a.g_idx", "a.qweight", "a.scales")),
            "a.w: GPTQ: g_idx, qweight, and 1 more",
        ),
        (Problem(ProblemKind.IDLE_PATTERN, "head.*", found="allow_missing"), "allow_missing: head.*"),
        (Problem(ProblemKind.IDLE_PATTERN, "head", found="transform", why="none"), "transform: head (none)"),
        (Problem(ProblemKind.FREED_MEMORY, "a.w", 24, 0), "a.w: of 24 bytes, its storage has 0"),
    ],
)
def test_the_line(problem: Problem, line: str) -> None:
    assert problem.line() == line


def test_every_kind_has_a_title_of_its_own() -> None:
    assert len({kind.title for kind in ProblemKind}) == len(ProblemKind)


@every_sample
def test_problems_as_json(problem: Problem) -> None:
    found = json.loads(json.dumps(problem.as_dict()))
    assert found["problem"] == problem.kind.name.lower()
    assert found["name"] == problem.name
    assert f"to do: {found['remedy']}\n" in explain([problem])
    assert f"to do: {found['options'] or found['remedy']}\n" in explain([problem], command_line=True)


# Many of them.


def test_a_rule_that_matches_nothing_comes_before_what_follows_from_it() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(24)))
    state = {f"old.{name}": value for name, value in model.state_dict().items()} | {"more": torch.ones(1)}
    with pytest.raises(PlanError) as caught:
        ms.load(model, state, rules=[ms.rules.Rename("odl.*", "*")])
    lines = str(caught.value).splitlines()
    assert lines[1] == "  patterns and rules that match nothing (1):"
    assert lines[2] == "    rules: Rename('odl.*', '*')"


@pytest.mark.parametrize(
    ("command_line", "missing"),
    [
        (False, "to keep the model's own values for them: allow_missing=['a', 'c']"),
        (True, "--allow-missing a --allow-missing c, to keep the model's own values for them"),
    ],
)
def test_problems_are_explained_by_their_kind(command_line: bool, missing: str) -> None:
    problems = [
        Problem(ProblemKind.MISSING, "a", (2,)),
        Problem(ProblemKind.NO_VALUES, "b"),
        Problem(ProblemKind.MISSING, "c", (3,)),
    ]
    assert explain(problems, command_line=command_line) == (
        "  names of the model that the checkpoint lacks (2):\n"
        "    a [2]\n"
        "    c [3]\n"
        f"    to do: {missing}\n"
        f"    more: modelstate explain {ProblemKind.MISSING.page}\n"
        "  tensors of the source without values: on meta, or with their memory freed (1):\n"
        "    b\n"
        "    to do: take the state dict of a model that has been loaded\n"
        f"    more: modelstate explain {ProblemKind.NO_VALUES.page}"
    )
    assert explain([]) == ""


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, "    ... and 1 more"), (312, "    ... and 304 more")])
def test_many_problems_are_cut_short(count: int, more: str) -> None:
    lines = explain([Problem(ProblemKind.MISSING, f"layer{i}") for i in range(count)]).split("\n")
    assert lines[0].endswith(f"({count}):")
    assert lines[1:9] == [f"    layer{i}" for i in range(8)]
    assert lines[9:-2] == ([more] if more else [])


# The error.


def test_the_error_has_the_problems_and_their_text() -> None:
    problems = tuple(SAMPLES.values())
    error = plan_error("Net", "x.pt [model]", problems)
    assert error.problems == problems
    first, rest = str(error).split("\n", 1)
    assert first == f"cannot load x.pt [model] into Net; nothing has been changed. {len(problems)} problems:"
    assert rest == explain(problems)
    assert error.text(command_line=True).split("\n", 1)[1] == explain(problems, command_line=True)
    made = pickle.loads(pickle.dumps(error))
    assert (str(made), made.problems) == (str(error), problems)


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
        Problem(ProblemKind.MISSING, "a.weight", (2, 2)),
        Problem(ProblemKind.WRONG_SHAPE, "b.weight", (2, 2), (3,)),
        Problem(ProblemKind.NOT_A_TENSOR, "c.weight", found="str"),
        Problem(ProblemKind.WRONG_DTYPE, "c.bias", "float32", "float64", why=LOSES_VALUES),
        Problem(ProblemKind.UNEXPECTED, "d", found=(1,)),
        Problem(ProblemKind.IDLE_PATTERN, "z*", found="allow_missing"),
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


def test_names_are_refused_without_a_look_at_their_tensors(tmp_path: Path) -> None:
    ms.save({f"extra.{number}": torch.ones(1) for number in range(50)}, tmp_path / "x.safetensors")
    checkpoint = ms.open(tmp_path / "x.safetensors")
    with faulty_reads() as faults, pytest.raises(PlanError) as caught:
        ms.load(nn.Linear(2, 2), checkpoint)
    assert not faults.requests
    unexpected = [problem for problem in caught.value.problems if problem.kind is ProblemKind.UNEXPECTED]
    assert [problem.found for problem in unexpected] == [(1,)] * 50


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
    assert {(problem.kind, problem.found) for problem in flat} == {(ProblemKind.NOT_A_TENSOR, "ndarray")}
    assert "torch.from_numpy" in explain(flat)
    nested: dict[str, object] = {path.rpartition(".")[2]: arrays}
    for key in reversed(path.split(".")[:-1]):
        nested = {key: nested}
    assert ms.plan(model, {**nested, **beside}).problems == flat


def test_arrays_of_other_names_are_left_where_they_are() -> None:
    problems = ms.plan(nn.Linear(2, 2), {"rng": {"state": np.ones(2)}}).problems
    assert {problem.name for problem in problems} == {"weight", "bias", "rng"}
