"""`skeleton`: builds models whose parameters have no memory, and whose buffers have their values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from modelstate.process import ThreadValue
from modelstate.torch_compat.modules import MethodOverride, Overrides
from modelstate.torch_compat.plain import is_plain
from modelstate.transaction.swap_tensors import give_memory

_FILLS = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "erfinv_", "clamp_")
"""Fills that initialisation uses, and that take 10 to 800 us for a tensor on meta, because torch implements their meta
kernels in Python. For many models they are most of the construction time. Other fills take about a microsecond."""

_created = ThreadValue[WeakValueDictionary[int, nn.Parameter] | None](None)
"""The parameters that a thread has created within `skeleton`, by id; None outside of `skeleton`."""


@contextmanager
def skeleton() -> Iterator[None]:
    """Builds models with parameters on the meta device and real buffers.

    A constructor creates a parameter as usual. When the parameter is registered, it moves to meta and stays the same
    object, so ties within the constructor stay. Memory that is never written to costs nothing, and calls that
    initialise tensors on meta do nothing. Buffers (position ids, rotary tables, masks) keep the values that the
    constructor computes; a model that is built with `torch.device("meta")` lacks these values. Parameters that existed
    before, and are tied into the new model, are left alone.

    The context applies to the current thread, and may be nested. A constructor that reads the values of its parameters
    fails in it, and so does a constructor that fails under `torch.device("meta")`.

    Returns:
        A context manager, which yields None.

    Raises:
        Exception: Only exceptions of the constructors within the context are passed on.

    Examples:
        >>> with modelstate.skeleton():
        ...     model = nn.Linear(4096, 4096)
        >>> model.weight.device
        device(type='meta')
    """
    outer = _created.value
    with _created.replaced(WeakValueDictionary() if outer is None else outer), _overrides.used():
        yield


def _new(stock: Any, cls: type[nn.Parameter], *args: Any, **named: Any) -> nn.Parameter:
    param: nn.Parameter = stock(cls, *args, **named)
    created = _created.value
    if created is not None:
        created[id(param)] = param
    return param


def _register(stock: Any, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    stock(module, name, param)
    created = _created.value
    # A parameter of an existing model keeps its memory.
    if param is not None and created is not None and id(param) in created and is_plain(param) and not param.is_meta:
        give_memory(param, torch.empty_like(param, device="meta", requires_grad=False))


def _fill(stock: Any, tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    recorded = tensor.requires_grad and torch.is_grad_enabled()
    if _created.value is not None and tensor.is_meta and is_plain(tensor) and not recorded:
        return tensor
    filled: torch.Tensor = stock(tensor, *args, **named)
    return filled


_overrides = Overrides(
    MethodOverride(nn.Module, "register_parameter", _register),
    MethodOverride(nn.Parameter, "__new__", _new),
    *(MethodOverride(torch.Tensor, name, _fill) for name in _FILLS),
)
