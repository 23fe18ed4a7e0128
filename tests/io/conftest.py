"""A checkpoint of a training run."""

from pathlib import Path

import pytest

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import open as open_checkpoint
from tests.formats.torch_files import saved, training


@pytest.fixture
def path(tmp_path: Path) -> str:
    return saved(tmp_path / "x.pt", training())


@pytest.fixture
def checkpoint(path: str) -> Checkpoint:
    return open_checkpoint(path)
