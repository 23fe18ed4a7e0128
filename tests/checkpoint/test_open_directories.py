"""What opens of a directory: the one checkpoint that is meant, or an error that names what is there."""

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.package
from safetensors.torch import save, save_file

import modelstate as ms
from modelstate import errors
from modelstate.errors import (
    AmbiguousCheckpointError,
    DamagedFileError,
    OpenError,
    SourceNotFoundError,
    UnknownFormatError,
)
from tests.checkpoint.test_open import FOREIGN, LFS, STATE, WRITERS, arrays, assert_opens, save_sharded, zipped
from tests.formats.files import index_text


def other_state(path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"other": torch.ones(1)}, file)


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# A model\n")
    (tmp_path / "empty").touch()
    (tmp_path / "data.npz").write_bytes(arrays(np.savez))
    WRITERS["torch legacy"](tmp_path / "epoch=3-step=400.ckpt")
    assert_opens(tmp_path)
    assert ms.open(tmp_path).source == str(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_training_directory(name: str, tmp_path: Path) -> None:
    WRITERS["safetensors" if name.endswith("safetensors") else "torch zip"](tmp_path / name)
    for other in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        other_state(tmp_path / other)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert_opens(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_safetensors_are_preferred_to_the_same_model_in_a_pickle(name: str, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    other_state(tmp_path / name)
    assert_opens(tmp_path)


def test_shards_of_safetensors_are_preferred_too(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    other_state(tmp_path / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(index_text({"other": "pytorch_model-00001-of-00001.bin"}))
    assert_opens(tmp_path)


@pytest.mark.parametrize("content", [LFS, b"", b"<html>", save(STATE)[:-1]])
def test_nothing_is_taken_in_place_of_a_damaged_model(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    other_state(tmp_path / "pytorch_model.bin")
    other_state(tmp_path / "optimizer.pt")
    with pytest.raises(OpenError) as raised:
        ms.open(tmp_path)
    assert raised.value.where == str(tmp_path / "model.safetensors")


def test_nothing_is_taken_in_place_of_a_model_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("blob")
    other_state(tmp_path / "optimizer.pt")
    with pytest.raises(SourceNotFoundError, match="symbolic link"):
        ms.open(tmp_path)


def test_the_only_file_that_could_be_meant_is_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(LFS)
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(UnknownFormatError):
        ms.open(tmp_path)


def test_several_checkpoints(tmp_path: Path) -> None:
    for name in ("last.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"):
        other_state(tmp_path / name)
    with pytest.raises(AmbiguousCheckpointError) as raised:
        ms.open(tmp_path)
    assert raised.value.found == "epoch=1.ckpt, epoch=2.ckpt, last.ckpt"
    assert raised.value.remedy.endswith(f"such as {tmp_path / 'epoch=1.ckpt'}")


def test_shards_without_their_index(tmp_path: Path) -> None:
    save_sharded(tmp_path).unlink()
    with pytest.raises(DamagedFileError, match="not the index") as raised:
        ms.open(tmp_path)
    assert "model-00001-of-00002.safetensors" in raised.value.found
    for number in range(2, 7):
        save_file(STATE, tmp_path / f"model-{number:05}-of-00009.safetensors")
    with pytest.raises(DamagedFileError) as raised:
        ms.open(tmp_path)
    assert raised.value.found.endswith(", and 3 more")


def test_shards_of_a_save_that_was_stopped_are_passed_over(tmp_path: Path) -> None:
    weights = {name: torch.full((100,), float(at)) for at, name in enumerate("abc")}
    ms.save(weights, tmp_path / "m.safetensors", shard_size_bytes=500)
    shard = next(tmp_path.glob("m-*-00001-of-*"))
    (tmp_path / f"m-{'0' * 12}-00001-of-00002.safetensors").write_bytes(shard.read_bytes())
    assert torch.equal(ms.open(tmp_path).tensor("c"), weights["c"])
    (tmp_path / "other.safetensors").write_bytes(shard.read_bytes())
    with pytest.raises(AmbiguousCheckpointError):
        ms.open(tmp_path)


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="an empty directory"):
        ms.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint-500").mkdir()
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(tmp_path)
    assert raised.value.found == "checkpoint-500/, config.json"
    assert raised.value.remedy.endswith("give one of checkpoint-500")
    for number in range(7):
        (tmp_path / f"checkpoint-{number}").mkdir()
    with pytest.raises(SourceNotFoundError, match=r"give one of .*, and 2 more"):
        ms.open(tmp_path)
    assert isinstance(raised.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("names", "tool"),
    [
        (("__0.metadata", "__0_0.distcp"), "torch.distributed.checkpoint"),
        ((".snapshot_metadata",), "torchsnapshot"),
        (("saved_model.pb", "keras_metadata.pb"), "TensorFlow"),
        (("_CHECKPOINT_METADATA", "manifest.ocdbt"), "Orbax"),
    ],
)
def test_directories_of_other_tools(names: tuple[str, ...], tool: str, tmp_path: Path) -> None:
    for name in names:
        other_state(tmp_path / name)
    with pytest.raises(UnknownFormatError, match=tool) as raised:
        ms.open(tmp_path)
    assert raised.value.remedy


def foreign_zips() -> dict[str, Callable[[Path], None]]:
    def script(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)

    def exported(path: Path) -> None:
        torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)), path)

    def package(path: Path) -> None:
        with torch.package.PackageExporter(path) as exporter:
            exporter.save_text("notes", "notes.txt", "hello")

    return {
        "torchscript": script,
        "exported program": exported,
        "torch.package": package,
        "numpy": lambda path: path.write_bytes(arrays(np.savez)) and None,
        "onnx": lambda path: path.write_bytes(FOREIGN["onnx"][2]) and None,
        "archive": lambda path: path.write_bytes(zipped("notes.txt", "model.pt")) and None,
    }


@pytest.mark.parametrize("name", ["model.pt", "model.pt2", "other.jit"])
@pytest.mark.parametrize("kind", foreign_zips())
def test_what_is_no_checkpoint_is_no_candidate(kind: str, name: str, tmp_path: Path) -> None:
    foreign_zips()[kind](tmp_path / name)
    with pytest.raises(OpenError):
        ms.open(tmp_path / name)
    with pytest.raises((SourceNotFoundError, UnknownFormatError)):
        ms.open(tmp_path)
    WRITERS["torch zip"](tmp_path / "weights.pt")
    assert_opens(tmp_path)
    save_file(STATE, tmp_path / "weights.safetensors")
    assert_opens(tmp_path)


def test_special_files_in_a_directory_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    save_file(STATE, tmp_path / "b.safetensors")
    assert stat.S_ISFIFO((tmp_path / "a.safetensors").stat().st_mode)
    assert_opens(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "x.index.json"])
def test_an_index_that_names_itself(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(index_text({"w": name}))
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(errors.DamagedFileError, match="another index"):
            ms.open(source)
