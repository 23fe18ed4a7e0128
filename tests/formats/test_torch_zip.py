"""What torch.save writes, with torch.load as the oracle: zip archives, and in part the stream of before 1.6."""

import io
import shutil
import signal
import struct
import subprocess
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate import errors
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


def tree(path: str, **options: Any) -> Any:
    return read_contents(path, **options).tree


both = pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])


@both
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_training_checkpoint(tmp_path: Path, protocol: int, as_zip: bool) -> None:
    value = rich_tree()
    path = saved(tmp_path / "noname", value, pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
    contents = read_contents(path)
    assert (contents.format, [*contents.files]) == ("torch zip" if as_zip else "torch legacy", [path])
    assert_same(values(contents), torch.load(path, weights_only=False))
    assert type(contents.tree["model_state"]) is type(value["model_state"])
    assert contents.tree["model_state"]._metadata == value["model_state"]._metadata
    one, other = contents.tree["shared"]
    assert one.storage == other.storage


@pytest.mark.parametrize("protocol", [0, 1])
@both
def test_the_old_protocols_are_not_called_damaged(tmp_path: Path, protocol: int, as_zip: bool) -> None:
    value, path, again = {"a": torch.ones(2)}, tmp_path / "x.pt", tmp_path / "again.pt"
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(errors.UnknownFormatError, match="protocol 0 or 1") as raised:
        ms.open(path)
    assert raised.value.where.startswith(str(path))
    command = raised.value.remedy.partition(": ")[2].partition(", which runs")[0]
    if protocol == 1:
        exec(command, {"torch": torch, "path": path, "new_path": again})
        assert_same(values(read_contents(again)), value)
    else:  # as the remedy says
        with pytest.raises(AssertionError):
            torch.load(path, weights_only=False)


@pytest.mark.parametrize("key", [((1, 2), 3), 2**61], ids=["nested", "large"])
def test_a_key_that_is_not_read_is_not_surely_damage(key: object, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {key: torch.ones(1)})
    with pytest.raises(errors.DamagedFileError, match="not a plain value") as raised:
        ms.open(path)
    assert "load it with torch.load" in raised.value.remedy
    assert list(torch.load(path)) == [key]  # as the remedy says


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@both
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, as_zip: bool) -> None:
    if not is_copied(dtype):
        pytest.skip(f"this torch copies no tensors of {dtype}")
    value = {
        "a": every_byte(dtype, 64).reshape(4, 16)[1:, ::2],
        "scalar": every_byte(dtype, 3)[2],
        "none": every_byte(dtype, 0),
    }
    assert_same(values(read_contents(saved(tmp_path / "x.pt", value, _use_new_zipfile_serialization=as_zip))), value)


def test_root_may_be_a_tensor_or_a_list(tmp_path: Path) -> None:
    assert tree(saved(tmp_path / "x.pt", torch.ones(2, 3))).shape == (2, 3)
    assert [leaf.shape for leaf in tree(saved(tmp_path / "y.pt", [torch.ones(1), torch.ones(2)]))] == [(1,), (2,)]


@pytest.mark.filterwarnings("ignore:TypedStorage")
@both
def test_a_storage_alone_is_a_flat_tensor(tmp_path: Path, as_zip: bool) -> None:
    tensor, options = torch.arange(3.0), {"_use_new_zipfile_serialization": as_zip}
    found = values(read_contents(saved(tmp_path / "x.pt", {"s": tensor.untyped_storage()}, **options)))
    assert_same(found["s"], tensor.view(torch.uint8))
    found = values(read_contents(saved(tmp_path / "y.pt", [tensor.storage(), tensor], **options)))
    assert_same(found, [tensor, tensor])


