"""`skeleton`: builds models whose parameters have no memory, and whose buffers have their values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, GetSetDescriptorType
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from modelstate.process import ThreadValue
from modelstate.torch_compat.modules import MethodOverride, Overrides, modules_of, own_parameters
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import is_unwritten, marked_empties, unwatched
from modelstate.transaction.swap_tensors import give_memory

_FILLS = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "erfinv_", "clamp_")
"""Fills that initialisation uses, and that take 10 to 800 us for a tensor on meta, because torch implements their meta
kernels in Python. For many models they are most of the construction time. Other fills take about a microsecond."""


class _Created(NamedTuple):
    """What a thread has created within `skeleton`, by id."""

    parameters: WeakValueDictionary[int, nn.Parameter]
    modules: WeakValueDictionary[int, nn.Module]
    devices: dict[int, torch.device]
    """Of the parameters that have moved to meta, before."""


_current = ThreadValue[_Created | None](None)
"""None outside of `skeleton`."""


@contextmanager
def skeleton() -> Iterator[None]:
    """Builds models with parameters on the meta device and real buffers.

    A constructor creates a parameter as usual. When the parameter is registered, it moves to meta and stays the same
    object, so ties within the constructor stay. Memory that is never written to costs nothing, and calls that
    initialise tensors on meta do nothing. Buffers (position ids, rotary tables, masks) keep the values that the
    constructor computes; a model that is built with `torch.device("meta")` lacks these values. Parameters that existed
    before, and are tied into the new model, are left alone.

    Methods of the new modules see `is_meta` and `device` of a new parameter as they were when it was created: many
    constructors fill their buffers only where parameters are not on meta. At the end of the context, a buffer or an
    attribute moves to meta if the constructor has only allocated it (`torch.empty`) and written none or not all of it,
    so that a load initialises it (`init_missing=True`), or reports it. Tensors that only closures or deeper containers
    refer to are not looked at.

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
    if _current.value is not None:
        yield
        return
    created = _Created(WeakValueDictionary(), WeakValueDictionary(), {})
    with _current.replaced(created), _overrides.used(), marked_empties():
        yield
    # The buffers of modules and of those below them, and the tensors among their attributes, each once.
    found = dict[int, nn.Module]()
    for root in created.modules.values():
        if id(root) not in found:
            found |= {id(module): module for module in modules_of(root)}
    values = [value for module in found.values() for value in vars(module).values()]
    within = [item for value in values if isinstance(value, dict) for item in value.values()]
    within += [item for value in values if isinstance(value, list | tuple) for item in value]
    tensors = {id(value): value for value in (*values, *within) if isinstance(value, torch.Tensor)}
    for tensor in tensors.values():
        if is_plain(tensor) and not tensor.is_meta and not isinstance(tensor, nn.Parameter) and is_unwritten(tensor):
            give_memory(tensor, torch.empty_like(tensor, device="meta"))


def _new(stock: Callable[..., nn.Parameter], cls: type[nn.Parameter], *args: object, **named: object) -> nn.Parameter:
    param = stock(cls, *args, **named)
    if _current.value is not None:
        _current.value.parameters[id(param)] = param
    return param


def _register(stock: Callable[..., None], module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    stock(module, name, param)
    created = _current.value
    if param is None or created is None or id(param) not in created.parameters:
        return  # a parameter of an existing model keeps its memory
    if is_plain(param) and not param.is_meta:
        created.devices[id(param)] = param.device
        with unwatched():
            give_memory(param, torch.empty_like(param, device="meta", requires_grad=False))


def _init(stock: Callable[..., None], module: nn.Module, *args: object, **named: object) -> None:
    stock(module, *args, **named)
    if _current.value is not None:
        _current.value.modules[id(module)] = module


def _is_meta(stock: GetSetDescriptorType, param: nn.Parameter) -> bool:
    is_meta: bool = stock.__get__(param)
    return is_meta and _concealed_device(param, sys._getframe(2)) is None


def _device(stock: GetSetDescriptorType, param: nn.Parameter) -> torch.device:
    device: torch.device = stock.__get__(param)
    concealed = _concealed_device(param, sys._getframe(2)) if device.type == "meta" else None
    return device if concealed is None else concealed


def _concealed_device(param: nn.Parameter, caller: FrameType) -> torch.device | None:
    """Returns the device where the constructor has created a parameter, for methods of a new module; else None.

    Constructors fill buffers only `if not self.weight.is_meta`, and compute buffers on `self.weight.device`. A method
    that gets another module as an argument initialises the parameters of that one, and computes with them.
    """
    created, code = _current.value, caller.f_code
    if created is None or id(param) not in created.parameters or id(param) not in created.devices:
        return None
    if code.co_varnames[:1] != ("self",) or caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
        return None
    own, *arguments = (caller.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
    others = [argument for argument in arguments if isinstance(argument, nn.Module)]
    is_others = any(param is each for other in others for each in own_parameters(other).values())
    return created.devices[id(param)] if id(own) in created.modules and not is_others else None


def _fill(stock: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
    recorded = tensor.requires_grad and torch.is_grad_enabled()
    if _current.value is not None and tensor.is_meta and is_plain(tensor) and not recorded:
        return tensor
    return stock(tensor, *args, **named)


_overrides = Overrides(
    MethodOverride(nn.Module, "register_parameter", _register),
    MethodOverride(nn.Parameter, "__new__", _new),
    MethodOverride(nn.Parameter, "is_meta", _is_meta),
    MethodOverride(nn.Parameter, "device", _device),
    MethodOverride(nn.Module, "__init__", _init),
    *(MethodOverride(torch.Tensor, name, _fill) for name in _FILLS),
)
