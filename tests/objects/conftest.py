"""Every way for a state dict to get into a model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from tests.objects.nets import Load, stock, through_a_file

LOADS = ["stock", "ms.load_state_dict", "ms.load", "a file", "stock and a file"]


@pytest.fixture(params=LOADS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Every way for a state dict to get into a model."""

    def saved(state: Any) -> Any:
        torch.save(state, tmp_path / "state.pt")
        return torch.load(tmp_path / "state.pt", weights_only=True)

    return {
        "stock": stock,
        "ms.load_state_dict": ms.load_state_dict,
        "ms.load": ms.load,
        "a file": lambda model, state: through_a_file(model, state, tmp_path / "state.pt"),
        "stock and a file": lambda model, state: stock(model, saved(state)),
    }[request.param]
