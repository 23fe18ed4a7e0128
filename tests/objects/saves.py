"""Two states, the ways to save them, and what is at a path: one of the two, in full."""

from itertools import product
from pathlib import Path
from typing import Any

import torch

import modelstate as ms
from tests.sweeps import EXHAUSTIVE

NAME = "x.safetensors"
LENGTH = 4
"""Elements of the shortest tensor."""
KINDS: dict[str, dict[str, Any]] = {"file": {}, "shards": {"shard_size_bytes": 100}, "more": {"shard_size_bytes": 30}}
PAIRS = [("file", "file"), ("file", "shards"), ("shards", "shards"), ("shards", "more"), ("more", "file")]
"""What was saved first and what is saved over it: each kind as old and as new."""
if EXHAUSTIVE:
    PAIRS = list(product(KINDS, KINDS))


def state(version: int) -> dict[str, Any]:
    """Of the same names and shapes in each version, and with a value that is not a tensor."""
    tensors = {f"w{n}": torch.full((LENGTH + n,), float(version)) for n in range(6)}
    return {**tensors, "tied": tensors["w0"], "_extra_state": {"version": version, "copy": torch.tensor([version])}}


def save(directory: Path, version: int, kind: str) -> Path:
    """Saves a version in one file, or in shards."""
    ms.save(state(version), directory / NAME, **KINDS[kind])
    return directory / NAME


def version_at(path: Path) -> int:
    """Which version can be opened at a path; fails where that is none in full."""
    checkpoint = ms.open(path)
    version = checkpoint.extra["_extra_state"]["version"]
    expected = state(version)
    assert set(checkpoint) == set(expected) - {"_extra_state"}
    assert all(torch.equal(checkpoint.tensor(name), expected[name]) for name in checkpoint)
    assert checkpoint.extra["_extra_state"]["copy"].tolist() == [version]
    assert checkpoint.verify() == 6 * LENGTH * 4 + 15 * 4 + 8
    return int(version)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file, with what is in it."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
