"""Models without memory for their parameters, and with everything that their constructors compute."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from modelstate.place.swap import give_memory
from modelstate.plan.placement import is_plain

_active = threading.local()
_lock = threading.Lock()
_count = 0
_stock_register = nn.Module.register_parameter
_stock_new: Any = nn.Parameter.__new__


@contextmanager
def skeleton() -> Iterator[None]:
    """Builds models with their parameters on the meta device and their buffers real.

    A constructor first makes a parameter as always; as it is registered, it loses its memory under its own identity,
    so ties made in the constructor stay. Memory that nothing has been written to costs nothing, and initialisation
    of what is on meta does nothing. Buffers (position ids, rotary tables, masks) are what the constructor computes,
    which a model built with `torch.device("meta")` lacks. Parameters that were made before, and are tied into the new
    model, are left alone. Works for this thread; may be nested. A constructor that reads the values of its parameters
    cannot run so, and neither can one that a `torch.device("meta")` stops.
    """
    outer = _made_here()
    _patch(1)
    _active.made = WeakValueDictionary() if outer is None else outer
    try:
        yield
    finally:
        _active.made = outer
        _patch(-1)


def _patch(change: int) -> None:
    global _count
    patched: Any = nn.Parameter
    with _lock:
        _count += change
        nn.Module.register_parameter = _register if _count else _stock_register  # type: ignore[method-assign]
        patched.__new__ = staticmethod(_new if _count else _stock_new)


def _made_here() -> "WeakValueDictionary[int, nn.Parameter] | None":
    """The parameters that this thread has made in a skeleton, by their ids; None outside of one."""
    found: WeakValueDictionary[int, nn.Parameter] | None = vars(_active).get("made")
    return found


def _new(cls: type[nn.Parameter], *args: Any, **named: Any) -> nn.Parameter:
    made: nn.Parameter = _stock_new(cls, *args, **named)
    here = _made_here()
    if here is not None:
        here[id(made)] = made
    return made


def _register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _stock_register(self, name, param)
    here = _made_here()
    # A parameter from elsewhere, of a model that lives already, keeps its memory.
    if param is not None and here is not None and id(param) in here and is_plain(param) and not param.is_meta:
        give_memory(param, torch.empty_like(param, device="meta", requires_grad=False))
