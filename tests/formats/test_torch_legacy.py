"""The stream that torch.save wrote before 1.6, with torch.load as the oracle."""

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import modelstate as ms
from modelstate import errors
from modelstate.formats.recognise import LEGACY_MAGIC, Format, recognise
from tests.formats.torch_files import (
    DTYPES,
    assert_same,
    every_byte,
    is_copied,
    read_contents,
    rich_tree,
    saved,
    values,
)
from tests.real_files import FILES


def old(path: Path, value: object, **options: Any) -> str:
    return saved(path, value, _use_new_zipfile_serialization=False, **options)


def tree(path: str, **options: Any) -> Any:
    return read_contents(path, **options).tree


def stream(value: bytes, keys: bytes, storages: bytes = b"") -> bytes:
    """A file around a main pickle of one's own."""
    head = [pickle.dumps(part, protocol=2) for part in (LEGACY_MAGIC, 1001, {"little_endian": True})]
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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_training_checkpoint(tmp_path: Path, protocol: int) -> None:
    value = rich_tree()
    path = old(tmp_path / "x.pt", value, pickle_protocol=protocol)
    assert recognise(Path(path).read_bytes()[:4096]) is Format.TORCH_LEGACY
    assert recognise(Path(path).read_bytes()[:4096]) is not Format.TORCH_ZIP
    contents = read_contents(path)
    assert (contents.format, [*contents.files]) == ("torch legacy", [path])
    assert_same(values(contents), torch.load(path, weights_only=False))
    assert contents.tree["model_state"]._metadata == value["model_state"]._metadata
    one, other = contents.tree["shared"]
    assert one.storage == other.storage


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    if not is_copied(dtype):
        pytest.skip(f"this torch copies no tensors of {dtype}")
    # Not all of them can be loaded by torch itself from such a file.
    value = {"a": every_byte(dtype, 64).reshape(4, 16)[1:, ::2], "b": every_byte(dtype, 0)}
    assert_same(values(read_contents(old(tmp_path / "x.pt", value))), value)


def test_sparse_and_conjugated(tmp_path: Path) -> None:
    path = old(tmp_path / "x.pt", {"s": torch.eye(3).to_sparse(), "c": torch.randn(3, dtype=torch.complex64).conj()})
    true = torch.load(path)
    found = values(read_contents(path))
    assert_same(found["s"], true["s"])
    assert torch.equal(found["c"], true["c"])


def test_a_storage_alone(tmp_path: Path) -> None:
    found = values(read_contents(old(tmp_path / "x.pt", [torch.arange(3).untyped_storage()])))
    assert found[0].tolist() == torch.arange(3).view(torch.uint8).tolist()


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


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.7, 0.9, 0.999])
def test_cut_short(small: Path, share: float) -> None:
    data = small.read_bytes()
    small.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(errors.TruncatedFileError, match="cut short"):
        tree(str(small))


def test_a_length_that_contradicts_the_pickle(small: Path) -> None:
    data = small.read_bytes()
    at = data.index(struct.pack("<q", 5) + struct.pack("<f", 0))
    small.write_bytes(data[:at] + struct.pack("<q", 6) + data[at + 8 :])
    with pytest.raises(errors.DamagedFileError, match="5 elements"):
        tree(str(small))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (viewed(("v", 3, 4)), errors.DamagedFileError, "a view leaves its storage"),
        (viewed(("v", -1, 4)), errors.DamagedFileError, "a view leaves its storage"),
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
def test_unsupported_tensors_are_named_with_their_place(tmp_path: Path) -> None:
    path = old(tmp_path / "x.pt", {"layers": [{"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)}]})
    with pytest.raises(errors.UnsupportedTensorError, match=r"layers\.0\.w: a quantized tensor") as caught:
        ms.open(path).tensor("layers.0.w")
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


def test_the_tar_archives_of_before_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    assert recognise(path.read_bytes()[:4096]) is Format.TORCH_LEGACY
    with pytest.raises(errors.UnknownFormatError, match=r"before 0\.2"):
        tree(str(path))


@pytest.mark.parametrize(
    "head", [b"", b"\x80", pickle.dumps({"a": 1}), pickle.dumps(7), b"L12L\n.", b"PK\3\4", bytes(range(100, 200))]
)
def test_what_does_not_match(head: bytes) -> None:
    assert recognise(head) is not Format.TORCH_LEGACY


# Any damage: a tree and one of our errors, nothing else. (There is no checksum, so names and numbers may be others.)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("damage") / "x.pt"
    value = {
        "a": torch.arange(5.0),
        "deep": [{"b": torch.arange(40).view(8, 5).t()}],
        "sparse": torch.eye(3).to_sparse(),
        "p": torch.nn.Parameter(torch.ones(3)),
        "n": [3, "text", None, (1.5, -7)],
    }
    return path, Path(old(path, value)).read_bytes()


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits(sample: tuple[Path, bytes], data: st.DataObject) -> None:
    path, true = sample
    damaged = bytearray(true)
    for at, bit in data.draw(
        st.lists(st.tuples(st.integers(0, len(true) - 1), st.integers(0, 7)), min_size=1, max_size=3)
    ):
        damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        values(read_contents(str(path)))
    except errors.ModelStateError:
        return


@pytest.mark.slow
def test_changed_bytes(sample: tuple[Path, bytes]) -> None:
    path, true = sample
    refused = 0
    for at in range(0, len(true), 3):
        damaged = bytearray(true)
        damaged[at] ^= 0xFF if at % 2 else 1 << at % 8
        path.write_bytes(damaged)
        recognise(bytes(damaged[:4096]))
        try:
            values(read_contents(str(path)))
        except errors.ModelStateError:
            refused += 1
    assert refused > 50, "most of the bytes say how the rest is read"


@pytest.mark.slow
def test_cut_anywhere(sample: tuple[Path, bytes]) -> None:
    path, true = sample
    for end in range(0, len(true), 7):
        path.write_bytes(true[:end])
        with pytest.raises(errors.TruncatedFileError):
            read_contents(str(path))
