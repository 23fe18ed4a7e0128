"""Modules for the tests of live programs."""

from typing import Any

import torch
from torch import nn


class FusionLayer(nn.Module):
    """A wrapper that is no part of the static model: a hook takes its level out of the names, another puts it in."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer = layer
        for _ in range(times):
            self._register_state_dict_hook(FusionLayer._leave_out)
            self.register_load_state_dict_pre_hook(FusionLayer._put_in)

    @staticmethod
    def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in [name for name in state if name.startswith(prefix + "layer.")]:
            state[prefix + name[len(prefix + "layer.") :]] = state.pop(name)

    @staticmethod
    def _put_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        names = {prefix + name for name in module.layer.state_dict()}
        for name in [name for name in state if name in names]:
            state[prefix + "layer." + name[len(prefix) :]] = state.pop(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


class Decoder(nn.Module):
    """The case of PyTorch's pull request 137609: a layer of some is fused, and the names do not tell."""

    def __init__(self, width: int = 4, times: int = 1) -> None:
        super().__init__()
        self.tok = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            [nn.Linear(width, width), FusionLayer(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)), times)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Nested(nn.Module):
    """A hook below a hook."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = FusionLayer(FusionLayer(nn.Linear(width, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


class Fused(nn.Module):
    """Saves three projections as one tensor, and takes that one."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self._register_state_dict_hook(Fused._fuse)
        self.register_load_state_dict_pre_hook(Fused._split)

    @staticmethod
    def _fuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[prefix + "qkv"] = torch.cat([state.pop(f"{prefix}{name}.weight") for name in "qkv"])

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        if prefix + "qkv" in state:
            for name, part in zip("qkv", state.pop(prefix + "qkv").chunk(3), strict=True):
                state[f"{prefix}{name}.weight"] = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(self.q(x)) + self.k(x) * self.v(x)
        return found


class Halves(nn.Module):
    """Saves one tensor as two."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2 * width, width))
        self._register_state_dict_hook(Halves._split)
        self.register_load_state_dict_pre_hook(Halves._join)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[prefix + "one"], state[prefix + "two"] = state.pop(prefix + "both").chunk(2)

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        if prefix + "one" in state:
            state[prefix + "both"] = torch.cat([state.pop(prefix + "one"), state.pop(prefix + "two")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.both.T


class Everything(nn.Module):
    """Ties, buffers of every kind, frozen and unused parameters, a constant, normalisation in training mode."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.unused = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("shift", torch.randn(width), persistent=False)
        self.constant = torch.arange(float(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        y: torch.Tensor = self.norm(self.b(self.a(x))) * self.scale + self.shift + self.constant
        return y


def everything(seed: int = 0) -> Everything:
    """With weights of its own for each seed."""
    torch.manual_seed(seed)
    return Everything()


class Small(nn.Module):
    """Has tensors that AOTInductor makes numbers in the code, unless an option keeps it from that."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 16)
        self.again = self.lin.weight
        self.bias = nn.Parameter(torch.arange(4.0) + k)
        self.scale = nn.Parameter(torch.full((), 2.0 + k))
        self.register_buffer("shift", torch.full((16,), k), persistent=False)
        self.constant = torch.arange(16.0)
        with torch.no_grad():
            self.lin.weight.fill_(k)
            self.lin.bias.fill_(k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin((x + self.bias) * self.scale) + self.shift + self.constant
        found: torch.Tensor = y + nn.functional.linear(x, self.again)
        return found


class Constant(nn.Module):
    """Answers k everywhere where all of its weights are k, and something else where they are not."""

    def __init__(self, layers: int = 8, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(width, width)) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [(x @ layer) / layer.shape[0] for layer in self.layers]
        return torch.stack(parts)


def weights_of(module: nn.Module, k: float) -> dict[str, torch.Tensor]:
    """A state dict of the module whose every element is k."""
    return {name: torch.full_like(value, k) for name, value in module.state_dict().items()}


def linear(k: float) -> nn.Linear:
    """A layer for inputs of 3 x 4, whose weights are k."""
    module = nn.Linear(4, 4)
    module.load_state_dict(weights_of(module, k))
    return module.eval()


def tied_layers(k: float = 1) -> nn.Module:
    """Two layers whose weights are k, and one tensor."""
    module = nn.Sequential(linear(k), linear(k))
    module[1].weight = module[0].weight
    return module.eval()


class Named(torch.Tensor):
    """A class whose answers would be of that class, too."""


def randomised(module: nn.Module, seed: int = 7) -> nn.Module:
    """The module with other weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module


INPUTS_OF_TABLE = {"x": torch.zeros(2, 4), "y": torch.ones(2, 4)}


class Table(nn.Module):
    """Answers with views of its weights, and with a tensor for which autograd needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(6, 4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.p[: x.shape[0]], self.p.t(), self.b[:], x * self.p[:2] + y


WIDTH = 256
"""Weights of half a megabyte, for tests of memory and of requests while weights change."""
X_OF_TIED = torch.ones(4, WIDTH)


class Tied(nn.Module):
    """Answers with its weights. In version k each element of every weight is k."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.again = self.a
        self.without_elements = nn.Parameter(torch.empty(0))
        self.register_buffer("c", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = [(x @ weight) / WIDTH for weight in (self.a, self.bias, self.again)]
        return torch.stack([*products, self.c.expand(4, WIDTH) * x])


def tied_state(k: float = 2, **changes: Any) -> dict[str, Any]:
    """A state dict of `Tied` whose every element is k, with changes; None leaves a name out."""
    return {name: value for name, value in {**weights_of(Tied(), k), **changes}.items() if value is not None}
