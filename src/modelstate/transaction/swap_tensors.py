"""Changes what a tensor is while it stays the same object. Each function returns its undo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from modelstate.errors import OptionError, PlacementError
from modelstate.process import deferred_signals
from modelstate.torch_compat.plain import has_dispatch, is_plain
from modelstate.torch_compat.private import (
    drop_frozen_code,
    gradient_hooks,
    is_transforming,
    restore_hooks,
    slots_of_class,
    swap_impl,
    without_modes,
)
from modelstate.transaction.object_snapshot import UNSET, set_grad, set_slot
from modelstate.transaction.references import described, holders_of

Undo = Callable[[], object]


def exchange(a: torch.Tensor, b: torch.Tensor) -> Undo:
    """Exchanges class, attributes, slots, and the implementations of two tensors in torch's core, all or nothing.

    It does what `torch.utils.swap_tensors` does, without its checks. The steps that can fail come first. It raises what
    torch raises.
    """
    classes = type(a), type(b)
    swap_impl(a, b)
    if classes[0] is not classes[1]:
        try:
            a.__class__ = classes[1]
            b.__class__ = classes[0]
        except TypeError:
            a.__class__ = classes[0]
            swap_impl(a, b)
            raise
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    for name in slots_of_class(classes[0]):
        of_a, of_b = getattr(a, name, UNSET), getattr(b, name, UNSET)
        set_slot(a, name, of_b)
        set_slot(b, name, of_a)
    return partial(exchange, a, b)


def give_memory(tensor: torch.Tensor, value: torch.Tensor) -> Undo:
    """Gives a plain tensor the memory of `value`. Class, hooks and `requires_grad` stay; a gradient is dropped.

    Unlike an assignment to `.data`, this works from and to the meta device.
    """
    other = value.detach()
    _exchange_memory(tensor, other)
    return partial(swap_impl, tensor, other)


def give_memory_to_all(
    tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor], register_undo: Callable[[Undo], None]
) -> None:
    """Gives plain tensors on meta the memory of values, which nothing else uses: they are on meta afterwards.

    The undo is registered first: an interrupt between two tensors must not lose one.
    """

    def undo() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            if value.is_meta:
                swap_impl(tensor, value)

    register_undo(undo)
    for tensor, value in zip(tensors, values, strict=True):
        _exchange_memory(tensor, value)


def _exchange_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    hooks = gradient_hooks(tensor)
    if tensor.requires_grad and (value.is_floating_point() or value.is_complex()):
        value.requires_grad = True
    swap_impl(tensor, value)
    if hooks and tensor.requires_grad:
        restore_hooks(tensor, hooks)


def point_to(
    tensor: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor | None = None,
    *,
    held_grad: torch.Tensor | None = None,
) -> Undo:
    """Gives a tensor the memory of `value`, of another dtype or device. Class and attributes stay.

    Args:
        tensor: The tensor that changes.
        value: The tensor whose memory it gets.
        grad: The new values of the gradient, which stays the same object. None drops the gradient.
        held_grad: The object of the gradient, where `tensor.grad` may be another object by now, since two tensors may
            have the same gradient.
    """
    old = tensor.data if torch.nn.parameter.is_lazy(tensor) else tensor.detach()

    def change() -> Undo:
        tensor.data = value
        return partial(setattr, tensor, "data", old)

    return _with_grad(tensor, change, held_grad, grad)


def give_grad(tensor: torch.Tensor, grad: torch.Tensor, new: torch.Tensor) -> Undo:
    """Gives the gradient of a tensor, the object `grad`, the values of `new`. The tensor does not change."""
    return _with_grad(tensor, lambda: None, grad, new)


def become(tensor: torch.Tensor, value: torch.Tensor, grad: torch.Tensor | None = None) -> Undo:
    """Gives `tensor` the class, payload and memory of `value`. Its hooks stay, and a parameter stays a parameter.

    Attributes of the tensor stay, except for those that the value has too. `grad` is the new value of the gradient;
    None drops the gradient. It raises what torch raises, and changes nothing then.
    """
    new, hooks = as_slot(tensor, value), gradient_hooks(tensor)
    attributes = {} if has_dispatch(tensor) and type(tensor) is not type(new) else dict(tensor.__dict__)
    new_grad = grad if new.requires_grad else None

    def change() -> Undo:
        undo = exchange(tensor, new)
        for name, attribute in attributes.items():
            tensor.__dict__.setdefault(name, attribute)
        if hooks and tensor.requires_grad:
            restore_hooks(tensor, hooks)
        return undo

    return _with_grad(tensor, change, None, new_grad)


def _with_grad(
    tensor: torch.Tensor, change: Callable[[], Undo | None], grad: torch.Tensor | None, new: torch.Tensor | None
) -> Undo:
    """Changes a tensor while it has no gradient, all or nothing, and gives it its gradient again with new values.

    Args:
        tensor: The tensor.
        change: Changes the tensor, and returns the undo.
        grad: The object of the gradient; None for `tensor.grad`.
        new: The new values of the gradient; None drops the gradient.
    """
    old_grad = tensor.grad if tensor.is_leaf else None
    undos: list[Undo | None] = []

    def undo() -> None:
        tensor.grad = None
        for step in reversed(undos):
            if step is not None:
                step()
        set_grad(tensor, old_grad)

    grad = old_grad if grad is None else grad
    tensor.grad = None  # torch exchanges only tensors with one owner
    try:
        undos.append(change())
        if old_grad is not None and grad is not None and new is not None:
            undos.append(_replace(grad, new))
            set_grad(tensor, grad)
    except BaseException:
        undo()
        raise
    return undo


def _replace(grad: torch.Tensor, new: torch.Tensor) -> Undo | None:
    if new is grad:
        return None
    if is_plain(grad, new) and not (grad.is_meta or new.is_meta):
        return point_to(grad, new)
    return exchange(grad, new)


def as_slot(slot: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the value as a parameter, with the `requires_grad` of the slot, or as a buffer: as the slot holds one."""
    if not isinstance(slot, nn.Parameter):
        return value.detach() if isinstance(value, nn.Parameter) else value
    differentiable = value.is_floating_point() or value.is_complex()
    requires_grad = slot.requires_grad and differentiable
    if isinstance(value, nn.Parameter):
        return value.requires_grad_(requires_grad)
    return nn.Parameter(value, requires_grad=requires_grad)


