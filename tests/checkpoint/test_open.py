"""Opening: what a source is, found by its content, and what is said of what is none."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import socket
import sys
import tarfile
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.package
from safetensors.torch import save, save_file

import modelstate as ms
from modelstate.errors import (
    DamagedFileError,
    OpenError,
    ReadFailedError,
    SourceNotFoundError,
    SourceTypeError,
    TruncatedFileError,
    UnknownFormatError,
)
from tests.faults import Request, faulty_reads
from tests.formats.files import index_text, same
from tests.programs import run_program

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.arange(3)}


def assert_opens(source: Any) -> None:
    checkpoint = ms.open(source)
    assert set(checkpoint) == set(STATE)
    assert all(same(checkpoint.tensor(name), STATE[name]) for name in STATE)


def save_sharded(directory: Path, index: str = "model.safetensors.index.json") -> Path:
    directory.mkdir(exist_ok=True)
    weight_map = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(STATE, 1)}
    for name, shard in weight_map.items():
        save_file({name: STATE[name]}, directory / shard)
    (directory / index).write_text(index_text(weight_map))
    return directory / index


def save_legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


# What opens.

WRITERS: dict[str, Callable[[Path], None]] = {
    "safetensors": lambda path: save_file(STATE, path),
    "torch zip": lambda path: torch.save(STATE, path),
    "torch legacy": save_legacy,
}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.json", "model", "model.tar.gz"])
@pytest.mark.parametrize("kind", WRITERS)
def test_the_content_decides_and_not_the_name(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[kind](path)
    assert_opens(path)
    assert ms.open(str(path)).format == kind


def test_a_mapping() -> None:
    assert_opens(STATE)
    checkpoint = ms.open(STATE)
    assert checkpoint.source == "mapping"
    assert checkpoint.format == "mapping"


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    checkpoint = ms.open({"model": STATE, "step": 3})
    assert ms.open(checkpoint) is checkpoint
    assert_opens(ms.open(checkpoint, key="model"))


def test_the_source_is_the_path_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(STATE, tmp_path / "x.safetensors")
    monkeypatch.chdir(tmp_path)
    checkpoint = ms.open("x.safetensors")
    assert checkpoint.source == "x.safetensors"
    monkeypatch.chdir("/")
    assert same(checkpoint.tensor("weight"), STATE["weight"])


def test_shards_of_every_format(tmp_path: Path) -> None:
    torch.save({"weight": STATE["weight"]}, tmp_path / "1.bin")
    torch.save({"bias": STATE["bias"]}, tmp_path / "2.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "pytorch_model.bin.index.json").write_text(index_text({"weight": "1.bin", "bias": "2.bin"}))
    assert_opens(tmp_path)
    assert ms.open(tmp_path).format == "torch legacy and torch zip"


# Files that are none.


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return file.getvalue()


def tarred(*names: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def arrays(writer: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    writer(file, np.arange(3))
    return file.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"
SOME = bytes(range(1, 255)) * 4

FOREIGN: dict[str, tuple[type[OpenError], str, bytes]] = {
    "nothing": (TruncatedFileError, "empty", b""),
    "git lfs": (UnknownFormatError, "lfs pull", LFS),
    "git lfs, with CRLF": (UnknownFormatError, "90868376", LFS.replace(b"\n", b"\r\n")),
    "html": (UnknownFormatError, "web page", b"<!DOCTYPE html>\n<html><head><title>Sign in</title>"),
    "html with a mark": (UnknownFormatError, "web page", b"\xef\xbb\xbf \n<HTML lang=en>"),
    "xml of a bucket": (UnknownFormatError, "web page", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>'),
    "gguf": (UnknownFormatError, "GGUF", b"GGUF\x03\0\0\0" + bytes(32)),
    "ggml": (UnknownFormatError, "GGML", b"tjgg\x01\0\0\0" + bytes(32)),
    "hdf5": (UnknownFormatError, "HDF5", b"\x89HDF\r\n\x1a\n" + bytes(32)),
    "onnx": (UnknownFormatError, "ONNX", b"\x08\x08\x12\x07pytorch\x1a\x052.6.0:\x8a\x01\n" + bytes(32)),
    "npy": (UnknownFormatError, "NumPy array", arrays(np.save)),
    "npz": (UnknownFormatError, "NumPy archive", arrays(np.savez)),
    "npz, compressed": (UnknownFormatError, "NumPy archive", arrays(np.savez_compressed)),
    "keras": (UnknownFormatError, "Keras 3", zipped("metadata.json", "config.json", "model.weights.h5")),
    "office": (UnknownFormatError, "office", zipped("[Content_Types].xml", "word/document.xml")),
    **{
        f"pickle {protocol}": (UnknownFormatError, "plain pickle", pickle.dumps({"weight": [1.0]}, protocol))
        for protocol in range(6)
    },
    "gzip": (UnknownFormatError, "gzip", gzip.compress(SOME)),
    "zstd": (UnknownFormatError, "zstd", b"\x28\xb5\x2f\xfd" + SOME),
    "xz": (UnknownFormatError, "xz", lzma.compress(SOME)),
    "bzip2": (UnknownFormatError, "bzip2", bz2.compress(SOME)),
    "lz4": (UnknownFormatError, "lz4", b"\x04\x22\x4d\x18" + SOME),
    "7z": (UnknownFormatError, "7z", b"7z\xbc\xaf\x27\x1c" + SOME),
    "tar": (UnknownFormatError, "tar -xf", tarred("model.safetensors")),
    "tar of torch": (UnknownFormatError, "before 0.2", tarred("sys_info", "pickle", "tensors", "storages")),
    "tf index": (UnknownFormatError, "TensorFlow", b"\0\0\x01\x02" + SOME + bytes.fromhex("57fb808b247547db")),
    "tflite": (UnknownFormatError, "TensorFlow Lite", b"\x1c\0\0\0TFL3" + SOME),
    "executorch": (UnknownFormatError, "ExecuTorch", b"\x1c\0\0\0ET12" + SOME),
    "json": (UnknownFormatError, "JSON", json.dumps({"hidden_size": 384, "vocab_size": 30522}).encode()),
    "json list": (UnknownFormatError, "JSON", b"[1, 2, 3]\n"),
    "json of a server": (UnknownFormatError, "Repository not found", b'{"error": "Repository not found"}'),
    "npy, as it begins": (UnknownFormatError, r"found: \x93NUMPY\x01", arrays(np.save)),
    "a zip's first byte": (TruncatedFileError, "1 byte: 50", b"P"),
    "a zip's first two": (TruncatedFileError, "2 bytes: 50 4b", b"PK"),
    "a legacy file's first two": (TruncatedFileError, "2 bytes: 80 02", b"\x80\x02"),
    "the length of a header": (TruncatedFileError, "1 byte: 40", b"@"),
    "program": (UnknownFormatError, "program", b"\x7fELF\x02\x01\x01" + bytes(60)),
    "text": (UnknownFormatError, "Entry not found", b"Entry not found"),
    "long text": (UnknownFormatError, "text file", "ein größerer Text 🙂\n".encode() * 1000),
    "zeros": (UnknownFormatError, "its first 3,000 bytes are zero", bytes(3000)),
    "one zero": (UnknownFormatError, "its first 1 bytes are zero", bytes(1)),
    "zeros at first": (UnknownFormatError, "its first 4,096 bytes are zero", bytes(5000) + bytes(range(1, 255))),
    "noise": (UnknownFormatError, "fe fd fc", bytes(range(254, 128, -1))),
    "a few bytes": (TruncatedFileError, "3 bytes", b"\x50\x00\x01"),
    "a zip and no more": (OpenError, "", b"PK\x03\x04"),
}


@pytest.mark.parametrize(("error", "text", "content"), FOREIGN.values(), ids=FOREIGN)
def test_files_that_are_no_checkpoints(error: type[OpenError], text: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(error) as raised:
        ms.open(path)
    assert type(raised.value) is error or error is OpenError
    assert str(path) in raised.value.where
    assert raised.value.remedy
    assert text in str(raised.value)
    assert len(str(raised.value)) < 1200
    assert str(raised.value).replace("\n", "").isprintable()


# Paths that lead nowhere.


def test_nothing_there(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(tmp_path / "modle.safetensors")
    assert f"did you mean {tmp_path}/model.safetensors?" in str(raised.value)
    assert isinstance(raised.value, FileNotFoundError)
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(tmp_path / "missing" / "such" / "x.pt")
    assert f"the directory {tmp_path} has no missing" in str(raised.value)
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(tmp_path / "model.safetensors" / "x.pt")
    assert f"{tmp_path}/model.safetensors is a file" in str(raised.value)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.pt").symlink_to("y.pt")
    with pytest.raises(SourceNotFoundError, match="symbolic link") as raised:
        ms.open(tmp_path / "x.pt")
    assert raised.value.found == str(tmp_path / "y.pt")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceNotFoundError):
        ms.open(tmp_path / "loop")


def test_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as where it is not installed
    with pytest.raises(SourceNotFoundError, match="hf://sentence-transformers/all-MiniLM-L6-v2"):
        ms.open("sentence-transformers/all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "NoneType"),
        (3, "int"),
        (b"x.pt", "bytes"),
        ({"x.pt"}, "set"),
        (torch.nn.Linear(1, 1), "state_dict"),
        (io.BytesIO(b""), "the path of the file"),
        ("", "cannot be a path"),
        ("a\0b", "cannot be a path"),
        ("file:///a%00b", "cannot be a path"),
        ("file://", "cannot be a path"),
        ("file://localhost", "cannot be a path"),
        ("ftp://example.com/{x}", "download it first"),
        ("file://server/share/x.pt", "download it first"),
    ],
)
def test_sources_of_another_kind(source: Any, text: str) -> None:
    with pytest.raises(SourceTypeError, match=text) as raised:
        ms.open(source)
    assert isinstance(raised.value, TypeError)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("s3://bucket/a b.pt2", "aws s3 cp [--recursive] 's3://bucket/a b.pt2' ."),
        ("hf://org/name", "hf download org/name"),
        ("hf://org/name/a/b.pt2", "hf download org/name a/b.pt2"),
        ("hf://org/name@v1/b.pt2", "hf download org/name b.pt2 --revision v1"),
    ],
)
def test_the_command_that_downloads_what_is_opened_from_a_disk_only(url: str, command: str) -> None:
    with pytest.raises(SourceTypeError) as raised:
        ms.Live(url)
    assert raised.value.remedy == f"download it first: {command}"


def test_commands_in_remedies_quote_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a; b"
    folder.mkdir()
    (folder / "x.pt").write_bytes(LFS)
    with pytest.raises(UnknownFormatError) as raised:
        ms.open(folder / "x.pt")
    assert f"git -C '{folder}' lfs pull" in raised.value.remedy


def test_a_file_url_may_name_any_file(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a b#\xff.pt")
    torch.save({"w": torch.ones(2)}, path)
    assert ms.open(path.as_uri()).tensor("w").tolist() == [1, 1]


@pytest.fixture
def special_files(tmp_path: Path) -> Iterator[dict[str, str]]:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(tmp_path)
        server.bind("socket")
        os.chdir(here)
        yield {"a pipe": str(tmp_path / "pipe"), "a socket": str(tmp_path / "socket"), "a device": "/dev/zero"}


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
def test_special_files_do_not_block(kind: str, special_files: dict[str, str]) -> None:
    with pytest.raises(SourceTypeError) as raised:
        ms.open(special_files[kind])
    assert raised.value.found == kind


# What may not be read.


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def as_nobody(*paths: Path) -> list[str]:
    """The errors of opening paths as a user without rights, and whether each is a `PermissionError`."""
    program = """
        import os, sys
        from modelstate.errors import ModelStateError
        from modelstate.checkpoint.open import open
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        for path in sys.argv[1:]:
            try:
                open(path)
            except ModelStateError as error:
                print(type(error).__name__, isinstance(error, PermissionError))
                print(error, end="\\0")
    """
    return run_program(textwrap.dedent(program), *paths).stdout.split("\0")[:-1]


@pytest.mark.slow
def test_no_permission(public: Path) -> None:
    (public / "closed").mkdir()
    save_file(STATE, public / "x.safetensors")
    save_file(STATE, public / "closed" / "x.safetensors")
    (public / "x.safetensors").chmod(0)
    (public / "closed").chmod(0)
    sharded = public / "sharded"
    sharded.mkdir(mode=0o755)
    save_sharded(sharded)
    for path in sharded.iterdir():
        path.chmod(0o644)
    (sharded / "model-00002-of-00002.safetensors").chmod(0)
    hidden = [public / "x.safetensors", public / "closed", public / "closed" / "x.safetensors", sharded]
    try:
        texts = as_nobody(*hidden)
    finally:
        (public / "closed").chmod(0o755)
    assert len(texts) == 4
    for text in texts:
        assert text.startswith("SourceAccessError True\n")
    for text in texts[:3]:
        assert "permission" in text
        assert "this process is user" in text
        assert "chmod +r" in text
    assert "model-00002-of-00002.safetensors" in texts[3]


@pytest.mark.parametrize("call", ["open", "fstat", "pread", "stat"])
def test_an_error_of_the_system(call: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(STATE, path)

    def fail(request: Request) -> None:
        if request.call == call:
            raise OSError(5, "Input/output error")

    with faulty_reads(before=fail), pytest.raises(ReadFailedError):
        ms.open(tmp_path if call == "stat" else path)
    assert_opens(path)


# Damage at random.

WHOLE = save(STATE, metadata={"format": "pt"})


@pytest.mark.parametrize("length", range(8, len(WHOLE), 13))
def test_a_cut_file_is_told_from_one_of_another_kind(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(WHOLE[:length])
    with pytest.raises((DamagedFileError, TruncatedFileError), match=r"the file (ends|is cut short)"):
        ms.open(path)


@pytest.mark.parametrize("make", [torch.save, lambda state, path: save_file(state, path)])
def test_a_file_that_is_written_over_while_it_is_opened(make: Any, tmp_path: Path) -> None:
    """At each request in turn: what is loaded is one of the two files, and no mixture."""
    path, count, at = tmp_path / "x", 1, 0
    while at < count:
        at += 1
        make({"a": torch.zeros(3), "b": torch.ones(5)}, path)
        os.utime(path, ns=(at, at))

        def write_over(request: Request) -> None:
            make({"a": torch.full((5,), 2.0), "b": torch.full((3,), 3.0)}, path)

        found: dict[str, list[float]] = {}
        with suppress(ms.ModelStateError):
            with faulty_reads(at=at, before=write_over) as faults:
                checkpoint = ms.open(path)
            found = {name: checkpoint.tensor(name).tolist() for name in checkpoint}
        count = len(faults.requests)
        assert found in ({}, {"a": [0.0] * 3, "b": [1.0] * 5}, {"a": [2.0] * 5, "b": [3.0] * 3}), at
    assert count >= 3


# What other libraries write.

TABLE_END = bytes.fromhex("57fb808b247547db")


def tensorflow(folder: Path) -> None:
    (folder / "model.ckpt.index").write_bytes(b"\0" * 64 + TABLE_END)
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(b"\1\2\3" * 50)
    (folder / "model.ckpt.meta").write_bytes(b"\n\x05graph")
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\n')


@pytest.mark.parametrize(
    "name", ["model.ckpt", "model.ckpt.index", "model.ckpt.data-00000-of-00001", "model.ckpt.meta", "checkpoint", "."]
)
def test_checkpoints_of_tensorflow_are_named(name: str, tmp_path: Path) -> None:
    tensorflow(tmp_path)
    with pytest.raises(UnknownFormatError, match="TensorFlow checkpoint"):
        ms.open(tmp_path / name)


FLAX = [
    b"\x81\xa6params\x81\xa5dense\x82\xa6kernel\xc7\x20\x01",
    b"\x82\xa4step\x07\xa6params\x80",
    b"\xde\x00\x20\xa6params\x80",
    b"\x81\xd9\x28" + b"a" * 40 + b"\x80",
]


@pytest.mark.parametrize("content", FLAX)
@pytest.mark.parametrize("name", ["flax_model.msgpack", "weights.bin"])
def test_flax_is_named(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content + b"\0" * 100)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UnknownFormatError, match=r"Flax \.msgpack"):
            ms.open(path)


def test_arguments_of_torch_load_are_answered(tmp_path: Path) -> None:
    with pytest.raises(ms.errors.OptionError, match=r"ms\.load\(model, path, device=\.\.\.\)"):
        ms.open(tmp_path, map_location="cpu")  # type: ignore[call-arg]


def test_a_spec_that_is_taken_for_a_tensor() -> None:
    spec = ms.open(STATE)["weight"]
    with pytest.raises(AttributeError, match=r"checkpoint\.tensor\('weight'\)"):
        spec.mean()
    with pytest.raises(AttributeError, match="no attribute 'maen'"):
        spec.maen()
    with pytest.raises(ms.errors.TensorSpecError, match="__array__"):
        np.asarray(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
