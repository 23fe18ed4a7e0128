"""`Canary`: what it is made of, what it compares, and what refuses."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import CanaryError, OptionError

X = torch.ones(2)


class Says(nn.Module):
    """Answers with what is made of its one weight."""

    def __init__(self, make: Callable[[float], Any], weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self._make = make

    def forward(self) -> Any:
        return self._make(float(self.weight))


def tried(make: Callable[[float], Any], k: float = 2.0, **canary: Any) -> None:
    """A swap from the weight 1 to the weight k."""
    live = ms.Live(Says(make).eval())
    try:
        live.swap({"weight": torch.tensor([k])}, canary=ms.Canary(**canary))
    finally:
        assert live.version().id in (1, 2)


FALSE = [False, np.False_, np.array([True, False]), torch.tensor(False), torch.tensor([True, False])]
NOT_FALSE = [None, True, np.True_, torch.tensor([True, True]), 0, 0.0, "", [], {}, np.zeros(2), torch.zeros(2)]


@pytest.mark.parametrize("result", FALSE, ids=repr)
def test_false_of_any_kind_refuses(result: Any) -> None:
    live = ms.Live(Says(lambda k: k).eval())
    for canary in (lambda v: result, ms.Canary(check=lambda answer: result)):
        with pytest.raises(CanaryError, match="refused the new version"):
            live.swap({"weight": torch.tensor([2.0])}, canary=canary)
    assert (live.version().id, live()) == (1, 1.0)


@pytest.mark.parametrize("result", NOT_FALSE, ids=repr)
def test_whatever_else_accepts_without_an_error(result: Any) -> None:
    live = ms.Live(Says(lambda k: k).eval())
    assert live.swap({"weight": torch.tensor([2.0])}, canary=lambda v: result).version == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda k: k,
        lambda k: {"loss": k},
        lambda k: int(k),
        lambda k: complex(k),
        lambda k: np.float64(k),
        lambda k: np.array([k, 0]),
        lambda k: torch.tensor([int(k)]),
        lambda k: torch.tensor([k > 1]),
        lambda k: k > 1,
        lambda k: torch.tensor([0, k]).to_sparse(),
        lambda k: f"label {k}",
        lambda k: b"%d" % k,
    ],
)
def test_what_differs_is_allowed_without_a_tolerance_and_refused_beyond_one(make: Callable[[float], Any]) -> None:
    tried(make)
    tried(make, expected=make(1.0))
    tried(make, k=1.0, atol=1e-6)
    with pytest.raises(CanaryError, match=r"differs too much|is another text"):
        tried(make, atol=1e-6)
    with pytest.raises(CanaryError, match=r"differs too much|is another text"):
        tried(make, expected=make(1.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda k: torch.tensor([k]), 3),
        (lambda k: torch.tensor(3), 3),
        (lambda k: torch.tensor([k]), "label"),
        (lambda k: k, 3),
        (lambda k: k, "label"),
        (lambda k: k > 1, 1),
        (lambda k: "label", torch.ones(1)),
        (lambda k: "label", b"label"),
        (lambda k: None, "label"),
        (lambda k: np.array([k]), np.ones(1, dtype=np.float32)),
        (lambda k: np.array(["label"]), np.array([1.0])),
        (lambda k: [k], (1.0,)),
        (lambda k: {"a": k}, {"b": 1.0}),
        (lambda k: [k], [1.0, 1.0]),
        (lambda k: torch.ones(1).to_sparse(), torch.ones(1)),
        (lambda k: object(), nn.Linear(1, 1)),
    ],
)
def test_an_answer_of_another_type_is_refused(make: Callable[[float], Any], expected: Any) -> None:
    for options in ({}, {"atol": 100.0}):
        with pytest.raises(CanaryError, match=r"structure|type|kind of tensor"):
            tried(make, expected=expected, **options)


def test_a_type_that_changes_with_the_version_is_refused() -> None:
    with pytest.raises(CanaryError, match="another type"):
        tried(lambda k: None if k > 1 else "label")
    with pytest.raises(CanaryError, match="has NaN"):
        tried(lambda k: float("nan") if k > 1 else k)
    with pytest.raises(CanaryError, match="has NaN"):
        tried(lambda k: torch.tensor([float("nan"), float("nan") if k > 1 else k]))
    tried(lambda k: [object(), None, 2**70, np.array(["label"])], atol=0.0)  # of which only the class is looked at


@pytest.mark.parametrize("value", [float("nan"), -1, -1e-9, "a", True, torch.tensor(1.0), [1]])
@pytest.mark.parametrize("name", ["atol", "rtol"])
def test_tolerances_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name}= must be a tolerance"):
        ms.Canary((X,), **{name: value})


@pytest.mark.parametrize("options", [{"args": X}, {"args": None}, {"kwargs": [X]}, {"check": 3}])
def test_arguments_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ms.Canary(**options)


class Reusing(nn.Module):
    """Answers in the memory of the answer before, as a graph of CUDA does."""

    answer = torch.zeros(3, 4)

    def __init__(self, k: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), k))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return Reusing.answer.copy_(x * self.weight)


def test_the_reference_stays_where_the_memory_of_an_answer_is_used_again() -> None:
    live = ms.Live(Reusing(1.0).eval())
    with pytest.raises(CanaryError, match="differs too much"):
        live.swap(Reusing(2.0).state_dict(), canary=ms.Canary((torch.ones(3, 4),), atol=0.5))
