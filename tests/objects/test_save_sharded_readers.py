"""Readers of shards that are replaced meanwhile."""

import threading
from pathlib import Path

import pytest
import torch

import modelstate as ms

pytestmark = pytest.mark.slow


def test_a_reader_finds_the_old_shards_or_the_new_ones(tmp_path: Path) -> None:
    path, over = tmp_path / "model.safetensors", threading.Event()

    def save(value: float) -> str:
        return ms.save({f"w{n}": torch.full((64,), value) for n in range(8)}, path, shard_size_bytes=512).files[0]

    index = save(0.0)
    errors: list[BaseException] = []
    opened = 0

    def read() -> None:
        nonlocal opened
        while not over.is_set():
            try:
                assert len(ms.open(index)) == 8
                opened += 1
            except BaseException as error:
                errors.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for value in range(1, 50):
            save(float(value))
    finally:
        over.set()
        reader.join()
    assert not errors
    assert opened > 10
