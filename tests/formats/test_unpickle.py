"""The pickle machine: what pickle itself makes of plain values, and nothing of what a hostile file asks for."""

import argparse
import collections
import datetime
import enum
import os
import pickle
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import modelstate as ms
from modelstate import errors
from modelstate.formats.construct import construct
from modelstate.formats.torch_globals import TorchGlobals
from modelstate.formats.unpickle import Refused, unpickle
from modelstate.spec import StoredComposite
from tests.formats.torch_files import assert_same, read_contents, saved, values

RUN: list[str] = []


def no_storage(key: tuple[Any, ...]) -> object:
    return Refused("storage")


def loads(data: bytes, allow: tuple[object, ...] = (), skip_forbidden: bool = False) -> Any:
    """The tree of a pickle, as the readers make it."""
    names = TorchGlobals(allow)
    value, _ = unpickle(data, 0, no_storage, names.find)
    return construct(value, path="x.pt", data_nbytes=len(data), names=names, skip_forbidden=skip_forbidden)


# Plain values.

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]), max_size=300)
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
    | st.builds(bytearray, st.binary(max_size=20))
)
keys = (
    st.text(max_size=5) | st.integers(-9, 9) | st.tuples(st.integers(0, 9), st.text(max_size=2)) | st.binary(max_size=3)
)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.dictionaries(st.text(max_size=3), st.integers(0, 9)).map(Counter)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(value=plain, protocol=st.integers(2, 5))
def test_plain_values(value: Any, protocol: int) -> None:
    found = loads(pickle.dumps(value, protocol))
    assert found == value
    assert types(found) == types(value)


def types(value: Any) -> Any:
    """The type of a value and of everything in it."""
    if isinstance(value, dict):
        return type(value), [(types(key), types(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    return type(value)


def test_shared_containers_stay_shared() -> None:
    inner = [1, 2]
    found = loads(pickle.dumps({"a": inner, "b": [inner]}))
    assert found["a"] is found["b"][0]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"I12\n.", 12),
        (b"(I1\nI2\nt.", (1, 2)),
        (b"\x80\x02(K\x01K\x02K\x031.", None),
        (b"\x80\x02K\x01K\x020.", 1),
        (b"\x80\x02U\x03abc.", "abc"),
        (b"\x80\x02U\x02\xff\xfe.", b"\xff\xfe"),
        (b"\x80\x02T\x03\0\0\0abc.", "abc"),
        (b"\x80\x02ccollections\nOrderedDict\n]\x8c\x01k]\x86a\x85R.", None),
        (b"\x80\x02c__builtin__\nset\n]K\x01a\x85R.", {1}),
    ],
)
def test_opcodes_that_torch_does_not_write(data: bytes, value: Any) -> None:
    try:
        found = loads(data)
    except errors.DamagedFileError:
        assert value is None
        return
    assert value is None or found == value
    assert value is None or type(found) is type(value)


# Nothing runs.


class Command:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_command_does_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps({"net": [1, Command(marker)]}, protocol)
    pickle.loads(data)
    assert marker.exists(), "the file would not do what it is for"
    marker.unlink()
    with pytest.raises(errors.ForbiddenGlobalError, match="do not trust") as caught:
        loads(data)
    assert caught.value.refused == ((f"{os.name}.system", "net.1"),)
    for allow in ((os.system,), ("os.system",), ("posix.system",)):
        with pytest.raises(errors.ForbiddenGlobalError):
            loads(data, allow)
    assert isinstance(loads(data, skip_forbidden=True)["net"][1], Refused)
    assert not marker.exists()


def test_a_command_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = saved(tmp_path / "x.pt", {"a": torch.ones(2), "b": Command(marker)})
    legacy = saved(tmp_path / "y.pt", {"a": torch.ones(2), "b": Command(marker)}, _use_new_zipfile_serialization=False)
    for file in (path, legacy):
        with pytest.raises(errors.ForbiddenGlobalError, match=r"posix\.system at b"):
            read_contents(file)
        assert repr(read_contents(file, skip_forbidden=True).tree["b"]) == "<refused posix.system>"
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(X\x09\0\0\0touch rantR0N.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x02cos\nsystem\n)\x81.",
        b"\x80\x02}cos\nsystem\nK\x01s.",
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x09\0\0\0_metadata}X\1\0\0\0acos\nsystem\nssb.",
        b"\x80\x04\x8c\x05torch\x8c\x0fTensor.__init__\x93.",
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
        b"\x80\x02ctorch\nload\nX\1\0\0\0x\x85R.",
        b"\x80\x02ctorch.serialization\nload\n.",
        b"\x80\x02ctorch._utils\n_import_dotted_name\nX\2\0\0\0os\x85R.",
        b"\x80\x02ctorch.storage\n_load_from_bytes\nC\1x\x85R.",
        b"\x80\x02cos\nsystem\nccollections\nOrderedDict\n]\x85R0.",
    ],
)
def test_everything_else_is_refused(data: bytes) -> None:
    with pytest.raises(errors.ForbiddenGlobalError):
        loads(data)


