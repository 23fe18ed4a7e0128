"""Shards: other tools read them, and a save takes away what it stands for and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import modelstate as ms
from modelstate.errors import ChecksumError, TargetExistsError, UnsavableError
from modelstate.formats import manifest, safetensors
from tests.faults import faulty_writes
from tests.objects.saves import NAME, contents, save, version_at

INDEX = f"{NAME}.index.json"


def by_other_tools(index: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(index.parent / name) for name in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}


def test_the_index_is_that_of_others(tmp_path: Path) -> None:
    report = ms.save({f"w{n}": torch.full((10,), float(n)) for n in range(5)}, tmp_path / NAME, shard_size_bytes=80)
    assert set(contents(tmp_path)) == {Path(path).name for path in report.files}
    assert report.files[0] == str(tmp_path / INDEX)
    assert report.bytes == sum(map(len, contents(tmp_path).values()))
    assert len(report.files) == 4
    assert "3 shards" in str(report)
    found = by_other_tools(tmp_path / INDEX)
    assert all(torch.equal(found[f"w{n}"], torch.full((10,), float(n))) for n in range(5))
    assert all(load_file(path) for path in report.files[1:])
    for source in (tmp_path / NAME, tmp_path / INDEX, tmp_path):
        assert set(ms.open(source)) == {f"w{n}" for n in range(5)}


def test_a_tensor_larger_than_a_shard(tmp_path: Path) -> None:
    report = ms.save(
        {"a": torch.ones(100), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / NAME, shard_size_bytes=8
    )
    assert len(report.files) == 3
    assert torch.equal(ms.open(tmp_path / NAME).tensor("a"), torch.ones(100))


def test_a_state_that_fits_is_one_file(tmp_path: Path) -> None:
    assert ms.save({"a": torch.ones(2)}, tmp_path / NAME, shard_size_bytes=8).files == (str(tmp_path / NAME),)
    assert ms.save({}, tmp_path / NAME, shard_size_bytes=1).files == (str(tmp_path / NAME),)


def test_more_than_a_header_or_an_index_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the error proposes works: shards, where one header is too large for all tensors, and parts elsewhere."""
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 6000)
    state = {"part": {f"w{n}": torch.full((1,), float(n)) for n in range(60)}}
    with pytest.raises(UnsavableError, match="shard_size_bytes="):
        ms.save(state, tmp_path / NAME)
    ms.save(state, tmp_path / NAME, shard_size_bytes=80)
    assert all(torch.equal(ms.open(tmp_path / NAME).tensor(f"part.w{n}"), torch.tensor([n * 1.0])) for n in range(60))
    before = contents(tmp_path)
    monkeypatch.setattr(manifest, "MAX_INDEX_BYTES", 6000)
    for size in (None, 80):
        with pytest.raises(UnsavableError, match="in files of their own"):
            ms.save(state, tmp_path / NAME, shard_size_bytes=size)
    assert contents(tmp_path) == before


OTHERS: dict[str, tuple[Any, Any]] = {
    "shapes": ({"a": torch.zeros(2, 3), "b": torch.ones(6)}, {"a": torch.zeros(3, 2), "b": torch.ones(6)}),
    "dtypes": ({"a": torch.zeros(4), "b": torch.ones(6)}, {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(6)}),
    "groups": (
        {"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(2)},
        {"b": torch.ones(2), "c": torch.ones(2), "a": torch.ones(4)},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_shard_of_the_old_checkpoint_is_overwritten(tmp_path: Path, name: str) -> None:
    """Also where both hold the same bytes under the same names: the old index must go on fitting them."""
    old, new = OTHERS[name]
    ms.save(old, tmp_path / NAME, shard_size_bytes=20)
    before, after = contents(tmp_path), list[dict[str, bytes]]()
    with faulty_writes(before=lambda _: after.append(contents(tmp_path))):
        ms.save(new, tmp_path / NAME, shard_size_bytes=20)
    for during in after:
        if during.get(INDEX) == before[INDEX]:
            assert before.items() <= during.items()
    found = ms.open(tmp_path / NAME)
    assert all(torch.equal(found.tensor(key), value) for key, value in new.items())


def test_shards_that_others_have_written_are_replaced(tmp_path: Path) -> None:
    names = {"a": "x-00001-of-00002.safetensors", "b": "x-00002-of-00002.safetensors"}
    for key, file in names.items():
        save_file({key: torch.ones(3)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": names}))
    save(tmp_path, 5, "shards")
    assert version_at(tmp_path / NAME) == 5
    assert not set(names.values()) & set(contents(tmp_path))


def test_files_that_are_no_shards_or_another_index_has_stay(tmp_path: Path) -> None:
    shared, other = "x-00001-of-00001.safetensors", "notes.txt"
    save_file({"a": torch.ones(3)}, tmp_path / shared)
    (tmp_path / other).write_text("mine")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shared, "b": other}}))
    (tmp_path / "y.index.json").write_text(json.dumps({"weight_map": {"a": shared}}))
    save(tmp_path, 5, "file")
    assert set(contents(tmp_path)) == {NAME, "y.index.json", shared, other}
    (tmp_path / "x-0123456789ab-00001-of-00001.safetensors").write_text("left by a save that was killed")
    save(tmp_path, 6, "file")
    assert set(contents(tmp_path)) == {NAME, "y.index.json", shared, other}


def test_an_index_in_the_way(tmp_path: Path) -> None:
    save(tmp_path, 1, "shards")
    for options in ({}, {"shard_size_bytes": 1}):
        with pytest.raises(TargetExistsError):
            ms.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / NAME, overwrite=False, **options)  # type: ignore[arg-type]
    assert version_at(tmp_path / NAME) == 1
    (tmp_path / INDEX).write_text("damaged")
    save(tmp_path, 2, "shards")
    assert version_at(tmp_path / NAME) == 2
    assert len(contents(tmp_path)) == 3


@pytest.mark.slow
def test_from_pretrained_reads_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    ms.save(model, tmp_path / "model.safetensors", shard_size_bytes=5000)
    assert not (tmp_path / "model.safetensors").exists()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_shard_of_another_save_is_found(tmp_path: Path) -> None:
    save(tmp_path, 1, "shards")
    kept = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("*.safetensors"))}
    save(tmp_path, 2, "shards")
    for name, path in zip(kept, sorted(tmp_path.glob("*.safetensors")), strict=True):
        path.write_bytes(kept[name])
    with pytest.raises(ChecksumError, match="are not what their checksums say"):
        ms.open(tmp_path / NAME).verify()