def test_names_in_the_code_page_of_zip_files(tmp_path: Path) -> None:
    """Python 3.14 writes names in this encoding where it can."""
    value = {"a": torch.arange(5.0)}
    path = tmp_path / "again.pt"
    with zipfile.ZipFile(saved(tmp_path / "archive.pt", value)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr("archive/" + name.partition("/")[2], old.read(name))
    path.write_bytes(path.read_bytes().replace(b"archive/", b"\x81rchive/"))
    assert {name.partition("/")[0] for name in zipfile.ZipFile(path).namelist()} == {"ürchive"}
    assert_same(values(read_contents(str(path))), value)


def test_any_prefix_and_any_writer(tmp_path: Path) -> None:
    value = {"a": torch.arange(5.0)}
    buffer = io.BytesIO()
    torch.save(value, buffer)
    plain = tmp_path / "archive.pt"
    plain.write_bytes(buffer.getvalue())
    again = tmp_path / "again.pt"
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(again, "w") as new:
        new.mkdir("ünï code")
        for name in old.namelist():
            new.writestr("ünï code/" + name.partition("/")[2], old.read(name))
    for path in (plain, again):
        assert_same(values(read_contents(str(path))), value)
    torch.serialization.set_crc32_options(False)
    try:
        assert_same(values(read_contents(saved(tmp_path / "nocrc.pt", value))), value)
    finally:
        torch.serialization.set_crc32_options(True)


def test_other_devices_are_where_the_file_has_them(tmp_path: Path) -> None:
    value = {"a": torch.arange(5.0), "b": torch.ones(2)}
    path = Path(saved(tmp_path / "x.pt", value))
    edit_record(path, "data.pkl", lambda data: data.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0"))
    assert_same(values(read_contents(str(path))), value)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@both
def test_sparse(tmp_path: Path, layout: str, as_zip: bool) -> None:
    dense = torch.zeros(4, 6)
    dense[0, 1], dense[2, 4], dense[3, 3] = 1.0, 2.0, -1.0
    made = {
        "coo": dense.to_sparse_coo,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 3)),
        "bsc": lambda: dense.to_sparse_bsc((2, 3)),
    }[layout]()
    state = {"s": made, "p": torch.nn.Parameter(made)}
    path = saved(tmp_path / "x.pt", state, _use_new_zipfile_serialization=as_zip)
    contents = read_contents(path)
    found = contents.tree["s"]
    assert (found.kind, found.shape, found.dtype) == (f"sparse_{layout}", (4, 6), torch.float32)
    assert contents.tree["p"].is_parameter
    assert contents.tree["p"].requires_grad
    assert_same(values(contents)["s"], made)


def test_sparse_is_checked_when_it_is_built(tmp_path: Path) -> None:
    bad = torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (3,), check_invariants=False)
    contents = read_contents(saved(tmp_path / "x.pt", {"a": {"s": bad}}))
    with pytest.raises(errors.DamagedFileError, match=r"a\.s"):
        values(contents)


@both
def test_conjugated_and_negative_views(tmp_path: Path, as_zip: bool) -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    for value in (z.conj(), z.conj().imag, torch._neg_view(z).conj(), torch._neg_view(z)):
        state = {"v": value, "p": torch.nn.Parameter(value)}
        contents = read_contents(saved(tmp_path / "x.pt", state, _use_new_zipfile_serialization=as_zip))
        assert isinstance(contents.tree, dict)
        assert (contents.tree["v"].dtype, contents.tree["v"].shape) == (value.dtype, value.shape)
        assert contents.tree["p"].is_parameter
        found = values(contents)["v"]
        assert torch.equal(found, value.resolve_conj().resolve_neg())
        assert not found.is_neg()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8), "quantized tensor"),
        (
            lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            "quantiz",
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8).storage(), "quantized storage"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensor"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
    ],
)
def test_unsupported_tensors_are_named_with_their_place(tmp_path: Path, made: Any, kind: str) -> None:
    path = saved(tmp_path / "x.pt", {"layers": [1, {"w": made(), "good": torch.ones(2)}]})
    # torch 2.15 no longer allows jagged tensors by itself.
    names = [f"torch.nested._internal.nested_tensor.{name}" for name in ("NestedTensor", "_rebuild_njt")]
    checkpoint = ms.open(path, allow=names)
    assert torch.equal(checkpoint.tensor("layers.1.good"), torch.ones(2))
    assert list(checkpoint) == ["layers.1.good"]
    for ask in (
        lambda: checkpoint.tensor("layers.1.w"),
        lambda: checkpoint["layers.1.w"],
        lambda: checkpoint.value("layers"),
        lambda: checkpoint.select("layers.1").tensor("w"),
        lambda: ms.save(checkpoint, tmp_path / "copy.safetensors"),
        lambda: ms.convert_checkpoint(path, tmp_path / "copy.safetensors"),
        lambda: ms.convert_checkpoint(path, tmp_path / "copy.pt", rules=[ms.rules.Rename("layers.*", "*")]),
    ):
        with pytest.raises(errors.UnsupportedTensorError, match=kind) as caught:
            ask()
        assert str(caught.value).replace("layers.", "").startswith(f"{path}: 1.w: ")
        assert caught.value.remedy
    assert sorted(tmp_path.iterdir()) == [Path(path)]


def test_64_bit_sizes_and_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(5 << 30, dtype=torch.uint8), "small": torch.ones(3)}, path)
    found = tree(str(path))
    assert found["big"].nbytes == 5 << 30
    assert found["small"].storage.start > 5 << 30
    with open(path, "r+b") as file:
        file.seek(found["small"].storage.start)
        file.write(struct.pack("<3f", 1, 2, 3))
    assert torch.load(path, mmap=True)["small"].tolist() == [1, 2, 3]


# Damaged archives: one error a failure.


def rewrite(path: Path, *, change: dict[str, Any] | None = None, drop: tuple[str, ...] = (), packed: int = 0) -> str:
    """The archive again, with other records."""
    target = path.with_name("rewritten.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", packed) as new:
        for name in old.namelist():
            short = name.partition("/")[2]
            if short not in drop:
                new.writestr(name, (change or {}).get(short, old.read(name)))
        for name, data in (change or {}).items():
            if name.startswith("+"):
                new.writestr(name[1:], data)
    return str(target)