def test_real_classes_are_not_written_to() -> None:
    for target in (b"ctorch\nTensor\n", b"ccollections\nOrderedDict\n", b"ctorch\nfloat32\n", b"]", b"}", b"K\1"):
        with pytest.raises(errors.DamagedFileError):
            loads(b"\x80\x02" + target + b"}X\1\0\0\0aK\1sb.")
    data = b"\x80\x02ccollections\nOrderedDict\n)R}(X\5\0\0\0itemsK\1X\x09\0\0\0_metadataK\2ub."
    found = loads(data)
    assert callable(found.items)
    assert not hasattr(found, "_metadata")


# What is refused is named, with where it stands.


@dataclass
class Point:
    x: int
    y: Any = None


class Colour(enum.Enum):
    RED = 1


class Bag(dict[Any, Any]):
    """A dict with attributes."""


class Sneaky:
    """Leaves a mark when it is made."""

    def __init__(self) -> None:
        RUN.append("made")

    def __reduce__(self) -> Any:
        return Sneaky, ()


HERE = __name__


def training_state() -> dict[str, Any]:
    bag = Bag(a=1)
    bag.note = "n"  # type: ignore[attr-defined]
    return {
        "args": argparse.Namespace(lr=0.1, when=[datetime.date(2024, 1, 2)]),
        "best": np.float64(0.5),
        "history": [Point(1, Point(2, None)), (3, Point(4))],
        "colour": {Colour.RED: "red"},
        "bag": bag,
        "default": collections.defaultdict(list, {"k": [1]}),
        "array": np.arange(6).reshape(2, 3),
    }


def test_every_refused_name_comes_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", training_state())
    with pytest.raises(errors.ForbiddenGlobalError) as caught:
        read_contents(path)
    refused = caught.value.refused
    assert ("argparse.Namespace", "args") in refused
    assert ("datetime.date", "args.when.0") in refused
    assert (f"{HERE}.Point", "history.0") in refused
    assert (f"{HERE}.Point", "history.1.1") in refused
    assert (f"{HERE}.Colour", "colour") in refused
    text = str(caught.value)
    assert "argparse.Namespace at args" in text
    pasted = re.search(r"if you trust them: ms\.load\(model, ms\.open\((.*?)\)\);", text)
    assert pasted
    given = eval(f"dict(path={pasted[1].partition(', ')[0]}, {pasted[1].partition(', ')[2]})")
    assert given["path"] == path
    assert given["allow"] == list(caught.value.allow)
    contents = read_contents(path, allow=given["allow"])
    assert repr(contents.tree) == repr(training_state())
    assert contents.tree["bag"].note == "n"
    skipped = read_contents(path, skip_forbidden=True).tree
    assert repr(skipped["args"]) == "<refused argparse.Namespace>"
    assert repr(skipped["history"][1][1]) == f"<refused {HERE}.Point>"


def test_allowing_by_object_and_by_torchs_list(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"p": Point(1, 2)})
    assert read_contents(path, allow=[Point]).tree == {"p": Point(1, 2)}
    assert read_contents(path, allow=[(Point, f"{HERE}.Point")]).tree == {"p": Point(1, 2)}
    with torch.serialization.safe_globals([Point]):
        assert read_contents(path).tree == {"p": Point(1, 2)}
    with pytest.raises(errors.ForbiddenGlobalError):
        read_contents(path)
    with pytest.raises(errors.SourceTypeError, match="allow"):
        read_contents(path, allow=[3])


class Outer:
    """Has a class inside."""

    @dataclass
    class Inner:
        """Is inside."""

        x: int


@pytest.mark.parametrize("protocol", [2, 4])
def test_nested_classes(protocol: int) -> None:
    data = pickle.dumps({"a": Outer.Inner(3)}, protocol)
    with pytest.raises(errors.ForbiddenGlobalError) as caught:
        loads(data)
    assert caught.value.refused == ((f"{HERE}.Outer.Inner", "a"),)
    assert loads(data, (Outer.Inner,)) == {"a": Outer.Inner(3)}
    assert loads(data, (f"{HERE}.Outer.Inner",)) == {"a": Outer.Inner(3)}


def test_members_of_an_enum_by_name() -> None:
    data = f"\x80\x02cbuiltins\ngetattr\nc{HERE}\nColour\nX\3\0\0\0RED\x86R.".encode("latin-1")
    assert loads(data, (Colour,)) is Colour.RED
    with pytest.raises(errors.ForbiddenGlobalError, match=r"Colour\.RED"):
        loads(data)
    with pytest.raises(errors.ForbiddenGlobalError, match="__init__"):
        loads(data.replace(b"X\3\0\0\0RED", b"X\x08\0\0\0__init__"), (Colour,))


