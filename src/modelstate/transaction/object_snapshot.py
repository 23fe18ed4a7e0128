"""Snapshots of Python objects, from which they can be restored: attributes, containers, and the tensors in them."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from modelstate.errors import keep_interrupt
from modelstate.torch_compat.plain import has_dispatch, same_place
from modelstate.torch_compat.private import (
    can_set_data,
    gradient_hooks,
    restore_hooks,
    slots_of_class,
    swap_impl,
    without_subclasses,
)

_ATOMS = (str, int, float, complex, bool, bytes, type(None), type, torch.dtype, torch.device, torch.Size, range)
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
)
_MAX_OBJECTS = 1_000_000
_MAX_ARRAY_BYTES = 64 << 20
UNSET = object()


class ObjectSnapshot:
    """The state of all objects that can be reached from some objects, and the steps that restore it.

    It follows attributes, slots and containers of Python: dicts, lists, sets, deques, byte arrays, NumPy arrays, random
    generators, modules and plain objects, up to a million of them. Of tensors it saves the metadata (class, storage,
    shape, `requires_grad`, `grad`, hooks, attributes), not the bytes.

    Args:
        roots: The objects to start from.
        others: Further objects, as optimizers, whose tensors are replaced and do not change: of these nothing is saved.
    """

    def __init__(self, roots: Iterable[object], others: Iterable[object] = ()) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        """All tensors, including gradients, by id."""
        self.restores: list[Callable[[], None]] = []
        """The steps that restore the objects, including the order of their elements."""
        self.unreadable: list[str] = []
        """Classes of objects whose attributes raise when they are read."""
        self._seen: dict[int, object] = {}
        self._saves_tensors = True
        self._visit_all(roots)
        self._saves_tensors = False
        self._visit_all(others)

    def _visit_all(self, roots: Iterable[object]) -> None:
        queue = deque(roots)
        while queue and len(self._seen) < _MAX_OBJECTS:
            value = queue.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            try:
                referents = list(self._visit(value))
            except Exception as error:
                keep_interrupt(error)
                self.unreadable.append(f"{type(value).__module__}.{type(value).__qualname__}")
                continue
            for referent in referents:
                # Tensors first, so that the limit does not cut them off behind a vocabulary.
                (queue.appendleft if isinstance(referent, torch.Tensor) else queue.append)(referent)

    def _visit(self, value: Any) -> Iterable[object]:
        """Adds the step that restores an object, and returns the objects that it refers to."""
        add = self.restores.append
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            if not self._saves_tensors:
                return ()
            with without_subclasses():
                add(tensor_state(value))
                grad = value.grad if value.is_leaf else None
            return [grad, *self._visit_attributes(value)]
        if isinstance(value, dict):
            return self._visit_dict(value)
        if isinstance(value, tuple):
            return value
        for cls, fill in _COLLECTIONS:
            if isinstance(value, cls):
                saved = cls.copy(value)
                add(partial(_refill, cls.clear, fill, value, saved))
                items = () if cls is bytearray else saved
                return items if type(value) is cls else [*items, *self._visit_attributes(value)]
        if isinstance(value, np.ndarray):
            # A larger array, or one that maps a file, is data that a model reads, and not state that a load changes.
            if value.flags.writeable and value.nbytes <= _MAX_ARRAY_BYTES and not isinstance(value, np.memmap):
                add(partial(_restore_array, value, value.copy()))
            return ()
        if isinstance(value, random.Random):
            add(partial(value.setstate, value.getstate()))
            return ()
        is_of_numpy = type(value).__module__.startswith("numpy.random")  # which torch does not import
        if isinstance(value, torch.Generator) or (is_of_numpy and hasattr(value, "get_state")):
            add(partial(value.set_state, value.get_state()))
            return ()
        if is_of_numpy:
            bits: Any = getattr(value, "bit_generator", value)
            add(partial(setattr, bits, "state", bits.state))
            return ()
        if isinstance(value, partial):
            return value.args, value.keywords
        if isinstance(value, types.MethodType):
            return (value.__self__,)
        return () if isinstance(value, _CODE) else self._visit_attributes(value)

    def _visit_dict(self, value: dict[object, object]) -> Iterable[object]:
        # An OrderedDict keeps its order beside the dict, so only its own methods may empty and fill it.
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        saved = list(base.items(value))

        def restore() -> None:
            now = list(base.items(value))
            if len(now) != len(saved) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(now, saved, strict=True)
            ):
                base.clear(value)
                for key, item in saved:
                    base.__setitem__(value, key, item)

        self.restores.append(restore)
        referents = [part for pair in saved for part in pair]
        return referents if type(value) in (dict, OrderedDict) else [*referents, *self._visit_attributes(value)]

    def _visit_attributes(self, value: object) -> Iterable[object]:
        referents: list[object] = []
        if not isinstance(value, torch.Tensor):  # `tensor_state` restores the class of a tensor
            self.restores.append(partial(_restore_class, value, type(value)))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            referents.extend(self._visit_dict(attributes))
        for name in slots_of_class(type(value)):
            try:
                saved = getattr(value, name, UNSET)
            except Exception as error:  # the other attributes are restored all the same
                keep_interrupt(error)
                self.unreadable.append(f"{type(value).__module__}.{type(value).__qualname__}")
                continue
            referents.append(saved)
            self.restores.append(partial(set_slot, value, name, saved))
        return referents


_COLLECTIONS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (list, list.extend),
    (set, set.update),
    (deque, deque.extend),
    (bytearray, bytearray.extend),
)
"""The classes of containers that are emptied and filled again, each with the method that fills one."""


def _refill(clear: Callable[..., None], fill: Callable[..., None], container: object, items: Iterable[object]) -> None:
    clear(container)
    fill(container, items)


def _restore_array(array: np.ndarray, saved: np.ndarray) -> None:
    if not array.flags.writeable:  # it was writeable when it was saved
        array.flags.writeable = True
    np.copyto(array, saved)


def _restore_class(value: object, cls: type) -> None:
    if type(value) is not cls:
        value.__class__ = cls


def set_slot(value: object, name: str, content: object) -> None:
    """Sets a slot of an object; `UNSET` deletes its content."""
    if getattr(value, name, UNSET) is content:
        return
    if content is UNSET:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, content)


def tensor_state(tensor: torch.Tensor) -> Callable[[], None]:
    """Saves the metadata of a tensor, without its attributes, and returns a function that restores it.

    The alias of the tensor shares its storage, so it needs no memory. A wrapper subclass is defined by its attributes.
    A tensor in a layout other than the strided one has no alias.
    """
    cls, requires_grad, is_leaf = type(tensor), tensor.requires_grad, tensor.is_leaf
    alias = tensor.data if torch.nn.parameter.is_lazy(tensor) else tensor.detach() if _is_view(tensor) else None
    grad = tensor.grad if is_leaf else None
    restore_grad = tensor_state(grad) if grad is not None else None
    hooks = gradient_hooks(tensor) if requires_grad and is_leaf else None

    def restore() -> None:
        with without_subclasses(), torch.no_grad():
            if type(tensor) is not cls:
                tensor.__class__ = cls
            if is_leaf and not tensor.is_leaf:
                tensor.detach_()
            if alias is not None and (tensor.is_quantized or not same_place(tensor, alias)):
                put_back(tensor, alias)
            if is_leaf and tensor.is_leaf:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if restore_grad is not None:
                    restore_grad()  # first, since torch takes a gradient only where it fits
                if tensor.grad is not grad:
                    set_grad(tensor, grad)
            if hooks is not None:
                restore_hooks(tensor, hooks)

    return restore


def set_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Assigns a gradient, also one whose dtype or device torch refuses in a plain assignment."""
    fits = grad is None or (grad.dtype, grad.device) == (tensor.dtype, tensor.device)
    if grad is None or fits or not (_is_view(grad) and _is_view(tensor)):
        tensor.grad = grad
        return
    data, grad.data = grad.data, torch.empty_like(grad, dtype=tensor.dtype, device=tensor.device)
    try:
        tensor.grad = grad
    finally:
        grad.data = data


def _is_view(tensor: torch.Tensor) -> bool:
    return not has_dispatch(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def put_back(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """Gives a tensor the storage and shape of `alias`. It stays the same object."""
    if tensor.layout is torch.strided and can_set_data(tensor, alias):  # can have no effect for sparse tensors
        tensor.data = alias
    else:
        swap_impl(tensor, alias.detach().requires_grad_(tensor.requires_grad))
