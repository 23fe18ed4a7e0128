"""State that the threads of a process share, and children that are forked while a thread works on it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.checkpoint.mapped import Maps
from modelstate.store.directory import StepIndex
from tests.io.test_forks import in_child

SOON = 60.0


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A file in which `a` and `b` are the same bytes."""
    tensor, path = torch.arange(8.0), tmp_path / "model.pt"
    torch.save({"a": tensor, "b": tensor}, path)
    return path


def test_tied_tensors_that_two_threads_read_share_memory(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[torch.Tensor] = []
    checkpoint, original = ms.open(tied), Maps.read

    def read(*args: Any) -> torch.Tensor:
        tensor = original(*args)
        monkeypatch.setattr(Maps, "read", original)
        others.append(checkpoint.tensor("b", map=False))
        return tensor

    monkeypatch.setattr(Maps, "read", read)
    checkpoint.tensor("a", map=False).zero_()
    assert not others[0].any()


# Forks.


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_is_forked_while_a_thread_reads_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_end = threading.Event(), threading.Event()
    store, name = ms.Store(tmp_path), StepIndex._name
    store.save(1, {"model": nn.Linear(2, 2)})

    def slow_name(*args: Any) -> str:
        is_reading.set()
        may_end.wait(SOON)
        return name(*args)

    monkeypatch.setattr(StepIndex, "_name", slow_name)
    thread = threading.Thread(target=store.infos)
    thread.start()
    is_reading.wait(SOON)
    monkeypatch.setattr(StepIndex, "_name", name)
    try:
        assert in_child(lambda: [info.step for info in store.infos()] == [1], seconds=10) == "True"
    finally:
        may_end.set()
        thread.join()
