"""Stores to follow, and what goes wrong with their checkpoints."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import modelstate as ms
from tests.serve.models import linear
from tests.store.common import flip

X = torch.ones(1, 4)
"""Of which `linear(k)` makes 5 k everywhere."""


def objects(k: float, name: str = "model") -> dict[str, Any]:
    """As training has them: a model, an optimizer that has a state, and values."""
    model = linear(k)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {name: model, "optimizer": optimizer, "rng": ms.RNG(cuda=False), "epoch": 1}


def save(
    store: ms.Store,
    step: int,
    k: float | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
) -> Path:
    """A checkpoint whose weights are all k, or else the number of its step."""
    made = objects(step if k is None else k)
    return Path(store.save(step, made, metrics=metrics, overwrite=overwrite).path)


def damage(step: Path, file: str = "model-*.safetensors") -> None:
    """Flips a bit of a file."""
    (path,) = step.glob(file)
    flip(path)


def cut(step: Path) -> None:
    (path,) = step.glob("model-*.safetensors")
    os.truncate(path, 20)


def spoil_record(step: Path) -> None:
    (step / "checkpoint.json").write_text("{")
