"""Whatever stands in a tree, decoding it gives a value or a `CodecError`, and runs nothing of anybody's."""

import copy
import dataclasses
import enum
import json
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from modelstate.codec.codec import TAGS, decode, encode
from modelstate.errors import CodecError, UnknownClassError
from tests.codec.values import EXAMPLES, Config, Pair, Point
from tests.sweeps import examples

HERE = "tests.codec.values"
CONFIG = {"name": 1, "items": 2, "hidden": 3}

BAD: list[Any] = [
    b"bytes",
    {1, 2},
    object(),
    float("nan"),
    {1: 2},
    {"$nonsense": 1},
    {"$tuple": 3},
    {"$int": 3},
    {"$bytes": "a"},
    {"$str": "gICA"},
    {"$set": [[1]]},
    {"$set": [1, 1]},
    {"$frozenset": 1},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[[], 2]]},
    {"$OrderedDict": {"items": []}},
    {"$deque": []},
    {"$defaultdict": {"factory": "eval", "items": []}},
    {"$datetime": ["2020-01-01T00:00:00", 2, None]},
    {"$datetime": ["2020-01-01T00:00:00", 0, 3]},
    {"$timedelta": [10**12, 0, 0]},
    {"$range": [0, 3, 0]},
    {"$timezone": [{"$timedelta": [2, 0, 0]}]},
    {"$Path": 3},
    {"$Parameter": {"data": torch.ones(2, dtype=torch.int8), "requires_grad": True}},
    {"$Parameter": {"data": torch.ones(2), "requires_grad": 1}},
    {"$requires_grad": torch.ones(2, dtype=torch.int8)},
    {"$UninitializedParameter": {"dtype": {"$torch.dtype": "float32"}, "requires_grad": 1}},
    {"$UninitializedParameter": {"dtype": {"$torch.dtype": "int8"}, "requires_grad": True}},
    {"$UninitializedBuffer": {"dtype": {"$torch.dtype": "float32"}}},
    {"$tensor": 0},
    torch.ones(2, device="meta"),
    torch.ones(2, 2).to_sparse(),
    {"$torch.Size": [-1, "a"]},
    {"$torch.dtype": "Tensor"},
    {"$torch.device": "toaster"},
    {"$numpy.array": {"dtype": "<f4", "shape": [2], "order": "C", "data": torch.zeros(4, dtype=torch.uint8)}},
    {"$numpy.array": {"dtype": "<f4", "shape": [-1], "order": "C", "data": torch.zeros(4, dtype=torch.uint8)}},
    {"$numpy.array": {"dtype": "O", "shape": [1], "order": "C", "data": torch.zeros(8, dtype=torch.uint8)}},
    {"$numpy.array": {"dtype": "<f4", "shape": [1], "order": "C", "data": torch.zeros(1)}},
    {"$numpy.array": {"dtype": "V0", "shape": [10**18], "order": "C", "data": torch.zeros(0, dtype=torch.uint8)}},
    {"$numpy.array": {"dtype": "<U0", "shape": [10**11], "order": "C", "data": torch.zeros(0, dtype=torch.uint8)}},
    {"$numpy.dtype": [["a", "<f4"]]},
    {"$numpy.dtype": "V0"},
    {"$numpy.scalar": ["<i1", 3]},
    {"$numpy.scalar": ["<f4", "AA=="]},
    {"$object": {"codec": "nobody", "value": 1}},
    {"$enum": {"class": f"{HERE}:Color", "name": "BLUE"}},
    {"$enum": {"class": f"{HERE}:Color", "value": 1}},
    {"$enum": {"class": f"{HERE}:Point", "name": "x"}},
    {"$enum": {"class": "os:system", "name": "x"}},
    {"$dataclass": {"class": "subprocess:Popen", "fields": {"args": "ls"}}},
    {"$dataclass": {"class": "builtins:dict", "fields": {}}},
    {"$dataclass": {"class": f"{HERE}:Point", "fields": {"x": 1}}},
    {"$dataclass": {"class": f"{HERE}:Point", "fields": {"x": 1, "y": 2, "z": 3}}},
    {"$dataclass": {"class": f"{HERE}:Point", "fields": {"x": 1, "y": 2}, "attributes": {"z": 3}}},
    {"$dataclass": {"class": f"{HERE}:Config", "fields": CONFIG, "attributes": {"__class__": 1}}},
    {"$dataclass": {"class": f"{HERE}:Config.made_at", "fields": {}}},
    {"$namedtuple": {"class": "builtins:tuple", "fields": {}}},
    {"$namedtuple": {"class": f"{HERE}:Pair", "fields": [1, 2]}},
]  # fmt: skip


@pytest.mark.parametrize(
    "index", range(len(BAD)), ids=lambda index: f"{index}: {repr(BAD[index]).split('0x7')[0][:60]}"
)
def test_bad_trees_are_refused(index: int) -> None:
    for tree, place in ((BAD[index], "file"), ([0, BAD[index]], "file[1]")):
        with pytest.raises(CodecError) as caught:
            decode(tree, "file")
        assert caught.value.where.startswith(place)


