"""What a module keeps where no copy follows: refused, so that no version serves another one's weights."""

import functools
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import modelstate as ms
from modelstate.errors import LiveTargetError
from tests.serve.models import randomised

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


def wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].forward = wrap(module[0].forward)  # type: ignore[assignment, method-assign]
    return module


def with_view(take: Callable[[nn.Linear], Any]) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].kept = take(module[0])  # type: ignore[arg-type]
    return module


def with_attribute_of_weight() -> nn.Module:
    """As the int8 layers of bitsandbytes have it."""
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].weight.codes = module[0].weight.detach()  # type: ignore[attr-defined, union-attr]
    return module


def with_hook(register: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    getattr(module[0], register)(lambda *_: module[0].bias and None)
    return module


class Below(nn.Linear):
    def __deepcopy__(self, memo: Any) -> "Below":
        return self


orig: Any = None


def by_global() -> nn.Module:
    """As a script has it, where nothing is a closure."""
    global orig
    module = nn.Sequential(nn.Linear(4, 4))
    orig = module[0].forward
    module[0].forward = lambda x: orig(x)  # type: ignore[assignment, method-assign]
    return module


HELD = {
    "a compiled forward": (lambda: wrapped(torch.compile(backend="eager")), r"0.forward: fn(: fn)?.__self__ is module"),
    "inference mode": (lambda: wrapped(torch.inference_mode()), r"0.forward: func.__self__ is module '0'"),
    "a default": (lambda: wrapped(lambda f: lambda x, f=f: f(x)), r"0.forward.__defaults__\[0\].__self__"),
    "a partial of a function": (lambda: wrapped(lambda f: functools.partial(lambda x: f(x))), r"0.forward.func: f"),
    "a global": (by_global, r"0.forward: orig.__self__"),
    "a function in a container": (
        lambda: with_view(lambda m: [{"f": lambda: m}]),
        r"0.kept\[0\]\['f'\]: m is module '0'",
    ),
    "a function in an object": (
        lambda: with_view(lambda m: types.SimpleNamespace(f=lambda: m)),
        r"0.kept.f: m is module '0'",
    ),
    "a forward hook": (lambda: with_hook("register_forward_hook"), r"0._forward_hooks\[\d+\]: module is the module"),
    "a hook of loading": (
        lambda: with_hook("register_load_state_dict_pre_hook"),
        r"0._load_state_dict_pre_hooks\[\d+\].hook: module",
    ),
    "a weak reference": (lambda: with_view(weakref.ref), r"0.kept\(\) is module '0'"),
    "a module that is not copied": (lambda: nn.Sequential(Below(4, 4)), "0 is module '0'"),
    "views": (lambda: with_view(lambda m: {"w": (m.weight.data.T,)}), r"0.kept\['w'\]\[0\] is a view of 0.weight"),
    "a view on a weight": (with_attribute_of_weight, "0.weight.codes is a view of 0.weight"),
    "a parameter in a function": (
        lambda: wrapped(lambda f: (lambda w: lambda x: x @ w)(f.__self__.weight)),  # type: ignore[attr-defined]
        "0.forward: w is 0.weight of the first version",
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_what_would_serve_old_weights_is_refused(name: str) -> None:
    make, where = HELD[name]
    with pytest.raises(LiveTargetError, match=where) as caught:
        ms.Live(make())
    assert "torch.compile(module)" in caught.value.remedy
    assert caught.value.where == "Sequential"
    with pytest.raises(LiveTargetError, match=where):
        ms.Live(torch.compile(make(), backend="eager"))


@pytest.mark.parametrize("kind", ["exported", "aoti"])
def test_neither_is_it_exported(kind: Any, tmp_path: Path) -> None:
    class Viewed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.w = self.weight.detach()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w.T + self.bias

    with pytest.raises(LiveTargetError, match="w is a view of weight"):
        ms.export(Viewed(), (X,), tmp_path / "viewed.pt2", kind=kind)
    assert not list(tmp_path.iterdir())


def doubled(module: nn.Module, x: torch.Tensor) -> Any:
    return type(module).forward(module, x) * 2


def by_method() -> nn.Module:
    module = nn.Linear(4, 4)
    module.forward = types.MethodType(functools.wraps(module.forward)(lambda m, x: doubled(m, x)), module)  # type: ignore[method-assign]
    return module


def by_partial() -> nn.Module:
    module = nn.Linear(4, 4)
    module.forward = functools.update_wrapper(functools.partial(doubled, module), module.forward)  # type: ignore[method-assign]
    return module


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


class Listed(nn.Module):
    """Modules, parameters and methods in containers of its own, and buffers that no checkpoint has with their views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.all: dict[str, Any] = {"layers": [self.layer], "weight": self.layer.weight, "call": self.layer.forward}
        self.bound = functools.partial(nn.functional.linear, weight=self.layer.weight)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.half = self.shift[:2]
        self.register_forward_hook(lambda module, args, out: out + module.layer.bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.all["call"](x) + self.bound(x) + self.all["layers"][0](x) + self.shift


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)  # the masked weight has a graph


class Signature(tuple[int, ...]):
    """As `Irreps` of e3nn: a tuple of parts that are tuples without a length."""

    def __len__(self) -> int:
        raise NotImplementedError


class Described(nn.Linear):
    """A layer with odd tuples, and with a buffer of a dtype that torch cannot add."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.signatures = [Signature((1, 2))]
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex32))


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    return made


def traced() -> nn.Module:
    made: nn.Module = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), X)  # type: ignore[no-untyped-call]
    return made