def test_nothing_allowed_runs_before_all_is_known_to_be_good() -> None:
    good, bad = pickle.dumps([Sneaky()]), pickle.dumps([Sneaky(), Point(1)])
    RUN.clear()
    with pytest.raises(errors.ForbiddenGlobalError):
        loads(bad, (Sneaky,))
    with pytest.raises(errors.TruncatedFileError):
        loads(good[:-1], (Sneaky,))
    assert not RUN
    loads(good, (Sneaky,))
    assert RUN == ["made"]


def test_an_allowed_name_that_cannot_be_imported() -> None:
    data = b"\x80\x02cno_such_module\nThing\n)R."
    with pytest.raises(errors.ForbiddenGlobalError, match="import failed"):
        loads(data, ("no_such_module.Thing",))


def test_an_allowed_class_that_raises_is_our_error() -> None:
    with pytest.raises(
        errors.DamagedFileError, match=r"datetime\.date cannot be created.*", check=lambda e: "at" in str(e)
    ):
        loads(
            pickle.dumps({"at": datetime.date(2024, 1, 2)}).replace(b"\x07\xe8\x01\x02", b"\x07\xe8\x55\x02"),
            (datetime.date,),
        )


def test_tensors_in_an_allowed_object_are_unsupported(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"p": Point(1, torch.ones(2)), "t": torch.ones(1)})
    checkpoint = ms.open(path, allow=[Point])
    assert torch.equal(checkpoint.tensor("t"), torch.ones(1))
    with pytest.raises(errors.UnsupportedTensorError, match=r"p: an object of .*Point with tensors in it"):
        checkpoint.value("p")
    assert_same(values(read_contents(path, skip_forbidden=True))["t"], torch.ones(1))


# Subclasses of tensors.


class Scaled(torch.Tensor):
    """A wrapper subclass: whole numbers and a scale."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, how: Colour = Colour.RED) -> "Scaled":
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)
        made.data_, made.scale, made.how = data, scale, how  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    def plain(self) -> torch.Tensor:
        return self.data_.to(self.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale, args[0].how)
        raise NotImplementedError(func)


class Marked(torch.Tensor):
    """A subclass that has a storage of its own."""


def scaled() -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.int8).view(2, 3), torch.tensor([[0.5], [2.0]]))


def test_a_wrapper_subclass(tmp_path: Path) -> None:
    both = scaled()
    path = saved(tmp_path / "x.pt", {"w": both, "p": torch.nn.Parameter(scaled(), requires_grad=True), "same": both})
    allow = [Scaled, Colour]
    with pytest.raises(errors.ForbiddenGlobalError) as caught:
        read_contents(path)
    assert {name for name, _ in caught.value.refused} == {f"{HERE}.Scaled", f"{HERE}.Colour"}
    contents = read_contents(path, allow=allow)
    found = contents.tree["w"]
    assert isinstance(found, StoredComposite)
    assert (found.kind, found.shape, found.dtype) == (f"{HERE}.Scaled", (2, 3), torch.float32)
    assert [part.dtype for part in found.parts] == [torch.int8, torch.float32]
    assert contents.tree["same"] is found
    made = values(contents)["w"]
    assert type(made) is Scaled
    assert made.how is Colour.RED
    assert torch.equal(made.plain(), scaled().plain())
    assert repr(read_contents(path, skip_forbidden=True).tree["w"]) == f"<refused {HERE}.Scaled>"


def test_a_subclass_with_a_storage(tmp_path: Path) -> None:
    marked = torch.arange(4.0).as_subclass(Marked)
    marked.note = ["a", torch.ones(1)]  # type: ignore[attr-defined]
    path = saved(tmp_path / "x.pt", [marked])
    made = values(read_contents(path, allow=[Marked]))[0]
    assert type(made) is Marked
    assert made.note[0] == "a"
    assert_same(made.note[1], torch.ones(1))
    assert made.as_subclass(torch.Tensor).tolist() == [0, 1, 2, 3]


def test_torchaos_subclasses(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 32))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    path = saved(tmp_path / "x.pt", model.state_dict())
    contents = read_contents(path)
    true = torch.load(path)
    found = values(contents)
    assert contents.tree["0.weight"].kind == "torchao.quantization.Int8Tensor"
    assert type(found["0.weight"]) is type(true["0.weight"])
    assert torch.equal(found["0.weight"].dequantize(), true["0.weight"].dequantize())
    model.load_state_dict(found, assign=True)
    model(torch.ones(1, 64))
