"""Paths as people write them: home directories, misspelt names and URLs, and one shard of several."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

import modelstate as ms
from modelstate.errors import PlanError, SourceNotFoundError, SourceTypeError, UnsavableError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory, which is not the working directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


# Home directories.


@pytest.mark.parametrize("as_path", [str, Path], ids=["str", "Path"])
def test_functions_expand_the_home_directory(home: Path, as_path: Callable[[str], Any]) -> None:
    model = torch.nn.Linear(2, 2)
    ms.save(model, as_path("~/net.safetensors"))
    assert (home / "net.safetensors").is_file()
    ms.save(model, as_path("~/shards"), shard_size_bytes=16)
    assert (home / "shards.index.json").is_file()
    ms.load(torch.nn.Linear(2, 2), as_path("~/net.safetensors"))
    assert len(ms.open(as_path("~/shards"))) == len(ms.open(as_path("~/net.safetensors"))) == 2
    assert ms.verify(as_path("~/net.safetensors")).tensors == len(ms.inspect(as_path("~/net.safetensors")).tensors) == 2
    assert ms.diff(as_path("~/net.safetensors"), as_path("~/shards")).is_equal
    ms.convert_checkpoint(as_path("~/net.safetensors"), as_path("~/net.pt"))
    assert (home / "net.pt").is_file()
    with ms.Store(as_path("~/run")) as store:
        store.save(1, {"model": model})
    assert (home / "run" / "store.json").is_file()
    assert os.listdir() == []
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(as_path("~/nowhere.pt"))
    assert raised.value.where == str(home / "nowhere.pt")


# URLs.


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("s3:/bucket/x.safetensors", "s3://bucket/x.safetensors"),
        ("s3:bucket/x.safetensors", "s3://bucket/x.safetensors"),
        (Path("s3://bucket/x.safetensors"), "s3://bucket/x.safetensors"),
        (Path("https://host/x.safetensors"), "https://host/x.safetensors"),
        ("HF:/org/name", "hf://org/name"),
        ("file:/x/y.pt", "file:///x/y.pt"),
    ],
)
def test_a_misspelt_url(path: str | Path, right: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SourceTypeError, match="misspelt URL") as raised:
        ms.open(path)
    assert right in str(raised.value)
    for call in (ms.verify, ms.inspect):
        with pytest.raises(SourceTypeError, match="misspelt URL"):
            call(path)
    for save in (lambda: ms.save(model, path, format="safetensors"), lambda: ms.Store(path)):
        with pytest.raises(UnsavableError, match=right):
            save()
    assert os.listdir() == []


def test_a_secret_of_a_misspelt_url_is_not_shown() -> None:
    with pytest.raises(SourceTypeError) as raised:
        ms.open("https:/user:secret@host/x.pt?sig=secret")
    assert "secret" not in str(raised.value)


def test_a_directory_with_the_name_of_a_scheme() -> None:
    os.mkdir("s3:")
    ms.save(torch.nn.Linear(2, 2), "s3:/x.safetensors")
    assert len(ms.open("s3:/x.safetensors")) == 2
    ms.save(torch.nn.Linear(2, 2), "./gs:x.safetensors")
    assert len(ms.open("gs:x.safetensors")) == 2


# Names that are not there.


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ("modle.safetensors", "model.safetensors"),
        ("Model.safetensors", "model.safetensors"),
        ("my-model.pt", "my_model.pt"),
        ("net.pt", "net.safetensors"),
        ("net.pt", "net.safetensors.index.json"),
        ("exprots/net.pt", "exports"),
        ("step-100-modle.pt", "step-100-model.pt"),
    ],
)
def test_a_misspelt_name(given: str, there: str) -> None:
    Path(there).mkdir() if there == "exports" else Path(there).write_bytes(b"x")
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(Path(given))
    assert raised.value.remedy == f"did you mean {os.path.abspath(there)}?"


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ("nowhere.pt", "net.pt"),
        ("bert-base.safetensors", "bart-base.safetensors"),
        ("llama-7b.safetensors", "llama-13b.safetensors"),
        ("step-100.pt", "step-10.pt"),
        ("model_a.pt", "model_b.pt"),
        ("model.pt", "models.pt"),
        ("encoder.pt", "decoder.pt"),
        ("config.pt", "config.json"),
    ],
)
def test_another_model_is_not_proposed(given: str, there: str) -> None:
    Path(there).write_bytes(b"x")
    with pytest.raises(SourceNotFoundError) as raised:
        ms.open(Path(given))
    assert there not in str(raised.value)


# One shard of several.


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))


SHARDS = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.fixture
def shards() -> Path:
    os.mkdir("repo")
    save_torch_state_dict(Layers().state_dict(), "repo", max_shard_size=300)
    return Path("repo")


@pytest.mark.parametrize("options", [{}, {"init_missing": True}])
def test_one_shard_names_the_index_and_the_others(shards: Path, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as raised:
        ms.load(Layers(), shards / SHARDS[0], **options)
    text, first = str(raised.value), raised.value.problems[0]
    assert first.found == str((shards / "model.safetensors.index.json").absolute())
    assert (first.name, first.others) == (SHARDS[0], SHARDS[1:])
    assert text.index("repo/model.safetensors.index.json") < text.find("allow_missing") % len(text)
    assert ms.load(Layers(), first.found).coverage == 1


def test_shards_without_an_index_and_a_list_of_shards(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(PlanError) as raised:
        ms.load(Layers(), [shards / SHARDS[0], shards / SHARDS[2]])
    problem = raised.value.problems[0]
    assert (problem.found, problem.others) == (None, (SHARDS[1],))
    assert "index" in str(problem.as_dict()["remedy"])
    assert ms.load(Layers(), [shards / name for name in SHARDS]).coverage == 1


@pytest.mark.parametrize("source", [".", "model.safetensors.index.json", SHARDS[0]])
def test_an_index_that_does_not_name_all_shards(shards: Path, source: str) -> None:
    """It is no remedy, since it has no more than what was loaded."""
    index = shards / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    named = {name: file for name, file in fields["weight_map"].items() if file == SHARDS[0]}
    index.write_text(json.dumps(fields | {"weight_map": named}))
    with pytest.raises(PlanError) as raised:
        ms.load(Layers(), shards / source)
    problem = raised.value.problems[0]
    assert (problem.name, problem.found, problem.others) == (SHARDS[0], None, SHARDS[1:])
    (note,) = ms.convert_checkpoint(shards / source, "part.safetensors").notes
    assert note.endswith(f"the result lacks the tensors of {', '.join(SHARDS[1:])}")
    assert ms.load(Layers(), [shards / name for name in SHARDS]).coverage == 1


def test_one_shard_beside_all_shards_of_another_checkpoint(shards: Path) -> None:
    files = [shards / name for name in SHARDS]
    save_file({"other": torch.ones(2)}, "other-00002-of-00002.safetensors")
    (note,) = ms.convert_checkpoint([*files, "other-00002-of-00002.safetensors"], "both.safetensors").notes
    assert "other-00001-of-00002.safetensors" in note
    assert SHARDS[0] not in note


def test_a_converted_shard_is_noted(shards: Path) -> None:
    (note,) = ms.convert_checkpoint(shards / SHARDS[0], "part.safetensors").notes
    assert all(name in note for name in (*SHARDS, "model.safetensors.index.json"))
    assert ms.convert_checkpoint(shards, "whole.safetensors").notes == ()
