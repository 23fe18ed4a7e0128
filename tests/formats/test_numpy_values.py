"""Scalars, arrays and dtypes of NumPy in pickles are plain data; arrays of objects are not."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.codec.values import EXAMPLES, same
from tests.formats.test_unpickle import loads
from tests.formats.torch_files import saved

ARRAYS = [
    *EXAMPLES["numpy arrays"],
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.array([1, -2], np.float16),
    np.array([[1 + 2j]], ">c16"),
    np.array([1, 2], "M8[25us]"),
    np.array(7, "m8"),
    np.array(["x", "yz"], ">U2"),
    np.array([np.nan, np.inf, -0.0]),
]
SCALARS = [value for value in EXAMPLES["numpy scalars"] if value.dtype.kind not in "SU"]  # NumPy cuts "a\0" in pickles
VALUES = [
    *ARRAYS,
    *SCALARS,
    np.str_("ü"),
    np.bytes_(b"a\xff"),
    *map(np.dtype, ("f8", ">i2", "?", "U7", "S3", "M8[ms]", "O")),
]


def as_in_numpy_1(data: bytes) -> bytes:
    """The names of NumPy 1, in pickles without lengths around them."""
    return data.replace(b"numpy._core.", b"numpy.core.")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{getattr(value, 'dtype', value)}")
def test_plain_values_of_numpy(value: Any, protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"values": [value, value], "w": torch.ones(1)}, pickle_protocol=protocol)
    checkpoint = ms.open(path)
    first, second = checkpoint.value("values")
    assert same(first, value)
    assert first is second or not isinstance(value, np.ndarray)  # one object stays one
    if isinstance(value, np.ndarray) and value.size:
        assert first.flags.writeable
        first.fill(first.flat[0])
        assert same(checkpoint.value("values")[0], value)
        assert same(checkpoint.extra["values"][0], value)
    if not (isinstance(value, np.dtype) and value.kind == "O"):
        ms.convert_checkpoint(path, tmp_path / "x.safetensors")
        assert same(ms.open(tmp_path / "x.safetensors").value("values")[1], value)


@pytest.mark.parametrize(
    "value",
    [np.ones((2, 3)), np.float64(0.1), np.array(["2024-05-01", "NaT"], "M8[D]")],
    ids=["array", "scalar", "time"],
)
def test_the_names_of_numpy_1(value: Any) -> None:
    data = pickle.dumps(value, 2)
    assert b"numpy._core" in data
    assert same(loads(as_in_numpy_1(data)), value)


def test_a_string_of_python_2() -> None:
    """Python 2 wrote bytes as text: these are UTF-8, and those of the second array are not."""
    for raw in (b"\0\0\0\0\0\0\xf0?", b"\0\0\0\0\0\0\xf0\xbf"):
        data = (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R(K\1K\1\x85cnumpy\ndtype\n"
            b"U\2f8K\0K\1\x87R(K\3U\1<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89U\x08" + raw + b"tb."
        )
        assert same(loads(data), np.frombuffer(raw, "<f8"))


def test_random_states_and_options_are_restored(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.25))  # type: ignore[arg-type]
    np.random.seed(5)
    torch.save({"opt": optimizer.state_dict(), "rng": np.random.get_state(), "epoch": np.int64(3)}, tmp_path / "x.pt")
    expected = np.random.rand(3)
    checkpoint = ms.open(tmp_path / "x.pt")
    np.random.set_state(checkpoint.value("rng"))
    assert np.array_equal(np.random.rand(3), expected)
    fresh = torch.optim.SGD(model.parameters(), lr=1.0)
    fresh.load_state_dict(checkpoint.value("opt"))
    assert fresh.param_groups[0]["lr"] == 0.25
    assert ms.restore({"epoch": None}, checkpoint, allow_unexpected=["*"])["epoch"] == 3


def test_keys(tmp_path: Path) -> None:
    value = {np.int64(1): "a", (np.int64(1), np.str_("b")): "b", "set": {np.float32(1.5), 2}}
    path = saved(tmp_path / "x.pt", {"values": value})
    assert ms.open(path).value("values") == value
    for key in (np.complex64(1j), np.int64(2**62)):
        with pytest.raises(errors.DamagedFileError, match="a key that is not a plain value"):
            ms.open(saved(tmp_path / "y.pt", {"values": {key: 1}}))


class Matrix(np.ndarray[Any, Any]):
    """A subclass, whose code would run."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.array([{}, None], object), "objects"),
        (np.zeros(2, [("a", "f4"), ("b", "i8")]), "structured"),
        (np.zeros(2, "V4"), "structured"),
        (np.zeros(2, [("a", "f4")])[0], "structured"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_other_arrays_are_refused_by_name(value: Any, kind: str, protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"a": {"b": [value]}, "w": torch.ones(1)}, pickle_protocol=protocol)
    checkpoint = ms.open(path)
    assert torch.equal(checkpoint.tensor("w"), torch.ones(1))
    with pytest.raises(errors.UnsupportedTensorError, match=rf"a\.b\.0: .*{kind}") as caught:
        checkpoint.value("a")
    if kind == "objects":  # the remedy, followed
        (name,) = re.findall(r'allow=\["([^"]*)"\]', caught.value.remedy)
        if protocol == 2:
            assert ms.open(path, allow=[name]).value("a")["b"][0].tolist() == [{}, None]


