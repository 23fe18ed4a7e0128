"""A replacement of `torch.nn.Module._apply` that keeps references, so that `.to()`, `.half()` and their like do."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import ClassVar

import torch
from torch import nn

from modelstate.arguments import check_flag
from modelstate.conversion.conversion import Conversion, apply_in_conversion, running_conversion
from modelstate.conversion.tensors import Target
from modelstate.forks import fork_safe_lock
from modelstate.planning.transfer import COPYABLE
from modelstate.process import gc_paused
from modelstate.torch_compat.modules import MethodOverride, Overrides, is_cast_of_torch, modules_of, tensors_of
from modelstate.torch_compat.plain import is_fake
from modelstate.torch_compat.private import is_faking, is_transforming
from modelstate.transaction.transaction import Transaction, exclusive

Apply = Callable[[torch.Tensor], torch.Tensor]


_switches: tuple[reference_keeping, ...] = ()
"""The switches of all threads that have not been left, in the order in which they were set. The last one counts. A
change replaces the tuple, since modules are converted in other threads meanwhile."""


class reference_keeping:
    """Makes `.to()`, `.cpu()`, `.half()`, `.to_empty()` and all that uses `nn.Module._apply` keep references.

    Use it as a context manager for a part of a program, or call it to switch it on for all threads and for good;
    `modelstate.reference_keeping(False)` switches it off again. What `modelstate.convert` promises holds meanwhile:
    all or nothing, with parameters, buffers and ties the same objects as before. Errors of the conversion itself, such
    as an unknown device, come as torch raises them. A tensor that is held by a graph that waits for backward raises
    `modelstate.errors.PlacementError`; torch finds that out at the backward, or never.

    The state of optimizers does not follow, since `Module.to` gets no optimizers. Where an optimizer has state already,
    call `modelstate.convert(model, dtype, optimizers=[optimizer])` instead. That holds in particular for an optimizer
    that was built on meta and made its state there, as `Adagrad` does: in place of `model.to_empty(device=device)`,
    call `modelstate.convert(model, device=device, empty=True, optimizers=[optimizer])`, which initialises the state.

    `torch.__future__.set_overwrite_module_params_on_conversion` and `set_swap_module_params_on_conversion` have no
    effect meanwhile. Modules that are traced (within `FakeTensorMode`, or with tensors of one) are left to torch.

    Args:
        on: Whether references are kept.

    Examples:
        >>> with modelstate.reference_keeping():
        ...     model.to(torch.bfloat16)
    """

    def __init__(self, on: bool = True) -> None:
        check_flag("on", on)
        self._on, self._is_fresh = on, True
        self._add()

    def __enter__(self) -> None:
        if not self._is_fresh:  # the object is entered a second time
            self._add()
        self._is_fresh = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _switches
        with _lock:
            last = max(index for index, switch in enumerate(_switches) if switch is self)
            _switches = _switches[:last] + _switches[last + 1 :]
        _overrides.update()

    def _add(self) -> None:
        global _switches
        with _lock:
            _switches = (*_switches, self)
        _overrides.update()

    @staticmethod
    def _is_on() -> bool:
        """Whether references are kept now."""
        switches = _switches
        return bool(switches) and switches[-1]._on


def _apply(_stock: Callable[..., nn.Module], self: nn.Module, fn: Apply, recurse: bool = True) -> nn.Module:
    if (
        running_conversion(self) is not None
        or not reference_keeping._is_on()
        or is_faking()  # a traced module, whose tensors stand for others
        or is_transforming()
        or any(map(is_fake, tensors_of(modules_of(self))))
    ):
        return apply_in_conversion(self, fn, recurse)
    with exclusive(self), gc_paused(), Transaction(self) as transaction:
        conversion = Conversion(transaction, _TorchFunction(fn))
        conversion.record(recurse)
        conversion.commit()
        del conversion  # before the garbage collector goes on, which would visit every change first
    return self


_lock = fork_safe_lock()
_overrides = Overrides(MethodOverride(nn.Module, "_apply", _apply), holds=reference_keeping._is_on)
replaced_apply = _overrides.used
"""Makes torch's part of a module's own `_apply` run in the conversion of this thread."""


class _TorchFunction(Target):
    """The target of a conversion by `Module.to` and its like: the function that they pass to `_apply`."""

    is_reported: ClassVar[bool] = False

    def __init__(self, fn: Apply) -> None:
        self._fn = fn

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._fn(tensor)

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        return self._fn(grad)

    def deferred_cast(self, dtype: torch.dtype) -> torch.Tensor | None:
        if dtype not in COPYABLE or not dtype.is_floating_point or not is_cast_of_torch(self._fn):
            return None
        with torch.inference_mode(False):
            new = self._fn(torch.empty(0, dtype=dtype, device="cpu"))
        return new if new.is_cpu and new.dtype in COPYABLE and new.is_floating_point() else None
