"""Answers that are weights, or views of them, stay what they were when weights are swapped."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.serve.models import INPUTS_OF_TABLE, Table, weights_of
from tests.serve.targets import KINDS, target_of

X = torch.zeros(2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_stay_as_they_were_given(kind: str) -> None:
    live = ms.Live(target_of(kind, Table(), **INPUTS_OF_TABLE))
    given: list[Any] = []
    for k in (1, 2, 3):
        if k > 1:
            live.swap(weights_of(Table(), k))
        given.append(live(**INPUTS_OF_TABLE))
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
