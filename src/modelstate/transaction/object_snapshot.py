"""What Python objects were, so that they can be put back: attributes, containers, and what tensors they hold."""

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from modelstate.torch_compat.plain import same_place
from modelstate.torch_compat.private import can_set_data, save_hooks, slots_of_class, swap_impl, without_subclasses

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
_UNSET = object()


class ObjectSnapshot:
    """The state of everything that can be reached from some objects, and the way back to it.

    It descends through attributes, slots and containers, without leaving Python: dicts, lists, sets, deques, byte
    arrays, NumPy arrays, random generators, modules and plain objects, a million of them at the most. Of tensors it
    keeps what they are (class, storage, shape, `requires_grad`, `grad`, hooks, attributes), not their bytes.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        """Every tensor that was found, gradients included, by its id."""
        self.restores: list[Callable[[], None]] = []
        """What puts everything back, the objects themselves and their order included, a step each."""
        self.unreadable: list[str] = []
        """Classes of objects whose contents cannot be listed: what only they hold is not put back."""
        self._seen: dict[int, object] = {}
        queue = deque(roots)
        while queue and len(self._seen) < _MAX_OBJECTS:
            found = queue.popleft()
            if not isinstance(found, _ATOMS) and id(found) not in self._seen:
                self._seen[id(found)] = found
                try:
                    visited = list(self._visit(found))
                except Exception:
                    self.unreadable.append(f"{type(found).__module__}.{type(found).__qualname__}")
                    continue
                for below in visited:
                    # Tensors first: they must not fall to the limit behind a vocabulary.
                    (queue.appendleft if isinstance(below, torch.Tensor) else queue.append)(below)

    def _visit(self, found: Any) -> Iterable[object]:
        if isinstance(found, torch.Tensor):
            return self._visit_tensor(found)
        for kind, visit in _BY_TYPE:
            if isinstance(found, kind):
                return visit(self, found)
        # Without their import, which is not ours to make, nobody has one.
        if type(found).__module__.startswith("numpy.random"):
            return _numpy_generator(self, found) if hasattr(found, "bit_generator") else _legacy_numpy(self, found)
        if isinstance(found, types.MethodType):
            return (found.__self__,)
        if isinstance(found, _CODE):
            return ()
        return self._visit_attributes(found)

    def _visit_tensor(self, tensor: torch.Tensor) -> Iterable[object]:
        self.tensors[id(tensor)] = tensor
        with without_subclasses():
            self.restores.append(tensor_state(tensor))
            grad = tensor.grad if tensor.is_leaf else None
        return [grad, *self._visit_attributes(tensor)]

    def _visit_dict(self, found: dict[Any, Any]) -> Iterable[object]:
        # An OrderedDict keeps its order beside the dict, so it has to be emptied and filled by its own methods.
        base: Any = OrderedDict if isinstance(found, OrderedDict) else dict
        kept = list(base.items(found))

        def restore() -> None:
            now = list(base.items(found))
            if len(now) != len(kept) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, kept, strict=True)):
                base.clear(found)
                for key, value in kept:
                    base.__setitem__(found, key, value)

        self.restores.append(restore)
        below = [part for item in kept for part in item]
        return below if type(found) in (dict, OrderedDict) else [*below, *self._visit_attributes(found)]

    def _visit_list(self, found: list[Any]) -> Iterable[object]:
        kept = list(found)
        self.restores.append(lambda: list.__setitem__(found, slice(None), kept))
        return kept if type(found) is list else [*kept, *self._visit_attributes(found)]

    def _visit_set(self, found: set[Any]) -> Iterable[object]:
        kept = set(found)

        def restore() -> None:
            set.clear(found)
            set.update(found, kept)

        self.restores.append(restore)
        return kept

    def _visit_deque(self, found: deque[Any]) -> Iterable[object]:
        kept = list(found)

        def restore() -> None:
            found.clear()
            found.extend(kept)

        self.restores.append(restore)
        return kept

    def _visit_bytes(self, found: bytearray) -> Iterable[object]:
        kept = bytes(found)
        self.restores.append(lambda: bytearray.__setitem__(found, slice(None), kept))
        return ()

    def _visit_array(self, found: "np.ndarray[Any, Any]") -> Iterable[object]:
        # A larger one, or one that is a file, is data that a model looks into, and no state that loading changes.
        if found.flags.writeable and found.nbytes <= _MAX_ARRAY_BYTES and not isinstance(found, np.memmap):
            kept = found.copy()
            self.restores.append(partial(_restore_array, found, kept))
        return ()

    def _visit_attributes(self, found: Any) -> Iterable[object]:
        below: list[object] = []
        if not isinstance(found, torch.Tensor):  # whose class is put back with what it is
            self.restores.append(partial(_set_class, found, type(found)))
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict):
            below.extend(self._visit_dict(attributes))
        for name in slots_of_class(type(found)):
            try:
                kept = getattr(found, name, _UNSET)
            except Exception:  # the other attributes are put back all the same
                self.unreadable.append(f"{type(found).__module__}.{type(found).__qualname__}")
                continue
            below.append(kept)
            self.restores.append(partial(_set_slot, found, name, kept))
        return below


def _restore_array(array: "np.ndarray[Any, Any]", kept: "np.ndarray[Any, Any]") -> None:
    if not array.flags.writeable:  # as it was when it was kept
        array.flags.writeable = True
    np.copyto(array, kept)


def _set_class(found: Any, cls: type) -> None:
    if type(found) is not cls:
        found.__class__ = cls


def _set_slot(found: object, name: str, kept: object) -> None:
    if getattr(found, name, _UNSET) is kept:
        return
    if kept is _UNSET:
        object.__delattr__(found, name)
    else:
        object.__setattr__(found, name, kept)


def _generator(get: str, set_: str) -> Callable[[ObjectSnapshot, Any], Iterable[object]]:
    def visit(snapshot: ObjectSnapshot, found: Any) -> Iterable[object]:
        kept = getattr(found, get)()
        snapshot.restores.append(lambda: getattr(found, set_)(kept))
        return ()

    return visit


_legacy_numpy = _generator("get_state", "set_state")


def _numpy_generator(snapshot: ObjectSnapshot, found: Any) -> Iterable[object]:
    bits = found.bit_generator
    kept = bits.state
    snapshot.restores.append(lambda: setattr(bits, "state", kept))
    return ()


_BY_TYPE: tuple[tuple[Any, Callable[[ObjectSnapshot, Any], Iterable[object]]], ...] = (
    (dict, ObjectSnapshot._visit_dict),
    (list, ObjectSnapshot._visit_list),
    (tuple, lambda _, found: found),
    (set, ObjectSnapshot._visit_set),
    (deque, ObjectSnapshot._visit_deque),
    (bytearray, ObjectSnapshot._visit_bytes),
    (np.ndarray, ObjectSnapshot._visit_array),
    (torch.Generator, _generator("get_state", "set_state")),
    (random.Random, _generator("getstate", "setstate")),
    (partial, lambda _, found: (found.args, found.keywords)),
)


def tensor_state(tensor: torch.Tensor) -> Callable[[], None]:
    """What a tensor is, but for its bytes and attributes; the function returned makes it that again.

    The alias that is kept costs no memory: it shares the storage. A wrapper subclass is what its attributes are, and a
    tensor in another layout than the strided one is not looked into.
    """
    cls, requires_grad, is_leaf = type(tensor), tensor.requires_grad, tensor.is_leaf
    alias = tensor.data if torch.nn.parameter.is_lazy(tensor) else tensor.detach() if _is_view(tensor) else None
    grad = tensor.grad if is_leaf else None
    restore_grad = tensor_state(grad) if grad is not None else None
    restore_hooks = save_hooks(tensor) if requires_grad and is_leaf else None

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
                    restore_grad()  # a gradient is taken only where it fits
                if tensor.grad is not grad:
                    set_grad(tensor, grad)
            if restore_hooks is not None:
                restore_hooks()

    return restore


def set_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Assigns a gradient. Its dtype and device may differ from the tensor's, which an assignment alone refuses."""
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


def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of the tensor handles every operation itself, as wrapper subclasses do."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def put_back(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """Makes `tensor` show what `alias` shows, under its own identity."""
    if tensor.layout is torch.strided and can_set_data(tensor, alias):  # for sparse tensors it does nothing at times
        tensor.data = alias
    else:
        swap_impl(tensor, alias.detach().requires_grad_(tensor.requires_grad))
