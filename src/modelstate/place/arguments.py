"""Arguments that loading and converting have in common."""

from typing import Any

import torch
from torch import nn

from modelstate.errors import OptionError
from modelstate.plan.torch_private import unwrapped


def check_budget_option(max_memory_bytes: object) -> None:
    """Raises `OptionError` for what is no number of bytes, and not None."""
    given = max_memory_bytes
    if given is not None and not (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        raise OptionError("max_memory_bytes= is a number of bytes", expected="int, from 0", found=repr(given))


def device_of(device: Any) -> torch.device | None:
    """The device that is meant. Raises `OptionError` for what is none, or not here."""
    try:
        # A tensor knows which of several devices "cuda" means, and whether there is one.
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise OptionError(
            "not a device that is here", found=f"{device!r}: {error}", remedy="device='cpu', or none"
        ) from error


def check_model(model: object) -> nn.Module:
    """The model, without the wrappers of compiling and data parallelism. Raises `OptionError` for what is none."""
    if isinstance(model, nn.Module):
        return unwrapped(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(
            "this is a class, and not a model of it",
            expected=f"an object of it: {model.__name__}(...)",
            found=f"the class {model.__qualname__}",
            remedy=f"with ms.skeleton(): model = {model.__name__}(...), with its arguments; then give the model",
        )
    raise OptionError("not a model", expected="torch.nn.Module", found=type(model).__name__)
