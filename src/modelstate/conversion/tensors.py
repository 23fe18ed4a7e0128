"""The parts of a conversion: what each tensor becomes, and the write that puts the new tensor in place.

A `Target` makes the new tensors: that of `cast_and_move` for a dtype and a device, that of `by_function` by a user's
function. A `Change` is one new tensor with its placement.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch.nn.parameter import is_lazy

from modelstate.errors import PlacementError, TransformError, code_errors
from modelstate.planning.plan import Step
from modelstate.planning.transfer import COPYABLE, Way
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import has_dispatch, has_its_memory, is_plain, same_values
from modelstate.torch_compat.private import (
    can_set_data,
    flatten,
    payload_of,
    slots_of_class,
    sparse_values,
    write_count,
)
from modelstate.transaction.slots import Slot
from modelstate.transaction.swap_tensors import become, give_grad, give_memory, point_to
from modelstate.transaction.transaction import Transaction, Write

UNCHANGED: object = type("Unchanged", (), {"__repr__": lambda _: "modelstate.conversion.UNCHANGED"})()
"""Returned by the function of `modelstate.convert` for a tensor that stays as it is."""


class Target(msgspec.Struct, frozen=True):
    """What a conversion makes of each tensor."""

    make: Callable[[str, torch.Tensor], torch.Tensor]
    """Returns the new tensor of a name, with its values; the tensor itself if it stays as it is."""
    grad: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
    """Returns the new gradient, for a gradient and the new tensor; None if the new tensor cannot have it."""
    deferred_cast: Callable[[torch.dtype], torch.Tensor | None] = lambda _: None
    """Returns an empty tensor like the results for plain CPU tensors of a dtype, if these are casts, or nothing. Such a
    cast can fail only for lack of memory, so it can be deferred to the commit. None for anything else."""
    description: str = ""
    """The text for a report: "bfloat16", "the results of quantize"."""
    cause: str = ""
    """What makes infinite or NaN values, for a note; empty if they are not counted."""
    is_user_function: bool = False
    """Whether a user's function makes the tensors, which may return anything. Other targets can convert the memory that
    several tensors share at once."""


def cast_and_move(dtype: torch.dtype | None = None, device: torch.device | None = None, empty: bool = False) -> Target:
    """Returns another dtype for floating-point tensors, another device, or both. With `empty`, values are not kept."""
    to = f" {short(dtype)}" if dtype else ""
    to += (" on" if to else "") + f" device {device}" if device else ""
    description = to.strip()

    def dtype_of(old: torch.dtype) -> torch.dtype:
        """Returns the new dtype. Integers and booleans keep theirs, and so do complex numbers for a real dtype."""
        is_cast = old.is_floating_point or (dtype is not None and old.is_complex and dtype.is_complex)
        return dtype if dtype is not None and is_cast else old

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        new_dtype, new_device = dtype_of(tensor.dtype), device or tensor.device
        if empty and not is_lazy(tensor):
            return torch.empty_like(tensor, dtype=new_dtype, device=new_device)
        without = ""
        if tensor.is_meta and new_device.type != "meta":
            without = "on meta"
            remedy = "fill it with modelstate.load, or convert(..., empty=True) for memory without values"
        elif is_plain(tensor) and not tensor.is_meta and not has_its_memory(tensor):
            without = "whose memory has been freed"
            remedy = "convert before the memory is freed (by offloading or sharding), or after it is restored"
        if without:
            raise PlacementError(
                f"a tensor {without} has no values to be converted; nothing has been changed",
                where=name,
                expected="a tensor with memory",
                found=f"{short(tensor.dtype)} of shape {tuple(tensor.shape)}",
                remedy=remedy,
            )
        try:
            return tensor.to(new_device, new_dtype)
        except (torch.OutOfMemoryError, MemoryError):
            raise  # the call says that the memory is used up
        except Exception as error:  # code of a subclass may raise anything
            raise PlacementError(
                "torch cannot convert this tensor; nothing has been changed",
                where=name,
                expected=description,
                found=f"{short(tensor.dtype)} on {tensor.device}: {error}",
                remedy="give transform= for it, or another dtype",
            ) from error

    def grad(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        if empty and (old.is_meta or new.is_meta):
            return None
        return old.to(new.device, new.dtype if old.is_floating_point() or old.is_complex() else old.dtype)

    def deferred_cast(old: torch.dtype) -> torch.Tensor | None:
        if empty or (device is not None and device.type != "cpu"):
            return None
        new = dtype_of(old)
        return torch.empty(0, dtype=new, device="cpu") if new in COPYABLE and old in COPYABLE else None

    return Target(make, grad, deferred_cast, description, "" if empty else "a cast")


def by_function(function: Callable[..., object], then: Target | None, casts: bool) -> Target:
    """Returns the result of a user's function, made what `then` makes of it; `casts` says whether that is a cast."""

    def call(name: str, tensor: torch.Tensor) -> torch.Tensor:
        writes = None if is_lazy(tensor) or tensor.is_inference() else write_count(tensor)
        with code_errors(TransformError, "the function raised; nothing has been changed", where=name):
            new = function(name, tensor)
        if writes is not None and write_count(tensor) != writes:
            raise TransformError(
                "the function has changed its input in place, which nothing can undo",
                where=name,
                expected="a new tensor",
                found=f"{writes} writes to it before, {write_count(tensor)} after",
                remedy="let it work on a copy: tensor.clone()",
            )
        if new is UNCHANGED:
            return tensor
        if new is tensor or not isinstance(new, torch.Tensor):
            raise TransformError(
                f"the function returned {'its own input' if new is tensor else 'no tensor'}; nothing has been changed",
                where=name,
                expected="a new tensor, or modelstate.conversion.UNCHANGED for one that is to stay as it is",
                found="" if new is tensor else short_repr(new),
                remedy="let it return one of these for every name that it is called with",
            )
        return new

    def grad(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        if not (new.is_floating_point() or new.is_complex()) or new.layout is not old.layout:
            return None
        if new.is_nested or old.is_nested or old.shape != new.shape:
            return None
        return old.to(new.device, new.dtype)

    return Target(
        call if then is None else lambda name, tensor: then.make(name, call(name, tensor)),
        grad,
        description=f"the results of {getattr(function, '__name__', 'transform=')}",
        cause="transform= or the cast after it" if casts else "transform=",
        is_user_function=True,
    )


DATA = "other memory under the same object"
GRADIENT = "its gradient alone"
SUBCLASS = "a tensor subclass: its payload has to change with it"
_LAYOUT = "a layout that has no data pointer to be changed"
_MEMORY = "has no memory, or will have none"
_CORE = "torch cannot change what it points to"
"""Placements: why a tensor gets a new value in the way that it does."""


def placement_of(tensor: torch.Tensor, value: torch.Tensor) -> str:
    """Returns the cheapest placement of a new value that keeps every reference to the tensor."""
    if has_dispatch(tensor) or has_dispatch(value):
        return SUBCLASS
    if tensor.layout is not torch.strided or value.layout is not torch.strided or tensor.is_nested or value.is_nested:
        return _LAYOUT
    if is_lazy(tensor):
        return DATA
    if type(value) is not type(tensor) and not is_plain(value):
        return SUBCLASS
    if tensor.is_meta is not value.is_meta:
        return _MEMORY
    loses_training = tensor.requires_grad and not (value.is_floating_point() or value.is_complex())
    if tensor.is_inference() or loses_training or not can_set_data(tensor, value):
        return _CORE
    return DATA


class Change(Write):
    """A tensor that becomes another one: the write that puts the new one in place."""

    __slots__ = ("grad", "old_grad", "placement", "slot")

    def __init__(
        self,
        slot: Slot,
        value: torch.Tensor,
        placement: str,
        old_grad: torch.Tensor | None,
        grad: torch.Tensor | None = None,
    ) -> None:
        self.target, self.value, self.done = slot.tensor, value, False
        self.slot, self.placement = slot, placement
        self.old_grad, self.grad = old_grad, grad
        """The gradient before and after. `grad` is None if there is none, or if the new tensor cannot have it."""

    @property
    def name(self) -> str:
        return self.slot.names[0]

    @property
    def keeps_values(self) -> bool:
        """Whether dtype, device and values stay the same, and only the memory changes, as for a memory format.

        A graph that waits for backward stays right then. Finding out compares all values.
        """
        tensor, value = self.target, self.value
        return tensor.device == value.device and not tensor.is_meta and same_values(tensor, value)

    def run(self, transaction: Transaction | None) -> None:
        assert transaction is not None  # `Conversion.commit` runs all changes before the commit of the transaction
        tensor, value, grad = self.target, self.value, self.grad
        if self.placement is GRADIENT:
            if self.old_grad is None or grad is None:
                return
            undo = give_grad(tensor, self.old_grad, grad)
        elif self.placement is DATA:
            undo = point_to(tensor, value, grad, held_grad=self.old_grad)
        elif is_plain(tensor) and is_plain(value):
            undo = give_memory(tensor, value)
        else:
            undo = become(tensor, value, grad)
        transaction.register_undo(undo)


def step_of(change: Change) -> Step:
    """Returns the description of a change that has not been made yet. It holds no tensor."""
    tensor, value, (names, kind, _) = change.target, change.value, change.slot
    shape = () if is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape)
    return step(names, kind, change.placement, shape, value.dtype, tensor.dtype, value.device, nbytes_of(tensor))


