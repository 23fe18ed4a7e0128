"""`runtime_state`: the names of an exported program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import PlanError
from tests.serve.models import Decoder, Everything, Fused, Halves, Nested, randomised

MODULES: dict[str, Callable[[], nn.Module]] = {
    "no hooks": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "fusion layer": Decoder,
    "registered twice": lambda: Decoder(times=2),
    "nested": Nested,
    "fused": Fused,
    "split": Halves,
    "ties, buffers, constants": Everything,
    "the same module twice": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 4)),
    "a hook of the root": lambda: renamed(nn.Sequential(nn.Linear(4, 4))),
}


def renamed(module: nn.Module) -> nn.Module:
    def rename(_: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        for name in list(state):
            state[f"{prefix}model.{name[len(prefix) :]}"] = state.pop(name)

    module._register_state_dict_hook(rename)
    return module


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_it_is_the_state_of_the_exported_program(make: Callable[[], nn.Module], strict: bool) -> None:
    module = make()
    program = torch.export.export(module, (torch.randn(3, 4),), strict=strict)
    found = ms.serve.runtime_state(module)
    assert list(found) == list(program.state_dict)
    assert all(found[name] is value for name, value in program.state_dict.items())


@pytest.mark.parametrize("make", [Decoder, Nested, Fused, Halves])
def test_a_checkpoint_gets_the_runtime_names_through_the_modules_own_code(make: Callable[[], nn.Module]) -> None:
    module, trained = make(), randomised(make())
    before = {name: value.clone() for name, value in ms.serve.runtime_state(module).items()}
    found, expected = ms.serve.runtime_state(module, trained.state_dict()), ms.serve.runtime_state(trained)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert found[name].data_ptr() != value.data_ptr()
        assert torch.equal(ms.serve.runtime_state(module)[name], before[name])


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("target", ["eager", "compiled"])
@pytest.mark.parametrize("make", [Decoder, Nested, Fused])
def test_either_spelling_goes_into_a_module(make: Callable[[], nn.Module], target: str) -> None:
    """`test_exported` has the same for exported programs."""
    module, x = make().eval(), torch.randn(2, 4)
    live = ms.Live(module if target == "eager" else torch.compile(module, backend="eager"))
    for seed, of in ((1, nn.Module.state_dict), (2, ms.serve.runtime_state), (3, nn.Module.state_dict)):
        trained = randomised(make(), seed).eval()
        live.swap(of(trained))
        assert torch.allclose(live(x), trained(x))


@pytest.mark.parametrize("target", ["eager", "exported"])
@pytest.mark.parametrize("make", [Decoder, Nested])
def test_a_typo_is_refused_with_both_names(target: str, make: Callable[[], nn.Module]) -> None:
    module, x = make().eval(), torch.randn(2, 4)
    live = ms.Live(
        module if target == "eager" else torch.export.export(module, (x,)),
        names=None if target == "eager" else ms.serve.NameMap.of(module),
    )
    state = dict(make().state_dict())
    name = next(one for one in state if one.endswith("weight"))
    state[name.replace("weight", "wieght")] = state.pop(name)
    with pytest.raises(PlanError, match=r"weight \[4, 4\]\n[^`]*wieght \[4, 4\]\n.*ms\.rules\.Rename"):
        live.swap(state)
    assert live.version().id == 1
