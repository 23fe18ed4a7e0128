"""`Live` over exported programs: names, inputs, state that the graph writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import LiveTargetError, ProgramInputError
from tests.serve.models import Decoder, Fused, Halves, Nested, randomised

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))


def exported(module: nn.Module, *args: Any, **options: Any) -> torch.export.ExportedProgram:
    return torch.export.export(module, args or (X,), **options)


@pytest.mark.slow_except(6)
@pytest.mark.parametrize("spelling", ["eager", "runtime"])
@pytest.mark.parametrize("names", ["map", "module"])
@pytest.mark.parametrize("make", [Decoder, lambda: Decoder(times=2), Nested, Fused, Halves])
def test_a_new_checkpoint_in_either_spelling(make: Callable[[], nn.Module], names: str, spelling: str) -> None:
    """PyTorch's pull request 137609: state-dict hooks rename, and the program has the names of what runs."""
    module, trained = make(), randomised(make())
    if names == "map" and make in (Fused, Halves):
        return
    live = ms.Live(exported(module), names=ms.serve.NameMap.of(module) if names == "map" else module)
    state = trained.state_dict() if spelling == "eager" else ms.serve.runtime_state(trained)
    live.swap(state, exact=make not in (Fused, Halves))
    assert torch.allclose(live(X), trained(X))
    live.swap(make().state_dict(), exact=False)
    assert not torch.allclose(live(X), trained(X))


def test_names_of_another_module_are_refused() -> None:
    for names in (ms.serve.NameMap.of(Nested()), Nested()):
        with pytest.raises(LiveTargetError, match="another module"):
            ms.Live(exported(Decoder()), names=names)


class Calls(nn.Module):
    """Takes and returns containers, keywords, numbers and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: dict[str, torch.Tensor], *, scale: int = 2, y: torch.Tensor | None = None) -> Any:
        out = x["a"] * self.weight * scale
        return {"out": out if y is None else out + y, "both": (x["a"], 3)}


def test_containers_keywords_and_constants() -> None:
    program = exported(Calls(), {"a": X}, kwargs={"scale": 3, "y": X})
    live = ms.Live(program)
    found = live({"a": X}, y=X, scale=3)
    assert torch.equal(found["out"], X * 4)
    assert found["both"][1] == 3
    assert live({"a": X}, scale=3, y=X)["out"].equal(found["out"])
    for args, named, why in [
        (({"a": X},), {"scale": 4, "y": X}, "Guard failed"),
        (({"a": X},), {"scale": 3}, "keyword mismatch"),
        (({"b": X},), {"scale": 3, "y": X}, "tree spec"),
        (({"a": X[:2]},), {"scale": 3, "y": X}, "Guard failed"),
        (({"a": 3},), {"scale": 3, "y": X}, "no attribute 'size'"),
    ]:
        with pytest.raises(ProgramInputError, match=why):
            live(*args, **named)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.cache.add_(x)
        x.mul_(self.weight)
        return self.count + self.cache


@pytest.mark.slow
@pytest.mark.parametrize("functional", [False, True])
def test_what_the_graph_writes(functional: bool) -> None:
    """Buffers and inputs, whether the graph writes them itself or returns what is to be written."""
    program = exported(Counter(), torch.ones(2))
    if functional:
        program = program.run_decompositions()
        assert program.graph_signature.buffers_to_mutate
    live, x = ms.Live(program), torch.ones(2)
    assert live(x).tolist() == [2.0, 2.0]
    live.swap({"weight": torch.full((2,), 3.0), "count": torch.zeros(())})
    assert live(x).tolist() == [4.0, 4.0]
    assert x.tolist() == [3.0, 3.0]
    live.swap({"weight": torch.full((2,), 3.0), "count": torch.full((), 10.0)}, buffers="reset")
    assert live(torch.ones(2)).tolist() == [12.0, 12.0]
    assert live.rollback() == 2
    assert live(torch.ones(2)).tolist() == [6.0, 6.0]


def test_the_program_itself_is_not_changed() -> None:
    module = Decoder()
    program, expected = exported(module), module(X)
    live = ms.Live(program)
    live.swap(ms.serve.runtime_state(randomised(Decoder())))
    assert torch.equal(program.module()(X), expected)
    assert torch.equal(module(X), expected)


@pytest.mark.slow
def test_a_program_that_branches() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))

    live, trained = ms.Live(exported(Branch())), randomised(Branch())
    live.swap(trained.state_dict())
    for x in (X.abs(), -X.abs()):
        assert torch.allclose(live(x), trained(x))
