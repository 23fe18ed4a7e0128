"""Values of every kind that has an encoding, and how two of them are compared bit for bit."""

import dataclasses
import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn


class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # noqa: PIE796
    GREEN = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Word(enum.StrEnum):
    YES = "yes"


@dataclasses.dataclass
class Config:
    name: Any
    items: Any = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=3, init=False)

    def __post_init__(self) -> None:
        self.made_at = "construction"

    class Inner(enum.Enum):
        X = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: Any
    y: Any = 0.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


Pair = namedtuple("Pair", "first second")


class Typed(NamedTuple):
    number: Any
    text: Any = ""


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and one content, NaN, -0.0 and order included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, nn.UninitializedParameter | nn.UninitializedBuffer):
        return (a.dtype, a.requires_grad, a.device) == (b.dtype, b.requires_grad, b.device)
    if isinstance(a, torch.Tensor):
        flags = (a.dtype, a.shape, a.requires_grad, a.device) == (b.dtype, b.shape, b.requires_grad, b.device)
        raw = [t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)] if flags else []
        return flags and torch.equal(*raw)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.str_):
        return list(a) == list(b)
    if isinstance(a, np.ndarray | np.generic):
        layout = not isinstance(a, np.ndarray) or same_layout(a, b)
        return layout and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        alike = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return (
            alike
            and same(list(a.items()), list(b.items()))
            and same(getattr(a, "_metadata", 0), getattr(b, "_metadata", 0))
        )
    if isinstance(a, set | frozenset):
        return a == b and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        names = {f.name for f in dataclasses.fields(a)} | set(getattr(a, "__dict__", {}))
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, enum.Enum):
        return a is b
    if isinstance(a, datetime):
        return a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold and repr(a) == repr(b)
    if isinstance(a, int | np.dtype):
        return a == b
    return repr(a) == repr(b)


def same_layout(a: Any, b: Any) -> bool:
    flags = [(one.flags.c_contiguous, one.flags.f_contiguous) for one in (a, b)]
    return flags[0] == flags[1] or not any(flags[1])


NANS = [
    struct.unpack("<d", struct.pack("<Q", bits))[0]
    for bits in (0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001)
]


def _versioned() -> Any:
    return nn.BatchNorm1d(2).state_dict()


