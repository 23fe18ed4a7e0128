"""Lazy buffers: buffers that are None until they are assigned a tensor of any shape.

To torch a lazy buffer is a buffer that is registered with None, so that everything except loading is torch's own. A
pre-hook of `load_state_dict` gives the buffer the shape that the checkpoint has, or None, before torch looks for the
names that it expects. A hook of `state_dict` notes in torch's `_metadata` which of the buffers were set, so that a
value that was lost from a checkpoint differs from one that was never set.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from modelstate.errors import BufferNameError, OptionError
from modelstate.planning.recorder import KEEPS_NAMES
from modelstate.text_format import short_repr
from modelstate.torch_compat.modules import (
    is_initialised,
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)
from modelstate.torch_compat.plain import is_plain
from modelstate.transaction.slots import LAZY

NOTE = "modelstate.lazy_buffers"
"""The key, in the `_metadata` of a module, of which lazy buffers were set when it was saved."""

_seen: WeakKeyDictionary[nn.Module, tuple[list[str], dict[str, bool]]] = WeakKeyDictionary()
"""For each module the list of errors of the last load, which identifies that load, and whether it set each buffer.

A module that is shared has several names, and one load runs the hook for each of them.
"""


def register_lazy_buffer(module: nn.Module, name: str) -> None:
    """Registers a buffer that is None until `module.name` is assigned, and then has that shape and dtype.

    A lazy buffer that is set is a buffer like any other: it moves with the module and is in `state_dict()` under its
    name. Loading, by torch's own `load_state_dict` or by `modelstate.load`, sets it to what the checkpoint has: a
    value of any shape, or None. A buffer that is set stays the same object, of the same dtype and on the same device.
    One that was None gets the dtype of the checkpoint, and the device of the module's other tensors.

    Args:
        module: the module that gets the buffer, usually `self` in `__init__`.
        name: the name of the buffer: letters, digits and underscores.

    Raises:
        BufferNameError: The name is not an identifier, or the module has something under it.
        OptionError: `module` is not an initialised module, or `name` is not a string.

    Examples:
        >>> class Cache(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         ms.register_lazy_buffer(self, "table")
        >>> cache = Cache()
        >>> cache.load_state_dict({"table": torch.zeros(3, 4)})
        <All keys matched successfully>
        >>> cache.table.shape
        torch.Size([3, 4])
    """
    _check(module, name)
    untyped: Any = module
    untyped.register_buffer(name, None)
    known: tuple[str, ...] = vars(module).get(LAZY, ())
    if not known:
        untyped.register_load_state_dict_pre_hook(_before_loading)
        untyped.register_state_dict_post_hook(_note_set_buffers)
    if name not in known:  # it is known where the buffer was deleted and is registered again
        setattr(module, LAZY, (*known, name))


def _check(module: nn.Module, name: str) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError("not a module", expected="torch.nn.Module", found=type(module).__name__)
    where = type(module).__name__
    if not is_initialised(module):
        raise OptionError("the module is not initialised", where=where, remedy="call super().__init__() before")
    if not isinstance(name, str):
        raise OptionError("the name of a buffer is text", where=where, expected="str", found=short_repr(name))
    found, remedy = short_repr(name), "choose a name of letters, digits and underscores; or register it on a submodule"
    if name in own_buffers(module):
        found, remedy = f"the buffer {name!r}", "register the buffer once, and only as a lazy one"
    elif hasattr(module, name):
        value = getattr(module, name)
        found = f"the attribute {name!r}: {'None' if value is None else type(value).__name__}"
        remedy = "register the buffer before anything is assigned to it (it is None until then), or rename it"
    elif name.isidentifier() and not keyword.iskeyword(name):
        return
    raise BufferNameError("a module cannot have a buffer of that name", where=where, found=found, remedy=remedy)


def _note_set_buffers(module: nn.Module, state_dict: object, prefix: str, local_metadata: dict[str, object]) -> None:
    """The hook of `state_dict`: notes which of the lazy buffers are set."""
    local_metadata[NOTE] = {name: own_buffers(module)[name] is not None for name in _names(module)}


def _before_loading(
    module: nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    local_metadata: Mapping[str, object],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """The pre-hook of `load_state_dict`: shapes each lazy buffer as the checkpoint has it, so that torch can copy."""
    note = local_metadata.get(NOTE)
    noted = note if isinstance(note, Mapping) else {}
    if module not in _seen or _seen[module][0] is not error_msgs:
        _seen[module] = error_msgs, {}
    seen = _seen[module][1]
    # Where swap_tensors is on, torch swaps the tensors and does not assign.
    assigns = (
        bool(local_metadata.get("assign_to_params_buffers", False))
        and not torch.__future__.get_swap_module_params_on_conversion()
    )
    buffers = own_buffers(module)
    for name in _names(module):
        key = prefix + name
        has_key = key in state_dict
        was_set = True if has_key else bool(noted[name]) if name in noted else None
        if was_set is not None and seen.setdefault(name, was_set) is not was_set:
            error_msgs.append(f'"{key}" is set under one name of a shared module, and None under another.')
        if has_key:
            _make_room(module, name, key, state_dict, assigns, error_msgs)
        elif was_set and strict and buffers[name] is None:
            missing_keys.append(key)
        elif was_set is False or (was_set is None and name not in seen and _covers(state_dict, prefix, module)):
            buffers[name] = None


setattr(_before_loading, KEEPS_NAMES, True)


def _names(module: nn.Module) -> list[str]:
    """Returns the lazy buffers of a module, without those that were deleted or have become parameters."""
    buffers = own_buffers(module)
    return [name for name in vars(module).get(LAZY, ()) if name in buffers]


def _covers(state_dict: Iterable[str], prefix: str, module: nn.Module) -> bool:
    """Whether a checkpoint has a name of every part of a module: of its own tensors, and of each of its children.

    A checkpoint of one part, which is loaded with `strict=False`, does not mean that the buffer was None.
    """
    heads = {key[len(prefix) :].partition(".")[0] for key in state_dict if key.startswith(prefix)}
    children = {name: child for name, child in own_modules(module).items() if child is not None}
    if _has_own(module) and heads <= set(children):
        return False
    return heads.issuperset(name for name, child in children.items() if any(map(_has_own, child.modules())))


def _has_own(module: nn.Module) -> bool:
    """Whether every checkpoint of a module has a tensor of the module itself."""
    optional = {*vars(module).get(LAZY, ()), *non_persistent_buffers(module)}
    tensors = chain(own_parameters(module).items(), own_buffers(module).items())
    return any(tensor is not None and name not in optional for name, tensor in tensors)


@torch.inference_mode(False)
@torch.no_grad()
def _make_room(
    module: nn.Module, name: str, key: str, state_dict: dict[str, object], assigns: bool, error_msgs: list[str]
) -> None:
    """Gives the buffer the shape of the value that is about to be copied into it."""
    value, buffers = state_dict[key], own_buffers(module)
    buffer = buffers[name]
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
        if buffer is None:  # otherwise torch reports it
            del state_dict[key]
            error_msgs.append(
                f'While copying the buffer named "{key}", '
                f"expected torch.Tensor from checkpoint but received {type(value)}"
            )
        return
    if buffer is not None:
        if nn.parameter.is_lazy(buffer) or buffer.is_nested or value.is_nested or buffer.shape == value.shape:
            return  # torch copies it, or reports why it does not fit
        is_resizable = _is_ordinary(buffer) and buffer.is_leaf and not buffer.is_inference()
        if not assigns and is_resizable and _is_ordinary(value):
            # It stays the same object; other views keep the old memory.
            buffer.grad = None
            buffer.data = torch.empty(value.shape, dtype=buffer.dtype, device=buffer.device)
            return
    device = _device(module) if buffer is None else buffer.device
    if assigns:
        buffers[name] = value
    elif _is_ordinary(value):
        buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
    else:
        buffers[name] = value.detach().clone().to(device)  # a class of tensors may have no empty ones


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_quantized


def _device(module: nn.Module) -> torch.device:
    """Returns the device of the module's own tensors, or else of its descendants'; meta only where all are on meta."""
    own = chain(own_parameters(module).values(), own_buffers(module).values())
    for tensors in (own, chain(module.parameters(), module.buffers())):
        devices = [tensor.device for tensor in tensors if tensor is not None]
        if devices:
            return next((device for device in devices if device.type != "meta"), devices[0])
    return torch.device("cpu")
