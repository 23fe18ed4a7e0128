"""Digests and sizes that lie: a checkpoint or a typed error, in little memory."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import DamagedFileError, UnsavableError
from modelstate.formats.manifest import KEY, OPEN_SEAL, SEAL, sealed
from tests.objects.saves import NAME


def index_of(directory: Path, metadata: dict[str, Any]) -> Path:
    """One of two shards that torch wrote, one of which has a sparse tensor."""
    torch.save({"a": torch.ones(3)}, directory / "0.bin")
    torch.save({"b": torch.eye(3).to_sparse()}, directory / "1.bin")
    path = directory / "pytorch_model.bin.index.json"
    text = json.dumps({"metadata": metadata, "weight_map": {"a": "0.bin", "b": "1.bin"}})
    path.write_bytes(sealed(text.encode()) if SEAL in metadata else text.encode())
    return path


def test_a_digest_of_what_has_none(tmp_path: Path) -> None:
    digests = {"algorithm": "xxh3-128", "block_bytes": 4 << 20, "tensors": {"b": "0" * 32}}
    said = json.dumps({"format": 1, "digests": digests})
    with pytest.raises(DamagedFileError, match="'b', which is not a plain tensor"):
        ms.open(index_of(tmp_path, {SEAL: OPEN_SEAL, KEY: said}))


def test_an_index_of_others_that_mentions_ours(tmp_path: Path) -> None:
    path = index_of(tmp_path, {"total_size": 48, "note": f"once had a {SEAL}"})
    assert list(ms.open(path)) == ["a", "b"]


def expanded() -> dict[str, torch.Tensor]:
    """Returns a tensor that shows the byte which is stored of it again and again, and another one."""
    return {"v": torch.ones(3), "w": torch.zeros(1, dtype=torch.int8).expand(10**7, 10**7)}


COPIES: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda old, new: ms.save(ms.open(old), new),
    "convert": lambda old, new: ms.convert_checkpoint(old, new),
    "shards": lambda old, new: ms.convert_checkpoint(old, new, shard_size_bytes=1 << 20),
}


@pytest.mark.slow
@pytest.mark.parametrize(("copy", "name"), [*((copy, "new.safetensors") for copy in COPIES), ("save", "new.pt")])
def test_a_small_file_does_not_become_a_huge_one(tmp_path: Path, copy: str, name: str) -> None:
    torch.save(expanded(), tmp_path / "old.pt")
    tracemalloc.start()
    try:
        with pytest.raises(UnsavableError, match="expanded views have far more elements"):
            COPIES[copy](tmp_path / "old.pt", tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"old.pt"}


def test_a_live_tensor_that_is_expanded_far_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsavableError) as caught:
        ms.save(expanded(), tmp_path / NAME)
    assert caught.value.where.endswith(": w")
    assert list(tmp_path.iterdir()) == []


def test_expanded_tensors_of_models_are_saved_in_full(tmp_path: Path) -> None:
    state = {
        "mask": torch.tensor([True]).expand(1, 1, 2048, 2048),
        "ids": torch.arange(512).expand(1, 512),
        "batch": torch.randn(64).expand(1000, 64),
    }
    torch.save(state, tmp_path / "old.pt")
    ms.save(ms.open(tmp_path / "old.pt"), tmp_path / NAME)
    found = ms.open(tmp_path / NAME)
    assert all(torch.equal(found.tensor(name), value) for name, value in state.items())
