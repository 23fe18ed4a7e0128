"""Every error: it stands in the tree that the module draws, carries its fields, and survives a pickle."""

import copy
import pickle
from typing import Any

import pytest

from modelstate import errors
from modelstate.errors import CUT_SHORT, AmbiguousCheckpointError, ForbiddenGlobalError, ModelStateError, PlanError
from modelstate.problems import Problem, ProblemKind

CLASSES = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type)
    and issubclass(found, BaseException)
    and found.__module__ == errors.__name__
    and not issubclass(found, Warning)
}
FIELDS = {"where": "x.pt, byte 7", "expected": "8 bytes", "found": "7 bytes", "remedy": "copy it again"}
REMEDIES = {
    errors.TruncatedFileError: CUT_SHORT,
    errors.DamagedFileError: CUT_SHORT,
    errors.NewerManifestError: "update modelstate",
    errors.CanaryError: "nothing has been changed; look at the new weights, or at the canary's conditions",
    errors.ModelCodeError: "see the traceback of the cause",
    errors.TargetExistsError: "take another path, or overwrite=True to replace it",
}
"""The classes whose errors have a remedy of the class where the site gives none."""
OWN: dict[type, dict[str, Any]] = {
    ForbiddenGlobalError: {"refused": [("os.system", "a.b")]},
    AmbiguousCheckpointError: {"candidates": [("model", 3), ("ema", 2)]},
    errors.ExtraStateError: {"names": ["p", "epoch"]},
    PlanError: {
        "problems": [
            Problem(ProblemKind.MISSING, "a", (2, 3), has_values="b"),
            Problem(ProblemKind.WRONG_SHAPE, "c", (1,), (2,)),
        ]
    },
}


def make(kind: type[ModelStateError]) -> ModelStateError:
    return kind("something is wrong", **FIELDS, **OWN.get(kind, {}))


def test_the_text_has_all_fields() -> None:
    for kind in CLASSES.values():
        more = f"\n  more: modelstate explain {kind.page}" if kind.page else ""
        fields = "x.pt, byte 7: something is wrong\n  expected: 8 bytes\n  found: 7 bytes\n  to do: copy it again"
        # The problems of a plan name their pages themselves.
        assert str(make(kind)) == (fields if kind is PlanError else fields + more)
        remedy = f"\n  to do: {REMEDIES[kind]}" if kind in REMEDIES else ""
        assert str(kind("something is wrong")) == "something is wrong" + remedy + more
        assert str(kind("something is wrong", found=0)) == "something is wrong\n  found: 0" + remedy + more


def test_fields_are_text() -> None:
    for kind in CLASSES.values():
        error = kind("wrong", where=OSError("cause"), expected=3, found=["a"], remedy=4)
        fields = [error.what, error.where, error.expected, error.found, error.remedy]
        assert fields == ["wrong", "cause", "3", "['a']", "4"], kind


@pytest.mark.parametrize("field", ["what", *FIELDS])
def test_the_text_moves_no_cursor(field: str) -> None:
    fields = {"what": "wrong"} | {field: "a\x1b[2J\u202eb\nc"}
    error = ModelStateError(**fields)
    assert "a\\x1b[2J\\u202eb" in str(error)
    assert all(line.isprintable() for line in str(error).split("\n"))
    assert getattr(error, field) == fields[field]


def assert_alike(made: ModelStateError, error: ModelStateError) -> None:
    assert type(made) is type(error)
    assert str(made) == str(error)
    assert vars(made) == vars(error)
    assert made.args == error.args


def test_pickles_and_copies_keep_everything() -> None:
    for kind in CLASSES.values():
        error = make(kind)
        error.add_note("in a worker")
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert_alike(pickle.loads(pickle.dumps(error, protocol)), error)
        assert_alike(copy.copy(error), error)
        assert_alike(copy.deepcopy(error), error)


@pytest.mark.parametrize("kind", OWN)
def test_fields_of_their_own_are_tuples(kind: type[ModelStateError]) -> None:
    ((name, value),) = OWN[kind].items()
    assert getattr(make(kind), name) == tuple(value)
    assert getattr(kind("wrong"), name) == ()
