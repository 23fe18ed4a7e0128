"""A checkpoint of a training run."""

from pathlib import Path

import pytest

from modelstate.read.checkpoint import Checkpoint
from modelstate.read.open import open as open_checkpoint
from tests.read.torch_files import saved, training


@pytest.fixture
def path(tmp_path: Path) -> str:
    return saved(tmp_path / "x.pt", training())


@pytest.fixture
def checkpoint(path: str) -> Checkpoint:
    return open_checkpoint(path)
