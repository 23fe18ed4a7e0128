"""What tensors are to become: another dtype, another device, or what a function makes of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from modelstate.codec.plain import has_its_memory
from modelstate.errors import ModelStateError, PlacementError, TransformError
from modelstate.plan.dtypes import device_name, short
from modelstate.plan.placement import COPYABLE, is_plain

UNCHANGED: Any = type("Unchanged", (), {"__repr__": lambda _: "modelstate.UNCHANGED"})()
"""What a function returns that is given to `modelstate.convert`, for a tensor that is to stay as it is."""


class Target(Protocol):
    """What becomes of each tensor."""

    @property
    def words(self) -> str:
        """For a report: "bfloat16", "what quantize makes of it"."""

    @property
    def cause(self) -> str:
        """What makes infinite or NaN values, for a note; empty where they are not counted."""

    @property
    def by_user(self) -> bool:
        """Whether a function of the user's makes it, which may return anything; what torch does to tensors can be done
        to the common memory of several as well."""

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The new tensor, complete; the tensor itself where it stays as it is."""

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """What becomes of the gradient of a tensor that becomes `new`; None where it has no place any more."""

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What becomes of plain CPU tensors of a dtype, as an empty tensor, where that is a cast (or nothing), which is
        certain to succeed as long as there is memory, and can be put off; else None."""


@dataclass(frozen=True, slots=True)
class To:
    """Another dtype for floats, another device, or both. `empty` says that values are not kept."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    empty: bool = False

    @property
    def cause(self) -> str:
        return "" if self.empty else "a cast"

    @property
    def by_user(self) -> bool:
        return False

    @property
    def words(self) -> str:
        dtype = f" {short(self.dtype)}" if self.dtype else ""
        place = f" device {device_name(self.device)}" if self.device else ""
        return f"{dtype}{' on' if dtype and place else ''}{place}".strip()

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Integers and booleans stay what they are, and so do complex numbers unless a complex dtype is asked for."""
        if self.dtype is None or not (dtype.is_floating_point or (dtype.is_complex and self.dtype.is_complex)):
            return dtype
        return self.dtype

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype, device = self._dtype_of(tensor.dtype), self.device or tensor.device
        if self.empty:
            return torch.empty_like(tensor, dtype=dtype, device=device)
        if tensor.is_meta and device.type != "meta":
            raise PlacementError(
                "a tensor on meta has no values to be converted; nothing has been changed",
                where=name,
                expected="a tensor with memory",
                found=f"{short(tensor.dtype)} of shape {tuple(tensor.shape)} on meta",
                remedy="fill it with modelstate.load, or convert(..., empty=True) for memory without values",
            )
        if is_plain(tensor) and not tensor.is_meta and not has_its_memory(tensor):
            raise PlacementError(
                "the memory of a tensor has been freed; nothing has been changed",
                where=name,
                expected=f"{tensor.nbytes} bytes",
                found=f"a storage of {tensor.untyped_storage().nbytes()}",
                remedy="have what freed it (offloading, sharding) bring it back first, or convert before that",
            )
        try:
            return tensor.to(device, dtype)
        except (NotImplementedError, RuntimeError) as error:
            raise PlacementError(
                "torch cannot convert this tensor; nothing has been changed",
                where=name,
                expected=self.words,
                found=f"{short(tensor.dtype)} on {device_name(tensor.device)}: {error}",
                remedy="give fn= for it, or another dtype",
            ) from error

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        if self.empty and (grad.is_meta or new.is_meta):
            return None
        return grad.to(new.device, new.dtype if grad.is_floating_point() or grad.is_complex() else grad.dtype)

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        if self.empty or (self.device is not None and self.device.type != "cpu"):
            return None
        new = self._dtype_of(dtype)
        return _stand_in(new) if new in COPYABLE and dtype in COPYABLE else None


@cache
def _stand_in(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class Made:
    """What a function of the user's makes of a tensor, and then perhaps another dtype or device."""

    function: Callable[..., Any]
    by_name: bool
    then: To | None

    @property
    def cause(self) -> str:
        casts = self.then is not None and self.then.dtype is not None
        return "fn= or the cast after it" if casts else "fn="

    @property
    def by_user(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return f"what {getattr(self.function, '__name__', 'the function')} makes of it"

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        new = self._call(name, tensor)
        return new if self.then is None else self.then.make(name, new)

    def _call(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        version = None if torch.nn.parameter.is_lazy(tensor) or tensor.is_inference() else tensor._version
        try:
            new = self.function(name, tensor) if self.by_name else self.function(tensor)
        except ModelStateError:
            raise
        except Exception as error:
            raise TransformError(
                "the function raised; nothing has been changed",
                where=name,
                found=f"{type(error).__name__}: {error}",
                remedy="see the traceback of the cause",
            ) from error
        if version is not None and tensor._version != version:
            raise TransformError(
                "the function has changed its input in place, which nothing can undo",
                where=name,
                expected="a new tensor",
                found=f"{version} writes to it before, {tensor._version} after",
                remedy="let it work on a copy: tensor.clone()",
            )
        if new is UNCHANGED:
            return tensor
        if new is tensor:
            raise TransformError(
                "the function returned its own input; nothing has been changed",
                where=name,
                expected="a new tensor",
                remedy="return modelstate.UNCHANGED for a tensor that is to stay as it is",
            )
        if not isinstance(new, torch.Tensor):
            raise TransformError(
                "the function returned no tensor; nothing has been changed",
                where=name,
                expected="a torch.Tensor, or modelstate.UNCHANGED",
                found=repr(new)[:80],
                remedy="let it return a tensor for every name that it is called with",
            )
        return new

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        if not (new.is_floating_point() or new.is_complex()) or new.layout is not grad.layout:
            return None
        if new.is_nested or grad.is_nested or grad.shape != new.shape:
            return None
        return grad.to(new.device, new.dtype)

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        return None


def takes_name(function: Callable[..., Any]) -> bool:
    """Whether a function is to be called with name and tensor: whether it has two parameters that have to be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one of torch's own, which take a tensor
        return False
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) >= 2
