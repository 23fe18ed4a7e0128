"""Modules whose answers are only right for some sizes of their inputs."""

from typing import Any

import torch
from torch import nn
from torch.export import Dim


class Guarded(nn.Module):
    """Has a weight, as anything that is served."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))


class Even(Guarded):
    """Takes another branch for an odd number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.shape[0] % 2 == 0 else x * 100


class Within(Guarded):
    """Has to be called with no more rows than `y` has."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= y.shape[0])
        return x * self.weight + y[: x.shape[0]]


class Longer(Guarded):
    """Takes another branch where `x` is not longer."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() * self.weight + y.sum() if x.shape[0] > y.shape[0] else x.sum()


class Pairs(Guarded):
    """Takes rows by two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2, 3).sum(1) * self.weight


class Same(Guarded):
    """Takes tensors with the same number of rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.weight + y


class Product(Guarded):
    """Takes as many elements in two forms."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1) * self.weight + y


class Many(Guarded):
    """Takes containers, any number of inputs, and numbers."""

    def forward(self, *xs: torch.Tensor, of: dict[str, list[torch.Tensor]], n: int) -> torch.Tensor:
        factor = 1 if xs[0].shape[0] > xs[1].shape[0] else 10
        factor += 1 if of["a"][0].shape[0] * n > 20 else 20
        return xs[0].sum() * self.weight * factor


class Writes(Guarded):
    """Writes to an input, for an even number of rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= y.shape[0])
        if x.shape[0] % 2 == 0:
            x.mul_(self.weight)
        return x + y[: x.shape[0]]


def rows(*sizes: int, width: int = 3) -> tuple[torch.Tensor, ...]:
    """Tensors with so many rows, whose elements differ."""
    return tuple(torch.arange(float(size * width)).view(size, width) + place for place, size in enumerate(sizes))


DYNAMIC: Any = {0: Dim.DYNAMIC}
