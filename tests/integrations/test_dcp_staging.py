"""What `dcp.async_save` writes with `ms.dcp.Writer` is the state of the call, whatever training does meanwhile."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import modelstate as ms
from modelstate.objects import save as save_module


def state_of(value: float) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    wide = torch.full((4, 6), value)
    other = {
        "step": 3,
        "lists": [torch.full((2,), value), {"inner": torch.full((), value)}],
        "empty": torch.empty(0, 2),
    }
    return {"model": model.state_dict(), "view": wide.t()[1:3], "other": other}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_changes_after_the_call_are_not_saved(tmp_path: Path) -> None:
    state, may_write = state_of(1), threading.Event()
    save_with = save_module.save_with

    def later(*arguments: Any) -> Any:
        assert may_write.wait(30)
        return save_with(*arguments)

    path = tmp_path / "x.safetensors"
    with mock.patch.object(save_module, "save_with", later):
        saving = dcp.async_save(state, storage_writer=ms.dcp.Writer(path), no_dist=True)
        with torch.no_grad():
            for tensor in (*state["model"].values(), state["view"], *state["other"]["lists"][:1]):
                tensor.fill_(9)
        state["other"]["step"] = 4
        may_write.set()
        saving.result()
    dcp.save(state_of(1), storage_writer=ms.dcp.Writer(tmp_path / "y.safetensors"), no_dist=True)
    assert ms.diff(path, tmp_path / "y.safetensors").is_equal
    assert ms.open(path).value("other")["step"] == 3
    assert ms.open(path).tensor("view").shape == (2, 4)
    assert (
        "model.1.weight" in ms.open(path).aliases or path.stat().st_size == (tmp_path / "y.safetensors").stat().st_size
    )
