"""The stream that torch.save wrote before 1.6, with torch.load as the oracle."""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelstate import errors
from tests.formats.torch_files import assert_same, read_contents, saved, values
from tests.real_files import FILES


def old(path: Path, value: object, **options: Any) -> str:
    return saved(path, value, _use_new_zipfile_serialization=False, **options)


def tree(path: str, **options: Any) -> Any:
    return read_contents(path, **options).tree


def stream(value: bytes, keys: bytes, storages: bytes = b"") -> bytes:
    """A file around a main pickle of one's own."""
    head = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join(head) + value + keys + storages


class Persistent(pickle.Pickler):
    """Writes the tuples of storages, as torch does."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Stand) else None


class Stand:
    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class Tensor:
    def __init__(self, storage: Stand, *rest: Any) -> None:
        self.args = (storage, *rest, False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.args


def dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    Persistent(buffer, 2).dump(value)
    return buffer.getvalue()


def viewed(view: Any, numel: int = 6, size: int = 2) -> bytes:
    """A file with one storage of six numbers, and a tensor in a view of it."""
    storage = Stand("storage", torch.FloatStorage, "7", "cpu", numel, view)
    return stream(dumped({"a": Tensor(storage, 1, (size,), (1,))}), dumped(["7"]), struct.pack("<q6f", 6, *range(6)))


@pytest.mark.slow
def test_pickles_beyond_the_first_megabyte(tmp_path: Path) -> None:
    value = {f"a{i}": torch.full((1,), i) for i in range(8000)} | {"text": "x" * 3_000_000}
    path = old(tmp_path / "x.pt", value)
    found = values(read_contents(path))
    assert_same(found["a7999"], value["a7999"])
    assert len(found) == 8001


def test_a_view_of_a_storage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(viewed(("v", 2, 4)))
    found = read_contents(str(path))
    assert_same(values(found), torch.load(path, weights_only=False))
    assert values(found)["a"].tolist() == [3, 4]
    assert found.tree["a"].storage.nbytes == 24


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.member.endswith((".pt", ".pth"))])
def test_published_files(real_file: Callable[[str], Path], name: str) -> None:
    path = str(real_file(name))
    assert_same(values(read_contents(path)), torch.load(path, map_location="cpu"))


# One error a failure.


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return Path(old(tmp_path / "small.pt", {"a": torch.arange(5.0), "b": torch.arange(3)}))


def test_a_length_that_contradicts_the_pickle(small: Path) -> None:
    data = small.read_bytes()
    at = data.index(struct.pack("<q", 5) + struct.pack("<f", 0))
    small.write_bytes(data[:at] + struct.pack("<q", 6) + data[at + 8 :])
    with pytest.raises(errors.DamagedFileError, match="5 elements"):
        tree(str(small))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (viewed(("v", 4, 4)), errors.DamagedFileError, "leaves its storage"),
        (viewed(("v", -2, 4)), errors.DamagedFileError, "impossible layout"),
        (viewed(("v", 0)), errors.DamagedFileError, "the view of a storage is not valid"),
        (viewed("view"), errors.DamagedFileError, "the view of a storage is not valid"),
        (viewed(None, size=6), errors.DamagedFileError, "leaves its storage"),
        (viewed(None, numel=5), errors.DamagedFileError, "contradicts itself about a storage"),
        (viewed(None, numel=-6), errors.DamagedFileError, "."),
        (stream(dumped(1), dumped(["7"])), errors.DamagedFileError, "."),
        (stream(dumped(1), dumped("7")), errors.DamagedFileError, "."),
        (viewed(None).replace(dumped(["7"]), dumped([])), errors.DamagedFileError, "a storage is missing"),
        (viewed(None).replace(dumped(["7"]), dumped(["7", "7"])), errors.DamagedFileError, "a storage stands twice"),
        (viewed(None).replace(b"M\xe9\x03", b"M\xea\x03"), errors.UnknownFormatError, "."),
        (viewed(None).replace(b"\x80\x02M", b"\x80\x77M"), errors.DamagedFileError, "."),
        (viewed(None).replace(b"storage", b"storagf"), errors.DamagedFileError, "."),
        (viewed(None).replace(b"FloatStorage", b"GloatStorage"), errors.UnsupportedTensorError, "."),
    ],
)  # fmt: skip
def test_damage(tmp_path: Path, data: bytes, error: type[Exception], says: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(error, match=says) as caught:
        tree(str(path))
    assert str(caught.value).startswith(str(path))


@pytest.mark.filterwarnings("ignore")
def test_a_whole_module_is_refused_with_its_classes(tmp_path: Path) -> None:
    path = old(tmp_path / "x.pt", {"net": torch.nn.Sequential(torch.nn.Linear(2, 2)), "w": torch.ones(2)})
    with pytest.raises(errors.ForbiddenGlobalError, match=r"state_dict\(\)") as caught:
        tree(path)
    names = {name for name, place in caught.value.refused if place.startswith("net")}
    assert {"torch.nn.modules.container.Sequential", "torch.nn.modules.linear.Linear"} <= names
    found = read_contents(path, skip_forbidden=True)
    assert list(found.tree["net"]) == ["0.weight", "0.bias"]
    assert_same(values(found)["w"], torch.ones(2))
