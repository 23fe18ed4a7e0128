import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms


@pytest.fixture
def training() -> dict[str, Any]:
    """A training checkpoint: tied weights, repeated layers, an optimizer, and values of all kinds."""
    shared = torch.randn(10, 4)
    model: OrderedDict[str, torch.Tensor] = OrderedDict({"embed.weight": shared})
    for i in range(12):
        model[f"layer.{i}.weight"] = torch.randn(4, 4)
        model[f"layer.{i}.bias"] = torch.randn(4)
    model["head.weight"] = shared
    model["steps_seen"] = torch.tensor(3)
    return {
        "model": model,
        "step": 1000,
        "config": {"lr": float("nan"), "betas": (0.9, 0.99), "name": "run\x1b[1m"},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }


def test_text_of_a_training_checkpoint(training: dict[str, Any]) -> None:
    text = str(ms.inspect(training))
    lines = text.splitlines()
    assert "28 tensors" in lines[1]
    assert "285 elements" in lines[1]
    assert lines[2] == "dtypes: float32 (27), int64 (1)"
    row = ["model.layer.*.weight", "(12", "×)", "[4,", "4]", "float32", "768", "B"]
    assert any(line.split() == row for line in lines)
    assert any(line.endswith("= model.embed.weight") and "head.weight" in line for line in lines)
    assert "  model.embed.weight = model.head.weight" in lines
    assert any(line.split() == ["step", "int", "1000"] for line in lines)
    assert any("optimizer.param_groups" in line and "'lr': 0.1" in line for line in lines)
    assert "\x1b" not in text
    assert not [line for line in lines if line != line.rstrip()]


def test_a_description_names_what_was_left_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "model": torch.nn.Linear(2, 2), "other": Broken()}, tmp_path / "x.pt")
    inspection = ms.inspect(tmp_path / "x.pt", skip_forbidden=True)
    assert inspection.left_out == (f"{__name__}.Broken",)
    assert json.loads(inspection.to_json())["left_out"] == [f"{__name__}.Broken"]


def test_the_state_of_an_optimizer_takes_few_lines() -> None:
    def state(step: int) -> dict[str, Any]:
        return {"step": step, "exp_avg": torch.zeros(4)}

    steps = {140178894849152 + 72 * i: state(7) for i in range(20)} | {140178894999999: state(8)}
    lines = str(ms.inspect({"state": steps})).splitlines()
    assert any(line.split() == ["state.*.step", "(20", "×)", "int", "7"] for line in lines)
    assert any(line.split() == ["state.140178894999999.step", "int", "8"] for line in lines)
    assert any(line.split() == ["state.*.exp_avg", "(21", "×)", "[4]", "float32", "336", "B"] for line in lines)
    assert len(lines) < 12


def test_json_is_json_and_complete(training: dict[str, Any]) -> None:
    found = json.loads(ms.inspect(training).to_json(), parse_constant=pytest.fail)
    assert found["totals"] == {
        "tensors": 28,
        "elements": 285,
        "bytes": 284 * 4 + 8,
        "dtypes": {"float32": 27, "int64": 1},
    }
    assert len(found["tensors"]) == 28
    assert found["aliases"] == [["model.embed.weight", "model.head.weight"]]
    assert found["extra"]["step"] == 1000
    assert found["extra"]["config"] == {"lr": "nan", "betas": [0.9, 0.99], "name": "run\x1b[1m"}


def test_json_says_where_the_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    value = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    save_file({"a": value}, path, metadata={"format": "pt"})
    found = json.loads(ms.inspect(path).to_json())
    (tensor,) = found["tensors"]
    assert found["metadata"] == {"format": "pt"}
    assert (tensor["shape"], tensor["dtype"], tensor["bytes"]) == ([2, 3], "int32", 24)
    stored = Path(tensor["file"]).read_bytes()[tensor["offset"] :][: tensor["bytes"]]
    assert stored == value.numpy().tobytes()


def test_values_that_were_encoded(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "x._extra_state": {"step": (1, torch.ones(3))}, "y._extra_state": 3}
    path = tmp_path / "saved.safetensors"
    ms.save(state, path)
    text = str(ms.inspect(path))
    assert "x._extra_state  dict  {'step': [1, 'tensor([3], float32)']}" in text
    assert "_modelstate_extra" not in text
    assert json.loads(ms.inspect(path).to_json())["extra"]["y._extra_state"] == 3


def test_a_value_that_cannot_be_decoded_hides_no_other(tmp_path: Path) -> None:
    manifest = {
        "format": 1,
        "extra": {"x._extra_state": {"$object": {"codec": "gone", "value": 1}}, "y._extra_state": 3},
    }
    path = tmp_path / "saved.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"modelstate": json.dumps(manifest)})
    lines = [line.split(maxsplit=2) for line in str(ms.inspect(path)).splitlines()]
    assert ["x._extra_state", "?", "not decoded: nothing is registered under 'gone'"] in lines
    assert ["y._extra_state", "int", "3"] in lines
    assert "not decoded" in json.loads(ms.inspect(path).to_json())["extra"]["x._extra_state"]


def test_saved_values_that_cannot_be_decoded_hide_no_metadata(tmp_path: Path) -> None:
    manifest = {"format": 1, "schema": "1.0", "attached": {"run": {"$object": {"codec": "gone", "value": 1}}}}
    path = tmp_path / "saved.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"modelstate": json.dumps(manifest), "format": "pt"})
    metadata = json.loads(ms.inspect(path).to_json())["metadata"]
    assert metadata == {"format": "pt", "schema": "1.0", "extra": "not decoded: nothing is registered under 'gone'"}
    assert "not decoded" in str(ms.inspect(path))


def test_values_that_stand_for_more_than_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    values = {"range": range(10**15), "large": 10**5000, "tuple": (1 << 20, 3)}
    ms.save({"a": torch.ones(2), **values}, path)
    found = json.loads(ms.inspect(path).to_json())["extra"]
    assert found["range"] == "range(0, 1000000000000000)"
    assert found["large"].startswith(hex(10**5000)[:100])
    assert found["tuple"] == [1 << 20, 3]
    assert "range(0, 1000000000000000)" in str(ms.inspect(path))


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("not now")

    def __hash__(self) -> int:
        return 1


def test_a_value_whose_repr_raises() -> None:
    checkpoint = ms.open({"w": torch.ones(2), "a": Broken(), "b": [{Broken()}]})
    inspection = ms.inspect(checkpoint)
    for text in (str(inspection), inspection.to_json()):
        assert "Broken, whose repr raises RuntimeError" in text
    with pytest.raises(ms.errors.SourceTypeError, match="RuntimeError"):
        ms.open({"w": torch.ones(2), "b": {Broken(): torch.ones(2)}})


def test_a_value_that_is_nested_deeply_is_shown_in_part() -> None:
    nested: list[Any] = []
    for _ in range(490):
        nested = [nested]
    inspection = ms.inspect({"w": torch.ones(1), "nested": nested})
    assert "[" * 100 + '"..."' in inspection.to_json().replace(" ", "").replace("\n", "")
    assert str(inspection)
