"""Exchanges the contents of tensors under their identities; each function returns its undo."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.errors import OptionError, SwapError
from modelstate.process import deferred_signals
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import is_transforming, keep_hooks, slots_of_class, swap_impl
from modelstate.transaction.object_snapshot import has_dispatch, set_grad
from modelstate.transaction.references import holders_of

Undo = Callable[[], None]
_UNSET = object()


def exchange(a: torch.Tensor, b: torch.Tensor) -> Undo:
    """Exchanges class, attributes, slots, and what the tensors are in torch's core: all of it, or nothing.

    `torch.utils.swap_tensors` without its checks, in an order in which whatever can fail comes before anything has
    changed. Raises what torch raises.
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
        _exchange_slot(a, b, name)
    return partial(swap_back, a, b)


def swap_back(a: torch.Tensor, b: torch.Tensor) -> None:
    """Undoes an exchange."""
    exchange(a, b)


def _exchange_slot(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
    values = getattr(a, name, _UNSET), getattr(b, name, _UNSET)
    for tensor, old, new in ((a, *values), (b, values[1], values[0])):
        if new is not _UNSET:
            object.__setattr__(tensor, name, new)
        elif old is not _UNSET:
            object.__delattr__(tensor, name)


def give_memory(tensor: torch.Tensor, value: torch.Tensor) -> Undo:
    """Makes a plain tensor show the memory of `value`, under its own identity, class, hooks and `requires_grad`.

    This works where assigning `.data` does not: from the meta device, and to it. A gradient is lost.
    """
    restore_hooks, other = keep_hooks(tensor), value.detach()
    if tensor.requires_grad and (value.is_floating_point() or value.is_complex()):
        other.requires_grad = True
    swap_impl(tensor, other)
    restore_hooks()
    return lambda: swap_impl(tensor, other)


def point_to(
    tensor: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor | None = None,
    *,
    held_grad: torch.Tensor | None = None,
    undoable: bool = True,
) -> Undo:
    """Gives a tensor the memory of `value`, of another dtype or device, under its own identity, class and attributes.

    `grad` is what its gradient becomes, which keeps its identity too; without it the gradient is dropped. `held_grad`
    is the gradient's object, where it may have become another by now, as one that two tensors have. Without `undoable`
    the old memory is let go of at once, and what is returned does nothing.
    """
    held: Any = tensor
    old_grad = tensor.grad if tensor.is_leaf else None
    old = None if not undoable else tensor.data if torch.nn.parameter.is_lazy(tensor) else tensor.detach()
    if old_grad is None:
        held.data = value
        return partial(setattr, held, "data", old) if undoable else _nothing
    new_grad = old_grad if held_grad is None else held_grad
    held.grad = None
    undo_grad = _nothing
    if grad is not None:
        try:
            undo_grad = _replace(new_grad, grad, undoable)
        except BaseException:
            set_grad(held, old_grad)
            raise

    def undo() -> None:
        held.grad = None
        held.data = old
        undo_grad()
        set_grad(held, old_grad)

    try:
        held.data = value
        if grad is not None:
            set_grad(held, new_grad)
    except BaseException:
        if undoable:
            undo()
        raise
    return undo if undoable else _nothing


def give_grad(tensor: torch.Tensor, grad: torch.Tensor, new: torch.Tensor) -> Undo:
    """Makes the gradient of a tensor, which is the object `grad`, what `new` is, and leaves the tensor alone."""
    tensor.grad = None  # torch exchanges only tensors with one owner
    undo_grad = _nothing
    try:
        undo_grad = _replace(grad, new)
        set_grad(tensor, grad)
    except BaseException:
        undo_grad()
        set_grad(tensor, grad)
        raise

    def undo() -> None:
        tensor.grad = None
        undo_grad()
        set_grad(tensor, grad)

    return undo


def become(tensor: torch.Tensor, value: torch.Tensor, grad: torch.Tensor | None = None) -> Undo:
    """Makes `tensor` what `value` is: class, payload and memory, under its own identity, with its hooks.

    A parameter stays one. What Python code has hung on the tensor stays, where the value has nothing of that name.
    `grad` is what its gradient becomes; without it the gradient is dropped. Raises what torch raises, unchanged.
    """
    new, restore_hooks = as_slot(tensor, value), keep_hooks(tensor)
    old_grad = tensor.grad if tensor.is_leaf else None
    attributes = {} if has_dispatch(tensor) and type(tensor) is not type(new) else dict(tensor.__dict__)
    tensor.grad = None  # its owner counts
    try:
        undo = exchange(tensor, new)
    except BaseException:
        set_grad(tensor, old_grad)
        raise
    for name, attribute in attributes.items():
        tensor.__dict__.setdefault(name, attribute)
    restore_hooks()
    undo_grad = _nothing
    if old_grad is not None and grad is not None and tensor.requires_grad:
        try:
            undo_grad = _replace(old_grad, grad)
            set_grad(tensor, old_grad)
        except BaseException:
            undo_grad()
            undo()
            set_grad(tensor, old_grad)
            raise

    def back() -> None:
        tensor.grad = None
        undo()
        undo_grad()
        set_grad(tensor, old_grad)

    return back


def as_slot(slot: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as what the slot holds: a parameter that needs a gradient or does not, or a buffer."""
    if not isinstance(slot, nn.Parameter):
        return value.detach() if isinstance(value, nn.Parameter) else value
    differentiable = value.is_floating_point() or value.is_complex()
    requires_grad = slot.requires_grad and differentiable
    if isinstance(value, nn.Parameter):
        return value.requires_grad_(requires_grad)
    return nn.Parameter(value, requires_grad=requires_grad)


def _replace(grad: torch.Tensor, new: torch.Tensor, undoable: bool = True) -> Undo:
    if new is grad:
        return _nothing
    if is_plain(grad) and is_plain(new) and not (grad.is_meta or new.is_meta):
        return point_to(grad, new, undoable=undoable)
    return exchange(grad, new)


def _nothing() -> None:
    pass


def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges what two tensors are, under their identities: class, attributes, slots and storage.

    What `torch.utils.swap_tensors` does, with the same result. Weak references to either are no hindrance: they refer
    to the object, which stays. Nor is an autograd graph whose backward pass has been run, which nothing can use again.
    Views, graphs that wait for backward and reducers of distributed training would go on with the other tensor, so
    then it raises `SwapError`, with nothing changed, and says who holds which of the two, and where.

    Raises `OptionError` for what is no tensor, `SwapError` for tensors that cannot be exchanged.
    """
    for one in (a, b):
        if not isinstance(one, torch.Tensor):
            raise OptionError("not a tensor", expected="two torch.Tensor", found=type(one).__name__)
    if is_transforming():
        raise SwapError(
            "within a transform of torch.func a tensor stands for others, and cannot be swapped",
            remedy="swap before the transform",
        )
    if a is b:
        return
    check_slots(a, b)
    for error in refusals({"the first tensor": a, "the second tensor": b}):
        raise error
    with deferred_signals():
        try:
            exchange(a, b)
        except (RuntimeError, TypeError) as error:
            raise SwapError(
                "torch cannot exchange these tensors; nothing has been changed",
                expected="tensors with no weak reference in torch's core, of classes whose objects have one layout",
                found=f"{type(a).__name__} and {type(b).__name__}: {error}",
                remedy="clone the tensor, and use the clone from now on",
            ) from error


def check_slots(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises `SwapError` where the classes have different `__slots__`."""
    mine, theirs = set(slots_of_class(type(a))), set(slots_of_class(type(b)))
    if mine != theirs:
        raise SwapError(
            "the classes of the tensors have different __slots__; nothing has been changed",
            expected=f"the same: {sorted(mine)}",
            found=f"{sorted(theirs)} of {type(b).__name__}",
            remedy="keep what differs in attributes of the object, without __slots__",
        )


def refusals(tensors: Mapping[str, torch.Tensor]) -> list[SwapError]:
    """The errors for tensors, by their names, that somebody holds who would go on with them as they were.

    They are returned and not raised, so that no frame in their traceback keeps those holders alive.
    """
    held = holders_of(tensors.values())
    found = [(name, held[id(one)]) for name, one in tensors.items() if id(one) in held and held[id(one)].all()]
    return [
        SwapError(
            "somebody else holds the tensor, and would go on with what it was; nothing has been changed",
            where=name,
            expected="a tensor that only Python refers to",
            found="; ".join(holders.all()),
            remedy=holders.remedy,
        )
        for name, holders in found
    ]
