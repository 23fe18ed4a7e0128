"""New weights while requests are answered: some are answered by layers of both."""

import time
from collections.abc import Callable

import pytest
import torch

import modelstate as ms
from tests.pains.conftest import StockFails
from tests.serve.models import Constant, weights_of
from tests.serve.targets import Readers

pytestmark = pytest.mark.slow

X = torch.ones(16, 64)


def readers_while(swap: Callable[[int], object], request: Callable[[], tuple[int, torch.Tensor]]) -> Readers:
    """Two threads that send requests while the weights become 2, 3 and so on."""
    with Readers(request, 2).running() as readers:
        for k in range(2, 42):
            swap(k)
            time.sleep(0.005)
    assert readers.requests
    return readers


def test_a_request_sees_one_version(stock_fails: StockFails) -> None:
    for what, assign in (("load_state_dict mixes versions", False), ("assign=True mixes versions", True)):
        model = Constant(8, 64)
        for _ in range(10):  # which requests are torn is up to the scheduler
            readers = readers_while(
                lambda k: model.load_state_dict(weights_of(model, k), assign=assign),  # noqa: B023
                lambda: (-1, model(X)),  # noqa: B023
            )
            if readers.torn:
                break
        stock_fails(what, bool(readers.torn))

    live = ms.Live(Constant(8, 64).eval())

    def request() -> tuple[int, torch.Tensor]:
        value, version = live.answer(X)
        return version, value

    readers = readers_while(lambda k: live.swap(weights_of(Constant(8, 64), k)), request)
    assert readers.torn == readers.wrong_version == 0
    assert not readers.errors
    assert len(readers.seen) > 2