def edit_record(path: Path, name: str, edit: Any) -> None:
    with zipfile.ZipFile(path) as old:
        full = next(entry for entry in old.namelist() if entry.endswith(f"/{name}"))
        data = edit(old.read(full))
    shutil.move(rewrite(path, change={name: data}), path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return Path(saved(tmp_path / "small.pt", {"a": torch.arange(5.0), "b": torch.arange(3)}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"drop": ("data/1",)}, errors.DamagedFileError, "data/1"),
        ({"drop": ("data.pkl",)}, errors.DamagedFileError, r"data\.pkl"),
        ({"change": {"+small/data/0": b"x" * 20}}, errors.DamagedFileError, "twice in the archive"),
        ({"change": {"data/1": b"x" * 23}}, errors.DamagedFileError, "b: a storage is shorter in the archive"),
        ({"change": {"byteorder": b"big"}}, errors.UnsupportedTensorError, "big-endian"),
        ({"change": {"byteorder": b"lottle"}}, errors.DamagedFileError, "byte order"),
    ],
    ids=["no storage", "no pickle", "a record twice", "a short storage", "big-endian", "another byte order"],
)
def test_records_that_are_not_as_they_must_be(
    small: Path, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        tree(rewrite(small, **change))


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(saved(tmp_path / "a state.pt", {"w": torch.arange(3.0), "v": [1]}))


def run_remedy(remedy: str, directory: Path) -> None:
    """Runs the command of a remedy."""
    if shutil.which("zip") is None or shutil.which("unzip") is None:
        pytest.skip("zip and unzip are not installed")
    command = remedy.partition(": ")[2].partition("; or")[0]
    subprocess.run(["sh", "-ec", f"{command} >&2"], cwd=directory, check=True)


def test_an_archive_that_was_unpacked(archive: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(archive).extractall(tmp_path / "un packed")
    (top,) = (tmp_path / "un packed").iterdir()
    archive.unlink()
    for path in (top, top / "data", top / "data.pkl"):
        with pytest.raises(errors.UnknownFormatError, match="was unpacked") as caught:
            ms.open(path)
    run_remedy(caught.value.remedy, tmp_path)
    assert_same(ms.open(top.with_name(f"{top.name}.pt")).value(), {"w": torch.arange(3.0), "v": [1]})


def test_an_archive_that_was_packed_without_its_directory(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(tmp_path / "new.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name.partition("/")[2], old.read(name))
    assert_same(ms.open(tmp_path / "new.pt").value(), {"w": torch.arange(3.0), "v": [1]})
    assert ms.open(tmp_path / "new.pt").verify() == 12


def test_an_archive_that_was_compressed(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(tmp_path / "new.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(errors.DamagedFileError, match="compressed") as caught:
        ms.open(tmp_path / "new.pt")
    run_remedy(caught.value.remedy, tmp_path)
    assert_same(ms.open(tmp_path / "stored.pt").value(), {"w": torch.arange(3.0), "v": [1]})


def test_a_header_that_ends_too_early(small: Path) -> None:
    """The data would begin a few bytes too early."""
    data = bytearray(small.read_bytes())
    with zipfile.ZipFile(small) as archive:
        at = archive.getinfo("small/data/1").header_offset + 28
    (padding,) = struct.unpack_from("<H", data, at)
    assert padding > 8
    struct.pack_into("<H", data, at, padding - 8)
    small.write_bytes(data)
    with pytest.raises(errors.DamagedFileError, match="contradicts itself about a record"):
        tree(str(small))


def test_a_changed_pickle(small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[data.index(b"FloatStorage")] ^= 1
    small.write_bytes(data)
    with pytest.raises(errors.DamagedFileError, match="checksum"):
        tree(str(small))


def test_torchscript(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(errors.UnknownFormatError, match=r"torch\.jit\.load"):
        tree(str(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((), "empty zip"),
        (("m/archive_format", "m/models/model.json", "m/data/weights/w"), "torch.export"),
        (("m/.data/extern_modules", "m/data/0"), "torch.package"),
        (("x/y.py", "x.dist-info/METADATA"), "package"),
        (("out/model.pt",), "with checkpoints in it"),
        (("readme.txt",), "another kind"),
    ],
)
def test_other_archives(tmp_path: Path, names: tuple[str, ...], kind: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"content" * 100)
    with pytest.raises(errors.UnknownFormatError, match=kind):
        tree(str(tmp_path / "x.pt"))


def test_a_handler_that_does_not_raise_ends_no_save(tmp_path: Path) -> None:
    """As that of a deadline, which takes note of the signal."""
    seen = list[int]()
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        ms.save({"a": torch.ones(6_000_000), "b": torch.ones(600_000)}, tmp_path / "x.pt")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert torch.load(tmp_path / "x.pt")["b"].sum() == 600_000
