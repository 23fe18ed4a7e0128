"""Every name of the checkpoint and every slot of the model is accounted for, whatever the model's code does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms


def test_what_else_a_checkpoint_holds_is_noted(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    torch.save({"model": module.state_dict(), "moments": {"a": torch.ones(1)}}, tmp_path / "x.pt")
    assert "1 tensor of other parts" in ms.load(module, tmp_path / "x.pt").notes[0]


def test_values_that_an_override_swallows() -> None:
    class Swallows(nn.Linear):
        def _load_from_state_dict(self, *_: Any) -> None:
            pass

    module = nn.Sequential(Swallows(2, 2), nn.Linear(2, 2))
    report = ms.load(module, module.state_dict())
    assert report.coverage == 0.5
    assert "2 went into the model's own loading code: 0.bias, 0.weight" in report.notes
    assert "2 left to the model's own loading code: 0.bias, 0.weight" in report.notes


def test_names_that_hooks_forgive_or_take_away() -> None:
    forgiving = nn.Linear(2, 2)
    forgiving.register_load_state_dict_post_hook(lambda _, incompatible: incompatible.missing_keys.clear())
    report = ms.load(forgiving, {"weight": torch.ones(2, 2)})
    assert "1 left to the model's own loading code: bias" in report.notes

    taking = nn.Linear(2, 2)
    taking._register_load_state_dict_pre_hook(lambda state, *_: state.pop("x") and None)
    report = ms.load(taking, {"weight": torch.ones(2, 2), "bias": torch.ones(2), "x": torch.ones(())})
    assert "1 went into the model's own loading code: x" in report.notes


def test_nothing_at_all_is_not_a_load() -> None:
    with pytest.raises(ms.PlanError) as caught:
        ms.load(nn.Linear(2, 2), {"x": torch.ones(1)}, allow_missing=["*"], allow_unexpected=["*"])
    assert caught.value.problems[0].kind.name == "NOTHING_FITS"
