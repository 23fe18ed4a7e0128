"""What has no encoding is refused by name, with its place and the way out."""

import dataclasses
import enum
import io
import sys
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.codec.codec import decode, encode
from modelstate.codec.walk import MAX_DEPTH
from modelstate.errors import CodecError
from tests.codec.values import Access, Config, Pair, Point


class Plain:
    pass


class SubTensor(torch.Tensor):
    pass


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class WithProperty:
    rate: float

    @property  # type: ignore[no-redef]
    def rate(self) -> float:
        return 1.0

    @rate.setter
    def rate(self, value: float) -> None:
        pass


@dataclasses.dataclass
class WithEnd:
    x: int

    def __del__(self) -> None:
        pass


@dataclasses.dataclass
class OfDict(dict):  # type: ignore[type-arg]
    x: int


class More(Pair):
    pass


def more() -> More:
    made = More(1, 2)
    made.note = 3
    return made


def with_attribute() -> Any:
    made: Any = OrderedDict()
    made.note = 1
    return made


def local() -> Any:
    @dataclasses.dataclass
    class Inside:
        x: int

    return Inside(1)


def local_enum() -> Any:
    return enum.Enum("Outside", "A").A


def unset() -> Any:
    made = Config(1)
    del made.name
    return made


def emptied() -> torch.Tensor:
    made = torch.ones(5)
    made.untyped_storage().resize_(8)
    return made


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class WithoutShape(nn.UninitializedParameter):
    pass


REFUSED = {
    "object": (Plain(), "Plain"),
    "class": (Plain, "type"),
    "function": (unset, "function"),
    "lambda": (lambda: 0, "function"),
    "module": (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    "file": (io.BytesIO(), "BytesIO"),
    "subclass of str": (Text("a"), "Text"),
    "property": (WithProperty(1.0), "'rate' is a property"),
    "destructor": (WithEnd(1), "__del__"),
    "dict below": (OfDict(1), "made empty"),
    "more than a namedtuple": (more(), "more than its fields"),
    "attributes": (with_attribute(), "attributes"),
    "local dataclass": (local(), "found by its name"),
    "local enum": (local_enum(), "found by its name"),
    "local namedtuple": (namedtuple("Nowhere", "a")(1), "found by its name"),
    "unset field": (unset(), "'name' has not been set"),
    "own factory": (defaultdict(lambda: 0), "factory"),
    "meta": (torch.empty(2, device="meta"), "meta device"),
    "sparse": (torch.ones(2, 2).to_sparse(), "sparse_coo"),
    "nested": (nested(), "nested tensor"),
    "quantized": (quantized(), "quantized"),
    "tensor subclass": (torch.ones(2).as_subclass(SubTensor), "SubTensor"),
    "no memory": (emptied(), "memory has been given back"),
    "no shape": (WithoutShape(), "WithoutShape"),
    "objects": (np.array([Plain()]), "dtype object"),
    "fields": (np.zeros(1, [("a", "i4"), ("b", "f4")]), "'b'"),
    "several flags": (Access.READ | Access.WRITE, "does not have"),
    "bit generator": (np.random.PCG64(1), "PCG64"),
    "generator of NumPy": (np.random.default_rng(1), "Generator"),
    "old generator of NumPy": (np.random.RandomState(1), "RandomState"),
    "generator of torch": (torch.Generator(), "torch._C.Generator"),
    "long double": (np.longdouble(1), "float128"),
    "long doubles": (np.ones(2, np.clongdouble), "complex256"),
    "texts that are no array": (np.array(["a"], "T"), "StringDType"),
    "bytes of NumPy": (np.void(b"a"), r"V1"),
    "matrix": (np.ma.masked_array([1], [True]), "MaskedArray"),
    "generator": ((x for x in ()), "generator"),
    "result of max": (torch.max(torch.ones(2, 2), 0), "torch.return_types"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_encoding_is_named(path: Path, name: str) -> None:
    value, named = REFUSED[name]
    with pytest.raises(CodecError, match="(?s)" + named.replace("(", r"\(")) as caught:
        ms.save({"model._extra_state": {"cfg": Config([1, 2, 3, value])}}, path)
    assert caught.value.where.startswith(f"{path}: model._extra_state['cfg'].name[3]")
    assert ("ms.RNG" in caught.value.remedy) is (named in ("Generator", "RandomState", "torch._C.Generator"))
    assert caught.value.remedy
    assert not path.exists()


def looped() -> tuple[Any, ...]:
    items: list[Any] = []
    items.append({"a": (items,)})
    mapping: dict[Any, Any] = {}
    mapping[1] = mapping
    config = Config(1)
    config.items = config
    return items, mapping, config


@pytest.mark.parametrize(
    ("value", "where", "says"),
    [
        ({"cfg": Config(1, [0, 0, 0, Plain()])}, "['cfg'].items[3]", "register_codec"),
        ({3: (Plain(),)}, "[3][0]", "register_codec"),
        (Point(OrderedDict(a=Pair(1, Plain()))), ".x['a'].second", "register_codec"),
        ({(1, Plain): 2}, "[key a tuple of 2][1]", "register_codec"),
        (Plain(), "", "register_codec"),
        *zip(looped(), ("[0]['a'][0]", "[1]", ".items"), ["holds itself"] * 3, strict=True),
    ],
)
def test_places_are_written_as_code(path: Path, value: Any, where: str, says: str) -> None:
    with pytest.raises(CodecError, match=says) as caught:
        ms.save({"_extra_state": value}, path)
    assert caught.value.where == f"{path}: _extra_state{where}"


def test_what_stands_twice_is_no_loop() -> None:
    items = [1]
    assert decode(encode([items, items, (items,)])) == [[1], [1], ([1],)]


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}, Point, Config])
def test_depth_is_bounded(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert repr(decode(encode(value))) == repr(value)
    with pytest.raises(CodecError, match="nested too deeply"):
        encode(wrap(value))
    for _ in range(10_000):
        value = [value]
    with pytest.raises(CodecError, match="nested too deeply"):
        encode(value)


def test_a_short_stack_is_no_recursion_error() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = Config(value)
    tree = encode(value)

    def deeper(levels: int, function: Any, given: Any) -> Any:
        return deeper(levels - 1, function, given) if levels else function(given)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # compilers raise it
    try:
        for function, given in ((encode, value), (decode, tree)):
            with pytest.raises(CodecError, match="stack that is left"):
                deeper(700, function, given)
    finally:
        sys.setrecursionlimit(limit)


def test_few_lists_that_stand_for_very_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelstate.codec.walk.MAX_NODES", 10_000)
    items: list[Any] = [0]
    for _ in range(60):
        items = [items, items]
    for function in (encode, decode):
        with pytest.raises(CodecError, match="too many values"):
            function(items)


def test_values_that_would_run_code_as_keys_are_refused() -> None:
    for value in ({Hashed(1): 2}, {Hashed(1)}, {(1, Point(Hashed(1))): 1}, frozenset({Shy.A})):
        with pytest.raises(CodecError, match="__hash__ of its own"):
            encode(value)
    assert decode(encode([Hashed(1), {1: Shy.A}])) == [Hashed(1), {1: Shy.A}]


@dataclasses.dataclass(frozen=True)
class Hashed:
    x: int

    def __hash__(self) -> int:
        return 3


class Shy(enum.Enum):
    A = 1

    def __hash__(self) -> int:
        return 3
