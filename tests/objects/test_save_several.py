"""Several objects into one file, and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ChecksumError, ObjectStateError, PlanError
from tests.objects.nets import restored_from
from tests.store.common import flip


def test_damage_is_found_first(tmp_path: Path) -> None:
    path = tmp_path / "training.safetensors"
    ms.save({"model": nn.Linear(2, 2), "step": 3}, path)
    flip(path)
    with pytest.raises(ChecksumError):
        ms.restore({"model": nn.Linear(2, 2), "step": 0}, path, verify=True)


class Hidden(nn.Module):
    """Nothing of it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(2), persistent=False)


WITHOUT_TENSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "loss": lambda: {"model": nn.Linear(2, 2), "loss": nn.MSELoss()},
    "loss alone": lambda: {"loss": nn.MSELoss(), "step": 3},
    "nested": lambda: {"model": nn.Linear(1, 1), "of": {"loss": nn.L1Loss(), "more": {"act": nn.ReLU()}, "step": 3}},
    "hidden buffers": lambda: {"model": nn.Linear(1, 1), "hidden": Hidden()},
}


@pytest.mark.parametrize("what", WITHOUT_TENSORS)
@pytest.mark.parametrize("kind", ["file", "store"])
def test_modules_that_have_nothing_to_save(tmp_path: Path, what: str, kind: str) -> None:
    saved, fresh = WITHOUT_TENSORS[what](), WITHOUT_TENSORS[what]()
    restored = restored_from(kind, tmp_path, saved)(fresh)
    assert restored.missing == restored.unexpected == ()
    if "model" in fresh:
        assert all(map(torch.equal, saved["model"].parameters(), fresh["model"].parameters()))


def test_a_module_without_tensors_still_has_to_be_there(tmp_path: Path) -> None:
    path = tmp_path / "training.safetensors"
    ms.save({"model": nn.Linear(2, 2), "of": {"loss": nn.MSELoss(), "step": 3}}, path)
    with pytest.raises(ObjectStateError, match="other"):
        ms.restore({"model": nn.Linear(2, 2), "of": {"loss": nn.MSELoss(), "step": 0}, "other": nn.MSELoss()}, path)
    with pytest.raises(ObjectStateError, match=r"of\.step"):
        ms.restore({"model": nn.Linear(2, 2), "of": {"loss": nn.MSELoss()}}, path)
    with pytest.raises(PlanError, match=r"of\.loss\.weight"):
        ms.restore({"model": nn.Linear(2, 2), "of": {"loss": nn.Linear(1, 1), "step": 0}}, path)
