"""`NameMap`: from either spelling to the other."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelCodeError, NameMapError, PlanError
from tests.serve.models import Decoder, Everything, Fused, Halves, Nested, randomised


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def without_hooks(module: nn.Module) -> nn.Module:
    for one in module.modules():
        one._state_dict_hooks.clear()
        one._load_state_dict_pre_hooks.clear()
    return module


@pytest.mark.parametrize("make", [Decoder, lambda: Decoder(times=2), Nested, Everything])
def test_a_module_without_the_hooks_takes_either_spelling_by_a_map_as_a_rule(make: Callable[[], nn.Module]) -> None:
    trained = randomised(make())
    names = ms.serve.NameMap.from_json(ms.serve.NameMap.of(trained).to_json())
    assert names == ms.serve.NameMap.of(trained)
    runtime = ms.serve.runtime_state(trained)
    for state in (trained.state_dict(), runtime, {**trained.state_dict(), **runtime}):
        bare = without_hooks(make())
        ms.load(bare, {"epoch": 3, "model": state}, rules=[names])
        assert same(ms.serve.runtime_state(bare), runtime)


def test_hooks_on_submodules_only_and_on_meta() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Nested())
    names = ms.serve.NameMap.of(module)
    assert names.runtime["1.body.weight"] == "1.body.layer.layer.weight"
    assert names.eager["0.weight"] == "0.weight"


def test_both_spellings_of_one_tensor_have_to_agree() -> None:
    module = Decoder()
    state = {**module.state_dict(), "layers.1.layer.0.weight": torch.ones(4, 4)}
    with pytest.raises(PlanError, match=r"layers\.1\.layer\.0\.weight"):
        ms.load(without_hooks(Decoder()), state, rules=[ms.serve.NameMap.of(module)])


@pytest.mark.parametrize(
    ("make", "why"), [(Fused, r"qkv is computed.*q\.weight unchanged.*v\.weight"), (Halves, "one is a part of both")]
)
def test_split_and_fuse_are_refused_with_the_reason(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(NameMapError, match=why) as caught:
        ms.serve.NameMap.of(make())
    assert "runtime_state(module, checkpoint)" in caught.value.remedy


def test_what_a_hook_leaves_out_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda _, state, prefix, *rest: state.__delitem__(prefix + "bias"))
    with pytest.raises(NameMapError, match="no entry is bias"):
        ms.serve.NameMap.of(module)


def test_tensors_that_a_hook_detaches_are_recognised() -> None:
    module = nn.Linear(2, 2)

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        state[prefix + "w"] = state.pop(prefix + "weight").detach()

    module._register_state_dict_hook(rename)
    assert ms.serve.NameMap.of(module).eager["weight"] == "w"


class Exchanging(nn.Module):
    """Saves each of two tensors under the other's name."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((2,), a)), nn.Parameter(torch.full((2,), b))
        self._register_state_dict_hook(Exchanging._exchange)
        self.register_load_state_dict_pre_hook(Exchanging._exchange)

    @staticmethod
    def _exchange(_: nn.Module, state: dict[str, Any], *rest: object) -> None:
        state["a"], state["b"] = state["b"], state["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + 10 * self.b


def test_names_that_are_exchanged_need_the_module() -> None:
    module, trained, x = Exchanging(1.0, 2.0), Exchanging(3.0, 4.0), torch.ones(2)
    with pytest.raises(NameMapError, match=r"(?s)more than rename.*a is the name of another tensor"):
        ms.serve.NameMap.of(module)
    live = ms.Live(torch.export.export(module, (x,)), names=module)
    live.swap(trained.state_dict())
    assert torch.equal(live(x), trained(x))


def test_extra_state_is_left_out_of_a_map_and_refused_as_a_rule() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None: ...

    module = WithExtra(2, 2)
    names = ms.serve.NameMap.of(module)
    assert names.extra == ("_extra_state",)
    with pytest.raises(PlanError, match="takes no other"):
        ms.load(nn.Linear(2, 2), module.state_dict(), rules=[names])
    ms.load(nn.Linear(2, 2), module.state_dict(), rules=[ms.rules.Ignore("_extra_state"), names])


def test_a_tie_that_one_side_knows_under_fewer_names() -> None:
    module = Everything()
    names = ms.serve.NameMap.of(module)
    state = dict(module.state_dict())
    del state["b.weight"]
    ms.load(Everything(), state, rules=[names])
    module.register_state_dict_post_hook(lambda _, state, prefix, *rest: state.__delitem__(prefix + "b.weight"))
    fewer = ms.serve.NameMap.of(module)
    assert fewer.eager["b.weight"] == "a.weight"
    ms.load(Everything(), module.state_dict(), rules=[fewer])


def test_tied_names_with_two_values_are_a_conflict() -> None:
    module = Everything()
    module._register_state_dict_hook(lambda _, state, prefix, *r: state.update({"again": state["a.weight"]}))
    names = ms.serve.NameMap.of(module)
    state = dict(module.state_dict(), again=torch.zeros(4, 4))
    with pytest.raises(PlanError, match="several tensors"):
        ms.load(Everything(), state, rules=[names])


def test_a_hook_that_raises() -> None:
    module = nn.Linear(2, 2)
    module.register_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ModelCodeError, match="ZeroDivisionError"):
        ms.serve.NameMap.of(module)


GOOD = json.loads(ms.serve.NameMap.of(Nested()).to_json())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps(GOOD | {"version": 2}),
        json.dumps(GOOD | {"eager": {"a": 1}}),
        json.dumps(GOOD | {"runtime": {"a": "b"}}),
    ],
)
def test_what_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(NameMapError, match="not a map of names"):
        ms.serve.NameMap.from_json(text)
