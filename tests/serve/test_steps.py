"""A step of a store as the source of a swap: it holds several objects, and one of them has the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import AmbiguousCheckpointError, StepNotFoundError
from tests.serve.models import linear
from tests.serve.stores import X, objects
from tests.serve.targets import target_of

WAYS: dict[str, Callable[[ms.Store, Path], Any]] = {
    "opened": lambda store, step: store.open("model", 7),
    "opened and verified": lambda store, step: store.open("model", 7, verify=True),
    "the directory": lambda store, step: step,
    "the directory as text": lambda store, step: str(step),
    "the object in it": lambda store, step: step / "model.safetensors",
    "the path of the info": lambda store, step: next(info.path for info in store.infos() if info.step == 7),
}


@pytest.mark.slow_except(6)
@pytest.mark.parametrize("kind", ["eager", "exported"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_holds_several_objects(tmp_path: Path, way: str, kind: str) -> None:
    store = ms.Store(tmp_path)
    step = Path(store.save(7, {**objects(2), "ema": linear(4)}).path)
    live = ms.Live(target_of(kind, linear(0), X))
    report = live.swap(WAYS[way](store, step))
    assert torch.equal(live(X), linear(2)(X))
    assert "step-000000007" in report.source
    assert live.history()[-1].source == report.source


def test_the_model_is_called_something_else(tmp_path: Path) -> None:
    store, live = ms.Store(tmp_path), ms.Live(linear(0))
    step = Path(store.save(1, {"student": linear(1), "teacher": linear(2), "epoch": 3}).path)
    with pytest.raises(AmbiguousCheckpointError, match="give the path of the one that is meant") as caught:
        live.swap(step)
    assert "student" in caught.value.found
    live.swap(step / "teacher.safetensors")
    assert torch.equal(live(X), linear(2)(X))
    live.swap(store.open("student"))
    assert torch.equal(live(X), linear(1)(X))
    with pytest.raises(StepNotFoundError, match="student, teacher"):
        live.swap(store.open("model"))
