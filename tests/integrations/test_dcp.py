"""`ms.dcp` below the real `torch.distributed.checkpoint`, in one process. Ranks: `tests/distributed/test_dcp.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import modelstate as ms
from modelstate import errors
from modelstate.rules.names import Rename
from modelstate.rules.tensors import Cast, Transpose
from modelstate.torch_compat.private import torch_version
from tests.loading.fingerprint import described
from tests.store.common import flip

pytestmark = pytest.mark.filterwarnings("ignore")


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scalars = {"step": 7, "loss": [0.5, 0.25], "name": "run", "betas": (0.9, 0.99)}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scalars": scalars}


def empty(state: Any) -> Any:
    """The same tree with other values."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, -1)
    if isinstance(state, dict):
        return {key: empty(value) for key, value in state.items()}
    return [empty(value) for value in state] if isinstance(state, list) else type(state)()


def write(state: dict[str, Any], folder: Path, form: str) -> Path:
    path = folder / {"zip": "x.pt", "dcp": "x"}.get(form, "x.safetensors")
    if form == "dcp":
        dcp.save(state, checkpoint_id=path)
    elif form == "zip":
        torch.save(state, path)
    else:
        ms.save(state, path, shard_size_bytes=100 if form == "shards" else None)
    return path


def text_keys(state: Any) -> Any:
    """Keys of dicts as text, as DCP has them. It does not find values other than tensors below other keys."""
    if isinstance(state, dict):
        return {str(key): text_keys(value) for key, value in state.items()}
    return [text_keys(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("form", ["safetensors", "shards", "zip", "dcp"])
def test_load_reads_every_format(form: str, tmp_path: Path) -> None:
    state = text_keys(training())
    found = empty(state)
    dcp.load(found, storage_reader=ms.dcp.Reader(write(state, tmp_path, form), verify=form != "dcp"))
    assert described(state) == described(found)


def test_a_checkpoint_object_a_part_and_the_checkpoint_id(tmp_path: Path) -> None:
    state = training()
    path = write(state, tmp_path, "safetensors")
    for reader, options in (
        (ms.dcp.Reader(ms.open(path, key="model")), {}),
        (ms.dcp.Reader(path, key="model"), {}),
        (ms.dcp.Reader("nothing", key="model"), {"checkpoint_id": path}),
    ):
        found = empty(state["model"])
        dcp.load(found, storage_reader=reader, **options)
        assert described(state["model"]) == described(found)


def test_rules_and_their_casts(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    ms.save({"old.w": weight, "old.steps": torch.tensor(3)}, tmp_path / "x.safetensors")
    found = {"new.w": torch.zeros(2, 4, dtype=torch.bfloat16), "new.steps": torch.tensor(0)}
    rules = [Rename("old.*", "new.*"), Transpose("new.w"), Cast("new.w", torch.bfloat16)]
    dcp.load(found, storage_reader=ms.dcp.Reader(tmp_path / "x.safetensors", rules=rules))
    assert torch.equal(found["new.w"], weight.t().to(torch.bfloat16))
    assert int(found["new.steps"]) == 3


def test_whole_parts_may_be_left_out_but_no_tensors_of_a_part(tmp_path: Path) -> None:
    state = training()
    path = write(state, tmp_path, "safetensors")
    found = {"model": empty(state["model"])}
    dcp.load(found, storage_reader=ms.dcp.Reader(path))
    assert described(state["model"]) == described(found["model"])
    del found["model"]["1.bias"]
    with pytest.raises(CheckpointException, match=r"model\.1\.bias \[2\]"):
        dcp.load(found, storage_reader=ms.dcp.Reader(path))
    dcp.load(found, storage_reader=ms.dcp.Reader(path, allow_unexpected=["*.bias"]))


def seen_by_dcp(text: str) -> str:
    """What an error has where metadata is read: before torch 2.13, DCP may hide that error."""
    return text if torch_version() >= (2, 13) else f"{text}|metadata is None"


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a name that the checkpoint lacks": ({"c": torch.zeros(2)}, {}, "Missing key.*c"),
    "another shape": ({"a": torch.zeros(3)}, {}, "Size mismatch"),
    "integers": ({"a": torch.zeros(2, dtype=torch.int64)}, {}, "casting changes their kind"),
    "a cast that loses values": ({"a": torch.zeros(2, dtype=torch.float16)}, {}, "casting loses values"),
    "a number for a tensor": ({"n": torch.zeros(())}, {}, "n: found int"),
    "a rule that applies to nothing": ({}, {"rules": Rename("x", "y")}, seen_by_dcp("Rename")),
    "a pattern that matches nothing": ({}, {"allow_unexpected": ["z"]}, "z"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_a_tensor_is_touched(case: str, tmp_path: Path) -> None:
    ms.save({"a": torch.ones(2), "b": torch.ones(2), "n": 3}, tmp_path / "x.safetensors")
    changed, options, text = WRONG[case]
    found = {"a": torch.zeros(2), "b": torch.zeros(2), **changed}
    with pytest.raises(CheckpointException, match=text):
        dcp.load(found, storage_reader=ms.dcp.Reader(tmp_path / "x.safetensors", **options))
    assert not found["b"].any()


def test_damage_is_found_before_a_tensor_is_touched(tmp_path: Path) -> None:
    ms.save({"a": torch.ones(8), "b": torch.ones(8)}, tmp_path / "x.safetensors")
    flip(tmp_path / "x.safetensors")
    found = {"a": torch.zeros(8), "b": torch.zeros(8)}
    with pytest.raises(CheckpointException, match="are not what their checksums say"):
        dcp.load(found, storage_reader=ms.dcp.Reader(tmp_path / "x.safetensors", verify=True))
    assert not found["a"].any()


def test_a_missing_file() -> None:
    with pytest.raises(CheckpointException, match=seen_by_dcp(r"missing\.safetensors")):
        dcp.load({"a": torch.zeros(1)}, storage_reader=ms.dcp.Reader("missing.safetensors"))
    with pytest.raises(errors.SourceNotFoundError):
        ms.dcp.Reader("missing.safetensors").read_metadata()


# Saving.


def test_a_save_is_a_file_that_is_opened_as_the_state(tmp_path: Path) -> None:
    state = training()
    dcp.save(state, storage_writer=ms.dcp.Writer(tmp_path / "x.safetensors"))
    dcp.async_save(state, checkpoint_id=tmp_path / "step-3", storage_writer=ms.dcp.Writer()).result()
    assert [file.name for file in (tmp_path / "step-3").iterdir()] == ["model.safetensors"]
    for path in (tmp_path / "x.safetensors", tmp_path / "step-3"):
        assert described(state) == described(ms.open(path).value())
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        ms.load(model, path, key="model", verify=True)
        assert described(dict(model.state_dict())) == described(dict(state["model"]))


def test_lists_of_tensors_and_dicts_stay_lists(tmp_path: Path) -> None:
    state = {"a": [torch.ones(1), torch.zeros(2)], "b": [{"c": 1}, {"c": [2]}], "d": {"e": []}}
    dcp.save(state, storage_writer=ms.dcp.Writer(tmp_path / "x.safetensors"))
    assert described(ms.open(tmp_path / "x.safetensors").value()) == described(state)


class Halving(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object / 2


@pytest.mark.parametrize(
    ("options", "planner", "text"),
    [
        ({"path": "x.safetensors"}, Halving(), "the planner of dcp.save changes what is saved"),
        ({}, None, "dcp.save has no path"),
        ({"path": "old.safetensors", "overwrite": False}, None, "old.safetensors"),
    ],
)
def test_what_is_not_saved(
    options: dict[str, Any], planner: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ms.save({"a": torch.ones(1)}, "old.safetensors")
    with pytest.raises(CheckpointException, match=text):
        dcp.save({"a": torch.zeros(2)}, storage_writer=ms.dcp.Writer(**options), planner=planner)
    assert [file.name for file in tmp_path.iterdir()] == ["old.safetensors"]
    assert torch.equal(ms.open("old.safetensors").tensor("a"), torch.ones(1))


def test_changes_after_the_call_of_async_save_are_not_saved(tmp_path: Path) -> None:
    state = training()
    expected = {name: value.clone() for name, value in state["model"].items()}
    saving = dcp.async_save(state, storage_writer=ms.dcp.Writer(tmp_path / "x.safetensors"), no_dist=True)
    with torch.no_grad():
        for tensor in state["model"].values():
            tensor.fill_(9)
    state["scalars"]["step"] = 4
    saving.result()
    saved = ms.open(tmp_path / "x.safetensors").value()
    assert described(dict(saved["model"])) == described(expected)
    assert saved["scalars"]["step"] == 7
