"""Models, and stores to look at from outside."""

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.programs import run_program


def network(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))


class Training:
    """A model and Adam, of which each step changes every tensor."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        self.model = network(seed, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: int = 1) -> "Training":
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, self.model[0].in_features)).pow(2).mean().backward()
            self.optimizer.step()
        return self

    def bits(self) -> dict[str, bytes]:
        """All that there is."""
        found = {name: tensor.numpy().tobytes() for name, tensor in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": tensor.numpy().tobytes() for name, tensor in values.items()}
        return found


def state(value: float, size: int = 5) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), value)}


class Held:
    """An object with `state_dict`, whatever is in it."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory, but for who has the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def litter(directory: Path) -> list[str]:
    """What a store's directory has and should not have."""
    return [str(path) for path in directory.rglob("*") if "unfinished" in path.name]


def flip(path: Path, byte: int = -1, bit: int = 0) -> None:
    """Another bit in a file of its own, as a disk does it: no time changes."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    _replace(path, data)


def cut(path: Path) -> None:
    """A file of its own without the last byte, at the same time."""
    _replace(path, path.read_bytes()[:-1])


def _replace(path: Path, data: bytes | bytearray) -> None:
    status = path.stat()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def program(code: str, *arguments: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """A Python program, from a fork to the end of its interpreter."""
    return run_program(code, *arguments, timeout=timeout, finalizes=True)
