"""Checksums: a sound file is verified, and damage is named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import modelstate as ms
from modelstate import Checkpoint
from modelstate.errors import ChecksumError
from tests.formats.files import index_text
from tests.formats.torch_files import WEIGHT, saved


def damage(path: str, checkpoint: Checkpoint, *names: str) -> Checkpoint:
    """The checkpoint, opened after the last bit of some tensors was flipped."""
    with open(path, "r+b") as file:
        for name in names:
            place = checkpoint[name].location
            assert place is not None
            file.seek(place.start + place.nbytes - 1)
            last = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([last[0] ^ 1]))
    return ms.open(path)


def test_a_sound_file_is_verified(checkpoint: Checkpoint) -> None:
    batch_norm = 4 * 4 * 4 + 8
    assert checkpoint.verify() == 48 + 16 + batch_norm + 48
    assert checkpoint.select("optimizer").verify() == 48


def test_damage_is_named(path: str, checkpoint: Checkpoint) -> None:
    damaged = damage(path, checkpoint, "model_state.0.weight", "model_state.1.bias")
    with pytest.raises(ChecksumError, match=r"tensors that are not what their checksums say \(3\)") as caught:
        damaged.verify()
    assert caught.value.found == "model_state.0.weight, model_state.tied, model_state.1.bias"
    assert caught.value.where == path
    assert damaged.select("optimizer").verify() == 48


def test_damage_behind_the_bytes_that_a_tensor_uses(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"whole": WEIGHT, "view": WEIGHT[:1]})
    with pytest.raises(ChecksumError) as caught:
        damage(path, ms.open(path), "whole").select("").verify()
    assert caught.value.found == "whole, view"


def test_sparse_parts_are_verified(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"s": torch.eye(3).to_sparse()})
    checkpoint = ms.open(path)
    assert checkpoint.verify() == 2 * 3 * 8 + 3 * 4
    region = next(iter(checkpoint.checksums))
    with open(path, "r+b") as file:
        file.seek(region.start)
        file.write(b"\xff")
    with pytest.raises(ChecksumError) as caught:
        ms.open(path).verify()
    assert caught.value.found == "s"


def test_shares_are_the_whole_and_one_of_them_finds_the_damage(tmp_path: Path) -> None:
    """Small tensors are read together with their neighbours, large ones one by one."""
    sizes = [3, 5, 200_000, 1, 70_000, 2000, 2000, 2000, 7]
    state = {f"t{number:02d}": torch.full((size,), float(number)) for number, size in enumerate(sizes)}
    path = tmp_path / "x.safetensors"
    ms.save(state, path)
    shares = [slice(first, None, 3) for first in range(3)]
    verified = [ms.open(path).verification().run(share=share) for share in shares]
    assert min(verified) > 0
    assert sum(verified) == sum(tensor.nbytes for tensor in state.values())
    for name in state:
        ms.save(state, path)
        damage(str(path), ms.open(path), name)
        found = []
        for share in shares:
            try:
                ms.open(path).verification().run(share=share)
            except ChecksumError as error:
                found.append(error.found)
        assert found == [name]


def test_verify_describes_what_it_compared(path: str, checkpoint: Checkpoint) -> None:
    result = ms.verify(path, key="optimizer")
    assert (result.source, result.tensors, result.bytes, result.algorithms) == (path, 1, 48, ("crc32",))
    assert str(result).startswith(f"{path}: 1 tensor, 48 B, equal to their crc32 digests, ")
    assert json.loads(result.to_json())["bytes"] == 48
    damage(path, checkpoint, "model_state.0.weight")
    with pytest.raises(ChecksumError, match=r"found: model_state\.0\.weight"):
        ms.verify(path)


@pytest.mark.parametrize("kind", ["safetensors", "mapping"])
def test_nothing_to_verify_against(tmp_path: Path, kind: str) -> None:
    save_file({"a": WEIGHT}, tmp_path / "x.safetensors")
    source: Any = {"a": WEIGHT} if kind == "mapping" else tmp_path / "x.safetensors"
    with pytest.raises(ChecksumError, match=f"found: {kind}, which keeps none"):
        ms.open(source).verify()


def test_what_has_no_checksum_is_named(tmp_path: Path) -> None:
    save_file({f"b{i}": WEIGHT + i for i in range(5)}, tmp_path / "b.safetensors")
    torch.save({"a": WEIGHT}, tmp_path / "a.pt")
    (tmp_path / "x.index.json").write_text(index_text({"a": "a.pt"} | {f"b{i}": "b.safetensors" for i in range(5)}))
    with pytest.raises(ChecksumError) as caught:
        ms.open(tmp_path / "x.index.json").verify()
    assert caught.value.found == "none for b0, b1, b2, and 2 more"


def without_seal(path: Path) -> None:
    """Writes a file of `ms.save` as another program does that keeps the metadata that it does not know."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), load_file(path)
    del metadata["modelstate_seal"]
    save_file(tensors, path, metadata)


def test_digests_without_a_seal_verify_nothing(tmp_path: Path) -> None:
    """They may be those of other values, where a program that does not know them has changed the tensors."""
    path = tmp_path / "x.safetensors"
    ms.save({"a": WEIGHT, "b": WEIGHT + 1}, path)
    without_seal(path)
    with pytest.raises(ChecksumError, match="nothing to verify the tensors against"):
        ms.open(path).verify()


def test_digests_of_a_shard_without_a_seal_verify_nothing(tmp_path: Path) -> None:
    """What its header says of the tensors may be damaged."""
    ms.save({"a": WEIGHT, "b": WEIGHT + 1}, tmp_path / "x.safetensors", shard_size_bytes=1)
    assert ms.open(tmp_path).verify() == 2 * WEIGHT.nbytes
    without_seal(sorted(tmp_path.glob("*.safetensors"))[1])
    with pytest.raises(ChecksumError, match="nothing to verify the tensors against"):
        ms.open(tmp_path).verify()


@pytest.mark.parametrize(
    "verify", [lambda path: ms.open(path).verify(), lambda path: ms.load(torch.nn.Linear(2, 2), path, verify=True)]
)
def test_what_to_do_about_a_file_without_checksums(tmp_path: Path, verify: Any) -> None:
    save_file(torch.nn.Linear(2, 2).state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(ChecksumError) as caught:
        verify(tmp_path / "plain.safetensors")
    assert "modelstate.save(modelstate.open(source), path)" in caught.value.remedy
    ms.save(ms.open(tmp_path / "plain.safetensors"), tmp_path / "kept.safetensors")
    verify(tmp_path / "kept.safetensors")
