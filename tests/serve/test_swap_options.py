"""`key`, `allow_missing` and `allow_unexpected` of a swap: they mean what they mean in a load."""

from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, PlanError
from tests.serve.models import linear, tied_layers as tied
from tests.serve.targets import KINDS, linear_target, module_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
every_kind = pytest.mark.parametrize("kind", KINDS)


def layer(weight: float, bias: float) -> nn.Linear:
    module = linear(weight)
    nn.init.constant_(module.bias, bias)
    return module


@every_kind
def test_a_weight_that_may_be_missing_keeps_the_value_that_serves(kind: str) -> None:
    live = ms.Live(linear_target(kind))
    live.swap(layer(2, 7).state_dict())
    only_weight = {"weight": torch.full((4, 4), 3.0)}
    with pytest.raises(PlanError, match=r"allow_missing=\['bias'\]"):
        live.swap(only_weight)
    report = live.swap(only_weight, allow_missing=["bias"])
    assert torch.equal(live(X), layer(3, 7)(X))
    assert any("allow_missing" in note for note in report.notes)
    live.swap(layer(4, 4).state_dict())
    assert torch.equal(live(X), layer(4, 4)(X))


def test_a_kept_weight_is_a_copy() -> None:
    live = ms.Live(layer(1, 1))
    live.swap({"weight": torch.full((4, 4), 3.0)}, allow_missing=["bias"])
    live.swap(layer(5, 5).state_dict())
    assert torch.equal(live(X), layer(5, 5)(X))
    live = ms.Live(layer(1, 1))
    live.swap({"weight": torch.full((4, 4), 3.0)}, allow_missing=["bias"])
    assert live.rollback() == 1
    assert torch.equal(live(X), layer(1, 1)(X))


def test_patterns_are_those_of_a_load() -> None:
    live, state = ms.Live(layer(1, 1)), layer(2, 2).state_dict()
    for options in ({"allow_missing": ["bais"]}, {"allow_unexpected": ["old.*"]}):
        with pytest.raises(PlanError, match="patterns and rules that match nothing"):
            live.swap(state, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"if they are not needed: allow_unexpected=\['old\.x'\]"):
        live.swap({**state, "old.x": X})
    live.swap({**state, "old.x": X}, allow_unexpected=["old.*"])
    assert torch.equal(live(X), layer(2, 2)(X))
    with pytest.raises(PlanError):
        live.swap({"other": X}, allow_missing=["weight"], allow_unexpected=["*"])
    assert torch.equal(live(X), layer(2, 2)(X))


def test_a_key_selects_a_part(tmp_path: Path) -> None:
    torch.save({"ema": layer(2, 2).state_dict(), "model": layer(3, 3).state_dict()}, tmp_path / "both.pt")
    live = ms.Live(layer(1, 1))
    for key, k in (("ema", 2), ("model", 3)):
        live.swap(tmp_path / "both.pt", key=key)
        assert torch.equal(live(X), layer(k, k)(X))
    with pytest.raises(OptionError, match="key= must be a path"):
        live.swap(tmp_path / "both.pt", key=3)  # type: ignore[arg-type]


def test_a_tied_weight_under_one_name_is_not_missing() -> None:
    live = ms.Live(tied(1))
    state = tied(2).state_dict()
    del state["1.weight"], state["1.bias"]
    live.swap(state, allow_missing=["1.bias"])
    expected = tied(2)
    nn.init.constant_(expected[1].bias, 1)  # type: ignore[index, arg-type]
    assert torch.equal(live(X), expected(X))
    live.swap({"0.bias": torch.zeros(4), "1.bias": torch.zeros(4)}, allow_missing=["*.weight"])
    for part in expected:  # type: ignore[attr-defined]
        nn.init.constant_(part.bias, 0)
    assert torch.equal(live(X), expected(X))
    parts = module_of(live)
    assert parts[0].weight is parts[1].weight


def test_what_else_refers_to_a_kept_weight_follows() -> None:
    class Listed(nn.Module):
        def __init__(self, k: float) -> None:
            super().__init__()
            self.inner = layer(k, k)
            self.tensors = [self.inner.weight, self.inner.bias]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.tensors[0].T + self.tensors[1]

    live = ms.Live(Listed(1).eval())
    live.swap({"inner.bias": torch.full((4,), 9.0)}, allow_missing=["*.weight"])
    assert torch.equal(live(X), layer(1, 9)(X))
    gru = nn.GRU(4, 4).eval()
    expected, live = gru(X)[0], ms.Live(gru)
    live.swap({"bias_ih_l0": gru.bias_ih_l0.detach().clone()}, allow_missing=["weight_*", "bias_hh_l0"])
    assert torch.equal(live(X)[0], expected)


def test_first_weights_cannot_be_kept() -> None:
    with ms.skeleton():
        module = nn.Linear(4, 4)
    live = ms.Live(module)
    with pytest.raises(PlanError, match="stay on the meta device"):
        live.swap({"weight": torch.ones(4, 4)}, allow_missing=["bias"])
    assert live.version().id == 0
    with pytest.raises(PlanError) as caught:
        live.swap({"weight": torch.ones(4, 4)})
    assert "allow_missing" not in str(caught.value)


@pytest.mark.slow
def test_a_state_that_is_quantized_keeps_the_value_that_serves() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantized(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        module = nn.Linear(32, 32).eval()
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        return module

    x = torch.ones(1, 32)
    live = ms.Live(quantized(1))
    live.swap(quantized(2).state_dict())
    live.swap({"bias": quantized(3).state_dict()["bias"]}, allow_missing=["weight"])
    expected = quantized(2)
    expected.bias = quantized(3).bias
    assert torch.equal(live(x), expected(x))
