"""Answers that are weights, or views of them, stay what they were when weights are swapped."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.serve.targets import KINDS, target_of

X = torch.zeros(2, 4)


class Table(nn.Module):
    """Answers with views of its weights, and with a tensor for which autograd needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(6, 4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.p[: x.shape[0]], self.p.t(), self.b[:], x * self.p[:2] + 1


def state(k: float) -> dict[str, torch.Tensor]:
    return {"p": torch.full((6, 4), float(k)), "b": torch.full((4,), float(k))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_stay_as_they_were_given(kind: str) -> None:
    live = ms.Live(target_of(kind, Table(), X))
    given: list[Any] = []
    for k in (1, 2, 3):
        if k > 1:
            live.swap(state(k))
        given.append(live(X))
        for at, answer in enumerate(given, 1):
            assert [one.unique().tolist() for one in answer] == [[at], [at], [at], [1]]


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, self.p


def test_an_exported_program_that_answers_with_a_weight_itself() -> None:
    live = ms.Live(target_of("exported", Itself(), X))
    given = live(X)[1]
    live.swap({"p": torch.full((2, 4), 5.0)})
    assert given.unique().tolist() == [1.0]
    assert live(X)[1].unique().tolist() == [5.0]


def test_an_answer_that_is_the_storage_of_a_weight_stays_too() -> None:
    class Stored(Itself):
        def forward(self, x: torch.Tensor) -> Any:
            return self.p.untyped_storage()

    live, given = ms.Live(Stored().eval()), []
    for k in range(1, 6):
        live.swap({"p": torch.full((2, 4), float(k))})
        given.append(live(X))
        assert [torch.empty(0).set_(one).unique().tolist() for one in given] == [[at] for at in range(1, k + 1)]
