"""A manifest that is damaged, newer, or does not fit its file is refused, and a file without one is as it was."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import modelstate as ms
from modelstate.errors import CodecError, DamagedFileError, NewerManifestError
from tests.sweeps import examples

KEY = "modelstate"
STATE = {
    "a": torch.ones(2),
    "b": torch.zeros(3, dtype=torch.int64),
    "c._extra_state": {"x": (1, torch.ones(2)), "y": None},
}


def parts(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and manifest of a file, as the safetensors library sees them."""
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()[KEY])


def saved(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    state.update(STATE)
    state["alias"] = state["a"]
    ms.save(state, path)
    return parts(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def write(path: Path, tensors: dict[str, torch.Tensor], text: str) -> None:
    save_file(tensors, path, metadata={KEY: text})


def test_the_manifest_can_be_read(path: Path) -> None:
    tensors, manifest = saved(path)
    assert manifest["format"] == 1
    assert manifest["aliases"] == {"alias": "a"}
    assert manifest["extra"] == {
        "c._extra_state": {"x": {"$tuple": [1, {"$tensor": "_modelstate_extra.0"}]}, "y": None}
    }
    assert manifest["extra_tensors"] == ["_modelstate_extra.0"]
    assert manifest["versions"] == {"": {"version": 2}}
    write(path, tensors, json.dumps(manifest))
    assert ms.open(path).aliases == (("a", "alias"),)


WRONG: dict[str, Any] = {
    "no object": [],
    "no format": {},
    "format of another kind": {"format": "1"},
    "a flag for a format": {"format": True},
    "unknown field": {"format": 1, "shards": []},
    "schema": {"format": 1, "schema": 2},
    "aliases": {"format": 1, "aliases": [["a", "b"]]},
    "alias of nothing": {"format": 1, "aliases": {"x": "gone"}},
    "alias of a list": {"format": 1, "aliases": {"x": ["a"]}},
    "alias that is a tensor": {"format": 1, "aliases": {"b": "a"}},
    "alias of a hidden tensor": {"format": 1, "aliases": {"x": "a"}, "extra_tensors": ["a"]},
    "hidden tensor that is not there": {"format": 1, "extra_tensors": ["gone"]},
    "hidden list": {"format": 1, "extra_tensors": [["a"]]},
    "extra": {"format": 1, "extra": [1]},
    "extra that is a tensor": {"format": 1, "extra": {"a": 1}},
    "extra that is an alias": {"format": 1, "aliases": {"x": "a"}, "extra": {"x": 1}},
    "versions": {"format": 1, "versions": {"a": 1}},
    "a tree of a tensor that is not there": {"format": 1, "tree": {"dict": [["a", "gone"]]}},
    "tensors that are not there": {"format": 1, "tree": {"tensors": ["gone"]}},
    "a digest of nothing": {"format": 1, "digests": {"algorithm": "xxh3-128", "block_bytes": 1, "tensors": {"x": ""}}},
    "encoded versions": {"format": 1, "versions": {"a": {"$nonsense": 1}}},
}


@pytest.mark.parametrize("name", WRONG)
def test_manifests_that_do_not_fit(path: Path, name: str) -> None:
    write(path, {"a": torch.ones(2), "b": torch.ones(1)}, json.dumps(WRONG[name]))
    with pytest.raises(DamagedFileError, match="damaged") as caught:
        ms.open(path)
    assert caught.value.where == f"{path}: __metadata__['modelstate']"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", '{"format":1,"format":1}', '{"format":NaN}', "[" * 100_000, "1" * 5000, "," * 4_000_001],
)
def test_texts_that_are_no_manifest(path: Path, text: str) -> None:
    write(path, {"a": torch.ones(2)}, text)
    with pytest.raises(DamagedFileError):
        ms.open(path)


def test_a_newer_format_says_so(path: Path) -> None:
    write(path, {"a": torch.ones(2)}, '{"format": 2, "writer": "modelstate 9.1", "unheard of": 1}')
    with pytest.raises(NewerManifestError, match=r"(?s)newer version.*modelstate 9\.1.*update modelstate"):
        ms.open(path)


def test_a_file_without_one_is_as_it_was(path: Path) -> None:
    save_file({"a": torch.ones(2), "_modelstate_extra.0": torch.ones(1)}, path, metadata={"format": "pt", "x": "y"})
    checkpoint = ms.open(path)
    assert set(checkpoint) == {"a", "_modelstate_extra.0"}
    assert checkpoint.metadata == {"format": "pt", "x": "y"}
    assert checkpoint.versions is None


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(["", "a", "b.c", "$tuple", "\ud800"]),
        st.dictionaries(st.sampled_from(["version", "$int"]), st.integers(0, 3) | st.just("1"), max_size=2),
        max_size=3,
    )
)
def test_any_versions_come_back(path: Path, versions: dict[str, dict[str, object]]) -> None:
    state: Any = OrderedDict(a=torch.ones(1))
    state._metadata = versions
    ms.save(state, path, overwrite=True)
    assert (ms.open(path).versions or {}) == versions


@pytest.mark.parametrize(
    "tree", [{"$tensor": "gone"}, {"$tensor": "a"}, {"$tensor": ["a"]}, {"$tensor": {}}, {"$no": 1}]
)
def test_values_that_are_damaged_fail_when_they_are_asked_for(path: Path, tree: Any) -> None:
    manifest = {"format": 1, "extra": {"x._extra_state": [tree], "y._extra_state": 1}}
    write(path, {"a": torch.ones(2)}, json.dumps(manifest))
    checkpoint = ms.open(path)
    assert checkpoint.extra["y._extra_state"] == 1
    for name in ("x._extra_state", "x._extra_state.0"):
        with pytest.raises(CodecError) as caught:
            checkpoint.extra[name]
        assert caught.value.where == f"{path}: x._extra_state[0]"
