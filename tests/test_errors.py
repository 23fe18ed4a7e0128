"""Every error: it stands in the tree that the module draws, carries its fields, and survives a pickle."""

import builtins
import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
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
LINE = re.compile(r"^(?P<stem>[│ ├└─]*)(?P<name>\w+Error)(?: +\((?P<builtin>\w+(?:, \w+)*)\))?(?: |$)", re.MULTILINE)


def drawn() -> dict[str, tuple[str, str]]:
    """The tree of the docstring: from each class to its parent, and to the builtin that it names."""
    found: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    for match in LINE.finditer(errors.__doc__ or ""):
        depth = len(match["stem"]) // 4
        del above[depth:]
        assert match["name"] not in found
        found[match["name"]] = (above[-1] if above else "Exception", match["builtin"] or "")
        above.append(match["name"])
    return found


TREE = drawn()


def make(kind: type[ModelStateError]) -> ModelStateError:
    return kind("something is wrong", **FIELDS, **OWN.get(kind, {}))


def test_every_class_stands_in_the_tree() -> None:
    assert set(TREE) == set(CLASSES)
    assert len(TREE) > 40


def test_a_class_derives_from_what_the_tree_says() -> None:
    for kind in CLASSES.values():
        parent, builtin = TREE[kind.__name__]
        listed = set(builtin.split(", ")) if builtin else set()
        assert kind.__bases__[0].__name__ == parent, kind
        assert issubclass(kind, ModelStateError)
        named = {base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"} - {"Exception"}
        assert named == listed, kind
        assert all(issubclass(kind, getattr(builtins, name)) for name in listed)


def test_every_class_says_what_it_is_for() -> None:
    for kind in CLASSES.values():
        assert (kind.__doc__ or "").strip(), kind
        assert kind.__doc__ is not kind.__bases__[0].__doc__, kind


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


def test_names_of_files_move_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "mod\x1b-el.pt").touch()
    with pytest.raises(errors.SourceNotFoundError) as raised:
        ms.open(tmp_path / "model.pt")
    assert "mod\\x1b-el.pt" in str(raised.value)
    assert "\x1b" not in str(raised.value)


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