def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges class, attributes, slots and storage of two tensors, which stay the same objects.

    The result is that of `torch.utils.swap_tensors`, which refuses more tensors: those with weak references, and those
    in an autograd graph whose backward pass has run.

    Args:
        a, b: The tensors.

    Raises:
        OptionError: An argument is not a tensor.
        PlacementError: The tensors cannot be exchanged, and nothing has been changed. Views, graphs that wait for
            backward and reducers of distributed training would keep using the old tensor; the error names
            them and where Python refers to them.

    Examples:
        >>> modelstate.swap_tensors(model.weight, nn.Parameter(torch.zeros(2, 2)))
    """
    for tensor in (a, b):
        if not isinstance(tensor, torch.Tensor):
            raise OptionError("not a tensor", expected="two torch.Tensor", found=type(tensor).__name__)
    if is_transforming():
        raise PlacementError(
            "within a transform of torch.func a tensor stands for others, and cannot be swapped",
            remedy="swap before the transform",
        )
    if a is b:
        return
    for error in refusals({"the first tensor": a, "the second tensor": b}):
        raise error
    with deferred_signals(), without_modes():
        try:
            exchange(a, b)
        except (RuntimeError, TypeError) as error:
            raise PlacementError(
                "torch cannot exchange these tensors; nothing has been changed",
                expected="tensors with no weak reference in torch's core, of classes with one layout of objects",
                found=f"{type(a).__name__} and {type(b).__name__}: {error}",
                remedy="keep what differs in attributes of the objects, without __slots__"
                if isinstance(error, TypeError)
                else "clone the tensor, and use the clone from now on",
            ) from error
        drop_frozen_code()


def refusals(tensors: Mapping[str, torch.Tensor]) -> list[PlacementError]:
    """Returns the errors for tensors, by name, whose holders would keep using the old tensor.

    It returns the errors and does not raise them, so that no frame of their traceback keeps the holders alive.
    """
    held = holders_of(tensors.values())
    return [
        PlacementError(
            "something else holds the tensor, and would keep using the old one; nothing has been changed",
            where=name,
            expected="a tensor that only Python refers to",
            found=described(holders.all()),
            remedy=holders.remedy,
        )
        for name, tensor in tensors.items()
        if (holders := held.get(id(tensor))) is not None and holders.all()
    ]
