"""New weights while requests are answered: some are answered by layers of both."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails

pytestmark = pytest.mark.slow

X = torch.ones(16, 64)


class Constant(nn.Module):
    """Answers k everywhere where all of its weights are k."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(64, 64)) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ layer) / 64 for layer in self.layers])


def weights(k: float) -> dict[str, torch.Tensor]:
    return {f"layers.{at}": torch.full((64, 64), float(k)) for at in range(8)}


def answers_while(
    swap: Callable[[int], object], answer: Callable[[], torch.Tensor], times: int = 40
) -> list[list[float]]:
    """The values in each answer that two threads get meanwhile."""
    found: list[list[float]] = []
    ended = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not ended.is_set():
                found.append(answer().unique().tolist())

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for k in range(2, times + 2):
            swap(k)
            time.sleep(0.005)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert found
    return found


def test_a_request_sees_one_version(stock_fails: StockFails) -> None:
    for what, assign in (("load_state_dict mixes versions", False), ("assign=True mixes versions", True)):
        model = Constant()
        for _ in range(10):  # which requests are torn is up to the scheduler
            seen = answers_while(lambda k: model.load_state_dict(weights(k), assign=assign), lambda: model(X))  # noqa: B023
            torn = any(len(values) > 1 for values in seen)
            if torn:
                break
        stock_fails(what, torn)

    live = ms.Live(Constant().eval())
    versions: list[tuple[float, int]] = []

    def answer() -> torch.Tensor:
        value, version = live.answer(X)
        versions.append((float(value.max()), version))
        return value

    seen = answers_while(lambda k: live.swap(weights(k)), answer)
    assert all(len(values) == 1 for values in seen)
    assert all(value == version for value, version in versions)
    assert len(set(versions)) > 2
