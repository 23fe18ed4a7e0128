"""Rules for what has often changed, with the modules that it is about: those of `known`, and single ones."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import modelstate as ms
from modelstate.rules import known
from tests.loading.fingerprint import whole


@pytest.fixture(autouse=True)
def _deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def both_ways(old: nn.Module, new: nn.Module, rules: ms.rules.Rules, x: torch.Tensor) -> None:
    """Each takes the other's state, computes the same with it, and refuses it without the rules."""
    for one, other, way in ((old, new, rules), (new, old, rules.reverse())):
        for param in one.parameters():
            nn.init.normal_(param)
        ms.load(other, one.state_dict(), rules=way)
        assert other.state_dict().keys() == way.apply(one.state_dict()).keys()
        torch.testing.assert_close(other.eval()(x), one.eval()(x))


def test_weight_norm() -> None:
    def net(norm: Any) -> nn.Module:
        return nn.Sequential(norm(nn.Linear(3, 4)), nn.Sequential(norm(nn.Linear(4, 4))))

    both_ways(net(weight_norm), net(parametrizations.weight_norm), known.weight_norm(), torch.ones(2, 3))


def test_spectral_norm() -> None:
    def net(norm: Any) -> nn.Module:
        return nn.Sequential(norm(nn.Linear(3, 4)), nn.Sequential(norm(nn.Linear(4, 4))))

    both_ways(net(spectral_norm), net(parametrizations.spectral_norm), known.spectral_norm(), torch.ones(2, 3))


def test_one_owner_and_another_name() -> None:
    old = nn.ModuleDict({"a": weight_norm(nn.Bilinear(2, 2, 2)), "b": weight_norm(nn.RNN(2, 2), "weight_hh_l0")})
    rules = known.weight_norm("a") + known.weight_norm("b", "weight_hh_l0")
    new = nn.ModuleDict({"a": parametrizations.weight_norm(nn.Bilinear(2, 2, 2))})
    new["b"] = parametrizations.weight_norm(nn.RNN(2, 2), "weight_hh_l0")
    ms.load(new, old.state_dict(), rules=rules)
    assert torch.equal(new["b"].parametrizations.weight_hh_l0.original1, old["b"].weight_hh_l0_v)


@pytest.mark.parametrize("bias", [True, False])
def test_fused_head_by_head(bias: bool) -> None:
    heads, size = 2, 3

    def fused() -> nn.Module:
        return nn.ModuleDict({"qkv": nn.Linear(4, heads * size * 3, bias)})

    one = fused()
    state = known.separate_qkv_by_head("qkv", ["q", "k", "v"], heads, size, bias).apply(one.state_dict())
    by_head = one["qkv"](torch.eye(4)).unflatten(-1, (heads, 3, size))
    for index, name in enumerate("qkv"):
        mine = nn.functional.linear(torch.eye(4), state[f"{name}.weight"], state.get(f"{name}.bias"))
        torch.testing.assert_close(mine.unflatten(-1, (heads, size)), by_head[..., index, :])
    other = fused()
    ms.load(other, state, rules=known.separate_qkv_by_head("qkv", ["q", "k", "v"], heads, size, bias).reverse())
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in other.state_dict().items())


def test_heads_that_were_tied() -> None:
    def net() -> nn.ModuleDict:
        return nn.ModuleDict({"wte": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})

    embedding = nn.ModuleDict({"wte": nn.Embedding(5, 3)})
    absent = ms.rules.Copy("wte.weight", "head.weight")
    both = net()
    ms.load(both, embedding.state_dict(), rules=absent)
    assert torch.equal(both["head"].weight, embedding["wte"].weight)
    assert both["head"].weight.data_ptr() != both["wte"].weight.data_ptr()
    doubled = ms.rules.Same("wte.weight", "head.weight")
    ms.load(embedding, both.state_dict(), rules=doubled)
    before = whole(embedding)
    with torch.no_grad():
        both["head"].weight += 1
    with pytest.raises(ms.PlanError, match=r"head\.weight: it differs from wte\.weight"):
        ms.load(embedding, both.state_dict(), rules=doubled)
    assert whole(embedding) == before
    assert absent.reverse() == doubled


def test_wrappers_anywhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    state = {f"module.{name.replace('.0.', '.0._orig_mod.')}": value for name, value in model.state_dict().items()}
    wrapped = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    for rules, source in ((known.unwrapped(), state), (known.unwrapped(["_orig_mod"]), wrapped)):
        target = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        ms.load(target, source, rules=rules)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in target.state_dict().items())