EXAMPLES: dict[str, Any] = {
    "none": None,
    "bools": [True, False, 1, 0, 1.0, 0.0, -0.0],
    "ints": [2**53, 2**53 + 1, -(2**53) - 1, 2**64, 10**5000, -(10**5000)],
    "floats": [math.inf, -math.inf, *NANS, 5e-324, 1.7976931348623157e308, 0.1],
    "complex": [1 - 0.0j, complex(-0.0, math.nan), complex(math.inf, 2)],
    "text": ["", "é\0\n", "\ud800", "\ud83d\ude00", "😀", "$tuple"],
    "bytes": [b"", b"\xff\0"],
    "tuples": [(), (1,), ((), [()])],
    "dicts": [{}, {1: "a", "1": "b", 1.5: 0, (1, "a"): [], None: 3, b"k": 1}, {"\ud800": 1}, {"b": 1, "a": 2}],
    "like tags": [
        {"$tuple": [1]},
        {"$": 1},
        {"$a": 1, "$b": 2},
        {"$tensor": 0},
        {"$dict": [[1, 2]]},
        {"$dict": {"$dict": []}},
    ],
    "sets": [set(), {1, "a", (2, 3)}, frozenset({b"x", None, 2.5})],
    "ordered": [OrderedDict(), OrderedDict([("b", 1), ("a", 2)])],
    "state dict": _versioned(),
    "default": [defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(int)],
    "counter": [Counter("abca"), Counter({1: -2, "1": 0})],
    "enums": [Color.RED, Color.CRIMSON, Color.GREEN, Level.HIGH, Word.YES, Config.Inner.X],
    "flags": [Access.READ, Bits.A],
    "dataclasses": [Config("a", [Config((1,))]), Point(1, (2,)), Frozen({"a": Point(0)})],
    "namedtuples": [Pair(1, [2]), Typed(Pair(1, 2), "x")],
    "keys of classes": {Color.RED: 1, Point(1, 2): 2, Frozen((Point(1),)): 3, Pair(1, 2): 4, Access.READ: 5},
    "paths": [Path("/a/b"), Path("x/../y"), Path("\udce9")],
    "times": [
        datetime(2020, 1, 2, 3, 4, 5, 6, fold=1),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=2, microseconds=1), "here")),
        date(2020, 2, 29),
        timedelta(-1, 2, 3),
        timedelta.max,
    ],
    "ranges": [range(3), range(9, -1, -2), range(-(2**62), 2**62, 2**60)],
    "torch constants": [torch.Size([2, 0]), torch.float8_e4m3fn, torch.bool, torch.device("cuda:3")],
    "tensors": [
        torch.arange(3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True]),
        torch.ones(3, requires_grad=True),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.tensor([math.nan, -0.0]),
        torch.arange(4).to(torch.uint16),
        torch.ones(2).to(torch.float8_e5m2),
    ],
    "parameters": [
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2, dtype=torch.int8), False),
        nn.Parameter(torch.ones(())),
    ],
    "uninitialised": [
        nn.UninitializedParameter(),
        nn.UninitializedParameter(False, dtype=torch.int8),
        nn.UninitializedBuffer(dtype=torch.float64),
        nn.UninitializedBuffer(True),
    ],
    "numpy scalars": [
        np.float32(0.1),
        np.float16(-0.0),
        np.float64("nan"),
        np.bytes_(b"a\0"),
        np.datetime64("2024-05-01", "ms"),
        np.timedelta64(3, "D"),
        np.array(["2020", "NaT"], "M8[s]"),
        np.float32("inf"),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.str_("a\0"),
    ],
    "numpy arrays": [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), ">f4")),
        np.array(3.5),
        np.zeros((0, 2), np.uint8),
        np.array(["a", "béc"]),
        np.array([b"a", b"bcd"]),
        np.arange(10)[::-2],
        np.array([True]),
        np.ones(2, np.complex128),
        np.array(["", ""]),
        np.broadcast_to(np.float32(2), (3, 2)),
    ],
    "numpy dtypes": [np.dtype("<f4"), np.dtype(">i8"), np.dtype("U7")],
    "random states": [random.Random(3).getstate(), np.random.RandomState(1).get_state()],
}

_SINGLE = [  # less what hypothesis could not print
    one
    for values in EXAMPLES.values()
    for one in (values if isinstance(values, list) else [values])
    if type(one) is not int
]
_texts = st.text(st.characters(), max_size=6)
_floats = st.floats(width=64) | st.sampled_from(NANS)
_hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | _texts
    | st.binary(max_size=4)
    | st.sampled_from([Color.RED, Level.LOW, Access.READ]),
    lambda inner: (
        st.tuples(inner, inner)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=4,
)


_leaves = (
    st.integers(0, len(_SINGLE) - 1).map(_SINGLE.__getitem__)
    | _hashable
    | _floats
    | st.complex_numbers()
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.none() | st.just(UTC))
    | st.timedeltas()
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(_texts | st.just("$tuple"), inner, max_size=3)
    pairs = st.dictionaries(_hashable, inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | pairs
        | pairs.map(OrderedDict)
        | pairs.map(lambda made: defaultdict(list, made))
        | st.builds(Point, inner, inner)
        | st.builds(Config, inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Typed, inner, inner)
        | st.sets(_hashable, max_size=3)
        | st.dictionaries(_hashable, st.integers(), max_size=3).map(Counter)
    )


ANY_VALUE = st.recursive(_leaves, _containers, max_leaves=8)
