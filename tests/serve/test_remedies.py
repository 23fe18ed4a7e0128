"""What the errors of a swap tell to do, followed to the letter."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelStateError
from tests.serve.models import Named, linear, tied_layers as tied

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
STATE = linear(2).state_dict()


def arguments(text: str) -> list[dict[str, Any]]:
    """Returns the keyword arguments that a remedy has as code, each with its value."""
    found = []
    for name, value in re.findall(r"\b([a-z_]+)=(\[.*?\](?=$|[;,.]? |[;,.]\n)|'[^']*'|\w+)", text, re.MULTILINE):
        if value[0] in "['" or value in ("True", "False"):
            found.append({name: eval(value, {"ms": ms, "modelstate": ms, "other": "other"})})
    return found


class Hidden(nn.Linear):
    def __init__(self, k: float = 1) -> None:
        super().__init__(4, 4)
        self.load_state_dict(linear(k).state_dict())
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


class Stateful(nn.Linear):
    """Has extra state."""

    def __init__(self, k: float = 1) -> None:
        super().__init__(4, 4)
        self.load_state_dict({**linear(k).state_dict(), "_extra_state": k})

    def get_extra_state(self) -> float:
        return self.k

    def set_extra_state(self, state: float) -> None:
        self.k = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.k


def rival(module: nn.Module) -> dict[str, Any]:
    return {"a": module.state_dict(), "b": linear(3).state_dict()}


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        (linear, {"weight": STATE["weight"]}, lambda: X @ STATE["weight"].T + linear(1).bias),
        (linear, {**STATE, "old": X}, lambda: linear(2)(X)),
        (linear, {**STATE, "bias": STATE["bias"][None]}, lambda: linear(2)(X)),
        (linear, {**STATE, "weight": STATE["weight"].double() + 1e-12}, lambda: linear(2)(X)),
        (linear, {**STATE, "weight": STATE["weight"].half()}, lambda: linear(2)(X)),
        (
            linear,
            {**STATE, "weight": torch.ones(4, 4, dtype=torch.int8), "weight_scale": torch.full((4,), 2.0)},
            lambda: linear(2)(X),
        ),
        (linear, rival(linear(2)), lambda: linear(2)(X)),
        (Hidden, {**STATE, "shift": torch.zeros(4)}, lambda: Hidden(2)(X)),
        (Stateful, {"weight": STATE["weight"], "bias": STATE["bias"]}, lambda: linear(2)(X)),
        (linear, Stateful(2).state_dict(), lambda: linear(2)(X)),
    ],
)
def test_the_first_code_of_a_remedy_makes_the_swap(
    target: Callable[..., nn.Module], source: dict[str, Any], expected: Callable[[], torch.Tensor]
) -> None:
    live = ms.Live(target(1).eval())
    before = live(X)
    with pytest.raises(ModelStateError) as caught:
        live.swap(source)
    assert torch.equal(live(X), before)
    text = str(caught.value)
    given = arguments("\n".join(line for line in text.splitlines() if "to do" in line or "rules=" in line))
    assert given, text
    assert {name for each in given for name in each} <= {*inspect.signature(ms.Live.swap).parameters}
    live.swap(source, **given[0])
    assert torch.allclose(live(X), expected(), equal_nan=True)


def test_what_follows_only_the_names_never_serves_old_weights() -> None:
    live = ms.Live(linear(1))
    for source in ({}, {"a": X}, {"a": X, "b": X}):
        with pytest.raises(ModelStateError) as caught:
            live.swap(source)
        options = {name: value for each in arguments(str(caught.value)) for name, value in each.items()}
        options.pop("rules", None)
        with pytest.raises(ModelStateError):
            live.swap(source, **options)
    assert live.version().id == 1


def test_a_tie_that_conflicts() -> None:
    live = ms.Live(tied())
    source = {**tied(2).state_dict(), "1.weight": torch.zeros(4, 4)}
    with pytest.raises(ModelStateError) as caught:
        live.swap(source)
    first, second = arguments(str(caught.value))
    assert {str(first), str(second)} == {"{'rules': [Ignore('1.weight')]}", "{'rules': [Ignore('0.weight')]}"}
    live.swap(source, rules=ms.rules.Ignore("1.weight"))
    assert torch.equal(live(X), tied(2)(X))


def test_extra_state_that_may_be_missing_is_that_of_the_version_that_serves() -> None:
    live = ms.Live(Stateful(1).eval())
    live.swap(Stateful(3).state_dict())
    live.swap(STATE, allow_missing=["_extra_state"])
    assert torch.equal(live(X), linear(2)(X) * 3)


def test_tensors_of_another_kind() -> None:
    live = ms.Live(linear(1))
    for bias, call in ((STATE["bias"].to_sparse(), "to_dense()"), (STATE["bias"].as_subclass(Named), "as_subclass(")):
        with pytest.raises(ModelStateError) as caught:
            live.swap({**STATE, "bias": bias})
        _, _, code = caught.value.remedy.partition("give plain tensors: ")
        assert call in code
        live.swap({**STATE, "bias": eval(code, {"weight": bias, "torch": torch})})
        assert torch.equal(live(X), linear(2)(X))


@pytest.mark.slow
def test_quantized_tensors() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    plain, quantized = nn.Linear(32, 32).eval(), nn.Linear(32, 32).eval()
    quantization.quantize_(quantized, quantization.Int8WeightOnlyConfig())
    x, state = torch.ones(1, 32), quantized.state_dict()
    with pytest.raises(ModelStateError, match=r"give plain tensors: weight\.dequantize\(\)"):
        ms.Live(nn.Linear(32, 32)).swap(state)
    live = ms.Live(nn.Linear(32, 32))
    live.swap({**state, "weight": state["weight"].dequantize()})
    assert torch.allclose(live(x), quantized(x), atol=1e-5)
    with pytest.raises(ModelStateError, match="give weights of the class that the program has") as caught:
        ms.Live(quantized).swap(plain.state_dict())
    assert arguments(caught.value.remedy) == []
