"""The tensor subclass of PyTorch's tutorial on `swap_tensors` and `module_load`, as it is there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

aten = torch.ops.aten


def quantized_class() -> Any:
    """The class `MyQuantizedLinearWeight`, a new one each time: the handler below is put on the class."""

    class MyQuantizedLinearWeight(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, elem: torch.Tensor, scale: float) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls,
                elem.shape,
                dtype=elem.dtype,
                layout=elem.layout,
                device=elem.device,
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
            )

        def __init__(self, elem: torch.Tensor, scale: float) -> None:
            self.elem = elem
            self.scale = scale

        def __repr__(self) -> str:
            return f"MyQuantizedLinearWeight({self.elem}, scale={self.scale})"

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if func in (aten.detach.default, aten._to_copy.default):
                new_elem = func(args[0].elem, *args[1:], **kwargs)
                return cls(new_elem, args[0].scale)
            raise NotImplementedError(f"Unsupported function {func}")

    return MyQuantizedLinearWeight


def _handle(cls: Any, load: Any) -> None:
    @classmethod
    def custom_torch_function(own: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.module_load:
            return load(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    cls.__torch_function__ = custom_torch_function


def from_plain(cls: Any) -> None:
    """The handler of the tutorial: plain tensors of a state dict become the subclass, with the model's scale."""

    def load(dest: Any, src: Any) -> Any:
        assert (type(dest), type(src)) == (cls, torch.Tensor)
        return cls(src, dest.scale)

    _handle(cls, load)


def every_way(cls: Any) -> None:
    """A handler for the other scenarios that the tutorial imagines: subclasses on either side, or on both."""

    def load(dest: Any, src: Any) -> Any:
        if not isinstance(dest, cls):
            return src.elem * src.scale
        return cls(src.elem.detach(), src.scale) if isinstance(src, cls) else cls(src.detach(), dest.scale)

    _handle(cls, load)


HANDLERS: dict[str, Callable[[Any], None]] = {
    "no handler": lambda cls: None,
    "the tutorial's handler": from_plain,
    "a handler for every way": every_way,
}


def quantized(linear: nn.Linear, cls: Any, scale: float = 0.5) -> nn.Linear:
    """The layer with its weight in the subclass."""
    requires_grad = linear.weight.requires_grad
    linear.weight = nn.Parameter(cls(linear.weight.detach(), scale), requires_grad=requires_grad)
    return linear
