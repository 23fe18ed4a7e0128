"""Other values for a tensor, such as a model can be called with: what it is used as is not known."""

from collections.abc import Iterator

import torch

_STEPS = (0.0, 1.0, 8.0)
"""How far values are moved away from zero, beside being scaled; the first that shows is enough."""


def other_values(tensor: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Tensors like this one with other values, each farther away; none for a tensor without elements.

    Signs stay, as variances have to be positive. Whole numbers change places, as they may be indices; where all are the
    same they are counted up and down.
    """
    if not tensor.numel():
        return
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        yield ~tensor
    elif tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator().manual_seed(seed)
        for step in _STEPS:
            yield _scaled(tensor, step, generator)
    else:
        moved = tensor.reshape(-1).roll(1).reshape(tensor.shape)
        if not torch.equal(moved, tensor):
            yield _like(tensor, moved)
        else:
            yield _like(tensor, tensor + 1)
            yield _like(tensor, tensor - 1)


def _scaled(tensor: torch.Tensor, step: float, generator: torch.Generator) -> torch.Tensor:
    def random() -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    away = torch.where(wide == 0, 0.02 + 0.04 * random(), 0.0) + step * (0.5 + random())
    sign = torch.where(wide == 0, 1.0, wide.sgn())
    return _like(tensor, (wide * (0.75 + 0.5 * random()) + sign * away).to(tensor.dtype))


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(value)
