"""Optimizers whose parameters have changed their dtype or device."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from modelstate.errors import OptionError

Follow = tuple[dict[str, Any], str, torch.Tensor]
"""The state of one parameter, a name in it, and the new value."""


def check_optimizers(optimizers: Iterable[Any]) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, if that is what they are. Raises `OptionError`."""
    checked = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in checked:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError("not an optimizer", expected="torch.optim.Optimizer", found=type(optimizer).__name__)
    return checked


def follow(
    optimizers: Sequence[torch.optim.Optimizer], changes: Iterable[tuple[torch.Tensor, torch.dtype, torch.device]]
) -> list[Follow]:
    """What has to be cast or moved in the optimizers' state when parameters change to a dtype and device.

    It is state of the parameter's own shape (Adam's moments); counters of steps stay where the optimizer wants them.
    The new tensors are made here, so that nothing can fail when they are put in place.
    """
    found: list[Follow] = []
    for param, dtype, device in changes:
        for optimizer in optimizers:
            for key, old in optimizer.state.get(param, {}).items():
                if (
                    isinstance(old, torch.Tensor)
                    and old.shape == param.shape
                    and old.is_floating_point()
                    and key != "step"
                ):
                    found.append((optimizer.state[param], key, old.to(device, dtype)))
    return found
