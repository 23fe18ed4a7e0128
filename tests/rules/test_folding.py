"""Rules that fold what torch keeps as two tensors into a plain weight, bit for bit as torch folds it."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import modelstate as ms
from modelstate.errors import RuleError

OLD = ms.rules.WeightNorm(["*.weight_g", "*.weight_v"], "*.weight")
NEW = ms.rules.WeightNorm(["*.parametrizations.weight.original0", "*.parametrizations.weight.original1"], "*.weight")
MASK = ms.rules.Multiply(["*.weight_orig", "*.weight_mask"], "*.weight")
LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(5, 7),
    lambda: nn.Linear(1, 1),
    lambda: nn.Conv2d(3, 4, 3),
    lambda: nn.ConvTranspose1d(4, 6, 3, bias=False),
]


def with_norm(layer: nn.Module, dim: int | None, old: bool) -> nn.Module:
    if not old:
        return parametrizations.weight_norm(layer, dim=dim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer, dim=dim)


def without_norm(layer: nn.Module, old: bool) -> nn.Module:
    if old:
        return nn.utils.remove_weight_norm(layer)
    return parametrize.remove_parametrizations(layer, "weight")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("old", [True, False])
def test_weight_norm_folds_as_torch_removes_it(
    layer: Callable[[], nn.Module], dtype: torch.dtype, dim: int | None, old: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(with_norm(layer(), dim, old)).to(dtype)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
    ms.save(source, tmp_path / "norm.safetensors")
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    removed = without_norm(copy.deepcopy(source)[0] if not old else source[0], old)
    model = nn.Sequential(layer()).to(dtype)
    for saved in (str(tmp_path / "norm.safetensors"), state):
        with torch.no_grad():
            model[0].weight.zero_()
        ms.load(model, saved, rules=OLD if old else NEW)
        assert torch.equal(model[0].weight, removed.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_folds_as_torch_removes_it(dtype: torch.dtype, tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(40, 30)).to(dtype)
    prune.l1_unstructured(source[0], "weight", 0.5)
    ms.save(source, tmp_path / "pruned.safetensors")
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    prune.remove(source[0], "weight")
    expected = source[0].weight.detach()
    model = nn.Sequential(nn.Linear(40, 30)).to(dtype)
    for saved in (str(tmp_path / "pruned.safetensors"), state):
        with torch.no_grad():
            model[0].weight.zero_()
        ms.load(model, saved, rules=MASK)
        assert torch.equal(model[0].weight, expected)
        assert torch.equal(torch.signbit(model[0].weight), torch.signbit(expected))


@pytest.mark.parametrize(
    ("rule", "state", "says"),
    [
        (MASK, {"a.weight_orig": torch.ones(2, 3), "a.weight_mask": torch.ones(3)}, r"\[2, 3\] and \[3\] differ"),
        (MASK, {"a.weight_orig": torch.ones(2)}, r"nothing like \*.weight_mask"),
        (OLD, {"a.weight_g": torch.ones(2), "a.weight_v": torch.ones(2, 3)}, "no weight norm has the shapes"),
        (OLD, {"a.weight_g": torch.ones(2, 1), "a.weight_v": torch.ones(2, 3).half()}, "no weight norm has the dtypes"),
        (OLD, {"a.weight_v": torch.ones(2, 3)}, r"nothing like \*.weight_g"),
    ],
)
def test_tensors_that_do_not_fold(rule: Any, state: dict[str, Any], says: str) -> None:
    with pytest.raises(RuleError, match=says):
        ms.rules.Rules([rule]).apply(state)


@pytest.mark.parametrize("rule", [MASK, OLD])
def test_a_folding_rule_has_no_way_back_and_takes_no_moments(rule: Any) -> None:
    with pytest.raises(RuleError, match="cannot be computed from the result"):
        ms.rules.Rules([rule]).reverse()
    model = nn.Sequential(nn.Linear(2, 2))
    moments = {name.replace("*", "0"): {"exp_avg": torch.ones(2, 2)} for name in rule.patterns}
    with pytest.raises(RuleError, match="computes with values"):
        ms.load_optimizer_state(
            model, torch.optim.Adam(model.parameters()), {"state": moments, "param_groups": []}, rules=rule
        )


def test_a_fold_takes_two_names() -> None:
    with pytest.raises(RuleError, match="two names"):
        ms.rules.Multiply(["a", "b", "c"], "w")
    assert repr(MASK) == "Multiply(['*.weight_orig', '*.weight_mask'], '*.weight')"
