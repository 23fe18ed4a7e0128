"""Rules for what torch keeps in two tensors and the model in one, and for convolutions that are linear layers."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import modelstate as ms


class Net(nn.Module):
    """Layers, a convolution, and a head that is alone."""

    def __init__(self, stem: str = "layers", head: str = "head") -> None:
        super().__init__()
        self.add_module(stem, nn.ModuleList(nn.Linear(5, 5) for _ in range(3)))
        self.conv = nn.Conv1d(5, 4, 3)
        self.add_module(head, nn.Linear(5, 2))


def weighted(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if hasattr(module, "weight")]


def old_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module)


APPLIED = {
    "old weight norm": (old_norm, nn.utils.remove_weight_norm),
    "weight norm": (parametrizations.weight_norm, lambda module: parametrize.remove_parametrizations(module, "weight")),
    "mask": (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: prune.remove(module, "weight"),
    ),
}


@pytest.mark.parametrize("how", APPLIED)
@pytest.mark.parametrize("names", [{}, {"stem": "blocks"}, {"stem": "blocks", "head": "classifier"}])
@pytest.mark.parametrize("some", [False, True])
def test_parts_are_folded_into_the_weights_of_torch(how: str, names: dict[str, str], some: bool) -> None:
    torch.manual_seed(0)
    apply, remove = APPLIED[how]
    source = Net()
    changed = weighted(source)[:2] if some else weighted(source)
    for module in changed:
        apply(module)
    state = copy.deepcopy(source.state_dict())
    for module in changed:
        remove(module)
    model = Net(**names)
    found = ms.suggest(model, state)
    assert found.complete, str(found)
    assert any(isinstance(rule, ms.rules.Multiply | ms.rules.WeightNorm) for rule in found)
    ms.load(model, state, rules=found)
    for before, after in zip(weighted(source), weighted(model), strict=True):
        assert torch.equal(before.weight, after.weight)
        assert torch.equal(before.bias, after.bias)
    pasted: dict[str, Any] = {}
    exec(str(found), {"ms": ms}, pasted)
    ms.load(Net(**names), state, rules=pasted["rules"])


def test_a_module_alone() -> None:
    source = nn.Linear(3, 3)
    prune.l1_unstructured(source, "weight", 0.5)
    model = nn.Linear(3, 3)
    found = ms.suggest(model, source.state_dict())
    assert found.complete
    ms.load(model, source.state_dict(), rules=found)
    assert torch.equal(model.weight, source.weight)


def test_a_model_with_weight_norm_keeps_both_parts() -> None:
    source, model = Net(), Net()
    for module in weighted(source):
        old_norm(module)
    for module in weighted(model):
        parametrizations.weight_norm(module)
    found = ms.suggest(model, source.state_dict())
    assert not any(isinstance(rule, ms.rules.WeightNorm) for rule in found)
    ms.load(model, source.state_dict(), rules=ms.rules.known.weight_norm())


@pytest.mark.parametrize("new", [False, True])
def test_spectral_norm_is_named(new: bool) -> None:
    source = nn.Sequential(nn.Linear(4, 3))
    (parametrizations.spectral_norm if new else nn.utils.spectral_norm)(source[0])
    found = ms.suggest(nn.Sequential(nn.Linear(4, 3)), source.state_dict())
    assert not found.complete
    assert found.missing == ("0.weight",)
    assert "no rule folds spectral norm" in str(found)


@pytest.mark.parametrize("names", [("q", "to_q"), ("q", "q"), ("attn.proj", "attention.out")])
@pytest.mark.parametrize("make", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("is_back", [False, True])
def test_a_convolution_with_a_kernel_of_1_is_a_linear_layer(names: tuple[str, str], make: Any, is_back: bool) -> None:
    layers: list[nn.Module] = [make(4, 6, 1), nn.Linear(4, 6)]
    sides = []
    for name, layer in zip(names, reversed(layers) if is_back else layers, strict=True):
        side = nn.Module()
        *path, last = name.split(".")
        owner = side
        for part in path:
            owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(last, layer)
        sides.append(side)
    source, model = sides
    found = ms.suggest(model, source.state_dict())
    assert found.complete, str(found)
    ms.load(model, source.state_dict(), rules=found)
    assert torch.equal(layers[0].weight.flatten(), layers[1].weight.flatten())
    assert torch.equal(layers[0].bias, layers[1].bias)


def test_convolutions_of_all_layers_have_one_rule() -> None:
    source = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"fc1": nn.Conv2d(4, 8, 1)}) for _ in range(3))})
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(4, 8)}) for _ in range(3))})
    found = ms.suggest(model, source.state_dict())
    assert found.complete
    assert len(found) <= 3
    ms.load(model, source.state_dict(), rules=found)
