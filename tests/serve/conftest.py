"""Memory of every size is used again here, so that each test of a version also shows that none is in use then."""

import pytest


@pytest.fixture(autouse=True)
def reused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelstate.io.memory._LEAST_POOLED_BYTES", 1)
