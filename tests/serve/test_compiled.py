"""`Live` over compiled modules: no version is compiled again."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.serve.models import Decoder, Everything, randomised

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


class Counting:
    """A backend that counts what it is asked to compile."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [Decoder, Everything])
def test_no_version_is_compiled_again(make: Any, grad: bool) -> None:
    torch.compiler.reset()
    backend = Counting()
    live = ms.Live(torch.compile(make().eval(), backend=backend, fullgraph=True))
    with torch.set_grad_enabled(grad):
        live(X)
        compiled = backend.count
        for seed in range(12):
            trained = randomised(make().eval(), seed)
            live.swap(trained.state_dict(), canary=ms.Canary((X,)))
            if make is Decoder:
                assert torch.allclose(live(X), trained(X), atol=1e-6)
            else:
                live(X)
    assert compiled == backend.count == 1


@pytest.mark.slow
def test_every_version_has_the_options_of_the_first() -> None:
    torch.compiler.reset()
    live = ms.Live(torch.compile(nn.Linear(4, 4), backend="eager", dynamic=True))
    trained = nn.Linear(4, 4)
    live(X)
    live.swap(trained.state_dict())
    for rows in (2, 3, 5):
        assert torch.allclose(live(X[:1].expand(rows, 4)), trained(X[:1].expand(rows, 4)))
