"""A checkpoint of a training run."""

from pathlib import Path

import pytest

import modelstate as ms
from modelstate import Checkpoint
from tests.formats.torch_files import saved, training


@pytest.fixture
def path(tmp_path: Path) -> str:
    return saved(tmp_path / "x.pt", training())


@pytest.fixture
def checkpoint(path: str) -> Checkpoint:
    return ms.open(path)