FOLLOWED: dict[str, Callable[[], nn.Module]] = {
    "a method": by_method,
    "a partial": by_partial,
    "nn.LSTM": lambda: Recurrent(4, 4),
    "a parametrized nn.LSTM": lambda: nn.utils.parametrizations.weight_norm(Recurrent(4, 4), "weight_hh_l0"),
    "containers": Listed,
    "prune": pruned,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm, the old one": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "torch.fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "torch.jit.script": scripted,
    "torch.jit.trace": traced,
    "odd tuples and dtypes": Described,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
}


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_copy_follows_serves_the_new_weights(name: str) -> None:
    make = FOLLOWED[name]
    torch.manual_seed(0)
    module, trained = make().eval(), make().eval()
    randomised(trained)
    with torch.no_grad():
        live, expected = ms.Live(module), trained(X)
        live(X)
        live.swap(trained.state_dict())
        assert torch.allclose(live(X), expected, atol=1e-6)
        assert not torch.allclose(make().eval()(X), expected, atol=1e-3)


@pytest.mark.slow
def test_transformers_models_are_served() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 50}
    tokens = torch.tensor([[1, 2, 3]])
    for config, kind in (("BertConfig", "BertModel"), ("GPT2Config", "GPT2LMHeadModel")):
        options = getattr(transformers, config)(**sizes, bos_token_id=0, eos_token_id=0)
        module, trained = (getattr(transformers, kind)(options).eval() for _ in range(2))
        live = ms.Live(module)
        live.swap(trained.state_dict())
        assert torch.equal(live(tokens)[0], trained(tokens)[0])


def test_what_has_no_weights_does_not_matter() -> None:
    """A compiled function; and a wrapped representation, as torchao has it of a layer that it has quantized."""
    module = nn.Linear(4, 4).eval()
    module.act = torch.compile(lambda x: x.relu(), backend="eager")  # type: ignore[assignment]
    module.act(X)
    before = module.extra_repr
    module.extra_repr = lambda: f"{before()}, quantized"  # type: ignore[method-assign]
    live = ms.Live(module)
    live.swap({name: torch.full_like(value, 2) for name, value in module.state_dict().items()})
    assert torch.equal(live(torch.ones(1, 4)), torch.full((1, 4), 10.0))