def step(
    names: tuple[str, ...],
    kind: str,
    placement: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    old: torch.dtype,
    device: torch.device,
    nbytes: int,
) -> Step:
    """Returns the description of a change of a slot: what the tensor becomes, and its dtype and bytes before."""
    return Step(names[0], kind, "", Way.NEW, placement, shape, dtype, old, device, nbytes, names[1:])


def nbytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements, or of its parts if it consists of several tensors."""
    if is_plain(tensor) and not tensor.is_nested:
        return 0 if tensor.is_meta else tensor.nbytes
    if is_lazy(tensor) or tensor.is_meta:
        return 0
    return sum(part.numel() * part.itemsize for part in payload_of(tensor))


def swappable(name: str, tensor: torch.Tensor, value: torch.Tensor, shared: bool) -> torch.Tensor:
    """Returns the value as an object that can be swapped with `tensor`.

    A swap exchanges two objects. A value that others refer to (`shared`) would become the old tensor for them, and a
    value that holds the tensor, as `Wrapper(tensor)` does, would hold itself. In both cases an alias of the value is
    returned. Raises `TransformError` if the alias holds the tensor, too.
    """
    if not shared and not _holds(value, tensor):
        return value
    try:
        alias = value.detach()
    except (NotImplementedError, RuntimeError, TypeError):  # a class that cannot be detached
        alias = value
    if alias is value or _holds(alias, tensor):
        if not _holds(value, tensor):
            return value
        raise TransformError(
            "the function returned a tensor that holds its input; nothing has been changed",
            where=name,
            expected="a tensor that is made of others",
            found=f"a {type(value).__name__} that refers to the tensor itself",
            remedy="make it of a copy: tensor.clone(), or of tensor.detach(), which shares the memory",
        )
    return alias


def _holds(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether an attribute of a value is a tensor, or a container with it."""
    slots = [getattr(value, name, None) for name in slots_of_class(type(value))]
    return any(item is tensor for item in flatten([*vars(value).values(), *slots])[0])


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that hold the values of a tensor."""
    if is_lazy(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [sparse_values(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.detach().values()]
    return payload_of(tensor)