_TREES = [(name, encode(value)) for name, value in EXAMPLES.items()]
_PLAIN = [None, True, -1, 0, 2**70, 1.5, "", "x", "<f4", "O", [], {}, [[1, 2]], {"$tuple": []}, {"$int": "0x1"}]
_TAGGED = [{f"${tag}": value} for tag in sorted(TAGS) for value in ([], {}, "x", [[1, 2]])]
_PIECES = st.sampled_from([*_PLAIN, *_TAGGED, torch.zeros(3, dtype=torch.uint8)])


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        found += _places(part, (*path, key))
    return found


_PLACES = [_places(tree) for _, tree in _TREES]


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_changed_trees_give_a_value_or_an_error(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(_TREES) - 1))
    tree: Any = [copy.deepcopy(_TREES[index][1])]
    path = (0, *data.draw(st.sampled_from(_PLACES[index])))
    node = tree
    for key in path[:-1]:
        node = node[key]
    how = data.draw(st.sampled_from(["replace", "remove", "rename"]))
    if how == "replace" or len(path) == 1:
        node[path[-1]] = data.draw(_PIECES)
    else:
        old = node.pop(path[-1])
        if how == "rename" and isinstance(node, dict):
            node[data.draw(st.sampled_from(["$tuple", "x", "$dict", "$set", "$bytes", "$numpy.scalar", "$enum"]))] = old
    try:
        decode(tree)
    except CodecError:
        return


def test_a_tree_that_is_too_deep_is_refused() -> None:
    tree: Any = 1
    for _ in range(10_000):
        tree = [tree]
    with pytest.raises(CodecError, match="nested too deeply"):
        decode(tree)
    tree = json.loads('{"$tuple":[' * 400 + "]}" * 400)
    with pytest.raises(CodecError, match="nested too deeply"):
        decode(tree)


# What must not run.

RAN: list[str] = []


@dataclasses.dataclass
class Loud:
    x: int

    def __new__(cls, *args: Any) -> "Loud":
        RAN.append("new")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        RAN.append("post_init")

    def __setattr__(self, name: str, value: Any) -> None:
        RAN.append("setattr")
        object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__class__", "__dict__", "x"):
            RAN.append(f"get {name}")
        return object.__getattribute__(self, name)

    def __hash__(self) -> int:
        RAN.append("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        RAN.append("eq")
        return True

    def __repr__(self) -> str:
        RAN.append("repr")
        return "Loud"


class LoudFlag(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        RAN.append("missing")
        return super()._missing_(value)


class LoudPair(Pair):
    __slots__ = ()

    def __new__(cls, *args: Any) -> "LoudPair":
        RAN.append("new")
        return tuple.__new__(cls, args)


def test_no_code_of_a_class_runs() -> None:
    trees = [encode(value) for value in (Loud(3), LoudFlag.A, LoudPair(1, 2), [Loud(3)])]
    RAN.clear()
    values = [decode(tree) for tree in trees]
    for tree in (
        {"$set": [trees[0]]},
        {"$dict": [[trees[0], 1], [trees[0], 1]]},
        {"$dict": [[{"$tuple": [trees[0]]}, 1]]},
    ):
        with pytest.raises(CodecError, match="__hash__"):
            decode(tree)
    with pytest.raises(UnknownClassError):
        decode({"$dataclass": {"class": f"{__name__}:Loud", "fields": {"x": trees[0], "y": trees[0]}}})
    assert not RAN
    assert values[0].x == 3
    assert values[1:3] == [LoudFlag.A, (1, 2)]


def test_nothing_is_imported_and_no_module_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("a module's code has run")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    monkeypatch.setitem(sys.modules, "no_module", None)  # type: ignore[arg-type]
    before = set(sys.modules)
    for text in ("lazy_module:A", "no_module:A", "this.antigravity:A", "antigravity:A", "tests.codec.gone:A"):
        for tag, field in (("enum", {"name": "A"}), ("dataclass", {"fields": {}}), ("namedtuple", {"fields": {}})):
            with pytest.raises(UnknownClassError, match=r"import .* first"):
                decode({f"${tag}": {"class": text, **field}})
    assert set(sys.modules) == before


def test_fields_that_do_not_match_are_named() -> None:
    tree = encode(Config("a"))
    fields = tree["$dataclass"]["fields"]
    fields["renamed"] = fields.pop("items")
    with pytest.raises(UnknownClassError, match="1 missing, 1 that the class does not have") as caught:
        decode(tree, "file")
    assert caught.value.expected == "name, items, hidden"
    assert caught.value.found == "name, hidden, renamed"
    assert "register_codec" in caught.value.remedy
    assert decode(encode(Point(1))) == Point(1)
