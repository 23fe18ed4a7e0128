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
@pytest.mark.parametrize("mode", ["available", "in_place"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_stay_as_they_were_given(kind: str, mode: Any) -> None:
    live = ms.Live(target_of(kind, Table(), X))
    given: list[Any] = []
    for k in (1, 2, 3):
        if k > 1:
            live.swap(state(k), mode=mode)
        given.append(live(X))
        for at, answer in enumerate(given, 1):
            assert [one.unique().tolist() for one in answer] == [[at], [at], [at], [1]]
    if kind == "eager" and mode == "in_place":
        (gradient,) = torch.autograd.grad(given[0][0].sum(), [live._gate.current.program.weights_module.p])  # type: ignore[union-attr]
        assert gradient[:2].eq(1).all()


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, self.p


def test_an_exported_program_that_answers_with_a_weight_itself() -> None:
    live = ms.Live(target_of("exported", Itself(), X))
    given = live(X)[1]
    live.swap({"p": torch.full((2, 4), 5.0)}, mode="in_place")
    assert given.unique().tolist() == [1.0]
    assert live(X)[1].unique().tolist() == [5.0]


def test_a_swap_in_place_that_is_refused_leaves_answers_and_weights() -> None:
    live = ms.Live(Table().eval())
    given = live(X)
    with pytest.raises(ms.errors.CanaryError):
        live.swap(state(2), mode="in_place", canary=lambda v: False)
    assert [one.unique().tolist() for one in (*given, *live(X))] == [[1.0]] * 8


def test_memory_that_nobody_else_has_is_written_into() -> None:
    live = ms.Live(nn.Linear(4, 4))
    live(X)
    program: Any = live._gate.current.program
    before = [one.data_ptr() for one in program.weights_module.parameters()]
    live.swap({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, mode="in_place")
    assert [one.data_ptr() for one in program.weights_module.parameters()] == before


class Caching(nn.Module):
    """Keeps a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2, 4))
        self.cached: dict[str, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.cached:
            self.cached["views"] = [self.p.detach().t()]
        return self.cached["views"][0]


def test_views_that_a_module_keeps_follow_its_weights() -> None:
    live = ms.Live(Caching().eval())
    given = live(X)
    kept = given.t()
    live.swap({"p": torch.full((2, 4), 5.0)}, mode="in_place")
    assert kept.unique().tolist() == [1.0]
    assert live(X).unique().tolist() == [5.0]
