"""Extra state that is more than tensors and numbers: the file can be saved, and then not be read with the defaults."""

import enum
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


@dataclass
class Schedule:
    warmup: int
    rates: tuple[float, ...]


class Phase(enum.Enum):
    WARMUP = "warmup"


class Vocabulary:
    """A class of one's own, of whose inside nobody knows."""

    def __init__(self, words: list[str]) -> None:
        self._ids = {word: index for index, word in enumerate(words)}

    def words(self) -> list[str]:
        return list(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and other._ids == self._ids

    __hash__ = None  # type: ignore[assignment]


ms.register_codec(Vocabulary, Vocabulary.words, Vocabulary)

VALUES: dict[str, Any] = {
    "a dataclass": Schedule(3, (0.1, 0.2)),
    "an enum": Phase.WARMUP,
    "a class of one's own": Vocabulary(["a", "b"]),
    "a path": Path("runs") / "1",
    "a NumPy scalar": np.float64(0.5),
    "NumPy's random state": np.random.RandomState(1).get_state(),
    "a NumPy generator's state": np.random.default_rng(1).bit_generator.state,
    "Python's random state": random.Random(1).getstate(),
}
ACCEPTED = ("Python's random state", "a NumPy generator's state")
"""Tuples and dicts of numbers, which torch reads too."""


class ByHand(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@ms.extra_state("value")
class Declared(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.value = value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def refused(path: Path) -> bool:
    try:
        torch.load(path)
    except pickle.UnpicklingError:
        return True
    return False


@pytest.mark.parametrize("kind", VALUES)
def test_what_torch_load_refuses(kind: str, stock_fails: StockFails, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(ByHand(VALUES[kind]).state_dict(), path)
    if kind not in ACCEPTED:
        stock_fails(f"{kind} is refused with weights_only", refused(path))

    torch.save(Declared(VALUES[kind]).state_dict(), path)
    read = torch.load(path, weights_only=True)
    for load, source in ((nn.Module.load_state_dict, read), (ms.load_state_dict, read), (ms.load, path)):
        model = Declared()
        load(model, source)
        assert same(model.value, VALUES[kind])
