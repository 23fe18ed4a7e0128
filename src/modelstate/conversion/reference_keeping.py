"""`torch.nn.Module._apply` that keeps references, so that `.to()` on an unchanged model does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from modelstate.conversion.conversion import Conversion, dispatch, running, stock_apply
from modelstate.process import fork_safe_lock, gc_paused
from modelstate.torch_compat.private import is_fake, is_faking
from modelstate.transaction.exclusive import exclusive

Apply = Callable[[torch.Tensor], torch.Tensor]
_conversions: list[int] = []
"""The threads of those that are running."""
_switches: "list[reference_keeping]" = []
"""In the order in which they were asked for, those of all threads."""


class reference_keeping:
    """Makes `.to()`, `.cpu()`, `.half()`, `.to_empty()` and all that stands on `nn.Module._apply` keep references.

    `with modelstate.reference_keeping(): model.to(...)` does it for a while; calling it without `with` switches it on
    for good, and `modelstate.reference_keeping(False)` off again, for all threads. What `modelstate.convert` promises
    holds then: all or nothing, with parameters, buffers and ties the objects that they were. Errors of the conversion
    itself (`torch` saying that there is no such device) come as torch raises them; that a tensor is held by a graph
    that waits for backward, which torch finds out at the backward or never, raises `modelstate.errors.SwapError`.

    `torch.__future__.set_overwrite_module_params_on_conversion` and `set_swap_module_params_on_conversion` have no
    effect meanwhile. Modules that are traced (within `FakeTensorMode`, or with tensors of one) are left to torch.
    """

    def __init__(self, on: bool = True) -> None:
        self._on, self._waits = on, True
        with _lock:
            _switches.append(self)
            _install()

    def __enter__(self) -> None:
        with _lock:
            if not self._waits:  # it is used again
                _switches.append(self)
            self._waits = False
            _install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _switches.reverse()
            _switches.remove(self)
            _switches.reverse()
            _install()

    @staticmethod
    def holds() -> bool:
        """Whether references are kept now: what was asked for last, and not left since."""
        return bool(_switches) and _switches[-1]._on


@contextmanager
def replaced_apply() -> Iterator[None]:
    """While this lasts, torch's part of `_apply` comes back to the conversion that runs in the thread."""
    thread = threading.get_ident()
    with _lock:
        _conversions.append(thread)
        _install()
    try:
        yield
    finally:
        with _lock:
            _conversions.remove(thread)
            _install()


def _install() -> None:
    wanted: Any = _apply if reference_keeping.holds() or _conversions else stock_apply
    nn.Module._apply = wanted  # type: ignore[method-assign]


def _in_child(thread: int) -> None:
    _conversions[:] = [other for other in _conversions if other == thread]
    _install()


_lock = fork_safe_lock(_in_child)


def _apply(self: nn.Module, fn: Apply, recurse: bool = True) -> nn.Module:
    if running(self) is not None or not reference_keeping.holds() or _has_fakes(self):
        return dispatch(self, fn, recurse)
    with exclusive(self), gc_paused():
        conversion = Conversion(self, _Given(fn))
        try:
            conversion.record(recurse)
            conversion.commit()
        except BaseException:
            try:
                conversion.rollback()
            finally:
                conversion.rollback()
            raise
    return self


def _has_fakes(module: nn.Module) -> bool:
    """Whether a module is being traced, where tensors stand for others."""
    return is_faking() or any(map(is_fake, (*module.parameters(), *module.buffers())))


class _Given:
    """What torch has been asked for, as a function."""

    words = "what was asked for"
    cause = ""  # torch's own calls return no report
    by_user = False

    def __init__(self, fn: Apply) -> None:
        self._fn = fn

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._fn(tensor)

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        return self._fn(grad)

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        return None
