"""Models without memory for their parameters, and with everything that their constructors compute."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from modelstate.place.swap import give_memory
from modelstate.plan.placement import is_plain

_active = threading.local()
_lock = threading.Lock()
_count = 0
_stock_register = nn.Module.register_parameter


@contextmanager
def skeleton() -> Iterator[None]:
    """Builds models with their parameters on the meta device and their buffers real.

    A constructor first makes a parameter as always; as it is registered, it loses its memory under its own identity,
    so ties made in the constructor stay. Memory that nothing has been written to costs nothing, and initialisation
    of what is on meta does nothing. Buffers (position ids, rotary tables, masks) are what the constructor computes,
    which a model built with `torch.device("meta")` lacks. Works for this thread; may be nested.
    """
    global _count
    with _lock:
        if _count == 0:
            nn.Module.register_parameter = _register  # type: ignore[method-assign]
        _count += 1
    depth = _depth()
    _active.depth = depth + 1
    try:
        yield
    finally:
        _active.depth = depth
        with _lock:
            _count -= 1
            if _count == 0:
                nn.Module.register_parameter = _stock_register  # type: ignore[method-assign]


def _depth() -> int:
    return int(vars(_active).get("depth", 0))


def _register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _stock_register(self, name, param)
    if param is not None and _depth() and is_plain(param) and not param.is_meta:
        give_memory(param, torch.empty_like(param, device="meta", requires_grad=False))
