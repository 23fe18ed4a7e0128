"""Models without memory for their parameters, and with everything that their constructors compute."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from modelstate.torch_compat.overrides import MethodOverride, Overrides
from modelstate.torch_compat.plain import is_plain
from modelstate.transaction.swap_tensors import give_memory

_FILLS = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "erfinv_", "clamp_")
"""What initialisation is made of, and torch checks in Python for a tensor on meta: 10 to 800 us each, which for many
models is most of the time that they are built in. The other fills take it a microsecond."""

_active = threading.local()


@contextmanager
def skeleton() -> Iterator[None]:
    """Builds models with their parameters on the meta device and their buffers real.

    A constructor first makes a parameter as always; as it is registered, it loses its memory under its own identity, so
    ties made in the constructor stay. Memory that nothing has been written to costs nothing, and calls that would
    initialise what is on meta are passed over. Buffers (position ids, rotary tables, masks) are what the constructor
    computes, which a model built with `torch.device("meta")` lacks. Parameters that were made before, and are tied into
    the new model, are left alone. Works for this thread; may be nested. A constructor that reads the values of its
    parameters cannot run so, and neither can one that a `torch.device("meta")` stops.
    """
    outer = _made_here()
    _active.made = WeakValueDictionary() if outer is None else outer
    try:
        with _overrides.used():
            yield
    finally:
        _active.made = outer


def _made_here() -> "WeakValueDictionary[int, nn.Parameter] | None":
    """The parameters that this thread has made in a skeleton, by their ids; None outside of one."""
    found: WeakValueDictionary[int, nn.Parameter] | None = vars(_active).get("made")
    return found


def _new(stock: Any, cls: type[nn.Parameter], *args: Any, **named: Any) -> nn.Parameter:
    made: nn.Parameter = stock(cls, *args, **named)
    here = _made_here()
    if here is not None:
        here[id(made)] = made
    return made


def _register(stock: Any, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    stock(module, name, param)
    here = _made_here()
    # A parameter from elsewhere, of a model that lives already, keeps its memory.
    if param is not None and here is not None and id(param) in here and is_plain(param) and not param.is_meta:
        give_memory(param, torch.empty_like(param, device="meta", requires_grad=False))


def _fill(stock: Any, tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    recorded = tensor.requires_grad and torch.is_grad_enabled()
    if _made_here() is not None and tensor.is_meta and is_plain(tensor) and not recorded:
        return tensor
    filled: torch.Tensor = stock(tensor, *args, **named)
    return filled


_overrides = Overrides(
    MethodOverride(nn.Module, "register_parameter", _register),
    MethodOverride(nn.Parameter, "__new__", _new),
    *(MethodOverride(torch.Tensor, name, _fill) for name in _FILLS),
)