def test_a_subclass_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"a": np.zeros(2).view(Matrix)})
    with pytest.raises(errors.ForbiddenGlobalError, match="Matrix"):
        ms.open(path)


def array(shape: bytes, data: bytes, dtype: bytes = b"X\2\0\0\0f8", nbytes: bytes = b"J\xff\xff\xff\xff") -> bytes:
    return (
        b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\1b\x87R(K\1(" + shape + b"tcnumpy\ndtype\n"
        + dtype + b"K\0K\1\x87R(K\3X\1\0\0\0<NNN" + nbytes + b"J\xff\xff\xff\xffK\0tb\x89" + data + b"tb"
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        array(b"J\xff\xff\xff\x7f", b"C\x08" + bytes(8)),
        array(b"J\xff\xff\xff\x7f" * 3, b"C\0"),
        array(b"J\xff\xff\xff\xff", b"C\0"),
        array(b"K\1" * 65, b"C\x08" + bytes(8)),
        array(b"K\2", b"C\x08" + bytes(8)),
        array(b"J\xff\xff\xff\x7f", b"C\0", b"X\2\0\0\0U0", b"K\0"),
        array(b"K\1", b"C\x08" + bytes(8), b"X\2\0\0\0U1", b"J\xff\xff\xff\x7f"),
        array(b"K\1", b"K\1"),
        array(b"K\1", b"C\x08" + bytes(8), b"X\x04\0\0\0zzzz"),
        b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\nX\2\0\0\0f8K\0K\1\x87RC\1a\x86R",
        b"cnumpy._core.multiarray\nscalar\nX\2\0\0\0f8C\1a\x86R",
        b"cnumpy\ndtype\n](K\1K\2e\x85R",
        b"cnumpy\ndtype\nX\2\0\0\0f8\x85RK\1b",
        b"cnumpy._core.numeric\n_frombuffer\n(C\x08" + bytes(8) + b"cnumpy\ndtype\nX\2\0\0\0f8\x85RK\1\x85X\1\0\0\0ZtR",
        b"](B\0\0\1\0" + bytes(65536) + b"q\0" + array(b"J\0\0\1\0", b"h\0", b"X\2\0\0\0i1") * 500 + b"e",
    ],
)
def test_damaged_arrays(data: bytes) -> None:
    with pytest.raises(errors.DamagedFileError):
        loads(b"\x80\x04" + data + b".")
